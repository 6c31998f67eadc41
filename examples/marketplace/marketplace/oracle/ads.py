"""The expected tables of ads: touches, facts, and days."""

from __future__ import annotations

from typing import Any

from marketplace.generator.orders import Touch
from marketplace.generator.population import Ad
from marketplace.generator.publication import Seen
from marketplace.oracle.calendar import business_day
from marketplace.oracle.marts import Sums
from marketplace.oracle.orders import Winner
from marketplace.oracle.tables import Rows

_NO_TERMS = (None,) * 5
_NO_ROLLUP = (None,) * 5


class _TouchNote:
    """Holds the first event of a token that can be parsed, and counts all of them."""

    __slots__ = ("at", "deliveries", "event_id", "first_ms")

    def __init__(self, at: int, event_id: str) -> None:
        self.at = at
        self.event_id = event_id
        self.first_ms: int | None = None
        self.deliveries = 0


class AdTables:
    """Derives the tables of ads from their life, their rollups and telemetry."""

    def __init__(self, touches: Rows, facts: Rows) -> None:
        self._touches = touches
        self._facts = facts
        self._days = Sums(11)
        self._open: dict[str, Touch] = {}
        self._rollups: dict[tuple[Any, ...], tuple[tuple[int, int, str], tuple[int, ...]]] = {}

    # --- life -------------------------------------------------------------------------------

    def take(self, type_: str, ad: Ad, at: int, detail: Any, event_id: str) -> None:
        moved: tuple[Any, ...] = (None, None, None)
        terms: tuple[Any, ...] = _NO_TERMS
        rollup: tuple[Any, ...] = _NO_ROLLUP
        if type_ in ("ad_created", "ad_updated"):
            terms = (ad.placement, ad.target_type, ad.target_id, *detail)
            moved = ("draft" if type_ == "ad_created" else None, None, None)
        elif type_ == "ad_daily_rollup_ready":
            day, impressions, clicks, spend, revision = detail
            rollup = detail
            rank = (revision, at, event_id)
            key = (day, ad.id, ad.vendor.id)
            numbers = (impressions, clicks, spend, revision)
            self._rollups[key] = max(self._rollups.get(key, (rank, numbers)), (rank, numbers))
        else:
            old, new, cause = detail
            moved = (new, old, cause)
        self._facts.add(
            (
                *(event_id, type_, ad.id, ad.vendor.id, at * 1_000, business_day(at)),
                *(*moved, *terms, *rollup),
            )
        )

    # --- telemetry --------------------------------------------------------------------------

    def touch(self, touch: Touch, at: int, event_id: str) -> None:
        if touch.note is not None:  # the token is known; only the first event of it counts
            return
        touch.note = _TouchNote(at, event_id)
        is_click = touch.kind == "click"
        is_orphan = is_click and (touch.impression is None or touch.impression.note is None)
        key = (business_day(at), touch.ad.id, touch.ad.vendor.id)
        self._days.add(key, 0, int(not is_click), int(is_click), int(is_orphan))

    def see(self, seen: Seen) -> None:
        touch: Touch = seen.truth.detail
        note = touch.note
        if seen.truth.reason is None:
            note.deliveries += seen.deliveries
            if note.first_ms is None or seen.first.ms < note.first_ms:
                note.first_ms = seen.first.ms
        touch.events -= 1
        if note is None:
            return
        if touch.events:
            self._open[touch.token] = touch
        else:
            self._open.pop(touch.token, None)
            self._write(touch)

    def conclude(self) -> None:
        """Write the touches whose second event the world did not reach."""
        for touch in self._open.values():
            self._write(touch)
        self._open.clear()

    def _write(self, touch: Touch) -> None:
        note = touch.note
        ad, of = touch.ad, touch.impression
        self._touches.add(
            (
                *(touch.token, touch.kind, ad.id, ad.vendor.id, touch.buyer.id, ad.placement),
                *(ad.target_type, ad.target_id, of.token if of is not None else None),
                *(note.at * 1_000, business_day(note.at), note.event_id),
                *(note.first_ms * 1_000, note.deliveries),
            )
        )

    # --- days -------------------------------------------------------------------------------

    def credit(self, day: Any, winner: Winner) -> None:
        place = 7 if winner.scope == "store" else 9
        self._days.add((day, winner.ad.id, winner.ad.vendor.id), place, 1, winner.cents)

    def write_days(self, rows: Rows) -> None:
        for key, (_, numbers) in self._rollups.items():
            self._days.add(key, 3, *numbers)
        self._days.write(rows)
