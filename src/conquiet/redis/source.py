"""StreamSource: one consumer of a group of one or several Redis streams.

    XREADGROUP > ──▶ held ──ack──▶ XACK (an outbox: XACK + XDEL)
       XCLAIM  ──▶    │ nack: waits here, is delivered again at its place
                      │ close: claimable by others at once
                      └ crash: claimable by others when the lease has ended

Times are differences of the monotonic clock here and idle times of the server there; no clock
of the calendar is asked.
"""

from __future__ import annotations

import heapq
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

import redis

from conquiet.acking import Acking, Error
from conquiet.errors import Blameless, ConfigError, GivenBack, InvalidMessage, StoreError
from conquiet.message import Message, new_id
from conquiet.redis.claim import Claims
from conquiet.redis.consumer import remove_consumer
from conquiet.redis.delivery import FIRST, LAST, Delivery, id_after, split_id
from conquiet.redis.entry import UndecodableEntry, from_fields
from conquiet.redis.fetch import Fetch
from conquiet.redis.group import GroupStream, Start
from conquiet.redis.letter import letter
from conquiet.redis.topic import Streams, streams_of
from conquiet.redis.waiting import Waiter, Waiting
from conquiet.redis.wire import TROUBLE, UNWILLING, Argument, Wire

logger = logging.getLogger("conquiet.redis")

KeyOf = Callable[[Message[Any]], str]

_UNDECODABLE_DELIVERIES = 3
_REPLAY_PAGE = 500


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
    the time that one command waits. `max_deliveries` sends
    what failed that often to the stream `dead_letters`; by default only entries that are no
    CloudEvents go there. `delete` is for outboxes: what is acked is also deleted.

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
        if not group or consumer == "":
            raise ConfigError("a group and a consumer have a name, such as 'billing'")
        if start not in get_args(Start):
            raise ConfigError(f"start={start!r}: a group starts at the 'beginning' or 'now'")
        _check_seconds(lease=lease, claim_interval=claim_interval, block=block)
        _check_counts(batch=batch, max_in_flight=max_in_flight, max_deliveries=max_deliveries)
        self.lease = lease
        self.group = group
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{new_id()[-12:]}"
        self.dead = 0
        """How many entries went to the dead letters."""
        self._wire = Wire(client)
        self._streams = [
            GroupStream(self._wire, name, topic, group, self.consumer)
            for name, topic in streams_of(streams).items()
        ]
        for stream in self._streams:
            stream.own_from = b"0" if consumer else None  # nobody had a name that is new
            stream.deletes = delete
        self._is_ours = consumer is None
        self._fetch = Fetch(self._wire, self._streams, start, lease)
        self._claims = Claims(self._streams, lease, claim_interval or lease / 2)
        self._block = block
        self._batch = batch
        self._max_in_flight = max_in_flight
        self._max_deliveries = max_deliveries
        self._dead_letters = dead_letters
        self._backoff = backoff
        self._max_backoff = max_backoff
        self._key = key
        self._delete = delete
        self._changed = threading.Condition()
        self._waiting = Waiting()
        self._owed: dict[GroupStream, list[bytes]] = {}
        self._closed = False
        try:
            self._fetch.get_ready()
        except redis.ResponseError as error:
            raise ConfigError(f"{self!r} cannot be made ready: {error}") from error
        except TROUBLE as error:
            logger.warning("%r is made ready when the server can be reached: %r", self, error)

    @property
    def claimed(self) -> int:
        """How many entries were taken over from consumers that let them lie."""
        return self._claims.claimed

    @property
    def deleted(self) -> int:
        """How many entries were found to be deleted before they were acked."""
        return self._claims.deleted

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
            if self._owed:
                self._pay()
            if self._waiting:
                self._take_again(again, limit)
            self._find(found, limit - len(again), end, bool(again))
        except (redis.RedisError, OSError) as error:
            self._overcome(error, has_some=bool(again or found))
        messages = self._messages(again) if again else []
        if found:
            messages += self._hold_back(self._messages(found))
        return messages

    def _overcome(self, error: Exception, *, has_some: bool) -> None:
        """A read that failed midway gives what it has; the next will show if it fails again."""
        if isinstance(error, redis.ResponseError) and self._fetch.repair(error):
            return
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
            with self._changed:  # only a settlement makes room
                now = time.monotonic()
                self._changed.wait(max(0.0, min(end, self._waiting.next_due(now)) - now))

    def _longest_wait(self, end: float) -> float:
        """Until the read must end, the block time is over, or something else is to be done."""
        now = time.monotonic()
        moments = [end, self._claims.next_scan]
        if self._waiting:
            with self._changed:
                moments.append(self._waiting.next_due(now))
        wait = min(moments) - now
        return wait if self._block is None else min(wait, self._block)

    def _messages(self, deliveries: Iterable[Delivery]) -> list[Message[Any]]:
        """Decode; what cannot be read or was delivered too often is put aside."""
        messages: list[Message[Any]] = []
        most = self._max_deliveries
        for delivery in deliveries:
            if most is not None and delivery.deliveries > most:
                self._bury(delivery, delivery.deliveries - 1, None)
                continue
            try:
                data, attributes, topic = from_fields(delivery.fields)
            except InvalidMessage as error:
                self._refuse(delivery, error)
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

    def _hold_back(self, messages: list[Message[Any]]) -> list[Message[Any]]:
        """Of what was just read, keep here what would overtake a waiting message of its key."""
        if not self._waiting:
            return messages
        with self._changed:
            keys = self._waiting.keys()
            passing: list[Message[Any]] = []
            for message in messages:
                key = self._key_of(message)
                if key in keys:
                    assert message.acking is not None
                    delivery = message.acking.token
                    self._waiting.add(Waiter(delivery, key, 0.0, delivery.deliveries))
                else:
                    passing.append(message)
        return passing

    def _key_of(self, message: Message[Any]) -> str:
        try:
            return message.key if self._key is None else self._key(message)
        except Exception:  # noqa: BLE001 - the router refuses such a message, with the reason
            return ""

    def _take_again(self, again: list[Delivery], limit: int) -> None:
        """Deliver again what waited, if it is still ours: a slow process may have lost it."""
        with self._changed:
            waiters = self._waiting.take(limit, time.monotonic())
        try:
            for stream, some in _by_stream(waiters).items():
                self._touch_again(stream, some)
        except BaseException:
            with self._changed:
                for waiter in waiters:
                    self._waiting.add(waiter)
            raise
        now = time.monotonic()
        for waiter in waiters:
            delivery = waiter.delivery
            if delivery.stream.held.get(delivery.id) is delivery:
                delivery.deliveries = waiter.deliveries
                delivery.touched = now
                again.append(delivery)

    def _touch_again(self, stream: GroupStream, waiters: list[Waiter]) -> None:
        ours = stream.still_ours(waiter.delivery.id for waiter in waiters)
        counts: dict[int, list[bytes]] = {}
        for waiter in waiters:
            if waiter.delivery.id in ours:
                counts.setdefault(waiter.deliveries, []).append(waiter.delivery.id)
            else:
                stream.held.pop(waiter.delivery.id, None)
        for count, ids in counts.items():
            stream.touch(ids, b"RETRYCOUNT", count)

    # --- settling ---------------------------------------------------------------------------

    def settle(self, acked: Sequence[Delivery], nacked: Sequence[tuple[Delivery, Error]]) -> None:
        """Ack with one command per stream; let what was nacked wait for its next delivery."""
        if acked:
            self._ack(acked)
        if nacked:
            self._nack(nacked)
        if self._waiting or self.in_flight + len(acked) >= self._max_in_flight:
            with self._changed:
                self._changed.notify_all()

    def _ack(self, deliveries: Sequence[Delivery]) -> None:
        by_stream: dict[GroupStream, list[bytes]] = {}
        for delivery in deliveries:
            if delivery.acked and not self._delete:
                delivery.stream.held.pop(delivery.id, None)
                continue
            ids = by_stream.get(delivery.stream)
            if ids is None:
                ids = by_stream[delivery.stream] = []
            ids.append(delivery.id)
        failure: redis.RedisError | None = None
        for stream, ids in by_stream.items():
            try:
                stream.settle(ids, delete=self._delete)
            except (*TROUBLE, *UNWILLING) as error:
                # XACK does no harm twice, so it may be said again when the server is back.
                logger.warning("%d acks to %r wait for Redis: %r", len(ids), stream.name, error)
                with self._changed:
                    self._owed.setdefault(stream, []).extend(ids)
                continue
            except redis.RedisError as error:
                failure = error  # out of hand all the same: they return when the lease has ended
            held = stream.held
            for entry_id in ids:
                held.pop(entry_id, None)
        if failure is not None:
            raise StoreError(f"{self!r} cannot ack: {failure}") from failure

    def _pay(self) -> None:
        """Send the acks that could not be sent before."""
        with self._changed:
            owed, self._owed = self._owed, {}
        for stream in list(owed):
            try:
                stream.settle(owed[stream], delete=self._delete)
            except (*TROUBLE, *UNWILLING):
                with self._changed:
                    for late, ids in owed.items():
                        self._owed.setdefault(late, []).extend(ids)
                raise
            except redis.RedisError as error:  # as in _ack: they return when the lease has ended
                logger.error("%d acks to %r: %r", len(owed[stream]), stream.name, error)
            for entry_id in owed.pop(stream):
                stream.held.pop(entry_id, None)

    def _nack(self, nacked: Sequence[tuple[Delivery, Error]]) -> None:
        free: list[Delivery] = []
        for delivery, error in nacked:
            if delivery.stream.held.get(delivery.id) is not delivery:
                continue  # released, or lost to another consumer and read again
            if isinstance(error, Blameless):
                free.append(delivery)
                pause = not isinstance(error, GivenBack)
                self._wait(delivery, delivery.deliveries, pause=pause)
            elif self._max_deliveries is not None and delivery.deliveries >= self._max_deliveries:
                self._bury(delivery, delivery.deliveries, error)
            else:
                self._wait(delivery, delivery.deliveries + 1)
        if free:
            self._uncount(free)

    def _wait(self, delivery: Delivery, deliveries: int, *, pause: bool = True) -> None:
        seconds = 0.0
        if pause:
            seconds = min(self._max_backoff, self._backoff * 2.0 ** min(delivery.nacks, 60))
            delivery.nacks += 1
        try:
            data, attributes, _ = from_fields(delivery.fields)
            key = self._key_of(Message(data, attributes))
        except InvalidMessage:
            key = ""
        with self._changed:
            moment = time.monotonic() + seconds
            self._waiting.add(Waiter(delivery, key, moment, deliveries))

    def _uncount(self, deliveries: list[Delivery], *options: Argument) -> None:
        """Take the delivery back in Redis too, so that it also costs nothing if we die now."""
        try:
            for stream, some in _by_stream_of(deliveries).items():
                ours = stream.still_ours(delivery.id for delivery in some)
                counts: dict[int, list[bytes]] = {}
                for delivery in some:
                    if delivery.id in ours:
                        counts.setdefault(delivery.deliveries - 1, []).append(delivery.id)
                for count, ids in counts.items():
                    stream.touch(ids, *options, b"RETRYCOUNT", count)
        except (redis.RedisError, OSError) as error:
            logger.warning("%r: deliveries could not be taken back: %r", self, error)

    # --- dead letters -----------------------------------------------------------------------

    def _refuse(self, delivery: Delivery, error: InvalidMessage) -> None:
        """An entry that is no CloudEvent: try again, then put it aside; the rest flow on (R13)."""
        why = UndecodableEntry(delivery.stream.name, delivery.id.decode(), str(error))
        why.__cause__ = error
        logger.warning("delivery=%d: %s", delivery.deliveries, why)
        if delivery.deliveries >= (self._max_deliveries or _UNDECODABLE_DELIVERIES):
            self._bury(delivery, delivery.deliveries, why)
        else:
            self._wait(delivery, delivery.deliveries + 1)

    def _bury(self, delivery: Delivery, deliveries: int, error: Error) -> None:
        """Write the letter, then ack. Not in one MULTI: EXEC acks even if the XADD fails."""
        stream = delivery.stream
        place = (self._dead_letters or f"{stream.name}:dead").encode()
        try:
            self._wire.call(place, b"XADD", place, b"*", *letter(delivery, deliveries, error))
            stream.settle([delivery.id], delete=self._delete)
        except (redis.RedisError, OSError) as failure:
            logger.error("no dead letter could be written for %r: %r", delivery, failure)
            self._wait(delivery, deliveries + 1)
            return
        stream.held.pop(delivery.id, None)
        self.dead += 1
        why = error or "delivered too often"
        logger.error("dead letter in %r: %r: %s", place.decode(), delivery, why)

    # --- leases and life --------------------------------------------------------------------

    def renew(self, messages: Sequence[Message[Any]]) -> None:
        """Begin the idle time of these anew, unless that has just happened or they are lost."""
        now = time.monotonic()
        old = now - self.lease / 4
        with self._changed:
            waiting = [waiter.delivery for waiter in self._waiting]
        tokens = (message.acking.token for message in messages if message.acking is not None)
        ours = [token for token in tokens if isinstance(token, Delivery)]
        stale = [
            delivery
            for delivery in (*ours, *waiting)
            if delivery.touched <= old and delivery.stream.held.get(delivery.id) is delivery
        ]
        for stream, some in _by_stream_of(stale).items():
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
        parts = [self._replay(stream, start, end) for stream in self._streams]
        for _, message in heapq.merge(*parts, key=lambda item: item[0]):
            yield message

    def _replay(
        self, stream: GroupStream, start: str | None, end: str | None
    ) -> Iterator[tuple[tuple[int, int], Message[Any]]]:
        at: bytes | None = FIRST if start is None else start.encode()
        last = LAST if end is None else end.encode()
        while at is not None:
            try:
                page = stream.call(b"XRANGE", stream.key, at, last, b"COUNT", _REPLAY_PAGE)
            except (redis.RedisError, OSError) as error:
                raise StoreError(f"{stream.name!r} cannot be replayed: {error}") from error
            for entry_id, fields in page:
                try:
                    data, attributes, topic = from_fields(fields)
                except InvalidMessage as error:
                    why = UndecodableEntry(stream.name, entry_id.decode(), str(error))
                    logger.warning("left out of a replay: %s", why)
                    continue
                message: Message[Any] = Message(data, attributes, topic=topic or stream.topic)
                message.locals["position"] = entry_id.decode()
                yield split_id(entry_id), message
            at = id_after(page[-1][0]) if len(page) == _REPLAY_PAGE else None

    def close(self) -> None:
        """Stop reading; what is not settled can be claimed by others at once, and costs nothing."""
        if self._closed:
            return
        self._closed = True
        self._fetch.stop()
        with self._changed:
            for waiter in self._waiting:  # a nack that counts, counts
                waiter.delivery.deliveries = waiter.deliveries
            self._changed.notify_all()
        try:
            self._pay()
        except (redis.RedisError, OSError) as error:
            count = sum(map(len, self._owed.values()))
            logger.warning("%r: %d acks could not be sent; delivered again: %r", self, count, error)
        self._release()
        if self._is_ours:
            self._remove_name()
        self._wire.close()

    def _release(self) -> None:
        """Let others claim at once what is in hand."""
        held = [item for stream in self._streams for item in list(stream.held.values())]
        self._uncount(held, b"IDLE", max(1, round(self.lease * 1000)))
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


def _by_stream(waiters: Iterable[Waiter]) -> dict[GroupStream, list[Waiter]]:
    streams: dict[GroupStream, list[Waiter]] = {}
    for waiter in waiters:
        streams.setdefault(waiter.delivery.stream, []).append(waiter)
    return streams


def _by_stream_of(deliveries: Iterable[Delivery]) -> dict[GroupStream, list[Delivery]]:
    streams: dict[GroupStream, list[Delivery]] = {}
    for delivery in deliveries:
        streams.setdefault(delivery.stream, []).append(delivery)
    return streams


def _check_seconds(**settings: float | None) -> None:
    for name, value in settings.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value}: must be more than 0 seconds")


def _check_counts(**settings: int | None) -> None:
    for name, value in settings.items():
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name}={value}: must be at least 1")
