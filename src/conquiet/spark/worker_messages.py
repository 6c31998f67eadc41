"""Messages of the rows of a data frame: the way back from columns to what a router takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from conquiet.errors import InvalidMessage
from conquiet.message import Message
from conquiet.redis.dead_letter import UNREADABLE_TYPE
from conquiet.spark.columns import MALFORMED
from conquiet.spark.log.writer_rows import time_text

COLUMNS = (
    "stream",
    "entry_id",
    "key",
    "event_id",
    "type",
    "source",
    "subject",
    "time",
    "content_type",
    "attributes",
    "data",
    MALFORMED,
)
"""What is read of a frame; others are left where they are."""

ROW = "conquiet.spark.row"
"""Among a message's locals: its place in the slice, which its copies for other handlers share."""

_ATTRIBUTES = (
    ("event_id", "id"),
    ("type", "type"),
    ("source", "source"),
    ("subject", "subject"),
    ("time", "time"),
    ("content_type", "datacontenttype"),
)


class Malformed(InvalidMessage):
    """A source could not read an entry as an event."""


def slices(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def messages_of(batch: pa.RecordBatch, *, ordered: bool = False) -> list[Message[Any]]:
    """One message per row; with `ordered`, each waits for earlier ones of its key that failed."""
    columns = {name: _values(batch, name) for name in COLUMNS}
    found: list[Message[Any]] = []
    for row in range(batch.num_rows):
        message = _message(columns, row)
        message.locals[ROW] = row
        if ordered:
            message.order_key = columns["key"][row] or None
        found.append(message)
    return found


def reasons_of(batch: pa.RecordBatch) -> list[Malformed | None]:
    """Why rows are no events; None for those that are."""
    streams, entries = _values(batch, "stream"), _values(batch, "entry_id")
    return [
        None if why is None else Malformed(f"entry {entry} of {stream!r} is no event: {why}")
        for why, stream, entry in zip(_values(batch, MALFORMED), streams, entries, strict=True)
    ]


def _values(batch: pa.RecordBatch, name: str) -> Sequence[Any]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    column = batch.column(name)
    if name == "time" and pa.types.is_timestamp(column.type):
        column = time_text(column).cast(pa.string())
    elif name == "data":
        column = column.cast(pa.binary())
    values: list[Any] = column.to_pylist()
    return values


def _message(columns: dict[str, Sequence[Any]], row: int) -> Message[Any]:
    if columns[MALFORMED][row] is not None:
        place = f"{columns['stream'][row]} {columns['entry_id'][row]}"
        about = {"id": place, "type": UNREADABLE_TYPE, "source": "conquiet:unknown"}
        return Message(columns["data"][row], about, topic=columns["stream"][row])
    attributes = {
        name: value for column, name in _ATTRIBUTES if (value := columns[column][row]) is not None
    }
    attributes.update(columns["attributes"][row] or ())
    key = columns["key"][row]
    if key is not None and key != attributes.get("subject"):
        attributes["partitionkey"] = key
    return Message(columns["data"][row], attributes, topic=columns["stream"][row])
