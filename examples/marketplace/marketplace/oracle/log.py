"""The expected tables of the log: silver, quarantine, completeness and delivery."""

from __future__ import annotations

from array import array
from typing import Any

from marketplace.generator.publication import Seen
from marketplace.oracle.calendar import HOUR_MS, nearest_rank
from marketplace.oracle.tables import Rows

_MOST_NAMED = 100
_NO_ACTOR = (None, None, None)


class _Hour:
    __slots__ = ("entries", "failures", "foreign", "lags", "refused", "taken")

    def __init__(self) -> None:
        self.entries = self.failures = self.refused = self.taken = 0
        self.lags = array("q")
        self.foreign: list[str] = []


class LogTables:
    """Counts every event that is in the log, by the hour of its outbox row."""

    def __init__(self, events: Rows, quarantine: Rows, *, outbox: bool) -> None:
        self._events = events
        self._quarantine = quarantine
        self._has_outbox = outbox
        self._hours: dict[int, _Hour] = {}

    def see(self, seen: Seen) -> None:
        entry, truth = seen.first, seen.truth
        if not entry.is_telemetry:
            self._count(seen)
        at, first = truth.at * 1_000, entry.ms * 1_000
        if truth.reason is not None:
            self._quarantine.add(
                (
                    *(entry.event_id, entry.topic, entry.type, truth.version, truth.reason),
                    *(at, entry.data, first, seen.deliveries),
                )
            )
        elif not entry.is_telemetry:
            self._events.add(
                (
                    *(entry.event_id, entry.type, truth.version),
                    *(entry.aggregate_type, entry.aggregate_id, at, at),
                    *(truth.actor or _NO_ACTOR),
                    *(entry.data.decode(), first, seen.deliveries),
                )
            )

    def _count(self, seen: Seen) -> None:
        entry, at = seen.first, seen.truth.at
        hour = self._hours.get(at // HOUR_MS)
        if hour is None:
            hour = self._hours[at // HOUR_MS] = _Hour()
        hour.entries += seen.deliveries
        hour.lags.append(entry.ms - at)
        if seen.truth.reason is None:
            hour.taken += 1
        else:
            hour.refused += 1
        if entry.is_foreign:
            hour.foreign.append(entry.event_id)
        else:
            hour.failures += entry.failures

    def completeness(self, rows: Rows) -> None:
        for number, hour in sorted(self._hours.items()):
            count = hour.taken + hour.refused
            foreign = sorted(hour.foreign)[:_MOST_NAMED] if self._has_outbox else []
            outbox = count - len(hour.foreign) if self._has_outbox else None
            rows.add(
                (
                    *(
                        number * HOUR_MS * 1_000,
                        outbox,
                        count,
                        hour.entries,
                        hour.taken,
                        hour.refused,
                    ),
                    *([], foreign, [], not foreign),
                )
            )

    def delivery(self, rows: Rows) -> None:
        for number, hour in sorted(self._hours.items()):
            lags: Any = sorted(hour.lags)
            failures = hour.failures if self._has_outbox else None
            rows.add(
                (
                    *(number * HOUR_MS * 1_000, len(lags), hour.entries, hour.entries - len(lags)),
                    *(failures, *(nearest_rank(lags, part) for part in (50, 95, 99)), lags[-1]),
                )
            )
