"""Events of the marketplace, one of each type, and how to look at their rows."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime
from typing import Any, get_args, get_origin

import msgspec
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from conquiet.events import Event, emit
from conquiet.events.source import relay_table
from marketplace.catalog import CATALOG, NotificationRequested

ROWS = relay_table("outbox_events")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def notification(**changes: Any) -> Event:
    data = NotificationRequested(uuid.uuid4(), uuid.uuid4(), "email", "welcome")
    event = CATALOG.event(data, aggregate_id=data.notification_id)
    return msgspec.structs.replace(event, **changes)


def filled(kind: Any) -> Any:
    """A value of any type that a payload has; structs with all of their fields."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return kind(**{field.name: filled(field.type) for field in fields})
    if getattr(kind, "__metadata__", None):
        pattern = kind.__metadata__[0].pattern
        return "USD" if pattern else filled(get_args(kind)[0])
    if type(None) in get_args(kind):
        return filled(get_args(kind)[0])
    origin = get_origin(kind) or kind
    if origin is list:
        return [filled(get_args(kind)[0])]
    if origin is dict:
        return {"ad": "a"}
    made = {uuid.UUID: uuid.uuid4, int: lambda: 7, str: lambda: "größer ☃", Any: lambda: 1}
    made |= {datetime: lambda: NOON, date: lambda: date(2026, 3, 8)}
    return made[origin]() if origin in made else get_args(kind)[0]


def one_of_each() -> list[Event]:
    return [
        CATALOG.event(filled(declaration.data), aggregate_id=uuid.uuid4())
        for declaration in CATALOG.declarations
    ]


def store(engine: Engine, count: int) -> list[str]:
    """Emit events in one transaction; their ids, in order."""
    with Session(engine) as session, session.begin():
        return [str(id_) for id_ in emit(session, *(notification() for _ in range(count)))]


def rows(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(ROWS).order_by(ROWS.c.created_at, ROWS.c.id)))
