"""Read ahead from the streams into a buffer, and hand the messages over."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import redis
from kombu.utils.json import loads

from conquiet.kombu import scripts
from conquiet.kombu.connection import Commands, is_replica
from conquiet.kombu.consumer import Consumer
from conquiet.kombu.layout import (
    BACK,
    GROUP,
    Entry,
    Keys,
    Place,
    decode_fetch,
    decode_read,
    place_of,
    tag_of,
)
from conquiet.kombu.lease import Pulse
from conquiet.kombu.settlement import Acks, Settlement, encode_acks
from conquiet.kombu.topology import Topology

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 100
"""Messages in one fetch, however large the prefetch count is."""

LONGEST_BLOCK = 10.0
"""Seconds that a read blocks at most, since an entry that was given back does not wake it."""

TURN = 0.02
"""Seconds of callbacks after which the event loop gets its turn, with messages still in the buffer.

On Celery's solo pool a callback is a whole task: control commands and a shutdown come between two.
"""

_RETRY_AFTER = 0.2  # seconds
_REASON_CHARS = 500

# Redis refuses commands with these for a while; a ResponseError that got out would end a Celery
# worker.
_PASSING = ("BUSY ", "MISCONF ", "NOREPLICAS ")
_PASSING_CLASSES = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.MasterDownError,
    redis.exceptions.TryAgainError,
)


class Reader:
    """Decide which command reads next, and keep the entries of its reply in a buffer.

    A fetch is a script that takes ready messages and settles acks on the way. Once a fetch took
    everything, the next read is an XREADGROUP that blocks until a message arrives. As many messages
    are read as there is credit for: the prefetch count less those that are unacked or buffered.

    The reader does not own the socket. The channel sends what `next_command` returns, and then
    calls `accept` with the reply, `recover` with an error reply, or `lose` if no reply will come.
    """

    def __init__(
        self,
        commands: Commands,
        keys: Keys,
        topology: Topology,
        consumer: Consumer,
        settlement: Settlement,
        *,
        qos: Callable[[], Any],
        rotate: Callable[[str], Any],
        in_event_loop: Callable[[], bool],
        delivery_limit: int,
    ) -> None:
        self.is_blocking = False  # the read under way ends when a message arrives
        self.has_strays = False  # a reply was lost, and its entries are pending with us
        self.retry_at = 0.0
        self._commands = commands
        self._keys = keys
        self._topology = topology
        self._consumer = consumer
        self._settlement = settlement
        self._qos = qos
        self._rotate = rotate
        self._in_event_loop = in_event_loop
        self._delivery_limit = delivery_limit
        self._buffer: deque[Entry] = deque()
        self._broadcasts = 0
        self._order: list[str] = []  # the streams of the read under way
        self._wanted = 0
        self._in_flight: Acks = {}
        self._is_drained = False  # the last fetch took everything
        self._prepares = True  # the next fetch creates missing streams and groups
        self._sends_whole = False  # the next fetch sends its script, not the hash
        self._slow_start = 1  # how many to fetch where no prefetch count limits it

    # --- command ----------------------------------------------------------------------------

    def next_command(self, queues: list[str], timeout: float) -> tuple[Any, ...] | None:
        """Return a fetch or a blocking read; None if there is no credit or Redis needs a pause."""
        wanted = self._qos().credit(self._slow_start) - len(self._buffer)
        if not queues or time.monotonic() < self.retry_at or wanted <= 0:
            return None
        self._order = self._consumer.streams_of(queues)
        # A fetch takes waiting acks along, and a read that blocks could not.
        self.is_blocking, self._wanted = self._is_drained and not self._settlement, wanted
        return self._blocking_read(timeout) if self.is_blocking else self._fetch(queues)

    def _fetch(self, queues: list[str]) -> tuple[Any, ...]:
        if self._consumer.lease is None:  # in a forked child that goes on consuming
            for queue in queues:
                self._consumer.consume(queue)
        self._in_flight = self._settlement.take_acks()
        build = scripts.fetch.whole if self._sends_whole else scripts.fetch.by_hash
        return build(*self._arguments(self._order, self._wanted, self._in_flight, self._prepares))

    def _arguments(
        self, streams: list[str], wanted: int, acks: Acks, prepares: bool
    ) -> tuple[list[str], list[scripts.Argument]]:
        consumer, expires_ms = self._consumer, self._topology.expires_ms
        args = encode_acks(
            acks,
            GROUP,
            consumer.name,
            BACK,
            consumer.lease.milliseconds if consumer.lease else 0,
            wanted,
            self._delivery_limit,
            self._keys.namespace,
            "1" if prepares else "",
            len(streams),
            *[expires_ms.get(consumer.queue_of(stream), "") for stream in streams],
        )
        return [self._keys.leases, *streams, *acks], args

    def _blocking_read(self, timeout: float) -> tuple[Any, ...]:
        block = max(int(min(timeout or LONGEST_BLOCK, LONGEST_BLOCK) * 1000), 1)
        new = [">"] * len(self._order)
        group = ("XREADGROUP", "GROUP", GROUP, self._consumer.name, "COUNT", 1, "BLOCK", block)
        return *group, "STREAMS", *self._order, *new

    def read_again(self) -> None:
        """Fetch next, also from queues that have no stream yet: there is a new subscriber."""
        self._is_drained, self._prepares = False, True

    # --- reply ------------------------------------------------------------------------------

    def accept(self, reply: Any) -> None:
        """Move the entries of a reply into the buffer."""
        self._in_flight, self._sends_whole = {}, False
        if self.is_blocking:
            self._is_drained = False
            self._keep(decode_read(reply, self._consumer.queue_of))
        else:
            self._prepares = False
            found = decode_fetch(reply, self._order, self._consumer.queue_of)
            self._is_drained = len(found) < self._wanted and not reply[0]
            self._keep(found)

    def _keep(self, found: list[Entry]) -> None:
        """Buffer entries; give back those without credit, since other consumers may be idle."""
        if not found:
            self._slow_start = 1
            return
        self._slow_start = min(max(self._slow_start, len(found)) * 2, MOST_AT_ONCE)
        for queue in dict.fromkeys(entry.queue for entry in found):
            self._rotate(queue)
        qos = self._qos()
        room = max(qos.credit(self._slow_start) - len(self._buffer), 0)
        if qos.prefetch_count and len(found) > room:
            found, excess = found[:room], found[room:]
            self._give_back(excess)
        self._buffer.extend(found)

    def accept_broadcast(self, payload: bytes, queues: Iterable[str]) -> None:
        """Move a broadcast into the buffer, once for each queue; no stream holds it."""
        for queue in queues:
            self._broadcasts += 1
            self._buffer.append(Entry(queue, "", str(self._broadcasts), False, payload))

    def lose(self) -> None:
        """Prepare for a reply that never comes: acks are sent again, entries looked for."""
        self.has_strays = True
        self._consumer.keep(self._order)  # also of queues that were cancelled since
        self._abort()

    def _abort(self) -> None:
        self._is_drained = False
        self._settlement.put_back(self._in_flight)
        self._in_flight = {}

    def recover(self, error: redis.ResponseError, queues: Iterable[str]) -> None:
        """Prepare for the next read after an error reply; raise it if that would not help.

        Raise `redis.ConnectionError` if the server became a replica: Kombu connects again, and
        Sentinel knows the new master.
        """
        self._abort()
        text = str(error)
        if isinstance(error, redis.exceptions.NoScriptError):
            self._sends_whole = True
        elif text.startswith(("NOGROUP", "UNBLOCKED")) or "consumer group" in text:
            self.read_again()
            for queue in queues:
                self._topology.restore(queue)
        elif is_replica(error):
            raise redis.ConnectionError(text) from error
        elif isinstance(error, _PASSING_CLASSES) or text.startswith(_PASSING):
            self.pause(error)
        else:
            raise error

    def pause(self, error: Exception) -> None:
        """Wait before the next read; an event loop goes on meanwhile."""
        logger.warning("Redis refuses to serve now, trying again in %s s: %s", _RETRY_AFTER, error)
        self.retry_at = time.monotonic() + _RETRY_AFTER
        if not self._in_event_loop():
            time.sleep(_RETRY_AFTER)

    def find_strays(self, execute: Callable[..., Any]) -> None:
        """Give back the entries of a lost reply, which the server counts as ours."""
        self._settlement.give_back_strays(execute, self._consumer.streams, self._list_held())
        self.has_strays = False

    def drop_taken(self) -> int:
        """Drop buffered entries that other consumers took over while our lease had ended.

        Return how many of those that were handed over they have, which cannot be taken back.
        """
        qos = self._qos()
        handed = {tag: place for tag in qos.list_unacked() if (place := place_of(tag))[0]}
        places = [entry.place for entry in self._buffer if entry.stream]
        taken = self._settlement.find_taken(self._commands.client, [*places, *handed.values()])
        kept = deque(entry for entry in self._buffer if entry.place not in taken)
        dropped, self._buffer = len(self._buffer) - len(kept), kept
        lost = [tag for tag, place in handed.items() if place in taken]
        qos.lose(lost)
        logger.warning(
            "%s was silent for longer than its lease: of its messages other consumers got %d that "
            "were buffered, and are dropped here, and %d that the application has",
            self._consumer.name,
            dropped,
            len(lost),
        )
        return len(lost)

    def _list_held(self) -> Iterator[Place]:
        yield from self._settlement.places()
        yield from (entry.place for entry in self._buffer)
        yield from (place_of(tag) for tag in list(self._qos()._delivered))

    # --- buffer -----------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Return whether messages are buffered."""
        return bool(self._buffer)

    def pop(self) -> Entry:
        """Take the oldest entry out of the buffer."""
        return self._buffer.popleft()

    def get(self, queue: str) -> Entry | None:
        """Take an entry of one queue out of the buffer, or fetch one at once."""
        for entry in self._buffer:
            if entry.queue == queue:
                self._buffer.remove(entry)
                return entry
        return self._fetch_one(queue)

    def _fetch_one(self, queue: str) -> Entry | None:
        if self.has_strays:
            self.find_strays(self._commands.client.execute_command)
        self._consumer.subscribe(queue)
        streams = self._consumer.streams_of([queue])
        acks = self._settlement.take_acks()
        try:
            reply = self._commands.call(scripts.fetch, *self._arguments(streams, 1, acks, True))
        except BaseException:
            self.has_strays = True
            self._settlement.put_back(acks)
            raise
        found = decode_fetch(reply, streams, self._consumer.queue_of)
        return found[0] if found else None

    def put_back(self, entry: Entry) -> None:
        """Return an entry that has no subscriber any more."""
        self._give_back([entry])

    def give_back(self, queue: str) -> None:
        """Return the buffered entries of a queue that has no subscriber any more."""
        kept = deque(entry for entry in self._buffer if entry.queue != queue)
        self._give_back(entry for entry in self._buffer if entry.queue == queue)
        self._buffer = kept

    def give_back_all(self) -> None:
        self._give_back(self._buffer)
        self._buffer.clear()

    def _give_back(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.stream:
                self._settlement.give_back(*entry.place)


class Subscriber(NamedTuple):
    """Name a consumer of Kombu: its tag, its callback, and whether its messages need an ack."""

    tag: str
    no_ack: bool
    callback: Callable[[Any], Any]


class Delivery:
    """Hand buffered messages to the subscribers of their queues.

    The last subscriber of a queue gets its messages, as in Kombu's other virtual transports.
    """

    def __init__(
        self,
        reader: Reader,
        settlement: Settlement,
        *,
        qos: Callable[[], Any],
        new_message: Callable[[Any], Any],
        confirm_lease: Callable[[], None],
        pulse: Pulse,
        subscribers: dict[str, list[Subscriber]] | None = None,
    ) -> None:
        self.subscribers: dict[str, list[Subscriber]] = subscribers or {}
        self._confirm_lease = confirm_lease
        self._pulse = pulse
        self._reader = reader
        self._settlement = settlement
        self._qos = qos
        self._new_message = new_message

    def subscribe(self, queue: str, subscriber: Subscriber) -> None:
        self.subscribers.setdefault(queue, []).append(subscriber)

    def unsubscribe(self, queue: str, tag: str) -> bool:
        """Remove a subscriber; return whether the queue has others."""
        left = [one for one in self.subscribers.get(queue, ()) if one.tag != tag]
        if left:
            self.subscribers[queue] = left
        else:
            self.subscribers.pop(queue, None)
        return bool(left)

    def get(self, queue: str, no_ack: bool) -> Any:
        """Return a message of a queue, or None if there is none."""
        while (entry := self._reader.get(queue)) is not None:
            message = self.decode(entry)
            if message is not None:
                self._own(entry, message, no_ack)
                return message
        return None

    @property
    def can_hand_over(self) -> bool:
        return bool(self._reader) and self._qos().can_consume()

    def hand_over_in_turn(self) -> int:
        """Hand over until the buffer or the credit is used up, or the time of a turn is."""
        handed, end = 0, time.monotonic() + TURN
        while self.can_hand_over and (not handed or time.monotonic() < end):
            handed += self.hand_over()
        return handed

    def hand_over(self) -> int:
        """Call back the subscriber of the next message; return 0 if there is no message."""
        self._confirm_lease()
        while self._reader:
            entry = self._reader.pop()
            subscribers = self.subscribers.get(entry.queue)
            if not subscribers:
                self._reader.put_back(entry)
                continue
            message = self.decode(entry)
            if message is None:
                continue
            self._own(entry, message, subscribers[-1].no_ack)
            self._pulse.begin()
            try:
                subscribers[-1].callback(message)
            finally:
                self._pulse.end()
            return 1
        return 0

    def _own(self, entry: Entry, message: Any, no_ack: bool) -> None:
        if no_ack:
            if entry.stream:
                self._settlement.ack(*entry.place)
        else:
            self._qos().append(message, message.delivery_tag)

    def decode(self, entry: Entry) -> Any:
        """Build the message of an entry; None if it is malformed, and becomes a dead letter."""
        try:
            payload = loads(entry.payload)
            properties = payload["properties"]
            properties["delivery_tag"] = tag_of(*entry.place)
            if entry.redelivered:
                payload["headers"] = {**(payload.get("headers") or {}), "redelivered": True}
                properties.setdefault("delivery_info", {})["redelivered"] = True
            return self._new_message(payload)
        except Exception as error:  # noqa: BLE001 - any error condemns this entry, not the next
            reason = f"{error!r:.{_REASON_CHARS}}"  # some errors quote the whole message
            logger.error(
                "entry %s of queue %r cannot be decoded and becomes a dead letter: %s",
                entry.id,
                entry.queue,
                reason,
            )
            if entry.stream:
                self._settlement.bury(*entry.place, f"it cannot be decoded: {reason}")
            return None
