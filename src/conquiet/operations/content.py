"""Content: entries of streams as an operator reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conquiet.errors import InvalidMessage
from conquiet.operations.text import as_text, moment
from conquiet.redis import ids
from conquiet.redis.entry import from_fields


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of a stream."""

    stream: str
    id: str
    time: str
    """When it was added, by the server's clock; empty if its id tells no time."""
    event_id: str
    event_type: str
    source: str
    attributes: Mapping[str, str]
    """Of a CloudEvent its attributes; of anything else its fields."""
    data: str
    data_is_base64: bool
    """Whether the data is no UTF-8 text."""
    is_event: bool
    """Whether it is a CloudEvent."""


def shown(stream: str, entry_id: bytes, fields: list[bytes]) -> LogEntry:
    """An entry, whatever it holds."""
    try:
        content, attributes, _ = from_fields(fields)
        is_event = True
    except InvalidMessage:
        named = dict(zip(fields[::2], fields[1::2], strict=False))
        content, is_event = named.pop(b"data", b""), False
        attributes = {as_text(name)[0]: as_text(value)[0] for name, value in named.items()}
    data, is_base64 = as_text(content)
    return LogEntry(
        stream,
        entry_id.decode(),
        time_of(entry_id),
        attributes.get("id", "") if is_event else "",
        attributes.get("type", "") if is_event else "",
        attributes.get("source", "") if is_event else "",
        {name: str(value) for name, value in attributes.items()},
        data,
        is_base64,
        is_event,
    )


def time_of(entry_id: bytes) -> str:
    milliseconds, _ = ids.parse(entry_id)
    return moment(milliseconds)
