"""Group: how far a group of consumers has read a log, who holds what, and until when.

new ──claim──▶ held ──ack──▶ gone
 ▲               │ nack, close, or the lease ends
 └── waiting ◀───┘
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conquiet.errors import InvalidMessage
from conquiet.message import Attributes, Message


@dataclass(frozen=True, slots=True)
class Entry:
    """One message as the log keeps it; positions start at 1 and increase."""

    position: int
    data: bytes
    attributes: Attributes
    topic: str | None

    def message(self, **given: Any) -> Message[bytes]:
        """A fresh message each time: what a handler does to it does not change the log."""
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
    """An entry that was handed to `owner`; the token of the message's acking."""

    entry: Entry
    owner: object
    until: float
    deliveries: int


class Group:
    """The state of one group. Whoever calls it holds the log's lock."""

    def __init__(
        self, entries: Sequence[Entry], start: int, topics: frozenset[str] | None, ordered: bool
    ) -> None:
        self.topics = topics
        self.ordered = ordered
        self._entries = entries
        self._next = start  # index of the first entry that nobody was offered
        self._held: dict[int, Claim] = {}
        self._waiting: dict[int, Claim | None] = {}  # to be delivered (again), and who had it last
        self._places: list[int] = []  # heap: the waiting in their original order
        self._tried: dict[int, int] = {}  # deliveries that counted, of what is not settled
        self.next_expiry = math.inf
        """No lease ends before this time."""

    def claim(self, owner: object, limit: int, now: float, until: float) -> list[Claim]:
        """Hand out up to `limit` entries in the order of the log."""
        self._expire(now)
        busy = {claim.entry.key for claim in self._held.values()} if self.ordered else set()
        busy.discard("")
        claims: list[Claim] = []
        blocked: list[int] = []
        for entry in self._candidates():
            if busy and entry.key in busy:
                blocked.append(entry.position)  # an earlier one of its key is being worked on
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
        """What waits to be delivered again stands before what is new: it was there first."""
        last = 0
        while self._places:
            position = heapq.heappop(self._places)
            if position in self._waiting and position != last:
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
        """False if it went to somebody else meanwhile: then it is theirs to settle."""
        if not self._take_back(claim):
            return False
        del self._tried[claim.entry.position]
        return True

    def nack(self, claim: Claim, *, counts: bool) -> bool:
        """Let it be delivered again, at its original place; False if it is somebody else's."""
        if not self._take_back(claim):
            return False
        if not counts:
            self._tried[claim.entry.position] -= 1
        self._wait(claim.entry.position, None)
        return True

    def release(self, owner: object) -> None:
        """Give back all that `owner` holds, as if it had never been delivered."""
        for claim in [*self._held.values(), *filter(None, self._waiting.values())]:
            if claim.owner is owner:
                self.nack(claim, counts=False)

    def unsettled(self) -> list[Entry]:
        """What was not acked, whether it was ever delivered or not."""
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
        self.next_expiry = min((claim.until for claim in self._held.values()), default=math.inf)
