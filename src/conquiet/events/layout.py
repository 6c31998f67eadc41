"""`outbox_events` as a relay sees it: without a catalog, types are text."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import JSON, Column, DateTime, Integer, MetaData, Table, Text

from conquiet.events.table import UuidText
from conquiet.sql.claim import Layout
from conquiet.sql.schema import checked_name


class Row(NamedTuple):
    """A claimed row."""

    id: UUID
    event_type: str
    aggregate_type: str
    aggregate_id: UUID
    payload_json: str
    created_at: datetime
    attempt_count: int

    @property
    def key(self) -> str:
        """What keeps its order: the aggregate."""
        return str(self.aggregate_id)

    @property
    def attempts(self) -> int:
        return self.attempt_count


def relay_table(name: str) -> Table:
    schema, table = checked_name(name)
    return Table(
        table,
        MetaData(),
        Column("id", UuidText(), primary_key=True),
        Column("event_type", Text),
        Column("aggregate_type", Text),
        Column("aggregate_id", UuidText(), nullable=False),
        Column("payload_json", JSON),
        Column("created_at", DateTime(timezone=True)),
        Column("published_at", DateTime(timezone=True)),
        Column("attempt_count", Integer),
        Column("last_error", Text),
        schema=schema,
    )


def events_layout(table: str, max_attempts: int) -> Layout:
    return Layout(
        relay_table(table),
        Row,
        # Rows of one transaction share their time; UUIDv7 are made in order (S10).
        order=("created_at", "id"),
        start=("-infinity", str(UUID(int=0))),
        key="aggregate_id",
        first_key=str(UUID(int=0)),
        attempts="attempt_count",
        as_text=frozenset({"event_type", "aggregate_type", "payload_json"}),
        max_attempts=max_attempts,
        # With statistics from when little waited, the planner would rather take all that waits
        # from the locked index on published_at, and sort it, than go by the order of an index.
        sorts=False,
    )
