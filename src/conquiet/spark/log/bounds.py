"""Bounds: where to start and where to end, as the options say it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from json import JSONDecodeError, loads

from conquiet.errors import ConfigError
from conquiet.spark.log.offsets import Position
from conquiet.spark.log.piece import LARGEST, before, id_of, parts
from conquiet.spark.log.streams import StreamState

EARLIEST, LATEST = "earliest", "latest"

_id = re.compile(r"\d+(-\d+)?")


@dataclass(frozen=True, slots=True)
class Bounds:
    """A word or an id for each stream; the entry with the id lies behind the bound."""

    default: str
    streams: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, option: str, text: str, others: str) -> Bounds:
        """From an option; `others` is for streams that a JSON object does not name.

        >>> Bounds.of("startingOffsets", '{"orders": "1700000000000-0"}', "earliest").streams
        {'orders': '1700000000000-0'}
        """
        if not text.lstrip().startswith("{"):
            return cls(_bound(option, text))
        try:
            given = loads(text)
        except JSONDecodeError as error:
            raise ConfigError(f"{option} is not JSON: {error}") from error
        return cls(others, {name: _bound(option, value) for name, value in given.items()})

    def position(self, stream: str, state: StreamState) -> Position:
        """The last entry before the bound."""
        bound = self.streams.get(stream, self.default)
        if bound == EARLIEST:
            return state.beginning
        if bound == LATEST:
            return state.end
        found = Position(before(bound))
        # Behind the end there is nothing yet: then it is the end, and not the sign of a loss.
        if not state.end.is_after(found):
            return state.end
        if not state.length or parts(state.first_id) > parts(found.id):
            # Nor is it one that a stream begins later: what was removed before now was not wanted.
            return Position(found.id, state.removed)
        return found


def _bound(option: str, value: object) -> str:
    text = str(value).strip()
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    if _id.fullmatch(text) and max(parts(text)) <= LARGEST:
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
    return id_of(max(0, -int(-moment.timestamp() * 1000 // 1)))
