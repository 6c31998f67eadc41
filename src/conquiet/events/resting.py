"""Rests: the rows of `outbox_events` that failed a moment ago, under the ids that they have."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from conquiet.sql.resting import Resting


class Rests:
    """`conquiet.sql`'s rests for rows whose ids are UUIDs; it counts by their integers."""

    def __init__(self) -> None:
        self._resting = Resting(by_key=False)

    def add(self, id_: UUID, attempts: int, *, costs: bool) -> None:
        self._resting.add(id_.int, None, attempts, costs=costs)

    def forget(self, published: Iterable[UUID]) -> None:
        ids = [id_.int for id_ in published]
        if ids:
            self._resting.forget(ids)

    def ids(self) -> list[UUID]:
        """The rows that a claim must leave alone now."""
        return [UUID(int=id_) for id_ in self._resting.ids()]

    def seconds_to_next(self) -> float:
        return self._resting.seconds_to_next()
