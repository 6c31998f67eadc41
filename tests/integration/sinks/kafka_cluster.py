"""The mock cluster of librdkafka, a real server on the loopback, with its ways to fail.

The Python client has a setting for the cluster but no handle on it, so this calls the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka
from tests import needs

PRODUCE = 0
_PRODUCER = 0
_BROKER = 1
_LOG_NOTHING = b"0"


def _load() -> ctypes.CDLL:
    folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    for path in folder.glob("librdkafka*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "rd_kafka_mock_cluster_new"):
            return library
    return needs.missing("librdkafka's mock cluster", f"no library in {folder}")


class Cluster:
    """One broker, whose topics make themselves with four partitions."""

    def __init__(self) -> None:
        library = self._library = _load()
        pointer, number = ctypes.c_void_p, ctypes.c_int
        library.rd_kafka_conf_new.restype = pointer
        library.rd_kafka_conf_set.argtypes = [
            *(pointer, ctypes.c_char_p, ctypes.c_char_p),
            *(ctypes.c_char_p, ctypes.c_size_t),
        ]
        library.rd_kafka_new.restype = pointer
        library.rd_kafka_new.argtypes = [number, pointer, ctypes.c_char_p, ctypes.c_size_t]
        library.rd_kafka_destroy.argtypes = [pointer]
        library.rd_kafka_mock_cluster_new.restype = pointer
        library.rd_kafka_mock_cluster_new.argtypes = [pointer, number]
        library.rd_kafka_mock_cluster_destroy.argtypes = [pointer]
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        library.rd_kafka_mock_cluster_bootstraps.argtypes = [pointer]
        library.rd_kafka_mock_push_request_errors_array.argtypes = [
            *(pointer, ctypes.c_int16),
            *(ctypes.c_size_t, pointer),
        ]
        library.rd_kafka_mock_clear_request_errors.argtypes = [pointer, ctypes.c_int16]
        library.rd_kafka_mock_topic_create.argtypes = [pointer, ctypes.c_char_p, number, number]
        library.rd_kafka_mock_group_initial_rebalance_delay_ms.argtypes = [pointer, ctypes.c_int32]
        library.rd_kafka_mock_broker_set_down.argtypes = [pointer, ctypes.c_int32]
        library.rd_kafka_mock_broker_set_up.argtypes = [pointer, ctypes.c_int32]
        library.rd_kafka_mock_broker_set_rtt.argtypes = [pointer, ctypes.c_int32, number]
        why = ctypes.create_string_buffer(512)
        settings = library.rd_kafka_conf_new()
        library.rd_kafka_conf_set(settings, b"log_level", _LOG_NOTHING, why, len(why))
        self._handle = library.rd_kafka_new(_PRODUCER, settings, why, len(why))
        assert self._handle, why.value
        self._cluster = library.rd_kafka_mock_cluster_new(self._handle, 1)
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)

    @property
    def servers(self) -> str:
        return str(self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode())

    def create(self, topic: str, partitions: int) -> None:
        code = self._library.rd_kafka_mock_topic_create(
            self._cluster, topic.encode(), partitions, 1
        )
        assert code == 0

    def answer(self, *codes: int) -> None:
        """What the next requests to produce get as an answer; 0 is a good one."""
        array = (ctypes.c_int * len(codes))(*codes)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, PRODUCE, len(codes), array
        )

    @contextmanager
    def outage(self) -> Iterator[None]:
        self._library.rd_kafka_mock_broker_set_down(self._cluster, _BROKER)
        try:
            yield
        finally:
            self._library.rd_kafka_mock_broker_set_up(self._cluster, _BROKER)

    @contextmanager
    def slow(self, milliseconds: int) -> Iterator[None]:
        self._library.rd_kafka_mock_broker_set_rtt(self._cluster, _BROKER, milliseconds)
        try:
            yield
        finally:
            self._library.rd_kafka_mock_broker_set_rtt(self._cluster, _BROKER, 0)

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._handle)
