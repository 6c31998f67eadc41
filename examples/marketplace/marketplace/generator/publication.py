"""Publication: events become entries of the log, and here is where their way goes wrong.

    events ──▶ published at once ──▶ out
          └──▶ waiting (late, disordered, again) ──▶ out, when it is due

Chance has a source of its own here: the same events come out of a seed whatever their way is.
"""

from __future__ import annotations

import heapq
from random import Random

from msgspec.structs import replace

from marketplace.generator.clock import DAY, HOUR, MINUTE, SECOND
from marketplace.generator.entry import Entry
from marketplace.generator.faults import pick, thresholds
from marketplace.generator.witness import Seen, Told, Witness

_MOST_LATE = 11 * DAY
_DELAYS = ("duplicates", "out_of_order", "late", "crash")
_WITH_BATCH = -1


class _Account:
    """What a witness will be told about an event when its last publication is out."""

    __slots__ = ("deliveries", "first", "left", "told")

    def __init__(self, told: Told | None, left: int) -> None:
        self.told = told
        self.left = left
        self.first: Entry | None = None
        self.deliveries = 0


class Publication:
    """Takes entries in time's order, and keeps the log's order in `out`."""

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
        """The batch that a relay has published and, since it crashes, will not mark."""
        self._waiting: list[tuple[int, int, Entry, _Account]] = []

    def due(self, at: int, count: int) -> int:
        """When an event of that moment goes out if nothing happens to it."""
        ms = at + self._lags[count % 1_021]
        return ms if ms > self._last_ms else self._last_ms

    def publish(self, entry: Entry, told: Told | None) -> None:
        """Put an entry into the log, where its time allows; `told` is for the witness."""
        ms = entry.ms
        if self._waiting and self._waiting[0][0] <= ms:
            self._release(ms)
        delay = self._delay(entry) if self._delay_share else None
        if delay is None:
            self._last_ms = ms
            self.out.append(entry)
            if self._witness is not None and told is not None:
                self._witness.seen(Seen(entry, told, 1))
            return
        moments, failures = delay
        account = _Account(told, len(moments))
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
        """Publish all that still waits."""
        self._restart(self._last_ms)
        self._release(1 << 62)

    def _delay(self, entry: Entry) -> tuple[list[int], int] | None:
        """When it is published, and after how many failures; None for once and at once."""
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
        """Another relay takes over: what was not marked goes out again, in the same order."""
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
            if not account.left and self._witness is not None and account.told is not None:
                self._witness.seen(Seen(account.first, account.told, account.deliveries))
