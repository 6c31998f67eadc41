"""Settled: acks on their way to Redis, one command per stream.

An ack that finds no server is owed, and sent when it is back: XACK does no harm twice. What it
stands for is in hand until then, so that this consumer does not claim it from itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import redis

from conquiet.errors import StoreError
from conquiet.redis.delivery import Delivery
from conquiet.redis.group import GroupStream
from conquiet.redis.wire import may_pass

logger = logging.getLogger("conquiet.redis")


class Settled:
    """The acks of one consumer, and those that are owed."""

    def __init__(self) -> None:
        self._owed: dict[GroupStream, list[bytes]] = {}
        self._lock = threading.Lock()

    @property
    def owed(self) -> int:
        return sum(map(len, list(self._owed.values())))

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        by_stream: dict[GroupStream, list[bytes]] = {}
        for delivery in deliveries:
            if delivery.acked and not delivery.stream.deletes:
                delivery.stream.held.pop(delivery.id, None)
                continue
            ids = by_stream.get(delivery.stream)
            if ids is None:
                ids = by_stream[delivery.stream] = []
            ids.append(delivery.id)
        failure: Exception | None = None
        for stream, ids in by_stream.items():
            try:
                _send(stream, ids)
            except (redis.RedisError, OSError) as error:
                if may_pass(error):
                    logger.warning("%d acks to %r wait for Redis: %r", len(ids), stream.name, error)
                    self._owe(stream, ids)
                else:
                    failure = error
        if failure is not None:
            raise StoreError(f"acks were refused: {failure}") from failure

    def pay(self) -> None:
        """Send the acks that could not be sent before."""
        with self._lock:
            owed, self._owed = self._owed, {}
        for stream in list(owed):
            try:
                _send(stream, owed[stream])
            except (redis.RedisError, OSError) as error:
                if may_pass(error):
                    for late, ids in owed.items():
                        self._owe(late, ids)
                    raise
                logger.error("%d acks to %r: %r", len(owed[stream]), stream.name, error)
            del owed[stream]

    def _owe(self, stream: GroupStream, ids: Sequence[bytes]) -> None:
        with self._lock:
            self._owed.setdefault(stream, []).extend(ids)


def _send(stream: GroupStream, ids: Sequence[bytes]) -> None:
    try:
        stream.settle(ids)
    except (redis.RedisError, OSError) as error:
        if may_pass(error):
            raise
        _let_go(stream, ids)  # refused for good: they return when the lease has ended
        raise
    _let_go(stream, ids)


def _let_go(stream: GroupStream, ids: Sequence[bytes]) -> None:
    held = stream.held
    for entry_id in ids:
        held.pop(entry_id, None)
