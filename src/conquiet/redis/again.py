"""Again: what was nacked waits here, comes again at its place, or goes to the dead letters.

nack ──▶ waits ──its time has come, and it is still ours──▶ delivered again
  │ too often, or half of it took effect ──▶ dead letter, then XACK
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import redis

from conquiet.acking import Error
from conquiet.errors import Blameless, GivenBack, InvalidMessage
from conquiet.message import Message, printable
from conquiet.redis.delivery import Delivery, by_stream
from conquiet.redis.entry import UndecodableEntry, from_fields
from conquiet.redis.group import GroupStream
from conquiet.redis.letter import letter
from conquiet.redis.outcome import PartialExecError
from conquiet.redis.waiting import Waiter, Waiting
from conquiet.redis.wire import Argument, Wire

logger = logging.getLogger("conquiet.redis")

KeyOf = Callable[[Message[Any]], str]

_UNDECODABLE_DELIVERIES = 3


class Pauses(NamedTuple):
    """How long a nacked entry waits, in seconds: twice as long each time, up to a limit."""

    first: float
    longest: float

    def after(self, nacks: int) -> float:
        return min(self.longest, self.first * 2.0 ** min(nacks, 60))


class Again:
    """The nacked entries of one consumer; `changed` is told when one more waits."""

    def __init__(
        self,
        wire: Wire,
        pauses: Pauses,
        key: KeyOf | None,
        max_deliveries: int | None,
        dead_letters: str | None,
    ) -> None:
        self.changed = threading.Condition()
        self.dead = 0
        self._wire = wire
        self._waiting = Waiting()
        self._pauses = pauses
        self._key = key
        self._max_deliveries = max_deliveries
        self._dead_letters = dead_letters

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def waiting(self) -> list[Delivery]:
        with self.changed:
            return [waiter.delivery for waiter in self._waiting]

    def next_due(self, now: float) -> float:
        """When the next may go; the caller holds `changed`."""
        return self._waiting.next_due(now)

    # --- coming in --------------------------------------------------------------------------

    def nack(self, nacked: Sequence[tuple[Delivery, Error]]) -> None:
        free: list[Delivery] = []
        for delivery, error in nacked:
            if delivery.stream.held.get(delivery.id) is not delivery:
                continue  # released, or lost to another consumer and read again
            if isinstance(error, Blameless):
                free.append(delivery)
                self._wait(delivery, delivery.deliveries, pause=not isinstance(error, GivenBack))
            elif self._is_hopeless(delivery, error):
                self._bury(delivery, delivery.deliveries, error)
            else:
                self._wait(delivery, delivery.deliveries + 1)
        if free:
            uncount(free)

    def _is_hopeless(self, delivery: Delivery, error: Error) -> bool:
        if isinstance(error, PartialExecError):  # the inbox says done: it would not run again
            return True
        return self._max_deliveries is not None and delivery.deliveries >= self._max_deliveries

    def gives_up_on(self, delivery: Delivery) -> bool:
        """Bury what was delivered more often than allowed: it kills its consumers."""
        if self._max_deliveries is None or delivery.deliveries <= self._max_deliveries:
            return False
        self._bury(delivery, delivery.deliveries - 1, None)
        return True

    def refuse(self, delivery: Delivery, error: InvalidMessage) -> None:
        """An entry that is no CloudEvent: try again, then put it aside; the rest flow on (R13)."""
        why = UndecodableEntry(delivery.stream.name, delivery.id.decode(), str(error))
        why.__cause__ = error
        logger.warning("delivery=%d: %s", delivery.deliveries, printable(str(why)))
        if delivery.deliveries >= (self._max_deliveries or _UNDECODABLE_DELIVERIES):
            self._bury(delivery, delivery.deliveries, why)
        else:
            self._wait(delivery, delivery.deliveries + 1)

    def hold_back(self, messages: list[Message[Any]]) -> list[Message[Any]]:
        """Of what was just read, keep here what would overtake a waiting message of its key."""
        if not self._waiting:
            return messages
        with self.changed:
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

    def _wait(self, delivery: Delivery, deliveries: int, *, pause: bool = True) -> None:
        seconds = 0.0
        if pause:
            seconds = self._pauses.after(delivery.nacks)
            delivery.nacks += 1
        try:
            data, attributes, _ = from_fields(delivery.fields)
            key = self._key_of(Message(data, attributes))
        except InvalidMessage:
            key = ""
        with self.changed:
            moment = time.monotonic() + seconds
            self._waiting.add(Waiter(delivery, key, moment, deliveries))

    def _key_of(self, message: Message[Any]) -> str:
        try:
            return message.key if self._key is None else self._key(message)
        except Exception:  # noqa: BLE001 - the router refuses such a message, with the reason
            return ""

    # --- going out --------------------------------------------------------------------------

    def take(self, again: list[Delivery], limit: int) -> None:
        """Deliver again what waited, if it is still ours: a slow process may have lost it."""
        with self.changed:
            waiters = self._waiting.take(limit, time.monotonic())
        try:
            for stream, some in _waiters_by_stream(waiters).items():
                _touch(stream, some)
        except BaseException:
            with self.changed:
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

    def count_nacks(self) -> None:
        """At the end: a nack that counts, counts for whoever claims the entry."""
        with self.changed:
            for waiter in self._waiting:
                waiter.delivery.deliveries = waiter.deliveries
            self.changed.notify_all()

    def _bury(self, delivery: Delivery, deliveries: int, error: Error) -> None:
        """Write the letter, then ack. Not in one MULTI: EXEC acks even if the XADD fails."""
        stream = delivery.stream
        place = (self._dead_letters or f"{stream.name}:dead").encode()
        try:
            self._wire.call(place, b"XADD", place, b"*", *letter(delivery, deliveries, error))
            stream.settle([delivery.id])
        except (redis.RedisError, OSError) as failure:
            logger.error("no dead letter could be written for %r: %r", delivery, failure)
            self._wait(delivery, deliveries + 1)
            return
        stream.held.pop(delivery.id, None)
        self.dead += 1
        why = error or "delivered too often"
        logger.error("dead letter in %r: %r: %s", place.decode(), delivery, printable(str(why)))


def uncount(deliveries: Sequence[Delivery], *options: Argument) -> None:
    """Take the delivery back in Redis too, so that it also costs nothing if we die now."""
    try:
        for stream, some in by_stream(deliveries).items():
            ours = stream.still_ours(delivery.id for delivery in some)
            counts: dict[int, list[bytes]] = {}
            for delivery in some:
                if delivery.id in ours:
                    counts.setdefault(delivery.deliveries - 1, []).append(delivery.id)
            for count, ids in counts.items():
                stream.touch(ids, *options, b"RETRYCOUNT", count)
    except (redis.RedisError, OSError) as error:
        logger.warning("%d deliveries could not be taken back: %r", len(deliveries), error)


def _touch(stream: GroupStream, waiters: list[Waiter]) -> None:
    ours = stream.still_ours(waiter.delivery.id for waiter in waiters)
    counts: dict[int, list[bytes]] = {}
    for waiter in waiters:
        if waiter.delivery.id in ours:
            counts.setdefault(waiter.deliveries, []).append(waiter.delivery.id)
        else:
            stream.held.pop(waiter.delivery.id, None)
    for count, ids in counts.items():
        stream.touch(ids, b"RETRYCOUNT", count)


def _waiters_by_stream(waiters: Iterable[Waiter]) -> dict[GroupStream, list[Waiter]]:
    streams: dict[GroupStream, list[Waiter]] = {}
    for waiter in waiters:
        streams.setdefault(waiter.delivery.stream, []).append(waiter)
    return streams
