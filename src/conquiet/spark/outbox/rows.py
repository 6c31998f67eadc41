"""Read a range of an outbox in a task, by ADBC, as record batches in the columns of the log."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from conquiet.errors import StoreError
from conquiet.events.check import canonical
from conquiet.spark.columns import ARROW_SCHEMA, MALFORMED
from conquiet.spark.database import Database, begin, one_line
from conquiet.spark.outbox.options import OutboxOptions
from conquiet.spark.outbox.statement import DOMAIN_SOURCE, RowRange, statement
from conquiet.spark.outbox.survey import report_lost
from conquiet.spark.payload import finisher

BATCH_ROWS = 10_000
"""Rows of SQLite per record batch; PostgreSQL's driver counts bytes."""


def fetch_rows(
    options: OutboxOptions, row_range: RowRange, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Yield the events of a range; report a loss if it has fewer rows than were counted."""
    finish = finisher(schema)
    database = Database.of(options.address)
    query = statement(options, row_range, postgresql=database.is_postgresql)
    rows = 0
    for answer in _answers(database, query):
        rows += answer.num_rows
        if answer.num_rows:
            found = to_events(answer, options)
            yield finish(dict(zip(found.schema.names, found.columns, strict=True)))
    if row_range.rows is not None and not options.filters and rows < row_range.rows:
        report_lost(options, row_range.after, row_range.upto, row_range.rows - rows)


def _answers(database: Database, query: str) -> Iterator[pa.RecordBatch]:
    with begin(database) as connection, connection.cursor() as cursor:
        if not database.is_postgresql:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
        cursor.execute(query)
        with cursor.fetch_record_batch() as reader:
            yield from _read(reader, database)


def _read(reader: pa.RecordBatchReader, database: Database) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            answer = reader.read_next_batch()
        except StopIteration:
            return
        except (OSError, pa.ArrowException) as error:  # the server failed half-way
            raise StoreError(f"{database.shown}: {one_line(error):.500}") from error
        yield answer


_TIME = ARROW_SCHEMA.field("time").type
_JSON = "application/json"
_DOCUMENTS = 500
_QUOTE, _BACKSLASH = 0x22, 0x5C
_BETWEEN = pa.array(['": "', '":"'])  # as JSONB and SQLite write it
_objects = msgspec.json.Decoder(list[dict[str, Any]])
_texts = msgspec.json.Decoder(list[dict[str, str]])
_values = msgspec.json.Decoder(list[Any])
_value = msgspec.json.Decoder()
_TOKEN = secrets.token_hex(8)  # that no document can hold on purpose
_SEAM = f'"{_TOKEN}",'


def to_events(answer: pa.RecordBatch, options: OutboxOptions) -> pa.RecordBatch:
    """Convert the rows of a `statement` to events."""
    given = {name: answer.column(name) for name in answer.schema.names}
    columns = _domain(given, options) if options.has_domain_events else _generic(given)
    columns["entry_time"] = times(given["created_at"])
    if "attributes" in given:
        columns["attributes"] = attributes(given["attributes"])
    else:
        columns["attributes"] = _of_aggregates(given["aggregate_type"])
    arrays = [_as(columns.get(field.name), field, answer.num_rows) for field in ARROW_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def _generic(given: dict[str, pa.Array]) -> dict[str, pa.Array]:
    names = ("stream", "entry_id", "event_id", "type", "data")
    optional = ("key", "source", "subject", "content_type")
    return {
        **{name: given[name] for name in names},
        **{name: _empty_to_null(given[name]) for name in optional},
        "time": times(_empty_to_null(given["time"])),
    }


def _domain(given: dict[str, pa.Array], options: OutboxOptions) -> dict[str, pa.Array]:
    rows = len(given["entry_id"])
    data, malformed = render_payloads(given["data"])
    return {
        "stream": pa.repeat(options.stream, rows),
        "entry_id": given["entry_id"],
        "event_id": given["entry_id"],
        "key": given["key"],
        "subject": given["key"],
        "type": given["type"],
        "source": pa.repeat(DOMAIN_SOURCE, rows),
        "content_type": pa.repeat(_JSON, rows),
        "time": times(given["created_at"]),
        "data": data,
        MALFORMED: malformed,
    }


def _as(column: pa.Array | None, field: pa.Field, rows: int) -> pa.Array:
    if column is None:
        return pa.nulls(rows, field.type)
    return column if column.type == field.type else column.cast(field.type)


def _empty_to_null(column: pa.Array) -> pa.Array:
    """Replace empty texts, which mean no value, by null."""
    column = column if column.type == pa.string() else column.cast(pa.string())
    empty = pc.equal(column, "")
    if not pc.any(empty).as_py():
        return column
    return pc.if_else(empty, pa.scalar(None, pa.string()), column)


# --- times ----------------------------------------------------------------------------------
def times(column: pa.Array) -> pa.Array:
    """Convert times of the database or of attributes to UTC; an invalid time is null."""
    if not pa.types.is_string(column.type):
        return column.cast(_TIME)
    for read in (_read_zoned, _read_utc):
        try:
            return read(column)
        except pa.ArrowInvalid:
            continue
    return pa.array([_time(text) for text in column.to_pylist()], _TIME)


def _read_zoned(column: pa.Array) -> pa.Array:
    return column.cast(_TIME)


def _read_utc(column: pa.Array) -> pa.Array:
    """Convert times of SQLite, which are in UTC without a zone."""
    return pc.assume_timezone(column.cast(pa.timestamp("us")), "UTC")


def _time(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text or "")
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # in UTC, the last hours of the year 9999 are in the next
        return None


# --- JSON -----------------------------------------------------------------------------------
def attributes(column: pa.Array) -> pa.Array:
    """Convert JSON objects to maps of texts."""
    found = plain_maps(column)
    return _parse_maps(column) if found is None else found


def _of_aggregates(types: pa.Array) -> pa.Array:
    """Return the attributes of every row of `outbox_events`, in the order of names in JSONB."""
    rows = len(types)
    turns = pa.array(np.arange(2 * rows).reshape(2, rows).T.ravel())
    values = pa.concat_arrays([pa.repeat("1.0", rows), types.cast(pa.string())]).take(turns)
    names = pa.array(["specversion", "aggregatetype"]).take(pa.array(np.arange(2 * rows) % 2))
    return pa.MapArray.from_arrays(
        pa.array(np.arange(0, 2 * rows + 1, 2, dtype=np.int32)), names, values
    )


def plain_maps(column: pa.Array) -> pa.Array | None:
    """Convert JSON objects by their quotation marks alone; None where that is not enough.

    It is enough if no character is escaped and every value is a text: names and values are then
    between quotation marks in turn, four of which make an attribute. No object of Python is made
    for any of them.
    """
    _, at, content = column.buffers()
    if content is None or column.null_count:
        return None
    rows = np.frombuffer(at, np.int32)[column.offset : column.offset + len(column) + 1]
    bytes_ = np.frombuffer(content, np.uint8)[: rows[-1]]
    if (bytes_[rows[0] :] == _BACKSLASH).any():
        return None
    marks = np.flatnonzero(bytes_[rows[0] :] == _QUOTE).astype(np.int32) + rows[0]
    counts = np.searchsorted(marks, rows).astype(np.int32)
    if (counts % 4).any():
        return None
    # In turn: name, the text before its value, value, the text before the next name.
    borders = marks.copy()
    borders[0::2] += 1
    borders = np.append(borders, borders[-1:])
    texts = pa.StringArray.from_buffers(len(marks), pa.py_buffer(borders), content)
    between = texts.take(pa.array(np.arange(1, len(marks), 4)))
    if len(between) and not pc.all(pc.is_in(between, _BETWEEN)).as_py():
        return None
    names = texts.take(pa.array(np.arange(0, len(marks), 4)))
    values = texts.take(pa.array(np.arange(2, len(marks), 4)))
    return pa.MapArray.from_arrays(pa.array(counts // 4), names, values)


def _parse_maps(column: pa.Array) -> pa.Array:
    names: list[str] = []
    values: list[str] = []
    offsets = [0]
    for joined in _join_documents(column):
        for one in _attributes(joined):
            names.extend(one)
            values.extend(one.values())
            offsets.append(len(names))
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(names, pa.string()), pa.array(values, pa.string())
    )


def _attributes(joined: bytes) -> list[dict[str, str]]:
    try:
        return _texts.decode(joined)
    except msgspec.ValidationError:  # numbers and booleans
        objects = _objects.decode(joined)
        return [{name: _text(value) for name, value in one.items()} for one in objects]


def _text(value: Any) -> str:
    """Return a value in the form that the log has."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def render_payloads(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return payloads byte for byte as the relay publishes them, and the errors of the others."""
    rows = len(column)
    try:
        data = [
            canonical(one)
            for joined in _join_documents(column, _SEAM)
            for one in _whole_ones(joined)
        ]
        if len(data) == rows:
            return pa.array(data, pa.binary()), pa.nulls(rows, pa.string())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    made = [_render_payload(text) for text in column.to_pylist()]
    return (
        pa.array([data for data, _ in made], pa.binary()),
        pa.array([wrong for _, wrong in made], pa.string()),
    )


def _render_payload(text: str) -> tuple[bytes, str | None]:
    try:
        return canonical(_value.decode(text)), None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return text.encode(), f"the column payload_json is not JSON: {error}"


def _whole_ones(joined: bytes) -> list[Any]:
    """Return the documents, or none if one goes on past its seam: SQLite takes any text."""
    values = _values.decode(joined)
    return values[::2] if all(seam == _TOKEN for seam in values[1::2]) else []


def _join_documents(column: pa.Array, seam: str = "") -> Iterator[bytes]:
    """Yield the documents of a column as arrays of JSON, for few calls of the parser.

    Not as one array: thousands of objects at a time keep Python's garbage collector busy.
    """
    for start in range(0, len(column), _DOCUMENTS):
        part = column.slice(start, _DOCUMENTS)
        [joined] = pc.binary_join(pa.ListArray.from_arrays(_whole(len(part)), part), f",{seam}")
        yield b"[" + joined.as_buffer().to_pybytes() + b"]"


def _whole(rows: int) -> pa.Array:
    return pa.array([0, rows], pa.int32())
