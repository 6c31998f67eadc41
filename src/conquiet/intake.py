"""Share one source among the lanes of a worker: its threads, or the groups in flight on its loop.

A free thread reads; the others work or wait. Nothing is read ahead, so a slow handler or sink slows
the reading down: that is the back-pressure. On an event loop one task fills the intake, and groups
take from it.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from conquiet.acking import Acking, Error, State, settle
from conquiet.errors import GivenBack, InvalidMessage
from conquiet.message import Message, describe
from conquiet.shutdown import pause
from conquiet.source import Source

logger = logging.getLogger("conquiet.worker")

KeyOf = Callable[[Message[Any]], str]

_MAX_KEYS = 1_000
_SECONDS_TO_WAIT_FOR_A_KEY = 60.0
_SECONDS_BEFORE_ASKING_AGAIN = 0.01


class InFlight:
    """Holds the messages in flight: read and not settled yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[float, Message[Any]]] = {}
        """When each was read, by identity, oldest first."""

    def add(self, messages: Sequence[Message[Any]]) -> None:
        now = time.monotonic()
        with self._lock:
            self._held.update({id(message): (now, message) for message in messages})

    def remove(self, messages: Sequence[Message[Any]]) -> None:
        if not messages:
            return
        with self._lock:
            for message in messages:
                self._held.pop(id(message), None)

    def oldest(self) -> tuple[float, Message[Any]] | None:
        """Return age in seconds and message of the oldest in flight."""
        with self._lock:
            found = next(iter(self._held.values()), None)
        if found is None:
            return None
        since, message = found
        return time.monotonic() - since, message

    def messages(self) -> list[Message[Any]]:
        with self._lock:
            return [message for _, message in self._held.values()]

    def __len__(self) -> int:
        return len(self._held)


@dataclass(slots=True)
class Taken:
    """Holds messages that a lane may run, and others that it must give back first."""

    messages: list[Message[Any]]
    overtaking: Sequence[Message[Any]] = ()
    """Messages that would overtake a failed one of their key."""

    def __bool__(self) -> bool:
        return bool(self.messages or self.overtaking)


class Intake(Protocol):
    """Reads batches for the lanes of a worker, which are numbered from 0."""

    def read(self, lane: int, limit: int, timeout: float, wait: float) -> list[Message[Any]]:
        """Read for a thread; it may wait for `timeout` seconds."""

    def fill(self, limit: int, timeout: float, wait: float) -> None:
        """Read messages that groups can take."""

    def room(self, free: int, ahead: int, limit: int) -> int:
        """Return how many messages to read for free lanes, and ahead, in groups of `limit`."""

    def take(self, lane: int, free: int, limit: int) -> Taken:
        """Take messages for one of `free` lanes, without reading."""

    def give_back_overtaking(self, taken: Taken) -> None:
        """Give back the messages that a lane took and must not run."""

    def note_failed(self, messages: Sequence[Message[Any]]) -> None: ...

    def give_back(self) -> None: ...


class AnyOrder:
    """Gives any message to any lane."""

    def __init__(self, source: Source, in_flight: InFlight) -> None:
        self._source = source
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._waiting: deque[Message[Any]] = deque()

    def read(self, lane: int, limit: int, timeout: float, wait: float) -> list[Message[Any]]:
        if not self._lock.acquire(timeout=timeout):
            return []
        try:
            batch = read_batch(self._source, limit, timeout, wait)
            self._in_flight.add(batch)
            return batch
        finally:
            self._lock.release()

    def fill(self, limit: int, timeout: float, wait: float) -> None:
        batch = read_batch(self._source, limit, timeout, wait)
        self._in_flight.add(batch)
        self._waiting.extend(batch)

    def room(self, free: int, ahead: int, limit: int) -> int:
        waiting = len(self._waiting)
        if waiting > ahead * limit // 2:  # a later read gets a larger page
            return 0
        return (free + ahead) * limit - waiting

    def take(self, lane: int, free: int, limit: int) -> Taken:
        waiting = self._waiting
        share = -(-len(waiting) // free)  # the other free lanes get as many
        return Taken([waiting.popleft() for _ in range(min(limit, share))])

    def give_back_overtaking(self, taken: Taken) -> None:
        pass

    def note_failed(self, messages: Sequence[Message[Any]]) -> None:
        pass

    def give_back(self) -> None:
        """Give back messages that no group has begun."""
        waiting = self.take(0, 1, len(self._waiting)).messages
        self._in_flight.remove(waiting)
        give_back(waiting, GivenBack("the worker stops"))


class ByKey:
    """Gives the messages of one key to one lane, in order, also when one of them fails.

    A failed message returns to the source. Messages of its key that were read since would overtake
    it, so they are given back as well; `_returned` holds, per key, those messages in order: only
    the first of them may run next.
    """

    def __init__(self, source: Source, in_flight: InFlight, lanes: int, key: KeyOf) -> None:
        self._source = source
        self._in_flight = in_flight
        self._key = key
        self._changed = threading.Condition()
        self._lanes: list[deque[Message[Any]]] = [deque() for _ in range(lanes)]
        self._reading = False
        self._returned: dict[str, _Returned] = {}

    def read(self, lane: int, limit: int, timeout: float, wait: float) -> list[Message[Any]]:
        waiting = self._lanes[lane]
        with self._changed:
            if not waiting and (self._reading or self._is_full(limit)):
                self._changed.wait(timeout)
            reads = not (waiting or self._reading or self._is_full(limit))
            self._reading = self._reading or reads
        if reads:
            self.fill(limit, timeout, wait)
        taken = self.take(lane, 1, limit)
        self.give_back_overtaking(taken)
        return taken.messages

    def room(self, free: int, ahead: int, limit: int) -> int:
        # Not by free lanes: a message may be for one that is busy.
        return limit * len(self._lanes) - self._count()

    def take(self, lane: int, free: int, limit: int) -> Taken:
        with self._changed:
            taken = self._take(self._lanes[lane], limit)
            self._changed.notify_all()
        return taken

    def give_back_overtaking(self, taken: Taken) -> None:
        if taken.overtaking:
            self._give_back(taken.overtaking, "an earlier message of its key failed")
            if not taken.messages:
                pause(_SECONDS_BEFORE_ASKING_AGAIN)  # the failed message has not returned yet

    def note_failed(self, messages: Sequence[Message[Any]]) -> None:
        """Note nacked messages; others of their keys that were given back come after them."""
        with self._changed:
            for message in reversed(messages):
                if message.order_key is not None and not _is_acked(message.origin):
                    returned = self._returned.setdefault(message.order_key, _Returned())
                    returned.before_all(message.identity)

    def give_back(self) -> None:
        """Give back messages that no lane has begun."""
        with self._changed:
            waiting = [message for lane in self._lanes for message in lane]
            for lane in self._lanes:
                lane.clear()
        self._give_back(waiting, "the worker stops")

    def fill(self, limit: int, timeout: float, wait: float) -> None:
        batch: list[Message[Any]] = []
        try:
            batch = read_batch(self._source, limit, timeout, wait)
            self._in_flight.add(batch)
        finally:
            with self._changed:
                self._reading = False
                self._hand_out(batch)
                self._changed.notify_all()

    def _is_full(self, limit: int) -> bool:
        """Return whether one batch per lane waits; a stuck lane must not fill the memory."""
        return self._count() >= limit * len(self._lanes)

    def _count(self) -> int:
        return sum(map(len, self._lanes))

    def _hand_out(self, batch: Sequence[Message[Any]]) -> None:
        for message in batch:
            key = self._key_of(message)
            message.order_key = key or None
            # crc32, since hash() of a string differs between processes
            lane = zlib.crc32(key.encode(errors="replace")) if key else id(message) >> 4
            self._lanes[lane % len(self._lanes)].append(message)
        if len(self._returned) > _MAX_KEYS:
            self._returned = {k: r for k, r in self._returned.items() if not r.is_forgotten}

    def _key_of(self, message: Message[Any]) -> str:
        try:
            key: object = self._key(message) if message.identity else None
            return "" if key is None else str(key)
        except InvalidMessage:  # the router refuses it, with the reason
            return ""
        except Exception:
            logger.exception(
                "the key function failed; the order of this message is not kept: %s",
                describe(message.attributes),
            )
            return ""

    def _take(self, lane: deque[Message[Any]], limit: int) -> Taken:
        taken: list[Message[Any]] = []
        overtaking: list[Message[Any]] = []
        while lane and len(taken) < limit:
            message = lane.popleft()
            key = message.order_key
            returned = self._returned.get(key) if key is not None else None
            if key is None or returned is None:
                taken.append(message)
            elif returned.is_turn_of(message.identity):
                taken.append(message)
                if returned.is_empty:
                    del self._returned[key]
            else:
                overtaking.append(message)
        return Taken(taken, overtaking)

    def _give_back(self, messages: Sequence[Message[Any]], reason: str) -> None:
        self._in_flight.remove(messages)
        give_back(messages, GivenBack(reason))


class _Returned:
    """Holds the messages of one key that went back to the source, in the order they must run."""

    def __init__(self) -> None:
        self._identities: deque[str] = deque()
        self._since = time.monotonic()

    @property
    def is_empty(self) -> bool:
        return not self._identities

    @property
    def is_forgotten(self) -> bool:
        """Return whether the first did not come back in time: another worker has taken it."""
        return time.monotonic() - self._since > _SECONDS_TO_WAIT_FOR_A_KEY

    def before_all(self, identity: str) -> None:
        if identity in self._identities:  # another share of the message, which comes back once
            self._identities.remove(identity)
        self._identities.appendleft(identity)
        self._since = time.monotonic()

    def is_turn_of(self, identity: str) -> bool:
        """Return whether a message may run; if not, note its place in the order."""
        if self.is_forgotten:
            self._identities.clear()
            return True
        if self._identities[0] == identity:
            self._identities.popleft()
            self._since = time.monotonic()
            return True
        if identity not in self._identities:
            self._identities.append(identity)
        return False


def _is_acked(message: Message[Any]) -> bool:
    """Return whether a handler acked a message before it failed: then it does not come back."""
    return message.acking is not None and message.acking.state is State.ACKED


def give_back(messages: Sequence[Message[Any]], error: Exception) -> None:
    """Nack messages without raising: an unavailable source redelivers them by itself."""
    pending: list[tuple[Acking, Error]] = [
        (message.acking, error) for message in messages if message.acking is not None
    ]
    try:
        settle((), pending)
    except Exception:
        logger.exception("could not give messages back; their source will deliver them again")


def read_batch(source: Source, limit: int, timeout: float, wait: float) -> list[Message[Any]]:
    """Read a batch; if it is not full, wait up to `wait` seconds for more."""
    batch = list(source.read(limit, timeout))
    if not batch or wait <= 0:
        return batch
    end = time.monotonic() + wait
    try:
        while len(batch) < limit and (left := end - time.monotonic()) > 0:
            batch.extend(source.read(limit - len(batch), left))
    except Exception:  # noqa: BLE001 - work on what was read; the next read raises it again
        pass
    return batch
