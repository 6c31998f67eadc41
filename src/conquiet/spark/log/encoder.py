"""Encode the rows of a data frame as XADD commands, by functions of Arrow alone.

| column | becomes |
|---|---|
| event_id, type, source, subject | the attributes id, type, source, subject |
| content_type | datacontenttype |
| time | time, in UTC |
| key | partitionkey, unless it equals the subject |
| attributes | attributes of those names |
| data | data, byte for byte; text in UTF-8 |
| topic, or stream | the destination, unless the option `topic` is set |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from conquiet.codec import SPEC_VERSION
from conquiet.errors import ConfigError, InvalidMessage
from conquiet.redis.topic import Topic
from conquiet.spark.columns import MALFORMED
from conquiet.spark.log.options import WriteOptions

_ATTRIBUTES = {
    "event_id": "id",
    "type": "type",
    "source": "source",
    "subject": "subject",
    "time": "time",
    "key": "partitionkey",
    "content_type": "datacontenttype",
}
_REQUIRED = ("event_id", "type", "source")
_OF_THE_READER = {"entry_id", "entry_time", MALFORMED}
"""Columns that a source adds for the old place of an event; they are not written."""
_KNOWN = {*_ATTRIBUTES, *_OF_THE_READER, "attributes", "data", "topic", "stream"}
_VERSION = "specversion"
_KEY = _ATTRIBUTES["key"]

_attribute_name = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Entries:
    """Commands for one stream, in order, in one block of memory."""

    stream: str
    commands: pa.BinaryArray
    identities: pa.BinaryArray
    """The source and id of each event."""
    counts: pa.Int64Array
    """How many names and values each command has."""

    def __len__(self) -> int:
        return len(self.commands)

    def slice(self, start: int, end: int | None = None) -> Entries:
        length = None if end is None else end - start
        return Entries(
            self.stream,
            self.commands.slice(start, length),
            self.identities.slice(start, length),
            self.counts.slice(start, length),
        )

    def take(self, places: Sequence[int]) -> Entries:
        chosen = pa.array(places, pa.int64())
        columns = (self.commands, self.identities, self.counts)
        return Entries(self.stream, *(column.take(chosen) for column in columns))

    def pack(self, start: int = 0, end: int | None = None) -> memoryview:
        """Return the commands one after another, as they go over the wire."""
        part = self.commands.slice(start, None if end is None else end - start)
        if not len(part):
            return memoryview(b"")
        offsets = memoryview(part.buffers()[1]).cast("i")
        first, last = offsets[part.offset], offsets[part.offset + len(part)]
        return memoryview(part.buffers()[2])[first:last]

    def slices(self, max_rows: int, max_bytes: int) -> Iterator[Entries]:
        """Yield slices of so many rows and bytes at most; a row is never cut."""
        offsets = memoryview(self.commands.buffers()[1]).cast("i")[self.commands.offset :]
        start = 0
        while start < len(self):
            end = min(start + max_rows, len(self))
            while end - start > 1 and offsets[end] - offsets[start] > max_bytes:
                end = start + (end - start) // 2
            yield self.slice(start, end)
            start = end


class RowEncoder:
    """Encodes the batches of one task; refuses a frame that cannot be written."""

    def __init__(self, columns: Sequence[str], options: WriteOptions, prefix: str = "") -> None:
        unknown = sorted(set(columns) - _KNOWN)
        if unknown:
            raise ConfigError(
                f"an event has no columns {', '.join(unknown)}; put them into `attributes`,"
                f" a map of text, or drop them. Known are: {', '.join(sorted(_KNOWN))}"
            )
        if options.topic is None and not {"topic", "stream"} & set(columns):
            raise ConfigError("say where events go: option topic, or a column `topic` or `stream`")
        for name, given in (("type", options.type), ("source", options.source)):
            if name not in columns and not given:
                raise ConfigError(f"an event needs a {name}: add the column, or option {name}")
        self.makes_ids = "event_id" not in columns
        self._options = options
        self._prefix = prefix
        self._topics: dict[str, Topic] = {}
        self._rows = 0

    def encode(self, batch: pa.RecordBatch) -> Iterator[Entries]:
        """Yield the commands of a batch, stream by stream."""
        batch = self._complete(batch)
        self._rows += batch.num_rows
        if not batch.num_rows:
            return
        for stream, places in self._streams(batch):
            part = batch if places is None else batch.take(pa.array(places, pa.int64()))
            yield self._entries(stream, part)

    # --- defaults ---------------------------------------------------------------------------

    def _complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = {name: batch.column(name) for name in batch.schema.names}
        size = batch.num_rows
        if self.makes_ids:
            numbers = pa.array(range(self._rows, self._rows + size), pa.int64())
            columns["event_id"] = _join(self._prefix.encode(), _decimal(numbers))
        for name in ("type", "source"):
            given = getattr(self._options, name)
            if name not in columns:
                columns[name] = pa.repeat(pa.scalar(given), size)
            elif given and columns[name].null_count:
                columns[name] = pc.fill_null(columns[name], given)
        for name in _REQUIRED:
            self._refuse_missing(name, columns)
        return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))

    def _refuse_missing(self, name: str, columns: dict[str, Any]) -> None:
        column = columns[name]
        empty = pc.fill_null(pc.equal(pc.binary_length(column), 0), True)
        bad = pc.index(empty, True).as_py()
        if bad < 0:
            return
        about = {
            other: columns[other][bad].as_py()
            for other in ("entry_id", "event_id", "type", MALFORMED)
            if other in columns
        }
        raise InvalidMessage(
            f"row {self._rows + bad} of this partition has no {name}: {about!r:.300}; filter such"
            f" rows out{f', or set option {name}' if name != 'event_id' else ''}"
        )

    # --- destinations ----------------------------------------------------------------------

    def _streams(self, batch: pa.RecordBatch) -> Iterator[tuple[str, Sequence[int] | None]]:
        """Yield each stream and the places of its rows; None if it gets them all."""
        if self._options.topic is not None:
            topic = self._topic(self._options.topic)
            if topic.partitions == 1:
                yield topic.name, None
                return
            names = [topic.name] * batch.num_rows
        else:
            column = "topic" if "topic" in batch.schema.names else "stream"
            found = batch.column(column)
            if found.null_count:
                raise InvalidMessage(f"a row has no {column}, so it has no stream to go to")
            if column == "stream":
                yield from _by_value(found.to_pylist())
                return
            names = found.to_pylist()
        keys = _keys(batch).to_pylist()
        yield from _by_value(
            [self._topic(name).stream(key) for name, key in zip(names, keys, strict=True)]
        )

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = Topic(name, self._options.partitions)
        return topic

    # --- the bytes --------------------------------------------------------------------------

    def _entries(self, stream: str, batch: pa.RecordBatch) -> Entries:
        names = batch.schema.names
        parts: list[Any] = []
        counts: Any = pa.scalar(0, pa.int64())
        for column, attribute in _ATTRIBUTES.items():
            if column in names:
                value = _value(column, batch)
                counts = pc.add(counts, _append(parts, attribute, value))
        counts = pc.add(counts, _append(parts, _VERSION, pa.scalar(SPEC_VERSION.encode())))
        if "attributes" in names:
            fields, strings = _extensions(batch.column("attributes"), has_key="key" in names)
            parts.append(fields)
            counts = pc.add(counts, strings)
        if "data" in names:
            counts = pc.add(counts, _append(parts, "data", batch.column("data")))
        if not isinstance(counts, pa.Array):
            counts = pa.repeat(counts, batch.num_rows)
        name, entry_id = stream.encode(), self._options.entry_id
        head = b"\r\n$4\r\nXADD\r\n" + encode_bulk(name) + encode_bulk(entry_id)
        commands = _join(b"*", _decimal(pc.add(counts, 3)), head, *parts)
        identities = _join(_binary(batch.column("source")), b" ", _binary(batch.column("event_id")))
        return Entries(stream, commands, identities, counts)


def _keys(batch: pa.RecordBatch) -> Any:
    """Return what picks the partition of a topic: the key, else the subject, else the id."""
    columns = [batch.column(name) for name in ("key", "subject") if name in batch.schema.names]
    ids = batch.column("event_id").cast(pa.string())
    empty = pa.scalar("", pa.string())
    given = [
        pc.if_else(pc.equal(pc.fill_null(item, empty), empty), pa.scalar(None, pa.string()), item)
        for item in columns
    ]
    return pc.coalesce(*given, ids)


def _by_value(names: Sequence[str]) -> Iterator[tuple[str, Sequence[int] | None]]:
    places: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        places.setdefault(name, []).append(index)
    for name, found in places.items():
        yield name, None if len(places) == 1 else found


def _value(column: str, batch: pa.RecordBatch) -> Any:
    value = batch.column(column)
    if column == "time" and pa.types.is_timestamp(value.type):
        return time_text(value)
    if column == "key" and "subject" in batch.schema.names:
        subject = batch.column("subject")
        same = pc.fill_null(pc.equal(value, subject), False)
        if "attributes" in batch.schema.names:  # an event that was read with both keeps both
            given = pc.map_lookup(batch.column("attributes"), pa.scalar(_KEY), "first")
            same = pc.and_(same, pc.is_null(given))
        return pc.if_else(same, pa.scalar(None, value.type), value)
    return value


def time_text(value: Any) -> Any:
    """Return times in RFC 3339 and UTC, as CloudEvents writes them."""
    text = value.cast(pa.timestamp("us")).cast(pa.string()).cast(pa.binary())
    return _join(pc.binary_replace_slice(text, start=10, stop=11, replacement=b"T"), b"Z")


def _append(parts: list[Any], name: str, value: Any) -> Any:
    """Add one field to the parts of a command; return how many strings that is, row by row."""
    two = pa.scalar(2, pa.int64())
    head = encode_bulk(name.encode()) + b"$"
    if isinstance(value, pa.Scalar):
        parts.append(_scalar(head + encode_bulk(value.as_py())[1:]))
        return two
    value = _binary(value)
    strings = (_scalar(head), _decimal(pc.binary_length(value)), _scalar(b"\r\n"), value)
    if not value.null_count:
        parts += (*strings, _scalar(b"\r\n"))
        return two
    parts.append(pc.fill_null(_join(*strings, b"\r\n"), b""))
    return pc.if_else(pc.is_valid(value), two, pa.scalar(0, pa.int64()))


def _extensions(column: Any, *, has_key: bool) -> tuple[Any, Any]:
    """Return the fields of a map's attributes, row by row, and how many strings they are.

    Sources leave the key there too; if the frame has a column `key`, that column is written.
    """
    names, values = column.keys, column.items
    elsewhere = {_VERSION} | ({_KEY} if has_key else set())
    for name in pc.unique(names).to_pylist():
        if name in elsewhere:
            continue
        if not _attribute_name.fullmatch(name) or name in (*_ATTRIBUTES.values(), "data"):
            raise InvalidMessage(
                f"attribute {name!r:.60} cannot be written: names consist of a-z and 0-9, and an"
                " attribute that has a column of its own belongs there"
            )
    names, values = _binary(names), _binary(values)
    fields = _join(
        b"$", _decimal(pc.binary_length(names)), b"\r\n", names,
        b"\r\n$", _decimal(pc.binary_length(values)), b"\r\n", values, b"\r\n",
    )  # fmt: skip
    left_out = pa.array([name.encode() for name in sorted(elsewhere)], pa.binary())
    dropped = pc.or_(pc.is_in(names, left_out), pc.is_null(values))
    fields = pc.if_else(dropped, _scalar(b""), fields)
    grouped = pa.ListArray.from_arrays(column.offsets, fields)
    joined = pc.fill_null(pc.binary_join(grouped, _scalar(b"")), b"")
    kept = pc.if_else(dropped, pa.scalar(0, pa.int64()), pa.scalar(2, pa.int64()))
    return joined, _sums(kept, column.offsets)


def _sums(values: Any, offsets: Any) -> Any:
    """Return the sums of the values between consecutive offsets."""
    upto = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(values)])
    return pc.subtract(upto.take(offsets[1:]), upto.take(offsets[:-1]))


# --- Arrow ----------------------------------------------------------------------------------
def _scalar(value: bytes) -> Any:
    return pa.scalar(value, pa.binary())


def _binary(value: Any) -> Any:
    return value if pa.types.is_binary(value.type) else value.cast(pa.binary())


def _decimal(value: Any) -> Any:
    return value.cast(pa.string()).cast(pa.binary())


def _join(*parts: Any) -> Any:
    given = [_scalar(part) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*given, _scalar(b""))


def encode_bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)
