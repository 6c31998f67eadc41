"""StreamSource: reads one or several Redis streams as a consumer of a group.

consumer (own pending, stale, new entries) ──▶ decode ──▶ messages
redelivery (nacked before, pause over)     ──▶   │
                                                 └ undecodable: retried, then a dead letter
"""

from __future__ import annotations

import heapq
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, get_args

import redis

from conquiet import attempts
from conquiet.acking import Acking, Error
from conquiet.errors import ConfigError, InvalidMessage, StoreError
from conquiet.message import ERRORS, Message, new_id, printable
from conquiet.redis.consumer import Consumer, Delivery
from conquiet.redis.delay import DelayKeys, Delays, KeyOf
from conquiet.redis.entry import UndecodableEntry, Unmarshal, decoder
from conquiet.redis.group import GroupStream, Start
from conquiet.redis.ids import FIRST, LAST, next_after, parse
from conquiet.redis.redelivery import Pauses, Redelivery
from conquiet.redis.topic import Streams, streams_of
from conquiet.redis.wire import Wire, may_pass

logger = logging.getLogger("conquiet.redis")

MAX_ATTEMPTS = 25
"""With the default pauses, a message that fails is retried for about a minute and a half."""

_REPLAY_PAGE = 500

Positioned: TypeAlias = tuple[tuple[int, int], Message[Any]]
"""An entry id as numbers, and the message of the entry."""


class StreamSource:
    """Reads streams as a member of a consumer group.

    >>> source = StreamSource(client, "orders", group="billing")
    >>> client.xadd("orders", {"specversion": "1.0", "id": "1", "type": "sold", "data": "{}"}) != ""
    True
    >>> [message] = source.read(limit=10, timeout=1.0)
    >>> message.type, message.data, message.ack()
    ('sold', b'{}', True)
    >>> source.close()

    Leave `consumer` out, unless the name is stable and used by one process at a time, such as the
    name of a StatefulSet's pod: then entries of a crashed process are read again at once.
    `lease` is how long an entry may stay with a dead consumer; a worker renews it while a handler
    runs. `batch_size` bounds one read, `max_in_flight` the entries that are read and not settled,
    `block` the time that one command waits. After `max_attempts` deliveries a failing entry goes to
    the stream `dead_letters`, by default the name of its stream and `:dead`; with a permanent error
    at once. `max_attempts=None` sets no limit: only entries with a permanent error go there, and
    those that are not CloudEvents. `delete` is for outboxes: acked entries are deleted.
    `unmarshal` makes messages of entries that are not CloudEvents.

    A client of `redis.asyncio` is for an async worker, on whose event loop it is then read.

    A nacked message pauses `backoff` seconds, then twice as long, up to `max_backoff`. Later
    messages of its `key` (`Message.key`, unless you pass a function) wait behind it.

    `start` says where a new group begins: at the `beginning` of the stream, or `now`. Entries of
    dead consumers are looked for every `claim_interval` seconds, by default half the lease.
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
        batch_size: int | None = None,
        max_in_flight: int = 10_000,
        max_attempts: int | None = MAX_ATTEMPTS,
        dead_letters: str | None = None,
        backoff: float = 0.05,
        max_backoff: float = 5.0,
        key: KeyOf | None = None,
        delete: bool = False,
        unmarshal: Unmarshal | None = None,
    ) -> None:
        _check_names(group, consumer, start)
        _check_seconds(lease=lease, claim_interval=claim_interval, block=block)
        _check_counts(batch_size=batch_size, max_in_flight=max_in_flight, max_attempts=max_attempts)
        self.lease = lease
        self.group = group
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{new_id()[-12:]}"
        self._has_own_name = consumer is None
        self._block = block
        self._batch_size = batch_size
        self._max_in_flight = max_in_flight
        self._wire = Wire(client, allows_async=True)
        self.is_async = self._wire.is_async
        self._streams = [
            GroupStream(
                *(self._wire, name, topic, group, self.consumer),
                deletes=delete,
                decode=decoder(unmarshal),
            )
            for name, topic in streams_of(streams).items()
        ]
        self._start: Start = start
        self._claim_interval = claim_interval or lease / 2
        self._terms = (Pauses(backoff, max_backoff), key, max_attempts, dead_letters)
        self._delays: Delays | None = None
        self._orders_delays = False
        self._set_up(self._streams)
        self._closed = False
        if not self.is_async:  # else the first read prepares it, on its event loop
            self._prepare()

    @property
    def client(self) -> Any:
        """Return the client that was given."""
        return self._wire.given

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its streams."""
        return tuple(stream.name for stream in self._streams)

    def _set_up(self, streams: Sequence[GroupStream]) -> None:
        self._consumer = Consumer(
            self._wire,
            streams,
            self._start,
            self.lease,
            self._claim_interval,
            resumes=not self._has_own_name,
        )
        self._redelivery = Redelivery(self._wire, self._consumer, *self._terms, self._delays)

    def allow_delays(self, attempts: int, *, ordered: bool) -> None:
        """Let failed entries wait beside their stream; see `conquiet.source.Delaying`."""
        if self._delays is None or self._orders_delays != ordered:
            self._orders_delays = ordered
            self._read_delayed()

    def _read_delayed(self) -> None:
        """Read what has waited for a later try, too."""
        key = self._terms[1] or (lambda message: message.key)
        self._delays = Delays(self._wire, self._streams, key if self._orders_delays else None)
        self._set_up([*self._streams, *self._delays.streams])

    def _has_delayed(self) -> bool:
        """Return whether entries wait for a later try, from a worker that had `Retry(delays=…)`."""
        try:
            return any(
                stream.call(b"EXISTS", *DelayKeys.of(stream.name, self.group))
                for stream in self._streams
            )
        except (redis.RedisError, OSError) as error:  # an ACL without these keys; or it is away
            logger.debug("%r: cannot look for entries that wait: %r", self, error)
            return False

    def _prepare(self) -> None:
        if self._has_delayed():
            self._read_delayed()
        try:
            self._consumer.prepare()
        except (redis.RedisError, OSError) as error:
            if not may_pass(error):
                raise ConfigError(f"{self!r} could not create its group: {error}") from error
            logger.warning("%r could not create its group, retrying later: %r", self, error)

    @property
    def dead_by_handler(self) -> Counter[str]:
        """Return the dead letters by the handler that failed last; `""` for what reached none."""
        return self._redelivery.dead_by_handler

    @property
    def dead(self) -> int:
        """Return how many entries went to the dead letters."""
        return self.dead_by_handler.total()

    @property
    def claimed(self) -> int:
        """Return how many stale entries were claimed from other consumers."""
        return self._consumer.claimed

    @property
    def deleted(self) -> int:
        """Return how many entries were deleted before they were acked, or trimmed unread."""
        return self._consumer.deleted

    @property
    def in_flight(self) -> int:
        """Return how many entries are held: delivered, or about to be delivered again."""
        return self._consumer.in_flight

    # --- reading ----------------------------------------------------------------------------

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        """Read up to `limit` messages; those that are redelivered come first.

        Waits up to `timeout` seconds for the first.
        """
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        limit = limit if self._batch_size is None else min(limit, self._batch_size)
        end = time.monotonic() + timeout
        while not self._closed:
            batch = self._read(limit, end)
            if self._closed:
                break
            if batch or time.monotonic() >= end:
                return batch
        self._consumer.release()  # entries of a read that was running when `close` was called
        return ()

    def _read(self, limit: int, end: float) -> list[Message[Any]]:
        again: list[Delivery] = []
        found: list[Delivery] = []
        try:
            self._consumer.prepare()
            if self._consumer.unsent_acks:
                self._consumer.send_acks()
            if self._delays is not None and time.monotonic() >= self._delays.next_look:
                self._delays.promote()
            if self._redelivery:
                self._redelivery.take(again, limit)
            self._collect(found, limit - len(again), end, bool(again))
        except (redis.RedisError, OSError) as error:
            self._recover(error, has_some=bool(again or found))
        except BaseException:  # a cancelled task: Redis may have delivered entries
            self._consumer.rescan()
            raise
        if self._delays is not None:
            again, found = self._without_waiting(self._delays, again, found)
        messages = self._decode(again) if again else []
        if found:
            messages += self._redelivery.hold_back(self._decode(found))
        return messages

    def _without_waiting(
        self, delays: Delays, again: list[Delivery], found: list[Delivery]
    ) -> tuple[list[Delivery], list[Delivery]]:
        """Leave out entries that wait for an earlier one of their key."""
        try:
            gone = delays.hold_back([*again, *found])
        except (redis.RedisError, OSError) as error:  # they pause here, so that the order is kept
            logger.warning("%r: could not look who waits for whom, retrying: %r", self, error)
            why = StoreError("it is not known who waits for whom")
            self._redelivery.nack([(delivery, why) for delivery in (*again, *found)])
            return [], []
        for delivery in gone:
            self._consumer.forget(delivery)
        return (
            [delivery for delivery in again if delivery not in gone],
            [delivery for delivery in found if delivery not in gone],
        )

    def _recover(self, error: Exception, *, has_some: bool) -> None:
        """Create deleted groups again; raise unless the failed read returned some entries."""
        try:
            if isinstance(error, redis.ResponseError) and self._consumer.repair(error):
                return
        except (redis.RedisError, OSError) as failure:
            error = failure
        self._consumer.rescan()
        if not has_some:
            raise StoreError(f"{self!r} could not read: {error}") from error
        logger.warning("%r: a read failed in part, retrying: %r", self, error)

    def _collect(self, found: list[Delivery], limit: int, end: float, has_some: bool) -> None:
        """Collect our own pending entries, then stale entries of other consumers, then new ones."""
        room = min(limit, self._max_in_flight - self.in_flight)
        if room > 0:
            self._consumer.collect_pending(found, room)
        if len(found) < room:
            wait = 0.0 if found or has_some else self._longest_wait(end)
            self._consumer.collect_new(found, room - len(found), wait)
        elif room <= 0 and not has_some:
            self._redelivery.wait(end)  # only a settlement makes room

    def _longest_wait(self, end: float) -> float:
        """Return the seconds until the read must end, or a scan or a redelivery is due."""
        moments = [end, self._consumer.next_scan]
        if self._redelivery:
            moments.append(self._redelivery.next_due())
        if self._delays is not None:
            moments.append(self._delays.next_look)
        wait = min(moments) - time.monotonic()
        return wait if self._block is None else min(wait, self._block)

    def _decode(self, deliveries: Iterable[Delivery]) -> list[Message[Any]]:
        """Decode entries; retry or bury those that are not CloudEvents or have no attempts left."""
        messages: list[Message[Any]] = []
        for delivery in deliveries:
            if delivery.deliveries > 1 and self._redelivery.bury_if_exhausted(delivery):
                continue
            try:
                data, attributes, topic = delivery.stream.decode(delivery.fields)
            except InvalidMessage as error:
                self._redelivery.refuse(delivery, error)
                continue
            message = Message(
                data,
                attributes,
                acking=Acking(self, delivery),
                topic=topic or delivery.stream.topic,
                deliveries=delivery.attempts_before + delivery.deliveries,
            )
            if errors := delivery.errors:
                message.locals[ERRORS] = attempts.read(errors)
            messages.append(message)
        return messages

    # --- settling ---------------------------------------------------------------------------

    def settle(self, acked: Sequence[Delivery], nacked: Sequence[tuple[Delivery, Error]]) -> None:
        """Ack with one command per stream; let nacked entries pause until their redelivery."""
        if acked:
            self._consumer.ack(acked)
        if nacked:
            self._redelivery.nack(nacked)
        if self._redelivery or self.in_flight + len(acked) >= self._max_in_flight:
            self._redelivery.notify()

    def renew(self, messages: Sequence[Message[Any]]) -> None:
        """Renew the lease of these messages, and of those that wait for their redelivery."""
        tokens = (message.acking.token for message in messages if message.acking is not None)
        ours = (token for token in tokens if isinstance(token, Delivery))
        self._consumer.renew((*ours, *self._redelivery.waiting))

    # --- replay -----------------------------------------------------------------------------

    def replay(self, start: str | None = None, end: str | None = None) -> Iterator[Message[Any]]:
        """Yield the entries with ids from `start` to `end`, in order of time; the group stays.

        The id of a message's entry is `message.locals["position"]`. Entries that are not
        CloudEvents are left out, with a warning.
        """
        parts = [_replay(stream, start, end) for stream in self._streams]
        for _, message in heapq.merge(*parts, key=lambda item: item[0]):
            yield message

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop reading; other consumers may claim unsettled entries at once, at no attempt."""
        if self._closed:
            return
        self._closed = True
        self._consumer.stop()
        self._redelivery.count_nacks()
        try:
            self._consumer.send_acks()
        except (redis.RedisError, OSError) as error:
            logger.warning(
                "%r: %d acks could not be sent, their entries will be delivered again: %r",
                *(self, self._consumer.unsent_acks, error),
            )
        self._consumer.release()
        if self._has_own_name:
            self._remove_name()
        self._wire.close()

    def _remove_name(self) -> None:
        """Remove the generated name, which no other process will use."""
        try:
            self._consumer.remove_name()
        except (redis.RedisError, OSError) as error:
            logger.debug("%r: could not remove the consumer's name: %r", self, error)

    def __repr__(self) -> str:
        names = ", ".join(stream.name for stream in self._streams)
        return f"<StreamSource {names} group={self.group} consumer={self.consumer}>"


def _replay(stream: GroupStream, start: str | None, end: str | None) -> Iterator[Positioned]:
    at: bytes | None = FIRST if start is None else start.encode()
    last = LAST if end is None else end.encode()
    while at is not None:
        try:
            page = stream.call(b"XRANGE", stream.key, at, last, b"COUNT", _REPLAY_PAGE)
        except (redis.RedisError, OSError) as error:
            raise StoreError(f"could not replay stream {stream.name!r}: {error}") from error
        for entry_id, fields in page:
            try:
                data, attributes, topic = stream.decode(fields)
            except InvalidMessage as error:
                why = UndecodableEntry(stream.name, entry_id.decode(), str(error))
                logger.warning("left out of a replay: %s", printable(str(why)))
                continue
            message: Message[Any] = Message(data, attributes, topic=topic or stream.topic)
            message.locals["position"] = entry_id.decode()
            yield parse(entry_id), message
        at = next_after(page[-1][0]) if len(page) == _REPLAY_PAGE else None


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
