"""Settling: a channel's claim to its messages, and what becomes of them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import redis

from conquiet.kombu import scripts
from conquiet.kombu.keys import BACK, GROUP
from conquiet.kombu.lease import Lease, keeper
from conquiet.kombu.publishing import Publishing
from conquiet.kombu.settlement import Settlement

logger = logging.getLogger(__name__)

Place = tuple[str, str]
"""Stream and entry."""


class Settling(Publishing):
    """Acks travel with the next fetch, or are sent by the keeper soon; all else is done at once."""

    settlement: Settlement
    lease: Lease | None
    lease_seconds: float
    autoclaim_interval: float | None
    delivery_limit: int

    def forget_settling(self) -> None:
        self._streams: dict[str, str] = {}  # all that were ever read -> their queues
        self._watched: set[str] = set()
        self.settlement = Settlement(self.keys)
        self.lease = None

    def streams_of(self, queues: Iterable[str]) -> list[str]:
        """In the order of reading: by priority, then by queue."""
        stream, known = self.keys.stream, self._streams
        found = []
        for priority in self.priority_steps:
            for queue in queues:
                key = stream(queue, priority)
                known[key] = queue
                found.append(key)
        return found

    def watch(self, queue: str) -> None:
        """Consume a queue: it does not expire meanwhile."""
        lease = self.join(queue)
        expires = self._expires.get(queue)
        if expires:
            streams = self.streams_of([queue])
            lease.expires = {**lease.expires, **dict.fromkeys(streams, expires)}

    def join(self, queue: str) -> Lease:
        """Before the first fetch there must be a lease, and somebody to renew it."""
        lease = self.lease
        if lease is None:
            lease = self.lease = Lease(
                self.connection.background_client(self),
                self.keys,
                self.consumer,
                self.settlement,
                self.lease_seconds,
                self.autoclaim_interval,
            )
            weakref.finalize(self, lease.end).atexit = False
        if queue not in self._watched:
            self._subscribe_to(queue, lease)
            lease.streams |= frozenset(self.streams_of([queue]))
            keeper.add(lease)
            self._watched.add(queue)
        return lease

    def _subscribe_to(self, queue: str, lease: Lease) -> None:
        """Be known as a consumer, and learn of x-expires, whoever declared it."""
        settings = self.call(
            scripts.subscribe,
            [self.keys.leases, self.keys.queues, self.keys.stream(queue, 0)],
            [GROUP, self.consumer, lease.milliseconds, queue],
        )
        expires = settings.partition(b"|")[0]
        if expires:
            self._expires[queue] = int(expires)
        else:
            self._expires.pop(queue, None)

    def unwatch(self, queue: str) -> None:
        self._watched.discard(queue)
        streams = self.keys.streams(queue)
        if self.lease:
            self.lease.expires = {
                stream: ms for stream, ms in self.lease.expires.items() if stream not in streams
            }
        try:
            self.settle_now()
            holds_some = self.call(scripts.unsubscribe, streams, [GROUP, self.consumer])
        except self.connection_errors as error:
            logger.debug("%s could not unsubscribe: %s", self.consumer, error)
            return
        if not holds_some:
            self._forget(streams)

    def _forget(self, streams: list[str]) -> None:
        for stream in streams:
            self._streams.pop(stream, None)
        if self.lease:
            self.lease.streams -= frozenset(streams)

    def queue_of(self, stream: str) -> str:
        """Also of one that is read no more, and whose last reply comes now."""
        return self._streams.get(stream) or self.keys.queue(stream)

    def settle(self, stream: str, entry: str) -> None:
        """It is done with, whoever has it by now."""
        self.settlement.ack(stream, entry)
        if not self.closed:
            keeper.hurry()
            return
        try:
            self.settle_now()
        except (redis.RedisError, OSError) as error:
            logger.warning("%s acks when Redis is back: %s", self.consumer, error)
            if self.lease is not None:
                keeper.remove(self.lease)
        else:
            if self.lease is not None:
                keeper.let_go(self.lease.client)

    def settle_now(self) -> None:
        if self.settlement and self.lease:
            self.settlement.send(self.lease.client, self.consumer)

    def requeue(self, stream: str, entry: str) -> None:
        """To the end of its queue."""
        self.call(
            scripts.requeue,
            [stream],
            [GROUP, self.consumer, entry, self.delivery_limit, self.keys.namespace],
        )

    def give_back(self, places: Iterable[Place]) -> None:
        """To where they were."""
        for stream, entries in _by_stream(places).items():
            for at in range(0, len(entries), scripts.AT_ONCE):
                some = entries[at : at + scripts.AT_ONCE]
                self.call(scripts.giveback, [stream], [GROUP, self.consumer, BACK, *some])

    def give_back_strays(self, held: Iterable[Place], execute: Callable[..., Any]) -> None:
        """After a reply was lost: what the server counts as ours, and we never got."""
        entries = _by_stream(held)
        for stream in self._streams:
            args: list[Any] = [GROUP, self.consumer, BACK, *entries.get(stream, ())]
            execute(*scripts.strays.whole([stream], args))

    def leave(self) -> None:
        """Give back all that the server counts as ours, what is still in the socket included."""
        lease = self.lease
        if lease is None:
            return
        try:
            self.settlement.send(lease.client, self.consumer)
            keys = [self.keys.leases, *self._streams]
            args: list[scripts.Argument] = [GROUP, self.consumer, BACK, scripts.AT_ONCE]
            while scripts.leave.call(lease.client, keys, args):
                pass
        except (redis.RedisError, OSError) as error:
            logger.warning(
                "%s could not give back its messages: %s; they come back when its lease ends",
                self.consumer,
                error,
            )
        finally:
            keeper.remove(lease)


def _by_stream(places: Iterable[Place]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stream, entry in places:
        found.setdefault(stream, []).append(entry)
    return found
