"""Filters: what a query says about stream and entry_time, as names and ids."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from conquiet.spark.log.offsets import Position
from conquiet.spark.log.piece import before, id_of, parts

_STREAM, _TIME = ("stream",), ("entry_time",)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICRO = timedelta(microseconds=1)


class Filters:
    """Takes the filters that a range can stand for; Spark applies the others."""

    def __init__(self) -> None:
        self._names: list[frozenset[str]] = []
        self._prefixes: list[str] = []
        self._from_ms: int | None = None
        self._to_ms: int | None = None
        """Not included."""

    def take(self, item: Filter) -> bool:
        """Whether this filter is done with, here and now."""
        attribute = getattr(item, "attribute", None)
        if isinstance(item, IsNotNull):
            return attribute == _STREAM  # a time may be missing: not every id is made of a clock
        if attribute == _STREAM:
            return self._take_stream(item)
        return attribute == _TIME and self._take_time(item)

    def _take_stream(self, item: Filter) -> bool:
        if isinstance(item, EqualTo):
            self._names.append(frozenset([item.value]))
        elif isinstance(item, In):
            self._names.append(frozenset(item.value))
        elif isinstance(item, StringStartsWith):
            self._prefixes.append(item.value)
        else:
            return False
        return True

    def _take_time(self, item: Filter) -> bool:
        """Narrows the range. Spark applies it too: an id without a time matches no time."""
        value = getattr(item, "value", None)
        if not isinstance(value, datetime) or value.tzinfo is None:
            return False
        micros = (value - _EPOCH) // _MICRO
        bounds: dict[type, tuple[int | None, int | None]] = {
            GreaterThan: (micros // 1000 + 1, None),
            GreaterThanOrEqual: (-(-micros // 1000), None),
            LessThan: (None, -(-micros // 1000)),
            LessThanOrEqual: (None, micros // 1000 + 1),
            EqualTo: (-(-micros // 1000), micros // 1000 + 1),
        }
        low, high = bounds.get(type(item), (None, None))
        self._from_ms = _pick(max, self._from_ms, low)
        self._to_ms = _pick(min, self._to_ms, high)
        return False

    def allow(self, stream: str) -> bool:
        return all(stream in names for names in self._names) and all(
            stream.startswith(prefix) for prefix in self._prefixes
        )

    def narrow(self, start: Position, end: Position) -> tuple[Position, Position]:
        """The part of a range in which wanted times lie."""
        if self._from_ms is not None:
            low = Position(before(id_of(max(0, self._from_ms))))
            start = low if low.is_after(start) else start
        if self._to_ms is not None:
            high = Position(before(id_of(max(0, self._to_ms))))
            end = end if parts(end.id) <= parts(high.id) else high
        return start, end


def _pick(choose: Callable[..., int], one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)
