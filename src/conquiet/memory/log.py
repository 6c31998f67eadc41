"""Keep an event log in memory, with consumer groups, leases and replay.

An entry in a group:

    new ──claim──▶ held ──ack──▶ gone
     ▲               │ nack, close, or the lease ends; after TryLater, for its seconds
     └── waiting ◀───┘
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any, Literal

from conquiet import attempts
from conquiet.acking import Acking, Error
from conquiet.codec import encode_data
from conquiet.delay import is_delayed
from conquiet.errors import (
    Blameless,
    ConfigError,
    ConquietError,
    InvalidMessage,
    SinkUnavailable,
    TryLater,
)
from conquiet.message import ERRORS, Attributes, Message
from conquiet.sink import Sink
from conquiet.source import EndOfSource

Start = Literal["beginning", "now"]
_SHORTEST_WAIT_SECONDS = 0.001


class Log:
    """Keeps messages in the order of publication; reading does not remove them.

    >>> log = Log()
    >>> log.sink("orders").publish([Message(b"{}", {"id": "1", "type": "order.placed"})])
    >>> [message] = log.source("billing").read(limit=10, timeout=0)
    >>> message.topic, message.ack()
    ('orders', True)

    `clock` measures leases; a test can pass its own and read with `timeout=0`. `calendar` tells the
    time that delayed messages wait for.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.calendar = calendar
        self.changed = threading.Condition()
        self._entries: list[Entry] = []
        self._groups: dict[str, Group] = {}
        self._delayed: list[Delayed] = []  # heap, the next one first
        self._numbers = count()

    def sink(self, topic: str | None = None) -> LogSink:
        """Return a sink of this log; `topic` is for messages without one."""
        return LogSink(self, topic)

    def source(
        self,
        group: str,
        *,
        topics: Collection[str] | None = None,
        lease: float = 30.0,
        start: Start = "beginning",
        ordered: bool = False,
    ) -> LogSource:
        """Return a consumer of a group. Groups are independent; sources of one group compete.

        `topics`, `start` and `ordered` belong to the group: its first source sets them.
        `ordered` holds a message back while an earlier one of its key is in flight.
        """
        return LogSource(self, self._group(group, topics, start, ordered), lease)

    def _group(
        self, name: str, topics: Collection[str] | None, start: Start, ordered: bool
    ) -> Group:
        if isinstance(topics, str):
            raise ConfigError(f"topics={topics!r}: give a list of topics")
        if start not in ("beginning", "now"):
            raise ConfigError(f"start={start!r}: a group starts at the 'beginning' or 'now'")
        wanted = None if topics is None else frozenset(topics)
        with self.changed:
            group = self._groups.get(name)
            if group is None:
                first = 0 if start == "beginning" else len(self._entries)
                group = self._groups[name] = Group(self._entries, first, wanted, ordered)
            if (group.topics, group.ordered) != (wanted, ordered):
                raise ConfigError(
                    f"group {name!r} exists with topics={group.topics and sorted(group.topics)}"
                    f" and ordered={group.ordered}; use the same, or another group"
                )
            return group

    def append(self, messages: Sequence[Message[Any]]) -> None:
        """Publish all messages, or none if the data of one cannot be encoded; hold delayed ones."""
        encoded = [encode_data(message) for message in messages]
        with self.changed:
            for message, data in zip(messages, encoded, strict=True):
                attributes = dict(message.attributes)
                if is_delayed(message):
                    due, number = self._due(message), next(self._numbers)
                    held = Delayed(due, number, data, attributes, message.topic)
                    heapq.heappush(self._delayed, held)
                else:
                    self._append(data, attributes, message.topic)
            self.changed.notify_all()

    def _append(self, data: bytes, attributes: Attributes, topic: str | None) -> None:
        self._entries.append(Entry(len(self._entries) + 1, data, attributes, topic))

    def _due(self, message: Message[Any]) -> float:
        due = message.notbefore
        if isinstance(due, datetime):
            return due.timestamp()
        assert due is not None, "else it is not delayed"
        return self.calendar() + due.total_seconds()

    def promote(self) -> float:
        """Publish delayed messages that are due; return the seconds until the next one is."""
        with self.changed:
            now = self.calendar()
            while self._delayed and self._delayed[0].due <= now:
                held = heapq.heappop(self._delayed)
                self._append(held.data, held.attributes, held.topic)
            return self._delayed[0].due - now if self._delayed else math.inf

    def cancel(self, id: str) -> bool:
        """Drop the delayed messages with this id; return whether one still waited."""
        with self.changed:
            self.promote()
            kept = [held for held in self._delayed if held.attributes.get("id") != id]
            was_there = len(kept) < len(self._delayed)
            self._delayed = kept
            heapq.heapify(self._delayed)
            return was_there

    def replay(self, start: str | None = None, end: str | None = None) -> Iterator[Message[Any]]:
        """Yield the messages from position `start` to `end`, both inclusive.

        A message's position is `message.locals["position"]`. No group moves.
        """
        first = 1 if start is None else _position(start)
        last = len(self._entries) if end is None else _position(end)
        for entry in self._entries[max(first - 1, 0) : last]:
            yield entry.message()

    def unsettled(self, group: str) -> list[Message[Any]]:
        """Return the messages that the group has not acked yet."""
        with self.changed:
            known = self._groups.get(group)
            entries = list(self._entries) if known is None else known.unsettled()
        return [entry.message() for entry in entries]

    def __len__(self) -> int:
        return len(self._entries)


class LogSink(Sink):
    """Publishes to a log; a test can let it fail."""

    def __init__(self, log: Log, topic: str | None = None) -> None:
        self._log = log
        self._topic = topic
        self._failures = 0

    def fail_next(self, times: int = 1) -> None:
        """Let the next `times` publications raise `SinkUnavailable`; 0 ends it."""
        self._failures = times

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        if self._failures > 0:
            self._failures -= 1
            raise SinkUnavailable("the log is unavailable by fail_next")
        return [self._publish(message) for message in messages]

    def _publish(self, message: Message[Any]) -> Error:
        sent = Message(message.data, message.attributes, topic=message.topic or self._topic)
        try:
            self._log.append([sent])
        except ConquietError as error:
            return error
        return None

    def close(self) -> None:
        """Do nothing: there is no buffer."""


def _position(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{text!r:.60} is not a position; use message.locals['position']")
    return int(text)


class LogSource:
    """Reads a log as one consumer of a group; `Log.source` creates it.

    It holds a message for `lease` seconds; after that another source may read it. `late` counts
    settlements that came after another source had taken the message; they do nothing.
    """

    def __init__(self, log: Log, group: Group, lease: float) -> None:
        if not lease > 0:
            raise ConfigError(f"lease={lease}: must be more than 0 seconds")
        self.lease = lease
        self.late = 0
        self._log = log
        self._group = group
        self._closed = False
        self._crashed = False

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        deadline = time.monotonic() + timeout
        with self._log.changed:
            while not self._closed:
                due = self._log.promote()
                now = self._log.clock()
                claims = self._group.claim(self, limit, now, now + self.lease)
                left = deadline - time.monotonic()
                if claims or left <= 0:
                    return [self._message(claim) for claim in claims]
                expiry = max(self._group.next_expiry - now, _SHORTEST_WAIT_SECONDS)
                self._log.changed.wait(min(left, expiry, max(due, _SHORTEST_WAIT_SECONDS)))
        raise EndOfSource("the source was closed")

    def _message(self, claim: Claim) -> Message[Any]:
        message = claim.entry.message(acking=Acking(self, claim), deliveries=claim.deliveries)
        if errors := self._group.errors.get(claim.entry.position):
            message.locals[ERRORS] = attempts.read(errors)
        return message

    def renew(self, messages: Sequence[Message[Any]]) -> None:
        with self._log.changed:
            if not self._crashed:
                self._group.renew(_claims(messages), self._log.clock() + self.lease)

    def settle(self, acked: Sequence[Claim], nacked: Sequence[tuple[Claim, Error]]) -> None:
        with self._log.changed:
            if self._crashed:
                return
            for claim in acked:
                self.late += not self._group.ack(claim)
            for claim, error in nacked:
                counts = not isinstance(error, Blameless)
                due = self._log.clock() + error.seconds if isinstance(error, TryLater) else None
                is_late = not self._group.nack(claim, counts=counts, due=due)
                self.late += is_late
                if due is not None and not is_late:
                    self._group.keep_error(claim, error, self._log.calendar())
            # An ack matters to other sources too: in an ordered group it frees its key.
            self._log.changed.notify_all()

    def allow_delays(self, attempts: int, *, ordered: bool) -> None:
        """Let messages wait in the group; see `conquiet.source.Delaying`."""
        self._group.delays_hold_keys = ordered

    def replay(self, start: str | None = None, end: str | None = None) -> Iterator[Message[Any]]:
        """Yield the messages of the group's topics from `start` to `end`; see `Log.replay`."""
        topics = self._group.topics
        for message in self._log.replay(start, end):
            if topics is None or message.topic in topics:
                yield message

    def close(self) -> None:
        with self._log.changed:
            if not self._closed:
                self._closed = True
                self._group.release(self)
                self._log.changed.notify_all()

    def crash(self) -> None:
        """Stop like a killed process: its messages are not released until their lease ends."""
        with self._log.changed:
            self._closed = self._crashed = True
            self._log.changed.notify_all()


def _claims(messages: Sequence[Message[Any]]) -> list[Claim]:
    tokens = (message.acking.token for message in messages if message.acking is not None)
    return [token for token in tokens if isinstance(token, Claim)]


@dataclass(frozen=True, slots=True, order=True)
class Delayed:
    """Holds a message until it is due; numbers keep messages of one time in order."""

    due: float
    number: int
    data: bytes
    attributes: Attributes
    topic: str | None


@dataclass(frozen=True, slots=True)
class Entry:
    """Holds one message of the log; positions start at 1 and increase."""

    position: int
    data: bytes
    attributes: Attributes
    topic: str | None

    def message(self, **given: Any) -> Message[bytes]:
        """Build a new message each time, so that handlers cannot change the log."""
        message = Message(self.data, dict(self.attributes), topic=self.topic, **given)
        message.locals["position"] = f"{self.position:012d}"
        return message

    @property
    def key(self) -> str:
        try:
            return Message(b"", self.attributes).key
        except InvalidMessage:
            return ""


@dataclass(slots=True, eq=False)
class Claim:
    """Holds an entry for `owner`; the token of the message's acking."""

    entry: Entry
    owner: object
    until: float
    deliveries: int


class Group:
    """Holds the state of one consumer group; callers must hold the log's lock."""

    def __init__(
        self, entries: Sequence[Entry], start: int, topics: frozenset[str] | None, ordered: bool
    ) -> None:
        self.topics = topics
        self.ordered = ordered
        self._entries = entries
        self._next = start  # index of the first entry that was never claimed
        self._held: dict[int, Claim] = {}
        self._waiting: dict[int, Claim | None] = {}  # to be redelivered, with the last claim
        self._places: list[int] = []  # heap: positions that wait, in their original order
        self._tried: dict[int, int] = {}  # counted deliveries of unsettled entries
        self._later: dict[int, float] = {}  # when waiting positions are due, if not at once
        self.errors: dict[int, str] = {}
        """The errors of messages that have waited for a later try, by position."""
        self.delays_hold_keys = False
        """Whether messages of its key wait for one that is tried later."""
        self.next_expiry = math.inf
        """No lease ends and no message is due before this time."""

    def claim(self, owner: object, limit: int, now: float, until: float) -> list[Claim]:
        """Claim up to `limit` entries for `owner`, in the order of the log."""
        self._expire(now)
        busy = {claim.entry.key for claim in self._held.values()} if self.ordered else set()
        if self.delays_hold_keys:
            busy |= {self._entries[position - 1].key for position in self._later}
        busy.discard("")
        claims: list[Claim] = []
        blocked: list[int] = []
        for entry in self._candidates():
            if busy and entry.key in busy:
                blocked.append(entry.position)  # an earlier entry of its key is in flight
                continue
            self._waiting.pop(entry.position, None)
            tried = self._tried[entry.position] = self._tried.get(entry.position, 0) + 1
            claim = self._held[entry.position] = Claim(entry, owner, until, tried)
            claims.append(claim)
            if len(claims) == limit:
                break
        for position in blocked:
            self._wait(position, self._waiting.get(position))
        if claims:
            self.next_expiry = min(self.next_expiry, until)
        return claims

    def _candidates(self) -> Iterator[Entry]:
        """Yield entries to redeliver, then new ones."""
        last = 0
        while self._places:
            position = heapq.heappop(self._places)
            if position in self._waiting and position != last and position not in self._later:
                last = position
                yield self._entries[position - 1]
        while self._next < len(self._entries):
            entry = self._entries[self._next]
            self._next += 1
            if self.topics is None or entry.topic in self.topics:
                yield entry

    def renew(self, claims: Sequence[Claim], until: float) -> None:
        for claim in claims:
            if self._held.get(claim.entry.position) is claim:
                claim.until = until

    def ack(self, claim: Claim) -> bool:
        """Settle an entry; return False if another source has claimed it since."""
        if not self._take_back(claim):
            return False
        del self._tried[claim.entry.position]
        self.errors.pop(claim.entry.position, None)
        return True

    def nack(self, claim: Claim, *, counts: bool, due: float | None = None) -> bool:
        """Redeliver an entry at its original place; return False if another source has it.

        Not before `due`, by the clock of the log.
        """
        if not self._take_back(claim):
            return False
        if not counts:
            self._tried[claim.entry.position] -= 1
        if due is None:
            self._wait(claim.entry.position, None)
        else:
            self._waiting[claim.entry.position] = None
            self._later[claim.entry.position] = due
            self.next_expiry = min(self.next_expiry, due)
        return True

    def keep_error(self, claim: Claim, error: Error, time: float) -> None:
        """Keep the error of an attempt for the next delivery."""
        position = claim.entry.position
        before, behind = attempts.append(self.errors.get(position), claim.deliveries, error)
        self.errors[position] = f"{before}{time}{behind}"

    def release(self, owner: object) -> None:
        """Give back all entries of `owner`, without counting the delivery."""
        for claim in [*self._held.values(), *filter(None, self._waiting.values())]:
            if claim.owner is owner:
                self.nack(claim, counts=False)

    def unsettled(self) -> list[Entry]:
        """Return the entries that were not acked, delivered or not."""
        positions = self._held.keys() | self._waiting.keys()
        new = self._entries[self._next :]
        chosen = [entry for entry in new if self.topics is None or entry.topic in self.topics]
        return [self._entries[position - 1] for position in sorted(positions)] + chosen

    def _take_back(self, claim: Claim) -> bool:
        position = claim.entry.position
        for place in (self._held, self._waiting):
            if place.get(position) is claim:
                del place[position]
                return True
        return False

    def _wait(self, position: int, last: Claim | None) -> None:
        self._waiting[position] = last
        heapq.heappush(self._places, position)

    def _expire(self, now: float) -> None:
        if now < self.next_expiry:
            return
        for claim in list(self._held.values()):
            if claim.until <= now:
                del self._held[claim.entry.position]
                self._wait(claim.entry.position, claim)
        for position in [position for position, due in self._later.items() if due <= now]:
            del self._later[position]
            self._wait(position, None)
        ends = [claim.until for claim in self._held.values()]
        self.next_expiry = min([*ends, *self._later.values()], default=math.inf)
