"""Count reads, acks and claims for Prometheus. Metrics never raise, so that no message fails.

Without prometheus-client they count nothing. If this module was loaded twice, both copies share the
metrics of the registry.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

_log = logging.getLogger(__name__)

# A read waits for a message, so its latency is up to the block time.
READ_LATENCY_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class StreamMetrics:
    """Holds the four metrics of one stream."""

    def __init__(self, stream: str) -> None:
        self._read = _child(_READ, stream)
        self._acked = _child(_ACKED, stream)
        self._claimed = _child(_CLAIMED, stream)
        self._latency = _child(_LATENCY, stream)

    def count_read(self, entries: int, seconds: float) -> None:
        with suppress(Exception):
            self._latency.observe(seconds)
            self._read.inc(entries)

    def count_acked(self, entries: int) -> None:
        with suppress(Exception):
            self._acked.inc(entries)

    def count_claimed(self, entries: int) -> None:
        with suppress(Exception):
            self._claimed.inc(entries)


class _Nothing:
    """Replaces a metric that is not available."""

    def labels(self, *_: object, **__: object) -> _Nothing:
        return self

    def inc(self, *_: object) -> None: ...

    def observe(self, *_: object) -> None: ...


def _metric(kind: str, name: str, help_text: str, **options: Any) -> Any:
    try:
        import prometheus_client
    except ImportError:
        return _Nothing()
    except Exception as error:  # noqa: BLE001 - a broken installation
        return _without(name, error)
    try:
        return getattr(prometheus_client, kind)(name, help_text, ["stream"], **options)
    except Exception as error:  # noqa: BLE001 - a name that is taken, a broken multiprocess directory, …
        return _find_registered(prometheus_client.REGISTRY, kind, name) or _without(name, error)


def _find_registered(registry: Any, kind: str, name: str) -> Any:
    """Return the registered metric of this name, if it is of the same kind."""
    with suppress(Exception):
        known = registry._names_to_collectors[name]  # there is no public API to look it up
        if type(known).__name__ == kind:
            return known
    return None


def _without(name: str, error: Exception) -> _Nothing:
    _log.warning("metric %s is not available: %s", name, error)
    return _Nothing()


def _child(metric: Any, stream: str) -> Any:
    try:
        return metric.labels(stream=stream)
    except Exception as error:  # noqa: BLE001 - in multiprocess mode this opens a file
        return _without(f"of stream {stream!r}", error)


_READ = _metric(
    "Counter", "conquiet_queue_messages_read_total", "Entries that XREADGROUP delivered."
)
_ACKED = _metric("Counter", "conquiet_queue_messages_ack_total", "Entries that XACK settled.")
_CLAIMED = _metric("Counter", "conquiet_queue_messages_claimed_total", "Entries that XCLAIM moved.")
_LATENCY = _metric(
    "Histogram",
    "conquiet_queue_read_latency_seconds",
    "Duration of XREADGROUP, with the wait for a message.",
    buckets=READ_LATENCY_BUCKETS_S,
)
