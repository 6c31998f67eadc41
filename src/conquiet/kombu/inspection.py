"""Inspect the queues under a key prefix, and clean up after dead consumers and applications.

    >>> from conquiet.kombu import inspection
    >>> inspection.queues(client)
    []

Every function takes a redis-py client and the `global_keyprefix` of the application.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

from conquiet.kombu import scripts
from conquiet.kombu.layout import BACK, GROUP, Keys, QueueSettings
from conquiet.kombu.topology import forget_expired


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """Describe a channel that reads a queue; it is alive while its lease lasts."""

    name: str
    pending: int
    alive: bool
    lease_seconds: float | None
    """Seconds until the lease ends; negative if it has ended, None if there is none."""


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """Describe a queue, all its priorities together."""

    name: str
    exists: bool
    """False if its `x-expires` has passed and only its name is left."""
    ready: int
    pending: int
    consumers: tuple[ConsumerInfo, ...]
    dead_letters: int
    expires_ms: int | None = None
    message_ttl_ms: int | None = None
    max_length: int | None = None

    @property
    def alive(self) -> int:
        return sum(consumer.alive for consumer in self.consumers)

    @property
    def expired(self) -> int:
        return len(self.consumers) - self.alive


@dataclass(frozen=True, slots=True)
class Removed:
    """Count what a clean-up did."""

    consumers: int
    given_back: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Hold a message that is not delivered any more, and the reason."""

    id: str
    queue: str
    reason: str
    deliveries: int
    message: bytes | None


def queues(client: Any, prefix: str = "") -> list[QueueInfo]:
    """List the queues that were declared or published to, by name."""
    keys = Keys(prefix)
    settings = {_text(name): _text(value) for name, value in client.hgetall(keys.queues).items()}
    leases = {
        _text(name): float(ends)
        for name, ends in client.zrange(keys.leases, 0, -1, withscores=True)
    }
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds / 1000
    return [_queue(client, keys, name, settings[name], leases, now_ms) for name in sorted(settings)]


class Gauges:
    """Collect the state of every queue for Prometheus, when it is scraped.

    `prometheus_client.REGISTRY.register(Gauges(client))`: `conquiet_kombu_ready`, `_pending`,
    `_consumers` (living ones) and `_dead_letters`, each with the label `queue`, all priorities
    together. Let one process do so; each would report the same.
    """

    def __init__(self, client: Any, prefix: str = "") -> None:
        self._client = client
        self._prefix = prefix

    def describe(self) -> list[Any]:
        """Return no metrics, so that registering does not ask Redis."""
        return []

    def collect(self) -> list[Any]:
        from prometheus_client.core import GaugeMetricFamily

        found = [info for info in queues(self._client, self._prefix) if info.exists]
        families = []
        for name, meaning, value in _GAUGES:
            family = GaugeMetricFamily(f"conquiet_kombu_{name}", meaning, labels=["queue"])
            for info in found:
                family.add_metric([info.name], value(info))
            families.append(family)
        return families


_GAUGES: tuple[tuple[str, str, Callable[[QueueInfo], int]], ...] = (
    ("ready", "Messages that wait for a consumer", lambda info: info.ready),
    ("pending", "Messages that consumers have not acked yet", lambda info: info.pending),
    ("consumers", "Consumers that are alive", lambda info: info.alive),
    ("dead_letters", "Messages that are not delivered any more", lambda info: info.dead_letters),
)


def remove_dead_consumers(client: Any, prefix: str = "", queue: str | None = None) -> Removed:
    """Give back the messages of dead consumers, then remove these; no message is dropped."""
    keys = Keys(prefix)
    names = [queue] if queue is not None else [_text(name) for name in client.hkeys(keys.queues)]
    consumers = given_back = 0
    for name in names:
        more = 1
        while more:
            moved, removed, more = scripts.reap.call(
                client, [keys.leases, *keys.streams(name)], [GROUP, BACK, scripts.AT_ONCE, ""]
            )
            consumers, given_back = consumers + removed, given_back + moved
    return Removed(consumers, given_back)


def delete_queue(client: Any, queue: str, prefix: str = "", force: bool = False) -> bool:
    """Delete a queue and its bindings; return False if it is in use or not empty, and was kept.

    With `force` it is deleted with its messages, unacked ones included. Its dead letters stay.
    """
    keys = Keys(prefix)
    only_if = "" if force else "1"
    return bool(
        scripts.delete.call(
            client,
            [keys.queues, keys.exchanges, keys.leases, *keys.streams(queue)],
            [queue, keys.namespace, GROUP, "", only_if, only_if, ""],
        )
    )


def forget_expired_queues(client: Any, prefix: str = "") -> list[str]:
    """Remove the names and bindings of queues whose `x-expires` has passed.

    Consumers do so as well, but keep the names for a day, so that late messages are dropped.
    """
    return sorted(forget_expired(client, Keys(prefix), 0))


def dead_letters(client: Any, queue: str, prefix: str = "", limit: int = 100) -> list[DeadLetter]:
    """List the oldest dead letters of a queue."""
    found = []
    for entry, fields in client.xrange(Keys(prefix).dead(queue), count=limit):
        named = {_text(name): value for name, value in fields.items()}
        found.append(
            DeadLetter(
                _text(entry),
                _text(named.get("queue", queue)),
                _text(named.get("reason", "")),
                int(named.get("deliveries", 0)),
                named.get("m"),
            )
        )
    return found


def delete_dead_letters(client: Any, queue: str, prefix: str = "") -> int:
    """Delete the dead letters of a queue, and return how many they were."""
    key = Keys(prefix).dead(queue)
    with client.pipeline() as pipe:
        count, _ = pipe.xlen(key).delete(key).execute()
    return int(count)


def _queue(
    client: Any, keys: Keys, name: str, settings: str, leases: dict[str, float], now_ms: float
) -> QueueInfo:
    streams = keys.streams(name)
    ready, pending = scripts.size.call(client, streams, [GROUP, BACK])
    limits = QueueSettings.decode(settings)
    return QueueInfo(
        name=name,
        exists=bool(client.exists(*streams)),
        ready=ready,
        pending=pending,
        consumers=_consumers(client, streams, leases, now_ms),
        dead_letters=client.xlen(keys.dead(name)),
        expires_ms=limits.expires_ms,
        message_ttl_ms=limits.message_ttl_ms,
        max_length=limits.max_length,
    )


def _consumers(
    client: Any, streams: list[str], leases: dict[str, float], now_ms: float
) -> tuple[ConsumerInfo, ...]:
    pending: dict[str, int] = {}
    for stream in streams:
        try:
            rows = client.xinfo_consumers(stream, GROUP)
        except redis.ResponseError:  # no such stream, or it was never read
            continue
        for row in rows:
            name = _text(row["name"])
            pending[name] = pending.get(name, 0) + row["pending"]
    pending.pop(BACK, None)
    found = []
    for name, count in sorted(pending.items()):
        ends = leases.get(name)
        left = None if ends is None else (ends - now_ms) / 1000
        found.append(ConsumerInfo(name, count, left is not None and left > 0, left))
    return tuple(found)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
