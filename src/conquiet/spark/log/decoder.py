"""Decode entries into Arrow record batches with the columns that Spark asked for.

Entries of the same fields are cut from the bytes of a reply by numpy and Arrow, without an object
of Python for any of them. Others go through `row_of`, which defines the meaning of an entry; the
fast way agrees with it.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql.types import StructType

from conquiet.errors import InvalidMessage
from conquiet.redis.entry import STRUCTURED_FIELD, TOPIC_FIELD, from_fields
from conquiet.spark.columns import MALFORMED
from conquiet.spark.log.fetch import Found, Oversized
from conquiet.spark.log.options import MAX_BYTES_PER_BATCH
from conquiet.spark.log.resp import Group, Numbers, Table
from conquiet.spark.payload import RAW, check_columns, finisher, has_struct, has_text

_ROWS = 10_000


class Decoder:
    """Makes record batches for one schema; can be pickled."""

    def __init__(
        self,
        schema: StructType,
        types: tuple[str, ...] = (),
        max_bytes: int = MAX_BYTES_PER_BATCH,
    ) -> None:
        check_columns(schema, "the log")
        self._max_bytes = max_bytes
        self._schema = schema
        self._types = types
        self._wanted = frozenset(schema.names) - {RAW}
        if has_struct(schema) or has_text(schema):
            self._wanted |= {MALFORMED, "data"}
        if types:
            self._wanted |= {MALFORMED, "type"}

    def decode(self, found: Iterable[Found]) -> Iterator[pa.RecordBatch]:
        finish = self._finisher()
        rows = RowBuilder()
        for stream, entries in found:
            if isinstance(entries, Table):
                if len(rows):
                    yield finish(rows.take())
                yield finish(columns_of(entries, stream, self._wanted))
                continue
            if isinstance(entries, Oversized):
                rows.add_oversized(stream, entries, self._max_bytes)
                continue
            for entry_id, fields in entries:
                rows.add(stream, entry_id, fields)
                if rows.bytes >= self._max_bytes or len(rows) >= _ROWS:
                    yield finish(rows.take())
        if len(rows):
            yield finish(rows.take())

    def _finisher(self) -> Callable[[dict[str, pa.Array]], pa.RecordBatch]:
        finish = finisher(self._schema)
        if not self._types:
            return finish
        types = pa.array(self._types, pa.string())
        return lambda columns: finish(_only(types, columns))


def _only(types: pa.Array, columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """Keep the events of these types, and malformed entries, whose type is unknown."""
    kept = pc.or_(pc.is_in(columns["type"], types), pc.is_valid(columns[MALFORMED]))
    return {name: column.filter(kept) for name, column in columns.items()}


_TIME = pa.timestamp("us", tz="UTC")
_DASH, _ZERO = b"-0"
_LAST_ASCII = 127
_CLOCK_DIGITS = 13
"""Digits of the milliseconds in an id, from 2001 to 2286."""


def columns_of(table: Table, stream: str, wanted: frozenset[str]) -> dict[str, pa.Array]:
    """Return the wanted columns of all entries of a reply, in its order."""
    parts = [_Cut(table, group, stream).columns(wanted) for group in table.groups]
    if len(parts) == 1:
        return parts[0]
    order = np.concatenate([group.rows for group in table.groups])
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    back = pa.array(places)
    return {name: pa.concat_arrays([part[name] for part in parts]).take(back) for name in wanted}


class _Unusual(Exception):
    """Some of these entries need to be decoded one by one."""


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
        """Check the other columns too: what is malformed must not depend on the query."""
        unread = [place for place, column in shape.texts.items() if column not in wanted]
        if unread and bool((self._bytes > _LAST_ASCII).any()):
            for place in unread:
                self._texts(1 + place)
        if "attributes" in wanted and "time" in shape.columns and "time" not in wanted:
            self._column("time", shape)  # an invalid time stays among the attributes

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
        """Return a column as text; raise `ArrowInvalid` unless all of it is UTF-8."""
        return self._values(column).cast(pa.string())

    def _cut(self, starts: Numbers, ends: Numbers) -> pa.Array:
        """Return the bytes between starts and ends: every second value between all these places."""
        places = np.empty(2 * len(starts), dtype=np.int32)
        places[0::2] = starts
        places[1::2] = ends
        values = pa.Array.from_buffers(
            pa.binary(), len(places) - 1, [None, pa.py_buffer(places), self._buffer]
        )
        return values.take(_every_second(len(starts)))

    # --- computed columns ----------------- ----------------------------------------------------

    def _entry_times(self) -> pa.Array:
        micros, is_clock = _milliseconds(self._bytes, self._group.starts[0], self._group.ends[0])
        micros *= 1000
        return pa.array(micros, mask=None if is_clock is None else ~is_clock).cast(_TIME)

    def _keys(self, shape: Shape) -> pa.Array:
        """Return keys as `Message.key` does: attribute partitionkey, else subject, else null."""
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

    # --- one by one -------------------------------------------------------------------------

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
    """Return the milliseconds of each id, and which of them can be a time (None: all)."""
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
    """Return the names of the attributes of `count` entries, one entry after the other."""
    return pa.array(names, pa.string()).take(pa.array(np.tile(np.arange(len(names)), count)))


LAST_MILLISECOND = 253_402_300_799_999
"""The end of the year 9999: an id beyond it was not made of a clock, and has no time."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_json = msgspec.json.Encoder()


class Row(NamedTuple):
    """An entry as columns; `attributes` still has all of them, the time as text."""

    attributes: dict[str, str]
    data: bytes | None
    malformed: str | None = None


def row_of(fields: Sequence[bytes] | None) -> Row:
    """Decode the fields of an entry, names and values in turn; never fails."""
    if not fields:
        return Row({}, None, "it has no fields")
    try:
        if tuple(fields[::2]) == QUEUED:
            check_queued(fields[1])
            return Row({}, fields[1])
        data, attributes, _ = from_fields(list(fields))
        is_there = bool(data) or (b"data" in fields[::2] and STRUCTURED_FIELD not in fields[::2])
        texts = {name: _text(value) for name, value in attributes.items()}
        return Row(texts, data if is_there else None)
    except InvalidMessage as error:
        return Row({}, fields_as_json(fields), str(error))


def check_queued(data: bytes) -> None:
    """Raise `InvalidMessage` unless a message of the queue holds a JSON object."""
    try:
        _object.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"its only field, data, holds no JSON object: {error}") from error


def fields_as_json(fields: Sequence[bytes]) -> bytes:
    """Return all fields of a malformed entry; binary values in base64, under NAME_base64."""
    named: dict[str, str] = {}
    for name, value in zip(fields[::2], fields[1::2], strict=False):
        plain = name.decode(errors="backslashreplace")
        try:
            named[plain] = value.decode()
        except UnicodeDecodeError:
            named[f"{plain}_base64"] = b64encode(value).decode()
    return _json.encode(named)


def _text(value: object) -> str:
    """Return an attribute as CloudEvents writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)


class RowBuilder:
    """Collects entries of any stream and turns them into columns."""

    def __init__(self) -> None:
        self._streams: list[str] = []
        self._ids: list[str] = []
        self._rows: list[Row] = []
        self.bytes = 0
        """About the size of the collected entries."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, stream: str, entry_id: bytes, fields: Sequence[bytes] | None) -> None:
        self._streams.append(stream)
        self._ids.append(entry_id.decode())
        self._rows.append(row_of(fields))
        self.bytes += sum(map(len, fields or ()))

    def add_oversized(self, stream: str, entry: Oversized, max_bytes: int) -> None:
        """Add an entry whose fields were not read: a malformed row without data."""
        self._streams.append(stream)
        self._ids.append(entry.id.decode())
        self._rows.append(
            Row(
                {},
                None,
                f"it has {entry.size} bytes, more than maxBytesPerBatch={max_bytes}; its data was"
                " not read",
            )
        )

    def take(self) -> dict[str, pa.Array]:
        """Return all columns of the collected entries, and begin again without them."""
        rows, ids, streams = self._rows, self._ids, self._streams
        self._rows, self._ids, self._streams, self.bytes = [], [], [], 0
        attributes = [row.attributes for row in rows]
        columns = {
            "stream": pa.array(streams, pa.string()),
            "entry_id": pa.array(ids, pa.string()),
            "entry_time": entry_times(ids),
            "key": pa.array([_key(item) for item in attributes], pa.string()),
            "time": _times(attributes),
            "data": pa.array([row.data for row in rows], pa.binary()),
            MALFORMED: pa.array([row.malformed for row in rows], pa.string()),
        }
        for name, column in ATTRIBUTE_COLUMNS.items():
            if name != "time":
                columns[column] = pa.array([item.pop(name, None) for item in attributes], "string")
        columns["attributes"] = pa.array(
            [None if row.malformed else list(row.attributes.items()) for row in rows],
            pa.map_(pa.string(), pa.string()),
        )
        return columns


def _key(attributes: dict[str, str]) -> str | None:
    return attributes.get("partitionkey") or attributes.get("subject") or None


def entry_times(ids: Sequence[str]) -> pa.Array:
    """Return the times in ids; null for ids that are not made of a clock."""
    milliseconds = [int(entry_id.partition("-")[0]) for entry_id in ids]
    micros = [None if ms > LAST_MILLISECOND else ms * 1000 for ms in milliseconds]
    return pa.array(micros, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def _times(attributes: Sequence[dict[str, str]]) -> pa.Array:
    """Take the attribute `time` out of the others; an invalid time stays there as text."""
    texts = [item.pop("time", None) for item in attributes]
    kind = pa.timestamp("us", tz="UTC")
    try:
        return pc.cast(pa.array(texts, pa.string()), kind)
    except pa.ArrowInvalid:
        pass
    moments: list[Any] = []
    for text, item in zip(texts, attributes, strict=True):
        moment = None if text is None else _moment(text, kind)
        if text is not None and moment is None:
            item["time"] = text
        moments.append(moment)
    return pa.array(moments, kind)


def _moment(text: str, kind: Any) -> Any:
    try:
        return pc.cast(pa.scalar(text), kind).as_py()
    except (pa.ArrowInvalid, ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(text)
        return None if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


ATTRIBUTE_COLUMNS = {
    "id": "event_id",
    "type": "type",
    "source": "source",
    "subject": "subject",
    "time": "time",
    "datacontenttype": "content_type",
}
"""Attributes with a column of their own; all others are in the map `attributes`."""

QUEUED = (b"data",)
"""The fields of a message of `conquiet.queue`: one, which holds a JSON object."""

_attribute_name = re.compile(rb"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Shape:
    """Maps the fields of an event in binary mode, or of a message of the queue, to columns."""

    kind: Literal["event", "queued"]
    columns: dict[str, int]
    """Column → place among the fields; `key` and `data` too, where there is one."""
    others: tuple[tuple[str, int], ...]
    """Attributes without a column, with their places."""
    version: int = -1
    """The place of `specversion`, whose value must be checked."""
    texts: dict[int, str] = field(default_factory=dict)
    """Places that must hold UTF-8, and the column of each, if any."""


@lru_cache(maxsize=1_000)
def shape_of(names: tuple[bytes, ...]) -> Shape | None:
    """Return the shape of these fields; None if such entries must be decoded one by one."""
    if names == QUEUED:
        return Shape("queued", {"data": 0}, ())
    if b"specversion" not in names or len(set(names)) < len(names):
        return None
    columns: dict[str, int] = {}
    others: list[tuple[str, int]] = []
    for place, given in enumerate(names):
        if given.startswith(b":"):
            continue
        if not _attribute_name.fullmatch(given):
            return None
        name = given.decode()
        if name == "data":
            columns["data"] = place
        elif name in ATTRIBUTE_COLUMNS:
            columns[ATTRIBUTE_COLUMNS[name]] = place
        else:
            others.append((name, place))
    texts = {place: "attributes" for _, place in others}
    texts |= {place: name for name, place in columns.items() if name != "data"}
    if TOPIC_FIELD in names:
        texts[names.index(TOPIC_FIELD)] = ""
    return Shape("event", columns, tuple(others), names.index(b"specversion"), texts)
