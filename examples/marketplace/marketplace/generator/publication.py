"""Publication: how the events of the world become entries of the log.

A witness sees the facts and the entries; the oracle is one.
"""

from __future__ import annotations

import heapq
from random import Random
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from marketplace.generator.clock import DAY, HOUR, MINUTE, SECOND, moment_text
from marketplace.generator.entry import DOMAIN_TOPIC, TELEMETRY_TOPIC, Entry
from marketplace.generator.faults import FAULTS, pick, thresholds

Actor = tuple[str, str, str] | None
"""Type, id and store of the actor of an event."""


class Truth(NamedTuple):
    """Holds what the world knows of an event, and a reader of the log has to find out."""

    at: int
    version: int | None
    actor: Actor
    reason: str | None
    """The reason for which a reader must refuse it, by the codes of the contract."""
    detail: Any


class Seen(NamedTuple):
    """Holds an event as the log has it, after its last publication."""

    first: Entry
    """Its first publication."""
    truth: Truth
    deliveries: int


class Witness(Protocol):
    """Receives the objects of the world, and parses no event."""

    def happened(self, type: str, subject: Any, at: int, detail: Any, event_id: str) -> None:
        """An event happened, and readers can parse its entries."""

    def seen(self, seen: Seen) -> None:
        """All publications of an event are in the log."""

    def finished(self, order: Any) -> None:
        """Nothing more will happen to this order."""


_MOST_LATE = 11 * DAY
_DELAYS = ("duplicates", "out_of_order", "late", "crash")
_WITH_BATCH = -1


class _Account:
    """Counts the publications of an event, for the witness."""

    __slots__ = ("deliveries", "first", "left", "truth")

    def __init__(self, truth: Truth | None, left: int) -> None:
        self.truth = truth
        self.left = left
        self.first: Entry | None = None
        self.deliveries = 0


class Publication:
    """Takes entries in order of time, and orders the log in `out`."""

    def __init__(self, seed: str, faults: frozenset[str], witness: Witness | None) -> None:
        self.out: list[Entry] = []
        self._witness = witness
        self._chance = chance = Random(f"{seed}/publication").random
        self._delays, self._delay_share = thresholds(_DELAYS, faults)
        self._lags = [2 + int(chance() * chance() * 900) for _ in range(1_021)]
        self._last_ms = 0
        self._postponed = 0
        self._crash_left = 0
        self._crashed: list[tuple[Entry, _Account]] = []
        """The batch that a relay has published and, since it crashes, not marked."""
        self._waiting: list[tuple[int, int, Entry, _Account]] = []

    def due(self, at: int, count: int) -> int:
        """Return when an event of that moment is published, unless a fault delays it."""
        ms = at + self._lags[count % 1_021]
        return ms if ms > self._last_ms else self._last_ms

    def publish(self, entry: Entry, truth: Truth | None) -> None:
        """Add an entry to the log at its time; `truth` is for the witness."""
        ms = entry.ms
        if self._waiting and self._waiting[0][0] <= ms:
            self._release(ms)
        delay = self._delay(entry) if self._delay_share else None
        if delay is None:
            self._last_ms = ms
            self.out.append(entry)
            if self._witness is not None and truth is not None:
                self._witness.seen(Seen(entry, truth, 1))
            return
        moments, failures = delay
        account = _Account(truth, len(moments))
        for number, moment in enumerate(moments, 1):
            copy = replace(entry, delivery=number, failures=failures)
            if moment is _WITH_BATCH:
                self._crashed.append((copy, account))
            else:
                self._wait(moment, copy, account)
        if self._crashed and not self._crash_left:
            self._restart(ms)
        self._release(ms)

    def finish(self) -> None:
        """Publish all postponed entries."""
        self._restart(self._last_ms)
        self._release(1 << 62)

    def _delay(self, entry: Entry) -> tuple[list[int], int] | None:
        """Return the times of its publications and its failures; None for once and at once."""
        chance, due = self._chance, entry.ms
        draw = chance()
        name = pick(self._delays, draw) if draw < self._delay_share else None
        if name == "late":
            late = HOUR + int(chance() * (_MOST_LATE - 2 * HOUR))
            return [due + late], 1 + int(chance() * 9)
        if name == "out_of_order":
            return [due + SECOND + int(chance() * 10 * MINUTE)], 0
        if name == "duplicates":
            moments = [due, due + SECOND + int(chance() * 6 * HOUR)]
            if chance() < 0.2:
                moments.append(moments[1] + SECOND + int(chance() * 3 * DAY))
            return moments, 0
        if entry.aggregate_type:  # telemetry has no relay that could crash
            if name == "crash" and not self._crash_left:
                self._crash_left = 10 + int(chance() * 90)
            if self._crash_left:
                self._crash_left -= 1
                return [due, _WITH_BATCH], 0
        return None

    def _restart(self, due: int) -> None:
        """Let another relay take over: unmarked entries are published again, in the same order."""
        for entry, account in self._crashed:
            self._wait(due + 30 * SECOND, entry, account)
        self._crashed.clear()

    def _wait(self, due: int, entry: Entry, account: _Account) -> None:
        self._postponed += 1  # no two items of the heap may be compared further
        heapq.heappush(self._waiting, (due, self._postponed, entry, account))

    def _release(self, until: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= until:
            due, _, entry, account = heapq.heappop(waiting)
            self._last_ms = ms = max(due, self._last_ms)
            entry = replace(entry, ms=ms)
            self.out.append(entry)
            account.first = account.first or entry
            account.deliveries += 1
            account.left -= 1
            if not account.left and self._witness is not None and account.truth is not None:
                self._witness.seen(Seen(account.first, account.truth, account.deliveries))


_CHANGES = ("unknown_type", "unknown_version", "null_data", "invalid_data", "broken_json")
_DATA = {"null_data": "null", "invalid_data": "{}"}
_FIRST_UNKNOWN = 0x8000000


class Recorder:
    """Takes the events of the world in order of time, and publishes them as entries."""

    def __init__(
        self, seed: str, faults: frozenset[str], publication: Publication, witness: Witness | None
    ) -> None:
        self._publication = publication
        self._witness = witness
        self._chance = Random(f"{seed}/telling").random
        self._changes, share = thresholds(_CHANGES, faults)
        self._wrong_share = FAULTS["wrong_amounts"] * ("wrong_amounts" in faults)
        self._has_changes = bool(share or self._wrong_share)
        mark = f"{Random(f'{seed}/ids').getrandbits(32):08x}"
        self._form = f"%s-7%03x-8{mark[:3]}-{mark[3:]}%07x"
        self._at = 0
        self._time = self._head = ""
        """The last moment as text, as a time and in ids: several events share a moment."""
        self._count = 0
        self._unknown = _FIRST_UNKNOWN

    def record(
        self,
        at: int,
        type_: str,
        aggregate_type: str,
        aggregate_id: str,
        data: str,
        subject: Any = None,
        detail: Any = None,
        actor: Actor = None,
        foreign: bool = False,
    ) -> str:
        """Publish an event of that time and return its id. `data` is canonical JSON."""
        self._count = count = self._count + 1
        time = self._time if at == self._at else self.text(at)
        event_id = self._form % (self._head, count >> 16, count)
        version: int | None = 1
        reason = self._reason(type_, at, aggregate_id) if self._has_changes else None
        if reason is not None:
            version = 99 if reason == "unknown_version" else 1
            data = _off_by_one(data) if reason == "wrong_amounts" else _DATA.get(reason, data)
        elif self._witness is not None:
            self._witness.happened(type_, subject, at, detail, event_id)
        by = "" if actor is None else _actor(actor)
        payload = (
            f'{{{by}"data":{data},"eventId":"{event_id}","occurredAt":"{time}","version":{version}}}'
        ).encode()
        if reason == "broken_json":
            payload, version, foreign = payload[: len(payload) // 2], None, True
        topic = DOMAIN_TOPIC if aggregate_type else TELEMETRY_TOPIC
        ms = self._publication.due(at, count)
        names = type_, aggregate_type, aggregate_id
        entry = Entry(topic, ms, event_id, *names, time, payload, 1, 0, foreign)
        truth = None if self._witness is None else Truth(at, version, actor, reason, detail)
        self._publication.publish(entry, truth)
        return event_id

    def text(self, at: int) -> str:
        """Format a moment; the ids of its events begin with it too.

        They are UUIDv7: milliseconds, then a count, its upper bits first, and the seed's mark.
        """
        if at != self._at:
            digits = f"{at:012x}"
            self._head = f"{digits[:8]}-{digits[8:]}"
            self._time = moment_text(at)
            self._at = at
        return self._time

    def _reason(self, type_: str, at: int, aggregate_id: str) -> str | None:
        """Draw the fault of the next event, if it has one."""
        if type_ == "order_created" and self._chance() < self._wrong_share:
            return "wrong_amounts"
        draw = self._chance()
        if not self._changes or draw >= self._changes[-1][0]:
            return None
        name = pick(self._changes, draw)
        if name == "unknown_type":  # one more event, beside the recorded one
            self._tell_unknown(at, aggregate_id)
            return None
        return name

    def _tell_unknown(self, at: int, aggregate_id: str) -> None:
        self._unknown += 1  # counted apart, so that other ids are the same without this fault
        time = self.text(at)
        event_id = self._form % (self._head, self._unknown >> 16, self._unknown)
        payload = (
            f'{{"data":{{"checkout_group_id":"{aggregate_id}"}},"eventId":"{event_id}",'
            f'"occurredAt":"{time}","version":1}}'
        ).encode()
        ms = self._publication.due(at, self._count)
        names = "checkout_converted", "checkout_group", aggregate_id
        entry = Entry(DOMAIN_TOPIC, ms, event_id, *names, time, payload, is_foreign=True)
        self._publication.publish(entry, Truth(at, 1, None, "unknown_type", None))


def _actor(actor: tuple[str, str, str]) -> str:
    return f'"actor":{{"id":"{actor[1]}","storeId":"{actor[2]}","type":"{actor[0]}"}},'


def _off_by_one(data: str) -> str:
    """Return an `order_created` whose total does not add up."""
    head, name, rest = data.rpartition('"total_cents":')
    digits = rest[: rest.index(",")]
    return f"{head}{name}{int(digits) + 1}{rest[len(digits) :]}"
