"""The table `outbox_events`, as it is locked, on PostgreSQL and SQLite.

    stored ──published──▶ published_at set
       └─ failed: attempt_count + 1, last_error; at the maximum it is claimed no more

PostgreSQL has the two enums as types, SQLite as CHECK constraints. Only `published_at`,
`attempt_count` and `last_error` ever change; a trigger says so too, for those who want it.
"""

from __future__ import annotations

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
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from conquiet.events.catalog import Catalog
from conquiet.sql.claim import SQLITE_NOW
from conquiet.sql.schema import checked_name

EVENTS_TABLE = "outbox_events"
EVENT_TYPE_ENUM = "event_type_enum"
AGGREGATE_TYPE_ENUM = "aggregate_type_enum"
MUTABLE = ("published_at", "attempt_count", "last_error")
IMMUTABLE = ("id", "event_type", "aggregate_type", "aggregate_id", "payload_json", "created_at")


class UuidText(TypeDecorator[UUID]):
    """UUID on PostgreSQL; elsewhere its 36 characters, as logs and envelopes write it."""

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
    """When the transaction began, as a default of a column; to the millisecond on SQLite."""

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
    """The table with the enums of a catalog."""
    schema, table = checked_name(name)
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
        # The claim reads only what waits, in the order in which it goes out (S8, S10).
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
    """For claims in the order of aggregates, which step from one to the next (S12).

    It is not one of the locked ones: only who wants the order pays for it.
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
    # 63, whatever the longest value of today is: SQLite cannot widen a column.
    return Enum(*values, name=name, schema=schema, length=63, create_constraint=True)
