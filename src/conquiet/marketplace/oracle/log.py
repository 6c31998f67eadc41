"""What the log itself must lead to: silver, quarantine, completeness and delivery."""

from __future__ import annotations

from array import array
from typing import Any

from conquiet.marketplace.generator.entry import DOMAIN_TOPIC, TELEMETRY_TOPIC
from conquiet.marketplace.generator.witness import Seen
from conquiet.marketplace.oracle.calendar import HOUR_MS, nearest_rank
from conquiet.marketplace.oracle.rows import Rows

_MOST_NAMED = 100
_NOBODY = (None, None, None)


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
        if seen.is_domain:
            self._count(seen)
        at, first = seen.at * 1_000, seen.first_ms * 1_000
        if seen.reason is not None:
            topic = DOMAIN_TOPIC if seen.is_domain else TELEMETRY_TOPIC
            self._quarantine.add(
                (
                    *(seen.event_id, topic, seen.type, seen.version, seen.reason, at, seen.data),
                    *(first, seen.deliveries),
                )
            )
        elif seen.is_domain:
            self._events.add(
                (
                    *(
                        seen.event_id,
                        seen.type,
                        seen.version,
                        seen.aggregate_type,
                        seen.aggregate_id,
                    ),
                    *(at, at, *(seen.actor or _NOBODY), seen.data.decode(), first, seen.deliveries),
                )
            )

    def _count(self, seen: Seen) -> None:
        hour = self._hours.get(seen.at // HOUR_MS)
        if hour is None:
            hour = self._hours[seen.at // HOUR_MS] = _Hour()
        hour.entries += seen.deliveries
        hour.failures += 0 if seen.is_foreign else seen.failures
        hour.lags.append(seen.first_ms - seen.at)
        if seen.reason is None:
            hour.taken += 1
        else:
            hour.refused += 1
        if seen.is_foreign:
            hour.foreign.append(seen.event_id)

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
                    *([], foreign, not foreign),
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
