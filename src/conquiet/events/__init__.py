"""Domain events: catalog, envelope, the table `outbox_events`, its source, idempotency.

Names that need SQLAlchemy or redis-py are imported on first use: a consumer has no database, and
a service that emits events may have no Redis.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from conquiet.events.catalog import Catalog, Consumer, Event, InvalidEvent, Received, UnknownEvent
from conquiet.events.envelope import ActorRef, Envelope, ErrorEnvelope, ErrorRef

if TYPE_CHECKING:
    from conquiet.events import schema
    from conquiet.events.idempotency import AsyncIdempotency, Idempotency, LeaseLost
    from conquiet.events.outbox import EventsOutbox, emit
    from conquiet.events.source import EventSource
    from conquiet.events.table import AppendOnly, OutboxEvent, map_outbox_events

__all__ = [
    "ActorRef",
    "AppendOnly",
    "AsyncIdempotency",
    "Catalog",
    "Consumer",
    "Envelope",
    "ErrorEnvelope",
    "ErrorRef",
    "Event",
    "EventSource",
    "EventsOutbox",
    "Idempotency",
    "InvalidEvent",
    "LeaseLost",
    "OutboxEvent",
    "Received",
    "UnknownEvent",
    "emit",
    "map_outbox_events",
    "schema",
]

_home = {
    "AppendOnly": "conquiet.events.table",
    "AsyncIdempotency": "conquiet.events.idempotency",
    "EventSource": "conquiet.events.source",
    "EventsOutbox": "conquiet.events.outbox",
    "Idempotency": "conquiet.events.idempotency",
    "LeaseLost": "conquiet.events.idempotency",
    "OutboxEvent": "conquiet.events.table",
    "emit": "conquiet.events.outbox",
    "map_outbox_events": "conquiet.events.table",
}


def __getattr__(name: str) -> Any:
    if name == "schema":
        return import_module("conquiet.events.schema")
    if name not in _home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_home[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
