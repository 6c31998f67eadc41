"""Offsets: how far a query has read each stream, as Spark's checkpoint keeps it.

    {"orders:{0}": "1763212345678-0@1204", "orders:{1}": "1763212345991-3@1187"}

The id is the last entry that is done. The number after `@` counts the entries ever added up to it,
where the server counts them (Redis 7): lag is then a subtraction, and a trimmed stream differs from
a recreated one. After `!` follow losses that `failOnDataLoss=false` let the query pass:
`1763212345678-0@1204!2:60` is 60 entries, lost on 2 occasions. A final `~` marks a stream that does
not exist any more; the loss is counted, and the position is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from json import JSONDecodeError, loads
from typing import TYPE_CHECKING, NamedTuple

from conquiet.errors import ConfigError
from conquiet.redis import ids
from conquiet.spark.log.ranges import BEGINNING

if TYPE_CHECKING:
    from conquiet.spark.log.streams import StreamState

EARLIEST, LATEST = "earliest", "latest"
_GONE = "~"


class Lost(NamedTuple):
    """Entries of a stream that a query was still to read and never can, since its checkpoint."""

    times: int = 0
    """On how many occasions entries were missing."""
    entries: int = 0
    """How many entries, for the occasions on which the server counted them."""

    def plus(self, more: Lost) -> Lost:
        return Lost(self.times + more.times, self.entries + more.entries)


NOTHING = Lost()


class Position(NamedTuple):
    """The last entry that is done, and how many were added up to it (None: not counted)."""

    id: str
    added: int | None = None
    lost: Lost = NOTHING
    is_gone: bool = False
    """Whether the stream did not exist at the last look."""

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
        return ids.parse(self.id) > ids.parse(other.id)


Positions = dict[str, Position]
"""Stream → position."""

START = Position(BEGINNING)


def read_offsets(given: Mapping[str, str]) -> Positions:
    return {stream: Position.read(text) for stream, text in given.items()}


def write_offsets(positions: Mapping[str, Position]) -> dict[str, str]:
    """Return offsets as JSON, sorted: Spark compares offsets by their text."""
    return {stream: str(positions[stream]) for stream in sorted(positions)}


def entries_between(start: Position, end: Position) -> int | None:
    """Return how many entries were added from one position to another, if both are counted."""
    if start.added is None or end.added is None or end.added < start.added:
        return None
    return end.added - start.added


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a read starts or ends: a word or an id per stream; the entry with that id is after."""

    default: str
    streams: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, option: str, text: str, others: str) -> Bounds:
        """Parse an option; `others` is for streams that a JSON object does not name.

        >>> Bounds.of("startingOffsets", '{"orders": "1700000000000-0"}', "earliest").streams
        {'orders': '1700000000000-0'}
        """
        if not text.lstrip().startswith("{"):
            return cls(_read_bound(option, text))
        try:
            given = loads(text)
        except JSONDecodeError as error:
            raise ConfigError(f"{option} is not JSON: {error}") from error
        return cls(others, {name: _read_bound(option, value) for name, value in given.items()})

    def position(self, stream: str, state: StreamState) -> Position:
        """Return the last position before the bound."""
        bound = self.streams.get(stream, self.default)
        if bound == EARLIEST:
            return state.beginning
        if bound == LATEST:
            return state.end
        found = Position(ids.before(bound))
        # A bound past the end means the end; it must not look like a loss later.
        if not state.end.is_after(found):
            return state.end
        if not state.length or ids.parse(state.first_id) > ids.parse(found.id):
            # Entries removed before now were not asked for, so they are no loss either.
            return Position(found.id, state.removed)
        return found


def _read_bound(option: str, value: object) -> str:
    text = str(value).strip()
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    if ids.is_valid(text):
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option}: {text!r:.60} is none of earliest, latest, an id (1700000000000-0),"
            " a time (2026-01-31T12:00:00Z), milliseconds since 1970, JSON per stream"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return ids.format(max(0, -int(-moment.timestamp() * 1000 // 1)))
