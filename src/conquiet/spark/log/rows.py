"""Rows: entries looked at one by one. What an entry means is said here; the fast way agrees."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from conquiet.errors import InvalidMessage
from conquiet.redis.entry import STRUCTURED_FIELD, from_fields
from conquiet.spark.columns import MALFORMED
from conquiet.spark.log.shape import ATTRIBUTE_COLUMNS, QUEUED

LAST_MILLISECOND = 253_402_300_799_999
"""Of the year 9999: an id beyond it was not made of a clock, and has no time."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_json = msgspec.json.Encoder()


class Row(NamedTuple):
    """An entry as columns; `attributes` still has all of them, the time as text."""

    attributes: dict[str, str]
    data: bytes | None
    malformed: str | None = None


def row_of(fields: Sequence[bytes] | None) -> Row:
    """What the fields of an entry, names and values in turn, say; never fails."""
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
    """A message of the queue holds a JSON object."""
    try:
        _object.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"its only field, data, holds no JSON object: {error}") from error


def fields_as_json(fields: Sequence[bytes]) -> bytes:
    """All fields of an entry that is no event; what is no text as base64, under its name + that."""
    named: dict[str, str] = {}
    for name, value in zip(fields[::2], fields[1::2], strict=False):
        plain = name.decode(errors="backslashreplace")
        try:
            named[plain] = value.decode()
        except UnicodeDecodeError:
            named[f"{plain}_base64"] = b64encode(value).decode()
    return _json.encode(named)


def _text(value: object) -> str:
    """An attribute as CloudEvents writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)


class RowBuilder:
    """Collects entries of any stream, and makes columns of them."""

    def __init__(self) -> None:
        self._streams: list[str] = []
        self._ids: list[str] = []
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, stream: str, entry_id: bytes, fields: Sequence[bytes] | None) -> None:
        self._streams.append(stream)
        self._ids.append(entry_id.decode())
        self._rows.append(row_of(fields))

    def take(self) -> dict[str, pa.Array]:
        """All columns of what was collected, which is then forgotten."""
        rows, ids, streams = self._rows, self._ids, self._streams
        self._rows, self._ids, self._streams = [], [], []
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
    """The times that ids are made of; null for those that are not."""
    milliseconds = [int(entry_id.partition("-")[0]) for entry_id in ids]
    micros = [None if ms > LAST_MILLISECOND else ms * 1000 for ms in milliseconds]
    return pa.array(micros, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def _times(attributes: Sequence[dict[str, str]]) -> pa.Array:
    """The attribute `time`, taken out of the others; what is none stays there as text."""
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
