"""Publication: an event of the world becomes entries of the log, and here is where it goes wrong.

    world ──tell──▶ [changed?] ──▶ published at once ──▶ out
                                └▶ waiting (late, disordered, twice) ──▶ out, when it is due

Chance has a source of its own here: the same world comes out of a seed whatever the faults are.
"""

from __future__ import annotations

import heapq
from random import Random
from typing import Any

from conquiet.marketplace.generator.clock import DAY, HOUR, MINUTE, SECOND, moment_text
from conquiet.marketplace.generator.entry import DOMAIN_TOPIC, TELEMETRY_TOPIC, Entry
from conquiet.marketplace.generator.faults import FAULTS
from conquiet.marketplace.generator.witness import Seen, Witness

_MOST_LATE = 11 * DAY
_CHANGES = ("unknown_type", "unknown_version", "null_data", "invalid_data", "broken_json")
_DELAYS = ("duplicates", "out_of_order", "late", "crash")
_FIRST_UNKNOWN = 0x8000000
_WITH_BATCH = -1
_DATA = {"null_data": "null", "invalid_data": "{}"}

Actor = tuple[str, str, str] | None
"""Type, id and store of who caused an event."""


class _Account:
    """What a witness will be told about an event when its last publication is out."""

    __slots__ = ("deliveries", "facts", "first_ms", "left")

    def __init__(self, facts: tuple[Any, ...], left: int) -> None:
        self.facts = facts
        self.left = left
        self.first_ms = 0
        self.deliveries = 0


class Publication:
    """Takes the events of the world in time's order, and keeps the log's order in `out`."""

    def __init__(self, seed: str, faults: frozenset[str], witness: Witness | None) -> None:
        self.out: list[Entry] = []
        self._witness = witness
        self._chance = chance = Random(f"{seed}/publication").random
        self._changes, self._change_share = _thresholds(_CHANGES, faults)
        self._delays, self._delay_share = _thresholds(_DELAYS, faults)
        self._wrong_share = FAULTS["wrong_amounts"] * ("wrong_amounts" in faults)
        self._lags = [2 + int(chance() * chance() * 900) for _ in range(1_021)]
        mark = f"{Random(f'{seed}/ids').getrandbits(32):08x}"
        self._form = f"%s-7%03x-8{mark[:3]}-{mark[3:]}%07x"
        self._at = 0
        self._time = self._head = ""
        """How the last moment is written, as a time and in ids: events come in groups."""
        self._count = 0
        self._postponed = 0
        self._unknown = _FIRST_UNKNOWN
        self._last_ms = 0
        self._crash_left = 0
        self._crashed: list[tuple[tuple[Any, ...], _Account]] = []
        """The batch that a relay has published and, since it crashes, will not mark."""
        self._waiting: list[tuple[int, int, tuple[Any, ...], _Account]] = []

    def tell(
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
        """Publish what happened at that time; the id of the event. `data` is canonical JSON."""
        self._count = count = self._count + 1
        time = self._time if at == self._at else self.text(at)
        event_id = self._form % (self._head, count >> 16, count)
        reason: str | None = None
        if self._wrong_share and type_ == "order_created" and self._chance() < self._wrong_share:
            data, reason = _off_by_one(data), "wrong_amounts"
        elif self._change_share and (draw := self._chance()) < self._change_share:
            reason = _pick(self._changes, draw)
            if reason == "unknown_type":  # one more event, beside the one that is being told
                reason = None
                self._tell_unknown(at, aggregate_id)
        if reason is None:
            if self._witness is not None:
                self._witness.happened(type_, subject, at, detail, event_id)
            version: int | None = 1
        else:
            data = _DATA.get(reason, data)
            version = 99 if reason == "unknown_version" else 1
        by = (
            ""
            if actor is None
            else f'"actor":{{"id":"{actor[1]}","storeId":"{actor[2]}","type":"{actor[0]}"}},'
        )
        payload = (
            f'{{{by}"data":{data},"eventId":"{event_id}","occurredAt":"{time}","version":{version}}}'
        ).encode()
        if reason == "broken_json":
            payload, version, foreign = payload[: len(payload) // 2], None, True
        topic = DOMAIN_TOPIC if aggregate_type else TELEMETRY_TOPIC
        self._publish(
            at,
            topic,
            event_id,
            type_,
            aggregate_type,
            aggregate_id,
            time,
            payload,
            foreign,
            version,
            actor,
            reason,
            detail,
        )
        return event_id

    def finish(self) -> None:
        """Publish all that still waits."""
        self._restart(self._last_ms)
        self._release(1 << 62)

    def text(self, at: int) -> str:
        """How a moment is written; the ids of its events begin with it too.

        They are UUIDv7: milliseconds, then a count, its upper bits first, and the seed's mark.
        """
        if at != self._at:
            digits = f"{at:012x}"
            self._head = f"{digits[:8]}-{digits[8:]}"
            self._time = moment_text(at)
            self._at = at
        return self._time

    def _tell_unknown(self, at: int, aggregate_id: str) -> None:
        self._unknown += 1  # apart, so that the ids of the others stay what they are without it
        time = self.text(at)
        event_id = self._form % (self._head, self._unknown >> 16, self._unknown)
        payload = (
            f'{{"data":{{"checkout_group_id":"{aggregate_id}"}},"eventId":"{event_id}",'
            f'"occurredAt":"{time}","version":1}}'
        ).encode()
        self._publish(
            at,
            DOMAIN_TOPIC,
            event_id,
            "checkout_converted",
            "checkout_group",
            aggregate_id,
            time,
            payload,
            True,
            1,
            None,
            "unknown_type",
            None,
        )

    # --- when, and how often ----------------------------------------------------------------

    def _publish(
        self,
        at: int,
        topic: str,
        event_id: str,
        type_: str,
        aggregate_type: str,
        aggregate_id: str,
        time: str,
        payload: bytes,
        foreign: bool,
        version: int | None,
        actor: Actor,
        reason: str | None,
        detail: Any,
    ) -> None:
        due = at + self._lags[self._count % 1_021]
        if self._waiting and self._waiting[0][0] <= due:
            self._release(due)
        delay = self._delay(due, topic) if self._delay_share else None
        if delay is None:
            if due < self._last_ms:
                due = self._last_ms
            self._last_ms = due
            self.out.append(
                Entry(
                    topic,
                    due,
                    event_id,
                    type_,
                    aggregate_type,
                    aggregate_id,
                    time,
                    payload,
                    1,
                    0,
                    foreign,
                )
            )
            if self._witness is None:
                return
        failures = 0 if delay is None else delay[1]
        facts: tuple[Any, ...] = (
            *(topic is DOMAIN_TOPIC, event_id, type_, version, aggregate_type, aggregate_id),
            *(at, payload, actor, reason, foreign, failures, detail),
        )
        if delay is None:
            if self._witness is not None:
                self._witness.seen(Seen._make((*facts, due, 1)))
            return
        fields = (topic, event_id, type_, aggregate_type, aggregate_id, time, payload)
        account = _Account(facts, len(delay[0]))
        for number, moment in enumerate(delay[0], 1):
            given = (*fields, number, failures, foreign)
            if moment is _WITH_BATCH:
                self._crashed.append((given, account))
            else:
                self._wait(moment, given, account)
        if self._crashed and not self._crash_left:
            self._restart(due)
        self._release(due)

    def _delay(self, due: int, topic: str) -> tuple[list[int], int] | None:
        """When it is published, and after how many failures; None for once and at once."""
        chance = self._chance
        draw = chance()
        name = _pick(self._delays, draw) if draw < self._delay_share else None
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
        if topic is DOMAIN_TOPIC:
            if name == "crash" and not self._crash_left:
                self._crash_left = 10 + int(chance() * 90)
            if self._crash_left:
                self._crash_left -= 1
                return [due, _WITH_BATCH], 0
        return None

    def _restart(self, due: int) -> None:
        """Another relay takes over: what was not marked goes out again, in the same order."""
        for given, account in self._crashed:
            self._wait(due + 30 * SECOND, given, account)
        self._crashed.clear()

    def _wait(self, due: int, given: tuple[Any, ...], account: _Account) -> None:
        self._postponed += 1  # no two items of the heap may be compared further
        heapq.heappush(self._waiting, (due, self._postponed, given, account))

    def _release(self, until: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= until:
            due, _, fields, account = heapq.heappop(waiting)
            self._last_ms = ms = max(due, self._last_ms)
            self.out.append(Entry(fields[0], ms, *fields[1:]))
            account.first_ms = account.first_ms or ms
            account.deliveries += 1
            account.left -= 1
            if not account.left and self._witness is not None:
                facts = (*account.facts, account.first_ms, account.deliveries)
                self._witness.seen(Seen._make(facts))


def _off_by_one(data: str) -> str:
    """An `order_created` whose total does not add up."""
    head, name, rest = data.rpartition('"total_cents":')
    digits = rest[: rest.index(",")]
    return f"{head}{name}{int(digits) + 1}{rest[len(digits) :]}"


def _thresholds(
    names: tuple[str, ...], faults: frozenset[str]
) -> tuple[list[tuple[float, str]], float]:
    found, total = [], 0.0
    for name in names:
        if name in faults:
            total += FAULTS[name]
            found.append((total, name))
    return found, total


def _pick(thresholds: list[tuple[float, str]], draw: float) -> str:
    return next(name for limit, name in thresholds if draw < limit)
