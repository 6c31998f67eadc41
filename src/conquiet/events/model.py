"""OutboxEvent: a row of `outbox_events` as an object of SQLAlchemy's ORM."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import inspect
from sqlalchemy.orm import registry

from conquiet.errors import ConquietError
from conquiet.events.catalog import Catalog
from conquiet.events.table import EVENTS_TABLE, IMMUTABLE, MUTABLE, events_table


class AppendOnly(ConquietError):
    """Somebody tried to change what a stored event says."""


class OutboxEvent:
    """A stored event. What it says never changes; how its publication goes may.

    A class to be mapped by `mapped`, for each catalog its own.
    """

    id: UUID
    event_type: str
    aggregate_type: str
    aggregate_id: UUID
    payload_json: dict[str, Any]
    created_at: datetime
    published_at: datetime | None
    attempt_count: int
    last_error: str | None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in IMMUTABLE and inspect(self).has_identity and value != getattr(self, name):
            raise AppendOnly(
                f"{name} of event {self.id} cannot change, only {', '.join(MUTABLE)};"
                " emit another event that says what is new"
            )
        super().__setattr__(name, value)


def mapped(
    catalog: Catalog, name: str = EVENTS_TABLE, mapper: registry | None = None
) -> type[OutboxEvent]:
    """A model over the table of a catalog, in a registry of one's own or a new one."""
    mapper = mapper or registry()
    model = type("OutboxEvent", (OutboxEvent,), {"__doc__": OutboxEvent.__doc__})
    mapper.map_imperatively(model, events_table(catalog, name, mapper.metadata))
    return model
