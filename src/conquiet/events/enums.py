"""The enums in the database: what they hold, and how values of a newer catalog are added.

PostgreSQL: ALTER TYPE … ADD VALUE, which rewrites nothing. SQLite cannot change a CHECK: the
table is made anew and the rows are copied, in the transaction of the migration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sqlalchemy import Connection, Enum, MetaData, Table, insert, inspect, select, text

from conquiet.events import trigger
from conquiet.events.catalog import Catalog
from conquiet.events.table import (
    AGGREGATE_TYPE_ENUM,
    EVENT_TYPE_ENUM,
    events_table,
    ordered_index,
)
from conquiet.sql import dialect

_VALUES = text(
    "SELECT e.enumlabel FROM pg_enum e JOIN pg_type t ON t.oid = e.enumtypid"
    " WHERE t.oid = to_regtype(:name) ORDER BY e.enumsortorder"
)
_literal = re.compile(r"'([^']*)'")


def compare(
    connection: Connection, catalog: Catalog, table: Table
) -> Iterator[tuple[str, Sequence[str], Sequence[str]]]:
    """Of each enum its name, the values of the catalog, and those of the database."""
    for enum, wanted in (
        (EVENT_TYPE_ENUM, catalog.event_types),
        (AGGREGATE_TYPE_ENUM, catalog.aggregate_types),
    ):
        yield enum, wanted, stored(connection, enum, table)


def stored(connection: Connection, enum: str, table: Table) -> list[str]:
    """The values that the database takes, in its order."""
    if dialect.is_postgresql(connection.dialect):
        name = f"{table.schema}.{enum}" if table.schema else enum
        return list(connection.execute(_VALUES, {"name": name}).scalars())
    checks = inspect(connection).get_check_constraints(table.name)
    return next((_literal.findall(c["sqltext"]) for c in checks if c["name"] == enum), [])


def extend(connection: Connection, catalog: Catalog, name: str) -> list[str]:
    """Add the values that are missing; returns them. Others may have values of their own."""
    table = events_table(catalog, name)
    missing = {
        enum: [value for value in wanted if value not in found]
        for enum, wanted, found in compare(connection, catalog, table)
    }
    added = [value for values in missing.values() for value in values]
    if not added:
        return []
    if dialect.is_postgresql(connection.dialect):
        for enum, values in missing.items():
            full = f"{table.schema}.{enum}" if table.schema else enum
            for value in values:  # a catalog's values need no quoting: a-z, 0-9 and _
                connection.exec_driver_sql(f"ALTER TYPE {full} ADD VALUE IF NOT EXISTS '{value}'")
    else:
        _make_anew(connection, catalog, table)
    return added


def _make_anew(connection: Connection, catalog: Catalog, table: Table) -> None:
    is_guarded = connection.exec_driver_sql(
        "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND name = ?",
        (f"{table.name}_append_only",),
    ).scalar_one()
    kept = {
        enum: stored(connection, enum, table) for enum in (EVENT_TYPE_ENUM, AGGREGATE_TYPE_ENUM)
    }
    for column, enum in (("event_type", EVENT_TYPE_ENUM), ("aggregate_type", AGGREGATE_TYPE_ENUM)):
        _keep_values(table.c[column].type, kept[enum])
    old = table.to_metadata(MetaData(), name=f"{table.name}_old")
    had = {index["name"] for index in inspect(connection).get_indexes(table.name)}
    if f"{table.name}_by_aggregate" in had:
        ordered_index(table)
    for index in table.indexes:
        connection.exec_driver_sql(f"DROP INDEX IF EXISTS {index.name}")
    connection.exec_driver_sql(f"ALTER TABLE {table.name} RENAME TO {old.name}")
    table.create(connection)
    connection.execute(insert(table).from_select(list(table.c.keys()), select(old)))
    connection.exec_driver_sql(f"DROP TABLE {old.name}")
    if is_guarded:
        for statement in trigger.create_statements("sqlite", table.name):
            connection.exec_driver_sql(statement)


def _keep_values(kind: object, values: Sequence[str]) -> None:
    """Values that only the database has stay allowed: rows may have them."""
    assert isinstance(kind, Enum)
    kind.enums.extend(value for value in values if value not in kind.enums)
