"""StreamSource: one consumer of a group of one or several Redis streams.

    XREADGROUP > ──▶ held ──ack──▶ XACK (an outbox: XACK + XDEL)
       XCLAIM  ──▶    │ nack: waits here, is delivered again at its place
                      │ close: claimable by others at once
                      └ crash: claimable by others when the lease has ended

Times are differences of the monotonic clock here and idle times of the server there; no clock
of the calendar is asked.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

import redis

from conquiet.acking import Acking, Error
from conquiet.errors import ConfigError, InvalidMessage, StoreError
from conquiet.message import Message, new_id
from conquiet.redis.again import Again, KeyOf, Pauses, uncount
from conquiet.redis.claim import Claims
from conquiet.redis.consumer import remove_consumer
from conquiet.redis.delivery import Delivery, by_stream
from conquiet.redis.entry import from_fields
from conquiet.redis.fetch import Fetch
from conquiet.redis.group import GroupStream, Start
from conquiet.redis.replay import replay
from conquiet.redis.settled import Settled
from conquiet.redis.topic import Streams, streams_of
from conquiet.redis.wire import Wire, may_pass

logger = logging.getLogger("conquiet.redis")


class StreamSource:
    """Reads streams as a member of a consumer group.

    >>> source = StreamSource(client, "orders", group="billing")
    >>> client.xadd("orders", {"specversion": "1.0", "id": "1", "type": "sold", "data": "{}"}) != ""
    True
    >>> [message] = source.read(limit=10, timeout=1.0)
    >>> message.type, message.data, message.ack()
    ('sold', b'{}', True)
    >>> source.close()

    `consumer` is best left out, unless the name is stable and used by one process at a time,
    as that of a StatefulSet's pod: then what a crashed process held is read again at once.
    `lease` is how long a message may lie with a dead consumer; a worker renews it while a
    handler runs. `batch` bounds one read, `max_in_flight` what is read and not settled, `block`
    the time that one command waits. `max_deliveries` sends what failed that often to the stream
    `dead_letters`; by default only entries that are no CloudEvents go there, and those of which
    a transaction was applied in part. `delete` is for outboxes: what is acked is also deleted.

    A nacked message waits `backoff` seconds, then twice as long, up to `max_backoff`. Later
    ones of its `key` (`Message.key`, unless you pass a function) wait with it.
    """

    def __init__(
        self,
        client: Any,
        streams: Streams,
        group: str,
        consumer: str | None = None,
        *,
        start: Start = "beginning",
        lease: float = 60.0,
        claim_interval: float | None = None,
        block: float | None = None,
        batch: int | None = None,
        max_in_flight: int = 10_000,
        max_deliveries: int | None = None,
        dead_letters: str | None = None,
        backoff: float = 0.05,
        max_backoff: float = 5.0,
        key: KeyOf | None = None,
        delete: bool = False,
    ) -> None:
        _check_names(group, consumer, start)
        _check_seconds(lease=lease, claim_interval=claim_interval, block=block)
        _check_counts(batch=batch, max_in_flight=max_in_flight, max_deliveries=max_deliveries)
        self.lease = lease
        self.group = group
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{new_id()[-12:]}"
        self._is_ours = consumer is None
        self._block = block
        self._batch = batch
        self._max_in_flight = max_in_flight
        self._wire = Wire(client)
        self._streams = [
            GroupStream(self._wire, name, topic, group, self.consumer, deletes=delete)
            for name, topic in streams_of(streams).items()
        ]
        self._fetch = Fetch(self._wire, self._streams, start, lease, had_some=not self._is_ours)
        self._claims = Claims(self._streams, lease, claim_interval or lease / 2)
        self._settled = Settled()
        pauses = Pauses(backoff, max_backoff)
        self._again = Again(self._wire, pauses, key, max_deliveries, dead_letters)
        self._closed = False
        self._get_ready()

    def _get_ready(self) -> None:
        try:
            self._fetch.get_ready()
        except (redis.RedisError, OSError) as error:
            if not may_pass(error):
                raise ConfigError(f"{self!r} cannot be made ready: {error}") from error
            logger.warning("%r is made ready when the server allows it: %r", self, error)

    @property
    def dead(self) -> int:
        """How many entries went to the dead letters."""
        return self._again.dead

    @property
    def claimed(self) -> int:
        """How many entries were taken over from consumers that let them lie."""
        return self._claims.claimed

    @property
    def deleted(self) -> int:
        """How many entries were found to be deleted before they were acked."""
        return self._claims.deleted + self._fetch.deleted

    @property
    def in_flight(self) -> int:
        """How many entries are in hand: delivered, or about to be delivered again."""
        return sum(len(stream.held) for stream in self._streams)

    # --- reading ----------------------------------------------------------------------------

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        """Up to `limit` messages, those first that wait to be delivered again."""
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        limit = limit if self._batch is None else min(limit, self._batch)
        end = time.monotonic() + timeout
        while not self._closed:
            batch = self._read(limit, end)
            if self._closed:
                break
            if batch or time.monotonic() >= end:
                return batch
        self._release()  # what a read brought that was still under way when we were closed
        return ()

    def _read(self, limit: int, end: float) -> list[Message[Any]]:
        again: list[Delivery] = []
        found: list[Delivery] = []
        try:
            self._fetch.get_ready()
            if self._settled.owed:
                self._settled.pay()
            if self._again:
                self._again.take(again, limit)
            self._find(found, limit - len(again), end, bool(again))
        except (redis.RedisError, OSError) as error:
            self._overcome(error, has_some=bool(again or found))
        messages = self._messages(again) if again else []
        if found:
            messages += self._again.hold_back(self._messages(found))
        return messages

    def _overcome(self, error: Exception, *, has_some: bool) -> None:
        """A read that failed midway gives what it has; the next will show if it fails again."""
        try:
            if isinstance(error, redis.ResponseError) and self._fetch.repair(error):
                return
        except (redis.RedisError, OSError) as failure:
            error = failure
        self._claims.look_for_lost_replies()
        if not has_some:
            raise StoreError(f"{self!r} cannot be read: {error}") from error
        logger.warning("%r: a part could not be read: %r", self, error)

    def _find(self, found: list[Delivery], limit: int, end: float, has_some: bool) -> None:
        """What is ours from before, what others let lie, what is new; older before newer."""
        room = min(limit, self._max_in_flight - self.in_flight)
        if room > 0:
            self._fetch.own(found, room)
            self._claims.take(found, room - len(found))
        if len(found) < room:
            wait = 0.0 if found or has_some else self._longest_wait(end)
            self._fetch.new(found, room - len(found), wait)
        elif room <= 0 and not has_some:
            changed = self._again.changed
            with changed:  # only a settlement makes room
                now = time.monotonic()
                changed.wait(max(0.0, min(end, self._again.next_due(now)) - now))

    def _longest_wait(self, end: float) -> float:
        """Until the read must end, the block time is over, or something else is to be done."""
        now = time.monotonic()
        moments = [end, self._claims.next_scan]
        if self._again:
            with self._again.changed:
                moments.append(self._again.next_due(now))
        wait = min(moments) - now
        return wait if self._block is None else min(wait, self._block)

    def _messages(self, deliveries: Iterable[Delivery]) -> list[Message[Any]]:
        """Decode; what cannot be read or was delivered too often is put aside."""
        messages: list[Message[Any]] = []
        for delivery in deliveries:
            if self._again.gives_up_on(delivery):
                continue
            try:
                data, attributes, topic = from_fields(delivery.fields)
            except InvalidMessage as error:
                self._again.refuse(delivery, error)
                continue
            messages.append(
                Message(
                    data,
                    attributes,
                    acking=Acking(self, delivery),
                    topic=topic or delivery.stream.topic,
                    deliveries=delivery.deliveries,
                )
            )
        return messages

    # --- settling ---------------------------------------------------------------------------

    def settle(self, acked: Sequence[Delivery], nacked: Sequence[tuple[Delivery, Error]]) -> None:
        """Ack with one command per stream; let what was nacked wait for its next delivery."""
        if acked:
            self._settled.ack(acked)
        if nacked:
            self._again.nack(nacked)
        if self._again or self.in_flight + len(acked) >= self._max_in_flight:
            with self._again.changed:
                self._again.changed.notify_all()

    # --- leases and life --------------------------------------------------------------------

    def renew(self, messages: Sequence[Message[Any]]) -> None:
        """Begin the idle time of these anew, unless that has just happened or they are lost."""
        now = time.monotonic()
        old = now - self.lease / 4
        tokens = (message.acking.token for message in messages if message.acking is not None)
        ours = [token for token in tokens if isinstance(token, Delivery)]
        stale = [
            delivery
            for delivery in (*ours, *self._again.waiting())
            if delivery.touched <= old and delivery.stream.held.get(delivery.id) is delivery
        ]
        for stream, some in by_stream(stale).items():
            still = stream.still_ours(delivery.id for delivery in some)
            if still:
                stream.touch(list(still))
            for delivery in some:
                delivery.touched = now

    def replay(self, start: str | None = None, end: str | None = None) -> Iterator[Message[Any]]:
        """What the streams hold from entry id `start` to `end`; the group does not move.

        The id of a message's entry is `message.locals["position"]`. What is no CloudEvent is
        left out, with a warning.
        """
        return replay(self._streams, start, end)

    def close(self) -> None:
        """Stop reading; what is not settled can be claimed by others at once, and costs nothing."""
        if self._closed:
            return
        self._closed = True
        self._fetch.stop()
        self._again.count_nacks()
        try:
            self._settled.pay()
        except (redis.RedisError, OSError) as error:
            count = self._settled.owed
            logger.warning("%r: %d acks could not be sent; delivered again: %r", self, count, error)
        self._release()
        if self._is_ours:
            self._remove_name()
        self._wire.close()

    def _release(self) -> None:
        """Let others claim at once what is in hand."""
        held = [item for stream in self._streams for item in list(stream.held.values())]
        uncount(held, b"IDLE", max(1, round(self.lease * 1000)))
        for stream in self._streams:
            stream.held.clear()

    def _remove_name(self) -> None:
        """Nobody will ever use a name again that we made up; if it holds nothing, it may go."""
        try:
            for stream in self._streams:
                remove_consumer(self._wire, stream.name, self.group, self.consumer)
        except (redis.RedisError, OSError) as error:
            logger.debug("%r: the consumer's name stays: %r", self, error)

    def __repr__(self) -> str:
        names = ", ".join(stream.name for stream in self._streams)
        return f"<StreamSource {names} group={self.group} consumer={self.consumer}>"


def _check_names(group: str, consumer: str | None, start: str) -> None:
    if not group or consumer == "":
        raise ConfigError("a group and a consumer have a name, such as 'billing'")
    if start not in get_args(Start):
        raise ConfigError(f"start={start!r}: a group starts at the 'beginning' or 'now'")


def _check_seconds(**settings: float | None) -> None:
    for name, value in settings.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value}: must be more than 0 seconds")


def _check_counts(**settings: int | None) -> None:
    for name, value in settings.items():
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name}={value}: must be at least 1")
