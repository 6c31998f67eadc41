"""Define the table `outbox_events`, whose columns are locked, on PostgreSQL and SQLite.

    stored ──published──▶ published_at set
       └─ failed: attempt_count + 1, last_error; at max_attempts it is parked

PostgreSQL has the two enums as types, SQLite as CHECK constraints. Only `published_at`,
`attempt_count` and `last_error` may change; an optional trigger and the ORM model enforce it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    JSON,
    Column,
    DateTime,
    Dialect,
    Enum,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    Uuid,
    inspect,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import registry
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from conquiet.config import EVENTS_TABLE
from conquiet.errors import ConquietError
from conquiet.events.catalog import Catalog
from conquiet.sql.claim import SQLITE_NOW
from conquiet.sql.schema import split_name

EVENT_TYPE_ENUM = "event_type_enum"
AGGREGATE_TYPE_ENUM = "aggregate_type_enum"
MUTABLE = ("published_at", "attempt_count", "last_error")
IMMUTABLE = ("id", "event_type", "aggregate_type", "aggregate_id", "payload_json", "created_at")


class UuidText(TypeDecorator[UUID]):
    """Stores a UUID as such on PostgreSQL, elsewhere as its 36 characters."""

    impl = Uuid
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return Uuid() if dialect.name == "postgresql" else String(36)

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        if value is None or dialect.name == "postgresql":
            return value
        return str(UUID(str(value)))

    def process_result_value(self, value: Any, dialect: Dialect) -> UUID | None:
        return value if value is None or isinstance(value, UUID) else UUID(value)


class Now(FunctionElement[Any]):
    """Returns the start of the transaction, as a column default; in milliseconds on SQLite."""

    inherit_cache = True
    type = DateTime(timezone=True)


@compiles(Now, "postgresql")
def _now_on_postgresql(element: Now, compiler: Any, **options: Any) -> str:
    return "now()"


@compiles(Now)
def _now_elsewhere(element: Now, compiler: Any, **options: Any) -> str:
    return SQLITE_NOW


def events_table(
    catalog: Catalog, name: str = EVENTS_TABLE, metadata: MetaData | None = None
) -> Table:
    """Define the table with the enums of a catalog."""
    schema, table = split_name(name)
    id_: Column[UUID] = Column("id", UuidText(), primary_key=True)
    created_at = Column("created_at", DateTime(timezone=True), nullable=False, server_default=Now())
    published_at = Column("published_at", DateTime(timezone=True))
    return Table(
        table,
        metadata if metadata is not None else MetaData(),
        id_,
        Column("event_type", event_types(catalog, schema), nullable=False),
        Column("aggregate_type", aggregate_types(catalog, schema), nullable=False),
        Column("aggregate_id", UuidText(), nullable=False),
        Column(
            "payload_json",
            JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql"),
            nullable=False,
        ),
        created_at,
        published_at,
        Column("attempt_count", Integer, nullable=False, server_default="0"),
        Column("last_error", Text),
        Index(f"{table}_published_at", published_at),
        Index(f"{table}_event_type", "event_type"),
        Index(f"{table}_aggregate", "aggregate_type", "aggregate_id"),
        # A claim reads unpublished rows only, in the order of publication: published rows cost
        # it nothing.
        Index(
            f"{table}_unpublished",
            created_at,
            id_,
            postgresql_where=published_at.is_(None),
            sqlite_where=published_at.is_(None),
        ),
        schema=schema,
    )


def ordered_index(table: Table) -> Index:
    """Define the index of ordered claims, which step from one aggregate to the next.

    It is no part of the locked schema: only ordered relays need it.
    """
    waits = table.c.published_at.is_(None)
    return Index(
        f"{table.name}_by_aggregate",
        table.c.aggregate_id,
        table.c.created_at,
        table.c.id,
        postgresql_where=waits,
        sqlite_where=waits,
    )


def event_types(catalog: Catalog, schema: str | None = None) -> Enum:
    return _enum(EVENT_TYPE_ENUM, catalog.event_types, schema)


def aggregate_types(catalog: Catalog, schema: str | None = None) -> Enum:
    return _enum(AGGREGATE_TYPE_ENUM, catalog.aggregate_types, schema)


def _enum(name: str, values: tuple[str, ...], schema: str | None) -> Enum:
    # The longest possible value, since SQLite cannot widen a column later.
    return Enum(*values, name=name, schema=schema, length=63, create_constraint=True)


REFUSAL = f"is append-only: only {', '.join(MUTABLE)} can change"


def create_trigger_statements(dialect: str, table: str = EVENTS_TABLE) -> list[str]:
    """Return the statements that create the append-only trigger; they may be repeated."""
    schema, name = split_name(table)
    if dialect == "sqlite":
        changed = " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in IMMUTABLE)
        return [
            f"CREATE TRIGGER IF NOT EXISTS {name}_append_only BEFORE UPDATE ON {table}\n"
            f"WHEN {changed}\n"
            f"BEGIN SELECT RAISE(ABORT, '{name} {REFUSAL}'); END"
        ]
    function = f"{schema}.{name}_append_only" if schema else f"{name}_append_only"
    old, new = (", ".join(f"{row}.{column}" for column in IMMUTABLE) for row in ("OLD", "NEW"))
    return [
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$\n"
        f"BEGIN RAISE EXCEPTION '{name} {REFUSAL}' USING ERRCODE = 'restrict_violation'; END $$",
        f"DROP TRIGGER IF EXISTS {name}_append_only ON {table}",
        # In WHEN, so that a relay's marks do not call the function.
        f"CREATE TRIGGER {name}_append_only BEFORE UPDATE ON {table} FOR EACH ROW\n"
        f"WHEN (ROW({old}) IS DISTINCT FROM ROW({new}))\n"
        f"EXECUTE FUNCTION {function}()",
    ]


def drop_trigger_statements(dialect: str, table: str = EVENTS_TABLE) -> list[str]:
    schema, name = split_name(table)
    if dialect == "sqlite":
        return [f"DROP TRIGGER IF EXISTS {name}_append_only"]
    function = f"{schema}.{name}_append_only" if schema else f"{name}_append_only"
    return [
        f"DROP TRIGGER IF EXISTS {name}_append_only ON {table}",
        f"DROP FUNCTION IF EXISTS {function}()",
    ]


class AppendOnly(ConquietError):
    """A locked column of a stored event was about to change."""


class OutboxEvent:
    """Represents a stored event, whose content cannot change.

    `map_outbox_events` maps a subclass for each catalog.
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
                " emit another event instead"
            )
        super().__setattr__(name, value)


def map_outbox_events(
    catalog: Catalog, name: str = EVENTS_TABLE, mapper: registry | None = None
) -> type[OutboxEvent]:
    """Map an ORM model to the table of a `catalog`, and return it.

    `name` is that of the table. `mapper` is the registry of your other models, which then share its
    metadata; by default a new one.
    """
    mapper = mapper or registry()
    model = type("OutboxEvent", (OutboxEvent,), {"__doc__": OutboxEvent.__doc__})
    mapper.map_imperatively(model, events_table(catalog, name, mapper.metadata))
    return model
