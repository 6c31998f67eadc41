"""Domain events: catalog, envelope, the table `outbox_events`, its relay source, idempotency.

What needs SQLAlchemy or redis-py is imported when it is first used: a consumer has no database,
and a service that emits may have no Redis.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from conquiet.events.catalog import Catalog, Consumer, InvalidEvent, Received, UnknownEvent
from conquiet.events.envelope import ActorRef, Envelope, ErrorEnvelope, ErrorRef
from conquiet.events.event import Event

if TYPE_CHECKING:
    from conquiet.events.emitting import emit, emit_async
    from conquiet.events.idempotency import Idempotency, LeaseLost
    from conquiet.events.model import AppendOnly, OutboxEvent, mapped
    from conquiet.events.outbox import EventsOutbox
    from conquiet.events.source import EventSource

__all__ = [
    "ActorRef",
    "AppendOnly",
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
    "emit_async",
    "mapped",
]

_home = {
    "AppendOnly": "conquiet.events.model",
    "EventSource": "conquiet.events.source",
    "EventsOutbox": "conquiet.events.outbox",
    "Idempotency": "conquiet.events.idempotency",
    "LeaseLost": "conquiet.events.idempotency",
    "OutboxEvent": "conquiet.events.model",
    "emit": "conquiet.events.emitting",
    "emit_async": "conquiet.events.emitting",
    "mapped": "conquiet.events.model",
}


def __getattr__(name: str) -> Any:
    if name not in _home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_home[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
