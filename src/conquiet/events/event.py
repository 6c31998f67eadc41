"""Event: one thing that happened, before it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from conquiet.events.envelope import ActorRef
from conquiet.message import new_id

if TYPE_CHECKING:
    from conquiet.events.catalog import Catalog


def now() -> datetime:
    return datetime.now(UTC)


def new_event_id() -> UUID:
    """A UUIDv7: ids that are made later sort later (S10)."""
    return UUID(new_id())


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What `Catalog.event` makes and `emit` stores; its id is the id of everything after it."""

    catalog: Catalog
    event_type: str
    aggregate_type: str
    aggregate_id: UUID
    version: int
    data: msgspec.Struct | Mapping[str, Any]
    occurred_at: datetime
    actor: ActorRef | None = None
    id: UUID = msgspec.field(default_factory=new_event_id)
