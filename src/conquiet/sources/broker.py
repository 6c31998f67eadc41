"""BrokerSource: redelivery, order by key and dead letters, for the sources of all brokers.

broker.receive ──▶ new deliveries ─────────────▶ messages ──ack──▶ broker.ack
                         │ an earlier one           │
                         │ of its key waits         └nack──▶ pause ──over──▶ messages, again
                         └──────▶ wait behind it               │ max_attempts reached, or
                                                               └ a permanent error ──▶ dead letter,
                                                                                       then ack

A message that failed is not returned to the broker: it waits in this process, still unacked. So it
keeps its place, its pause and its count of attempts, which brokers do not.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict

from conquiet.acking import Acking, Error
from conquiet.errors import (
    Blameless,
    ConfigError,
    ConquietError,
    GivenBack,
    InvalidMessage,
    PermanentError,
    handler_of,
)
from conquiet.message import Attributes, Message, describe, printable
from conquiet.middleware.dead_letter import to_letter
from conquiet.sink import Sink

logger = logging.getLogger("conquiet.sources")

KeyOf = Callable[[Message[Any]], str]

MAX_ATTEMPTS = 25
"""With the default pauses, a message that fails is retried for about a minute and a half."""


class Delivery:
    """A message of a broker, from its arrival to its settlement."""

    __slots__ = (
        "attributes",
        "data",
        "deliveries",
        "error",
        "is_moved",
        "is_tried",
        "nacks",
        "origin",
        "place",
        "receipt",
        "topic",
    )

    def __init__(
        self,
        data: bytes,
        attributes: Attributes,
        *,
        topic: str | None,
        origin: str,
        place: Any,
        receipt: Any,
        deliveries: int = 1,
        error: InvalidMessage | None = None,
    ) -> None:
        self.data = data
        self.attributes = attributes
        self.topic = topic
        self.origin = origin
        """The queue or topic that it was read from."""
        self.place = place
        """Sorts the deliveries of one broker in the order they arrived."""
        self.receipt = receipt
        """What the broker needs to ack it."""
        self.deliveries = deliveries
        self.error = error
        """Why it could not be decoded; `data` is then the body as it came."""
        self.nacks = 0
        self.is_tried = False
        """Whether a transaction moved a stored position past it; perhaps it was committed."""
        self.is_moved = False
        """Whether the last transaction with it did."""

    def __repr__(self) -> str:
        return f"<{describe(self.attributes)} from {self.origin}>"


class Broker(Protocol):
    """A client of a broker, as `BrokerSource` uses it. One thread receives; any thread acks."""

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        """Return up to `limit` new deliveries; wait for the first. Raise `StoreError`."""

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Remove settled messages at the broker; those that are lost are left out."""

    def holds(self, delivery: Delivery) -> bool:
        """Return whether a delivery is still ours: its connection, partition or lease is."""

    def open_letters(self, name: str) -> Sink:
        """Open the queue or topic for dead letters."""

    def close(self) -> None:
        """Return unacked messages to the broker."""


class Redelivery(TypedDict, total=False):
    """What the sources of all brokers take: how often a message is tried, and what comes then."""

    max_attempts: int | None
    dead_letters: str | Sink | None
    backoff: float
    max_backoff: float
    key: KeyOf | None


class _Waiter:
    """A delivery that waits for the end of its pause, or behind an earlier one of its key."""

    __slots__ = ("delivery", "key", "not_before")

    def __init__(self, delivery: Delivery, key: str, not_before: float) -> None:
        self.delivery = delivery
        self.key = key
        self.not_before = not_before


class BrokerSource:
    """Reads from a broker. The base of `AmqpSource`, `KafkaSource` and `SqsSource`.

    A failed message pauses `backoff` seconds, then twice as long, up to `max_backoff`; later ones
    of its `key` wait behind it. After `max_attempts` deliveries, or a permanent error, it goes to
    `dead_letters`: the name of a queue or topic, by default its own name and `dead`, or a `Sink`.
    """

    _letters_suffix = ".dead"
    _look_seconds = 0.02
    """How often a waiting read checks for nacks, while messages are in flight."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        *,
        max_attempts: int | None = MAX_ATTEMPTS,
        dead_letters: str | Sink | None = None,
        backoff: float = 0.05,
        max_backoff: float = 5.0,
        key: KeyOf | None = None,
    ) -> None:
        if max_attempts is not None and (isinstance(max_attempts, bool) or max_attempts < 1):
            raise ConfigError(f"max_attempts={max_attempts}: must be at least 1, or None")
        for setting, value in (("backoff", backoff), ("max_backoff", max_backoff)):
            if not value >= 0:
                raise ConfigError(f"{setting}={value}: must be 0 seconds or more")
        self.dead_by_handler: Counter[str] = Counter()
        """Dead letters by the handler that failed last; `""` for what reached none."""
        self._broker = broker
        self._name = name
        self._max_attempts = max_attempts
        self._backoff = backoff
        self._max_backoff = max_backoff
        self._key = key
        self._lock = threading.Lock()
        self._dead_letters = dead_letters
        self._letters: dict[str, Sink] = {}
        self._burial = threading.Lock()  # a sink belongs to one thread at a time
        self._waiters: dict[Delivery, _Waiter] = {}
        self._in_flight = 0
        self._closed = False

    # --- reading ----------------------------------------------------------------------------

    @property
    def dead(self) -> int:
        """Return how many messages became dead letters."""
        return self.dead_by_handler.total()

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        """Read up to `limit` messages; those that are redelivered come first."""
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        end = time.monotonic() + timeout
        while not self._closed:
            again = self._take_due(limit) if self._waiters else []
            found: list[Delivery] = []
            if len(again) < limit:
                wait = 0.0 if again else self._longest_wait(end)
                try:
                    found = self._admit(self._broker.receive(limit - len(again), wait))
                except BaseException:
                    self._wait_again(again)
                    raise
            if again or found:
                with self._lock:
                    self._in_flight += len(again) + len(found)
                return [self._message(delivery) for delivery in (*again, *found)]
            if time.monotonic() >= end:
                break
        return []

    def _longest_wait(self, end: float) -> float:
        now = time.monotonic()
        wait = end - now
        if self._waiters:
            with self._lock:
                moments = [waiter.not_before for waiter in self._waiters.values()]
            wait = min(wait, min((at for at in moments if at > now), default=math.inf) - now)
        if self._in_flight > 0:
            wait = min(wait, self._look_seconds)  # a nack may come from another thread
        return max(wait, 0.0)

    def _message(self, delivery: Delivery) -> Message[Any]:
        return Message(
            delivery.data,
            dict(delivery.attributes),  # a middleware may change them before a redelivery
            acking=Acking(self, delivery),
            topic=delivery.topic,
            deliveries=delivery.deliveries,
        )

    def _admit(self, found: Sequence[Delivery]) -> list[Delivery]:
        """Return new deliveries that may be handled now; bury or hold back the others."""
        most = math.inf if self._max_attempts is None else self._max_attempts
        good = [
            delivery
            for delivery in found
            if (delivery.error is None and delivery.deliveries <= most)
            or not self._bury_if_hopeless(delivery)
        ]
        if not self._waiters:
            return good
        passing: list[Delivery] = []
        with self._lock:
            keys = {waiter.key for waiter in self._waiters.values() if waiter.key}
            for delivery in good:
                key = self._key_of(delivery)
                if key in keys:
                    self._waiters[delivery] = _Waiter(delivery, key, 0.0)
                else:
                    passing.append(delivery)
        return passing

    def _bury_if_hopeless(self, delivery: Delivery) -> bool:
        """Bury what cannot be decoded, and what was delivered too often: it kills its consumers."""
        if delivery.error is not None:
            self._bury(delivery, delivery.error)
            return True
        if self._max_attempts is None or delivery.deliveries <= self._max_attempts:
            return False
        times = delivery.deliveries - 1
        self._bury(delivery, PermanentError(f"delivered {times} times and never settled"))
        return True

    # --- settling ---------------------------------------------------------------------------

    def settle(self, acked: Sequence[Delivery], nacked: Sequence[tuple[Delivery, Error]]) -> None:
        """Ack a batch; let nacked messages pause until their redelivery, or bury them."""
        for delivery, error in nacked:
            delivery.is_moved = False  # rolled back
            if self._broker.holds(delivery):  # else the broker delivers it again
                self._nack(delivery, error)
        if acked:
            self._broker.ack(acked)
        with self._lock:
            self._in_flight -= len(acked) + len(nacked)

    def _nack(self, delivery: Delivery, error: Error) -> None:
        if isinstance(error, Blameless):
            self._wait(delivery, pause=not isinstance(error, GivenBack))
            return
        exhausted = self._max_attempts is not None and delivery.deliveries >= self._max_attempts
        if exhausted or isinstance(error, PermanentError):
            self._bury(delivery, error or ConquietError("nacked without an error"))
            return
        delivery.deliveries += 1
        self._wait(delivery)

    def _wait(self, delivery: Delivery, *, pause: bool = True) -> None:
        seconds = 0.0
        if pause:
            seconds = min(self._max_backoff, self._backoff * 2.0 ** min(delivery.nacks, 60))
        delivery.nacks += 1
        waiter = _Waiter(delivery, self._key_of(delivery), time.monotonic() + seconds)
        with self._lock:
            if not self._closed:
                self._waiters[delivery] = waiter

    def _wait_again(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._wait(delivery, pause=False)

    def _key_of(self, delivery: Delivery) -> str:
        try:
            message = Message(delivery.data, delivery.attributes)
            return message.key if self._key is None else self._key(message)
        except Exception:  # noqa: BLE001 - the router refuses such a message, with the reason
            return ""

    def _take_due(self, limit: int) -> list[Delivery]:
        """Take up to `limit` deliveries that are ours and whose pause is over, in their order."""
        taken: list[Delivery] = []
        blocked: set[str] = set()
        now = time.monotonic()
        with self._lock:
            for waiter in sorted(self._waiters.values(), key=lambda item: item.delivery.place):
                if not self._broker.holds(waiter.delivery):
                    del self._waiters[waiter.delivery]
                elif waiter.not_before > now or waiter.key in blocked:
                    if waiter.key:
                        blocked.add(waiter.key)
                elif len(taken) < limit:
                    del self._waiters[waiter.delivery]
                    taken.append(waiter.delivery)
                else:
                    break
        return [delivery for delivery in taken if not self._bury_if_hopeless(delivery)]

    @property
    def _waiting(self) -> list[Delivery]:
        with self._lock:
            return list(self._waiters)

    def _bury(self, delivery: Delivery, error: Exception) -> None:
        """Publish the dead letter, then ack; a sink that fails is tried again after a pause."""
        message = Message(
            delivery.data,
            delivery.attributes,
            topic=delivery.topic or delivery.origin,
            deliveries=delivery.deliveries,
        )
        try:
            with self._burial:
                sink, topic = self._find_letters(delivery.origin)
                sink.publish([to_letter(message, error, topic)])
        except Exception as failure:  # noqa: BLE001 - a user's sink
            logger.error(
                "could not write the dead letter of %r, retrying later: %r", delivery, failure
            )
            self._wait(delivery)
            return
        self._broker.ack([delivery])
        self.dead_by_handler[handler_of(error)] += 1
        why = printable(f"{type(error).__name__}: {error}")
        logger.error("dead letter in %r: %r: %s", topic, delivery, why)

    def _find_letters(self, origin: str) -> tuple[Sink, str]:
        """Return the sink for dead letters of a queue or topic, and the topic there."""
        given = self._dead_letters
        name = given if isinstance(given, str) and given else self._name_letters(origin)
        if given is not None and not isinstance(given, str):
            return given, name
        if name not in self._letters:
            self._letters[name] = self._broker.open_letters(name)
        return self._letters[name], name

    def _name_letters(self, origin: str) -> str:
        return f"{origin}{self._letters_suffix}"

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop reading; the broker delivers unsettled messages again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._broker.close()
        with self._lock:
            self._waiters.clear()
        with self._burial:
            for sink in self._letters.values():
                sink.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"
