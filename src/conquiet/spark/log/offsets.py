"""Offsets: how far a query has come in each stream, as Spark's checkpoint keeps it.

    {"orders:{0}": "1763212345678-0@1204", "orders:{1}": "1763212345991-3@1187"}

The id is the last entry that is done. The number behind it counts the entries that were ever
added up to there, where the server counts them (Redis 7): it makes lag a subtraction, and tells a
trimmed stream from one that begins anew. What a query has missed stands behind them, if it was
allowed to go on (`failOnDataLoss=false`): `1763212345678-0@1204!2:60` is 60 entries, in 2 losses.
A `~` at the end says that the stream is gone; that was counted, and its place is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from conquiet.spark.log.piece import BEGINNING, parts


class Lost(NamedTuple):
    """What a query was still to read of a stream and never can, since its checkpoint began."""

    times: int = 0
    """How often something was missing."""
    entries: int = 0
    """How many entries, of those times when that could be told."""

    def plus(self, more: Lost) -> Lost:
        return Lost(self.times + more.times, self.entries + more.entries)


NOTHING = Lost()
_GONE = "~"


class Position(NamedTuple):
    """The last entry that is done, and how many were added up to it (None: nobody knows)."""

    id: str
    added: int | None = None
    lost: Lost = NOTHING
    is_gone: bool = False
    """Whether the stream did not exist any more, when that was looked at last."""

    @classmethod
    def read(cls, text: str) -> Position:
        place, _, lost = text.removesuffix(_GONE).partition("!")
        entry_id, _, added = place.partition("@")
        times, _, entries = lost.partition(":")
        missed = Lost(int(times), int(entries)) if lost else NOTHING
        return cls(entry_id, int(added) if added else None, missed, text.endswith(_GONE))

    def __str__(self) -> str:
        place = self.id if self.added is None else f"{self.id}@{self.added}"
        if self.lost != NOTHING:
            place += f"!{self.lost.times}:{self.lost.entries}"
        return place + _GONE if self.is_gone else place

    def is_after(self, other: Position) -> bool:
        return parts(self.id) > parts(other.id)


START = Position(BEGINNING)


def read_offsets(given: Mapping[str, str]) -> dict[str, Position]:
    return {stream: Position.read(text) for stream, text in given.items()}


def write_offsets(positions: Mapping[str, Position]) -> dict[str, str]:
    """As JSON wants it; in order, since Spark compares offsets by their text."""
    return {stream: str(positions[stream]) for stream in sorted(positions)}


def entries_between(start: Position, end: Position) -> int | None:
    """How many entries were added from one position to the other, if that is known."""
    if start.added is None or end.added is None or end.added < start.added:
        return None
    return end.added - start.added
