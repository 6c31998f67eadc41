"""Arrays: the columns of entries, cut from the bytes of a reply without looking at one entry."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from conquiet.errors import InvalidMessage
from conquiet.spark.columns import MALFORMED
from conquiet.spark.log.resp import Group, Numbers, Table
from conquiet.spark.log.rows import LAST_MILLISECOND, RowBuilder, check_queued
from conquiet.spark.log.shape import Shape, shape_of

_TIME = pa.timestamp("us", tz="UTC")
_MAP = pa.map_(pa.string(), pa.string())
_DASH, _ZERO = b"-0"
_LAST_ASCII = 127
_CLOCK_DIGITS = 13
"""Of the milliseconds in an id, from 2001 to 2286."""


def columns_of(table: Table, stream: str, wanted: frozenset[str]) -> dict[str, pa.Array]:
    """The wanted columns of all entries of a reply, in its order."""
    parts = [_Cut(table, group, stream).columns(wanted) for group in table.groups]
    if len(parts) == 1:
        return parts[0]
    order = np.concatenate([group.rows for group in table.groups])
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    back = pa.array(places)
    return {name: pa.concat_arrays([part[name] for part in parts]).take(back) for name in wanted}


class _Unusual(Exception):
    """These entries do not all mean what their fields promise."""


class _Cut:
    """One group of entries of the same shape."""

    def __init__(self, table: Table, group: Group, stream: str) -> None:
        self._bytes = table.buffer
        self._buffer = pa.py_buffer(table.buffer)
        self._group = group
        self._stream = stream
        self._count = len(group.rows)

    def columns(self, wanted: frozenset[str]) -> dict[str, pa.Array]:
        shape = shape_of(self._group.names)
        if shape is not None:
            try:
                return self._of_shape(shape, wanted)
            except (_Unusual, pa.ArrowInvalid, InvalidMessage):
                pass
        return self._one_by_one()

    def _of_shape(self, shape: Shape, wanted: frozenset[str]) -> dict[str, pa.Array]:
        if shape.kind == "queued":
            for data in self._values(1).to_pylist():
                check_queued(data)
        elif not pc.all(pc.equal(self._values(1 + shape.version), b"1.0")).as_py():
            raise _Unusual
        self._check_unwanted(shape, wanted)
        return {name: self._column(name, shape) for name in wanted}

    def _check_unwanted(self, shape: Shape, wanted: frozenset[str]) -> None:
        """What an entry is does not depend on the columns that somebody asks for."""
        unread = [place for place, column in shape.texts.items() if column not in wanted]
        if unread and bool((self._bytes > _LAST_ASCII).any()):
            for place in unread:
                self._texts(1 + place)
        if "attributes" in wanted and "time" in shape.columns and "time" not in wanted:
            self._column("time", shape)  # one that is no time is among the attributes

    def _column(self, name: str, shape: Shape) -> pa.Array:
        if name == "stream":
            return pa.repeat(pa.scalar(self._stream), self._count)
        if name == "entry_id":
            return self._texts(0)
        if name == "entry_time":
            return self._entry_times()
        if name == "key":
            return self._keys(shape)
        if name == "attributes":
            return self._attributes(shape)
        place = shape.columns.get(name)
        if name == "data":
            return pa.nulls(self._count, pa.binary()) if place is None else self._values(1 + place)
        if name == "time":
            if place is None:
                return pa.nulls(self._count, _TIME)
            return pc.cast(self._texts(1 + place), _TIME)
        if name == MALFORMED or place is None:
            return pa.nulls(self._count, pa.string())
        return self._texts(1 + place)

    # --- cutting ----------------------------------------------------------------------------

    def _values(self, column: int) -> pa.Array:
        return self._cut(self._group.starts[column], self._group.ends[column])

    def _texts(self, column: int) -> pa.Array:
        """Raises `ArrowInvalid` unless it all is UTF-8."""
        return self._values(column).cast(pa.string())

    def _cut(self, starts: Numbers, ends: Numbers) -> pa.Array:
        """The bytes between: every second of the pieces into which these places cut the reply."""
        places = np.empty(2 * len(starts), dtype=np.int32)
        places[0::2] = starts
        places[1::2] = ends
        pieces = pa.Array.from_buffers(
            pa.binary(), len(places) - 1, [None, pa.py_buffer(places), self._buffer]
        )
        return pieces.take(_every_second(len(starts)))

    # --- columns that are made of something ----------------------------------------------------

    def _entry_times(self) -> pa.Array:
        micros, is_clock = _milliseconds(self._bytes, self._group.starts[0], self._group.ends[0])
        micros *= 1000
        return pa.array(micros, mask=None if is_clock is None else ~is_clock).cast(_TIME)

    def _keys(self, shape: Shape) -> pa.Array:
        """As `Message.key` has it: the attribute partitionkey, else subject, else nothing."""
        places = dict(shape.others).get("partitionkey"), shape.columns.get("subject")
        found = [self._texts(1 + place) for place in places if place is not None]
        found = [_unless_empty(item) for item in found]
        if not found:
            return pa.nulls(self._count, pa.string())
        return found[0] if len(found) == 1 else pc.coalesce(*found)

    def _attributes(self, shape: Shape) -> pa.Array:
        names = tuple(name for name, _ in shape.others)
        columns = [1 + place for _, place in shape.others]
        starts, ends = self._group.starts[columns], self._group.ends[columns]
        values = self._cut(starts.T.ravel(), ends.T.ravel()).cast(pa.string())
        offsets = np.arange(0, len(values) + 1, max(1, len(names)), dtype=np.int32)
        if not names:
            offsets = np.zeros(self._count + 1, dtype=np.int32)
        return pa.MapArray.from_arrays(pa.array(offsets), _names(names, self._count), values)

    # --- the slow way -----------------------------------------------------------------------

    def _one_by_one(self) -> dict[str, pa.Array]:
        ids, *values = (
            self._values(column).to_pylist() for column in range(len(self._group.starts))
        )
        builder = RowBuilder()
        names = self._group.names
        for entry_id, row in zip(ids, zip(*values, strict=True), strict=True):
            fields = [item for pair in zip(names, row, strict=True) for item in pair]
            builder.add(self._stream, entry_id, fields)
        return builder.take()


def _milliseconds(
    buffer: NDArray[np.uint8], starts: Numbers, ends: Numbers
) -> tuple[Numbers, NDArray[np.bool_] | None]:
    """The first half of each id, and which of them can be a time (None: all of them)."""
    dashes = starts + _CLOCK_DIGITS
    if (ends > dashes).all() and (buffer[dashes] == _DASH).all():
        numbers = np.zeros(len(starts), dtype=np.int64)
        for place in range(_CLOCK_DIGITS):
            numbers *= 10
            numbers += buffer[starts + place] - _ZERO
        return numbers, None
    ids = [buffer[start:end].tobytes() for start, end in zip(starts, ends, strict=True)]
    halves = [int(item.partition(b"-")[0]) for item in ids]
    is_clock = np.array([half <= LAST_MILLISECOND for half in halves])
    return np.array([min(half, LAST_MILLISECOND) for half in halves]), is_clock


def _unless_empty(texts: pa.Array) -> pa.Array:
    empty = pc.equal(texts, "")
    return pc.if_else(empty, None, texts) if pc.any(empty).as_py() else texts


@lru_cache(maxsize=4)
def _every_second(count: int) -> pa.Array:
    return pa.array(np.arange(0, 2 * count, 2))


@lru_cache(maxsize=16)
def _names(names: tuple[str, ...], count: int) -> pa.Array:
    """The names of the attributes of `count` entries, one entry after the other."""
    return pa.array(names, pa.string()).take(pa.array(np.tile(np.arange(len(names)), count)))
