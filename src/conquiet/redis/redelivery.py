"""Redelivery: nacked entries pause here, then are delivered again or go to the dead letters.

nack ──▶ pauses ──the pause is over, the entry still ours──▶ delivered again, at its place
  │ TryLater ──▶ waits beside the stream (`delay`)
  │ max_attempts reached, or a permanent error ──▶ dead letter, then XACK
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from conquiet import bridge
from conquiet.acking import Error
from conquiet.errors import (
    Blameless,
    GivenBack,
    InvalidMessage,
    PermanentError,
    TryLater,
    handler_of,
)
from conquiet.message import Message, printable
from conquiet.redis.consumer import Consumer, Delivery
from conquiet.redis.dead_letter import to_dead_letter
from conquiet.redis.delay import Delays, KeyOf
from conquiet.redis.entry import UndecodableEntry
from conquiet.redis.wire import Wire

logger = logging.getLogger("conquiet.redis")

_UNDECODABLE_ATTEMPTS = 3
_POLL_SECONDS = 0.01


class Pauses(NamedTuple):
    """How long a nacked entry pauses, in seconds: twice as long each time, up to a limit."""

    first: float
    longest: float

    def after(self, nacks: int) -> float:
        return min(self.longest, self.first * 2.0 ** min(nacks, 60))


class _Waiter(NamedTuple):
    """An entry to be delivered again."""

    delivery: Delivery
    key: str
    """Entries of this key keep their order; empty for an entry that may be overtaken."""
    not_before: float
    deliveries: int
    """The delivery count of the redelivery."""


class Redelivery:
    """The entries of one consumer that wait to be delivered again.

    An entry that failed pauses. Entries of the same key wait behind it, so that none overtakes it;
    entries of other keys flow on. Waiting entries stay held by the consumer, which renews them.

    Entries are added by nacks, from any thread, and taken by the thread that reads; a lock guards
    them, and `notify` ends the wait of the reader.
    """

    def __init__(
        self,
        wire: Wire,
        consumer: Consumer,
        pauses: Pauses,
        key: KeyOf | None,
        max_attempts: int | None,
        dead_letters: str | None,
        delays: Delays | None = None,
    ) -> None:
        self.dead_by_handler: Counter[str] = Counter()
        """Dead letters by the handler that failed last; `""` for what reached none."""
        self._wire = wire
        self._consumer = consumer
        self._pauses = pauses
        self._key = key
        self._max_attempts = max_attempts
        self._dead_letters = dead_letters
        self._delays = delays
        self._changed = threading.Condition()
        self._waiters: dict[Delivery, _Waiter] = {}

    def __bool__(self) -> bool:
        return bool(self._waiters)

    @property
    def waiting(self) -> list[Delivery]:
        with self._changed:
            return list(self._waiters)

    def next_due(self) -> float:
        """Return when the next pause ends, by the monotonic clock; infinity if none is running.

        An entry that waits only for an earlier one of its key is due with that one.
        """
        now = time.monotonic()
        with self._changed:
            times = (waiter.not_before for waiter in self._waiters.values())
            return min((moment for moment in times if moment > now), default=math.inf)

    def wait(self, end: float) -> None:
        """Wait for `notify`, for the end of a pause, or until `end`; on an event loop, a moment."""
        if bridge.is_on_loop():  # where a wait for a condition would block the one that notifies
            left = min(end, self.next_due()) - time.monotonic()
            bridge.sleep(min(max(0.0, left), _POLL_SECONDS))
            return
        with self._changed:
            now = time.monotonic()
            self._changed.wait(max(0.0, min(end, self.next_due()) - now))

    def notify(self) -> None:
        """Wake the reader: an entry waits, or a settlement made room for more."""
        with self._changed:
            self._changed.notify_all()

    # --- coming in --------------------------------------------------------------------------

    def nack(self, nacked: Sequence[tuple[Delivery, Error]]) -> None:
        """Let nacked entries pause, or bury them; a `Blameless` error costs no attempt."""
        free: list[Delivery] = []
        for delivery, error in nacked:
            if not self._consumer.holds(delivery):
                continue
            if isinstance(error, Blameless):
                free.append(delivery)
                self._add(delivery, delivery.deliveries, pause=not isinstance(error, GivenBack))
            elif isinstance(error, TryLater) and self._delays is not None:
                self._defer(self._delays, delivery, error)
            elif self._is_hopeless(delivery, error):
                self._bury(delivery, delivery.deliveries, error)
            else:
                self._add(delivery, delivery.deliveries + 1)
        if free:
            self._consumer.uncount(free)

    def _defer(self, delays: Delays, delivery: Delivery, error: TryLater) -> None:
        attempts = delivery.attempts_before + delivery.deliveries
        try:
            delays.defer(delivery, attempts, error)
        except (redis.RedisError, OSError) as failure:
            logger.error(
                "could not let %r wait for a later try, it pauses here: %r", delivery, failure
            )
            self._add(delivery, delivery.deliveries + 1)
            return
        self._consumer.forget(delivery)

    def _is_hopeless(self, delivery: Delivery, error: Error) -> bool:
        if isinstance(error, PermanentError):
            return True
        return self._max_attempts is not None and delivery.deliveries >= self._max_attempts

    def bury_if_exhausted(self, delivery: Delivery) -> bool:
        """Bury an entry with more deliveries than attempts allowed: it kills its consumers."""
        if self._max_attempts is None or delivery.deliveries <= self._max_attempts:
            return False
        self._bury(delivery, delivery.deliveries - 1, None)
        return True

    def refuse(self, delivery: Delivery, error: InvalidMessage) -> None:
        """Retry an entry that is not a CloudEvent, then bury it; other entries flow on."""
        why = UndecodableEntry(delivery.stream.name, delivery.id.decode(), str(error))
        why.__cause__ = error
        logger.warning("delivery=%d: %s", delivery.deliveries, printable(str(why)))
        limit = min(self._max_attempts or _UNDECODABLE_ATTEMPTS, _UNDECODABLE_ATTEMPTS)
        if delivery.deliveries >= limit:
            self._bury(delivery, delivery.deliveries, why)
        else:
            self._add(delivery, delivery.deliveries + 1)

    def hold_back(self, messages: list[Message[Any]]) -> list[Message[Any]]:
        """Keep new messages that would overtake a waiting one of their key; return the others."""
        if not self._waiters:
            return messages
        with self._changed:
            keys = {waiter.key for waiter in self._waiters.values() if waiter.key}
            passing: list[Message[Any]] = []
            for message in messages:
                key = self._key_of(message)
                if key in keys:
                    assert message.acking is not None
                    delivery = message.acking.token
                    self._waiters[delivery] = _Waiter(delivery, key, 0.0, delivery.deliveries)
                else:
                    passing.append(message)
        return passing

    def _add(self, delivery: Delivery, deliveries: int, *, pause: bool = True) -> None:
        seconds = 0.0
        if pause:
            seconds = self._pauses.after(delivery.nacks)
            delivery.count_nack()
        try:
            data, attributes, _ = delivery.stream.decode(delivery.fields)
            key = self._key_of(Message(data, attributes))
        except InvalidMessage:
            key = ""
        with self._changed:
            moment = time.monotonic() + seconds
            self._waiters[delivery] = _Waiter(delivery, key, moment, deliveries)

    def _key_of(self, message: Message[Any]) -> str:
        try:
            return message.key if self._key is None else self._key(message)
        except Exception:  # noqa: BLE001 - the router refuses such a message, with the reason
            return ""

    # --- going out --------------------------------------------------------------------------

    def take(self, again: list[Delivery], limit: int) -> None:
        """Append up to `limit` entries whose pause is over and that are still ours."""
        waiters = self._take_due(limit)
        try:
            again += self._consumer.redeliver(
                {waiter.delivery: waiter.deliveries for waiter in waiters}
            )
        except BaseException:
            with self._changed:
                for waiter in waiters:
                    self._waiters[waiter.delivery] = waiter
            raise

    def _take_due(self, limit: int) -> list[_Waiter]:
        """Take up to `limit` waiters that may go now, in the order of the log."""
        taken: list[_Waiter] = []
        blocked: set[str] = set()
        with self._changed:
            now = time.monotonic()
            for waiter in sorted(self._waiters.values(), key=lambda item: item.delivery.place):
                if waiter.not_before > now or waiter.key in blocked:
                    if waiter.key:
                        blocked.add(waiter.key)
                    continue
                if len(taken) == limit:
                    break
                taken.append(waiter)
            for waiter in taken:
                del self._waiters[waiter.delivery]
        return taken

    def count_nacks(self) -> None:
        """Let nacks count for the consumer that claims the entry next; called before a release."""
        with self._changed:
            for waiter in self._waiters.values():
                waiter.delivery.restart(waiter.deliveries, waiter.delivery.touched)
            self._changed.notify_all()

    def _bury(self, delivery: Delivery, deliveries: int, error: Error) -> None:
        """Write the dead letter, then ack. Not in one MULTI: EXEC acks even if the XADD fails."""
        place = (self._dead_letters or f"{delivery.stream.origin}:dead").encode()
        fields = to_dead_letter(delivery, deliveries, error)
        try:
            self._wire.call(place, b"XADD", place, b"*", *fields)
            self._consumer.ack_buried(delivery)
        except (redis.RedisError, OSError) as failure:
            logger.error(
                "could not write the dead letter of %r, retrying later: %r", delivery, failure
            )
            self._add(delivery, deliveries + 1)
            return
        self.dead_by_handler[handler_of(error)] += 1
        why = error or "delivered too often"
        logger.error("dead letter in %r: %r: %s", place.decode(), delivery, printable(str(why)))
