"""Offsets: how far a query has come in each stream, as Spark's checkpoint keeps it.

    {"orders:{0}": "1763212345678-0@1204", "orders:{1}": "1763212345991-3@1187"}

The id is the last entry that is done. The number behind it counts the entries that were ever
added up to there, where the server counts them (Redis 7): it makes lag a subtraction, and tells a
trimmed stream from one that begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from conquiet.spark.log.piece import BEGINNING, parts


class Position(NamedTuple):
    """The last entry that is done, and how many were added up to it (None: nobody knows)."""

    id: str
    added: int | None = None

    @classmethod
    def read(cls, text: str) -> Position:
        entry_id, _, added = text.partition("@")
        return cls(entry_id, int(added) if added else None)

    def __str__(self) -> str:
        return self.id if self.added is None else f"{self.id}@{self.added}"

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
