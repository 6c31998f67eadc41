"""Check events before they are stored: a refusal by the database would abort the transaction."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from conquiet.errors import InvalidMessage
from conquiet.events.catalog import Declaration, Event, InvalidEvent
from conquiet.events.envelope import ActorRef

MAX_PAYLOAD_BYTES = 256 * 1024
"""A size that every sink accepts: Kafka's default is 1 MB, some cloud queues take 256 KB."""

_encode = msgspec.json.Encoder(order="sorted").encode
_nul = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # an escaped NUL, not an escaped backslash and u0000


class Checked(NamedTuple):
    """Holds the columns of a checked event."""

    id: UUID
    event_type: str
    aggregate_type: str
    aggregate_id: UUID
    payload_json: str


def canonical(value: Any) -> bytes:
    """Encode JSON with sorted keys and no spaces: equal content gives equal bytes."""
    return _encode(value)


def check(event: Event, max_bytes: int = MAX_PAYLOAD_BYTES) -> Checked:
    """Check an event and return its row; raise `InvalidEvent` with what to change."""
    if not isinstance(event, Event):
        raise InvalidEvent(
            f"{type(event).__name__} is not an event: create one by catalog.event(…), emit several"
            " by emit(session, *events)"
        )
    declaration = _declaration_of(event)
    for name, value in (("id", event.id), ("aggregate_id", event.aggregate_id)):
        if not isinstance(value, UUID):
            raise _invalid(event, f"{name} must be a UUID, not {type(value).__name__}")
    if event.id.version != 7:
        raise _invalid(event, "its id must be a UUIDv7, or rows of one moment lose their order")
    payload = _payload(event, declaration)
    if len(payload) > max_bytes:
        raise _invalid(
            event,
            f"its payload has {len(payload)} bytes, {max_bytes} are allowed;"
            " store large content elsewhere and refer to it",
        )
    if b"\\u0000" in payload and _nul.search(payload):
        raise _invalid(event, "NUL in a text, which JSONB cannot store; remove it")
    return Checked(
        event.id,
        declaration.event_type,
        declaration.aggregate_type,
        event.aggregate_id,
        payload.decode(),
    )


def _declaration_of(event: Event) -> Declaration:
    catalog = event.catalog
    if event.event_type not in catalog.event_types:
        raise _invalid(event, "its type is not in the catalog")
    if event.aggregate_type not in catalog.aggregate_types:
        raise _invalid(event, f"aggregate type {event.aggregate_type!r:.60} is not in the catalog")
    found = catalog.declaration(event.event_type, event.version)
    if found is None:
        known = ", ".join(map(str, catalog.versions(event.event_type))) or "none"
        raise _invalid(event, f"version {event.version!r:.20} is not declared; known: {known}")
    if event.aggregate_type != found.aggregate_type:
        raise _invalid(
            event, f"it belongs to aggregate {found.aggregate_type}, not {event.aggregate_type}"
        )
    return found


def _payload(event: Event, declaration: Declaration) -> bytes:
    try:
        data = _with_utc(_builtins(event.data))
        # A struct's constructor checks no types: decode what was encoded.
        kept = event.catalog.read(declaration.event_type, declaration.version, _encode(data))
        stored = _builtins(kept)
        if stored != data:  # fields have got their defaults, or are unknown
            unknown = list(_unknown_fields(data, kept))
            if unknown:
                raise _invalid(event, f"its data has unknown fields: {', '.join(unknown):.200}")
            stored = _with_utc(stored)
        envelope: dict[str, Any] = {
            "version": event.version,
            "eventId": str(event.id),
            "occurredAt": _in_utc(event.occurred_at),
            "data": stored,
        }
        if event.actor is not None:
            if not isinstance(event.actor, ActorRef):
                raise _invalid(event, f"its actor must be an ActorRef, not {_kind(event.actor)}")
            actor = msgspec.to_builtins(event.actor)
            msgspec.convert(actor, ActorRef)
            envelope["actor"] = actor
        return _encode(envelope)
    except InvalidMessage as error:
        raise _invalid(event, f"its data does not fit: {error}") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _invalid(event, f"it cannot be written as JSON: {error}") from error


def _unknown_fields(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Yield given fields, at every level, that no struct has: they would be lost."""
    if isinstance(kept, msgspec.Struct) and isinstance(given, dict):
        fields = _fields(type(kept))
        for name, value in given.items():
            if name not in fields:
                yield f"{where}{name}"
            else:
                yield from _unknown_fields(value, getattr(kept, fields[name]), f"{where}{name}.")
    elif isinstance(given, list) and isinstance(kept, (list, tuple)):
        for number, (one, other) in enumerate(zip(given, kept, strict=False)):
            yield from _unknown_fields(one, other, f"{where}{number}.")
    elif isinstance(given, dict) and isinstance(kept, dict):
        for name in given.keys() & kept.keys():
            yield from _unknown_fields(given[name], kept[name], f"{where}{name}.")


@lru_cache(maxsize=1024)
def _fields(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Cache a struct's fields by their JSON names; msgspec resolves annotations at every call."""
    return {field.encode_name: field.name for field in msgspec.structs.fields(kind)}


def _builtins(data: Any) -> Any:
    return msgspec.to_builtins(data, builtin_types=(datetime,))


_UNCHANGED = frozenset((str, int, bool, type(None)))


def _with_utc(value: Any) -> Any:
    if type(value) in _UNCHANGED:
        return value
    if isinstance(value, dict):
        return {name: _with_utc(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_utc(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a JSON number")
    return _in_utc(value) if isinstance(value, datetime) else value


def _in_utc(moment: datetime) -> datetime:
    if not isinstance(moment, datetime):
        raise TypeError(f"a time must be a datetime, not {_kind(moment)}")
    if moment.tzinfo is None:
        raise ValueError(f"the time {moment} has no offset; use datetime.now(UTC)")
    return moment.astimezone(UTC)


def _kind(value: object) -> str:
    return type(value).__name__


def _invalid(event: Event, why: str) -> InvalidEvent:
    return InvalidEvent(f"{event.event_type!s:.60} {event.id!s:.40}: {why}")
