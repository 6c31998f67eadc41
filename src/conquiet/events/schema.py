"""Create, upgrade, print and compare the table `outbox_events`; its enums are those of a catalog.

Values of a newer catalog are added. PostgreSQL does so by ALTER TYPE … ADD VALUE, which rewrites
nothing. SQLite cannot change a CHECK: the table is recreated and its rows are copied, in the
transaction of the migration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    Enum,
    Index,
    MetaData,
    Table,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql import CreateEnumType
from sqlalchemy.schema import CreateIndex, CreateTable

from conquiet.config import EVENTS_TABLE
from conquiet.errors import ConfigError
from conquiet.events.catalog import Catalog
from conquiet.events.table import (
    AGGREGATE_TYPE_ENUM,
    EVENT_TYPE_ENUM,
    aggregate_types,
    create_trigger_statements,
    event_types,
    events_table,
    ordered_index,
)
from conquiet.sql import dialect
from conquiet.sql.schema import DIALECTS, Difference, split_name

_VALUES = text(
    "SELECT e.enumlabel FROM pg_enum e JOIN pg_type t ON t.oid = e.enumtypid"
    " WHERE t.oid = to_regtype(:name) ORDER BY e.enumsortorder"
)
_literal = re.compile(r"'([^']*)'")


def compare_enums(
    connection: Connection, catalog: Catalog, table: Table
) -> Iterator[tuple[str, Sequence[str], Sequence[str]]]:
    """Yield the name of each enum, its values in the catalog, and those in the database."""
    for enum, wanted in (
        (EVENT_TYPE_ENUM, catalog.event_types),
        (AGGREGATE_TYPE_ENUM, catalog.aggregate_types),
    ):
        yield enum, wanted, stored_values(connection, enum, table)


def stored_values(connection: Connection, enum: str, table: Table) -> list[str]:
    """Return the values of the type `enum` in the database, in its order."""
    if dialect.is_postgresql(connection.dialect):
        name = f"{table.schema}.{enum}" if table.schema else enum
        return list(connection.execute(_VALUES, {"name": name}).scalars())
    checks = inspect(connection).get_check_constraints(table.name)
    return next((_literal.findall(c["sqltext"]) for c in checks if c["name"] == enum), [])


def extend_enums(connection: Connection, catalog: Catalog, name: str) -> list[str]:
    """Add missing values to the enums and return them; extra values are kept."""
    table = events_table(catalog, name)
    missing = {
        enum: [value for value in wanted if value not in found]
        for enum, wanted, found in compare_enums(connection, catalog, table)
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
        _recreate(connection, catalog, table)
    return added


def _recreate(connection: Connection, catalog: Catalog, table: Table) -> None:
    is_guarded = connection.exec_driver_sql(
        "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND name = ?",
        (f"{table.name}_append_only",),
    ).scalar_one()
    kept = {
        enum: stored_values(connection, enum, table)
        for enum in (EVENT_TYPE_ENUM, AGGREGATE_TYPE_ENUM)
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
        for statement in create_trigger_statements("sqlite", table.name):
            connection.exec_driver_sql(statement)


def _keep_values(kind: object, values: Sequence[str]) -> None:
    """Keep values that only the database has: rows may use them."""
    assert isinstance(kind, Enum)
    kind.enums.extend(value for value in values if value not in kind.enums)


VERSION_TABLE = "conquiet_events_alembic_version"
_LOCK = 0x636F6E76  # the advisory lock for changes of the table


def init(
    engine: Engine | str | URL,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    append_only: bool = True,
    ordered: bool = False,
    version_table: str = VERSION_TABLE,
) -> None:
    """Create what is missing, at the newest version; safe to repeat, also concurrently.

    `append_only=False` leaves the trigger out; the ORM model refuses changes also without it.
    `ordered` adds the index that ordered relays need behind a long backlog. The version is kept in
    `version_table`; a second table in one database needs another.
    """
    with _lock_tables(engine) as connection:
        schema, name = split_name(table)
        if not inspect(connection).has_table(name, schema=schema):
            create(connection, catalog, table, append_only=append_only)
        if not inspect(connection).has_table(version_table):
            given = _config(connection, catalog, table, append_only, version_table)
            command.stamp(given, "head")
        _add_indexes(connection, catalog, table, ordered)


def create(
    connection: Connection,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    append_only: bool = True,
) -> None:
    """Create table, enums, indexes and trigger in the caller's transaction.

    For your own migrations: `schema.create(op.get_bind(), CATALOG)`. `append_only` is as for
    `init`.
    """
    metadata = MetaData()
    events_table(catalog, table, metadata)
    metadata.create_all(connection)
    if append_only:
        for statement in create_trigger_statements(connection.dialect.name, table):
            connection.exec_driver_sql(statement)


def migrate(
    engine: Engine | str | URL,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    append_only: bool = True,
    ordered: bool = False,
    version_table: str = VERSION_TABLE,
    revision: str = "head",
) -> None:
    """Create the table, or upgrade it from an older conquiet or catalog.

    Missing enum values and indexes are added, with `ordered` its index too; none is removed.
    `append_only` and `version_table` are as for `init`; `revision` is a version to stop at.
    """
    with _lock_tables(engine) as connection:
        given = _config(connection, catalog, table, append_only, version_table)
        schema, name = split_name(table)
        there = inspect(connection)
        if there.has_table(name, schema=schema) and not there.has_table(version_table):
            command.stamp(given, "0001")  # created by other means, such as your own migration
        command.upgrade(given, revision)
        if revision == "head":
            if not inspect(connection).has_table(name, schema=schema):
                # The version is that of another table of this layout.
                create(connection, catalog, table, append_only=append_only)
            extend_enums(connection, catalog, table)
            _add_indexes(connection, catalog, table, ordered)


def downgrade(
    engine: Engine | str | URL,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    version_table: str = VERSION_TABLE,
    revision: str = "base",
) -> None:
    """Go back to an older version, a `revision`; `base` drops the table with its rows.

    `version_table` is as for `init`.
    """
    with _lock_tables(engine) as connection:
        command.downgrade(_config(connection, catalog, table, True, version_table), revision)


def ddl(
    dialect_name: str,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    append_only: bool = True,
    ordered: bool = False,
) -> str:
    """Return the statements that create everything, for your own migrations.

    `dialect_name` is `postgresql` or `sqlite`; `append_only` and `ordered` are as for `init`.
    """
    if dialect_name not in DIALECTS:
        raise ConfigError(f"dialect {dialect_name!r}: choose one of {', '.join(DIALECTS)}")
    target: Dialect = registry.load(dialect_name)()
    made = _table(catalog, table, ordered)
    statements: list[str] = []
    if dialect_name == "postgresql":
        for enum in (event_types(catalog, made.schema), aggregate_types(catalog, made.schema)):
            native = enum.dialect_impl(target)
            statements.append(dialect.compile_ddl(CreateEnumType(native), target))
    statements.append(dialect.compile_ddl(CreateTable(made), target))
    indexes = sorted(made.indexes, key=lambda index: str(index.name))
    statements.extend(dialect.compile_ddl(CreateIndex(index), target) for index in indexes)
    if append_only:
        statements.extend(create_trigger_statements(dialect_name, table))
    return ";\n\n".join(statements) + ";\n"


def verify(
    engine: Engine | str | URL,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    ordered: bool = False,
) -> list[Difference]:
    """Return the differences from the locked schema; an empty list if there are none.

    Columns, types, enums and what is indexed must match; names of indexes may differ, and the
    trigger is optional. With `ordered` the index of ordered relays must be there.
    """
    with dialect.use_engine(engine) as checked, checked.connect() as connection:
        return list(_differences(connection, catalog, _table(catalog, table, ordered)))


@contextmanager
def _lock_tables(given: Engine | str | URL) -> Iterator[Connection]:
    """Open a transaction that excludes other changes of the table."""
    with dialect.use_engine(given) as engine, engine.connect() as connection, connection.begin():
        if dialect.is_sqlite(engine.dialect):
            dialect.begin_immediate(connection)
        else:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
        yield connection


def _config(
    connection: Connection, catalog: Catalog, table: str, append_only: bool, version_table: str
) -> Config:
    config = Config()
    config.set_main_option("script_location", "conquiet.events:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes.update(
        connection=connection,
        table=table,
        event_types=catalog.event_types,
        aggregate_types=catalog.aggregate_types,
        trigger=append_only,
        version_table=version_table,
    )
    return config


def _table(catalog: Catalog, name: str, ordered: bool) -> Table:
    made = events_table(catalog, name)
    if ordered:
        ordered_index(made)  # attaches itself to the table
    return made


def _add_indexes(connection: Connection, catalog: Catalog, name: str, ordered: bool) -> None:
    for index in _missing_indexes(connection, _table(catalog, name, ordered)):
        index.create(connection)


def _missing_indexes(connection: Connection, table: Table) -> Iterator[Index]:
    """Yield indexes that have no equal in the database under any name."""
    found = [
        (tuple(index["column_names"]), _is_partial(index))
        for index in inspect(connection).get_indexes(table.name, schema=table.schema)
    ]
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        if (tuple(column.name for column in index.columns), _is_for_some(index)) not in found:
            yield index


def _is_for_some(index: Index) -> bool:
    return index.dialect_options["postgresql"]["where"] is not None


def _differences(connection: Connection, catalog: Catalog, table: Table) -> Iterator[Difference]:
    name = table.fullname
    inspector = inspect(connection)
    if not inspector.has_table(table.name, schema=table.schema):
        yield Difference(name, "table", "there", "missing")
        return
    columns = inspector.get_columns(table.name, schema=table.schema)
    found = {
        column["name"]: _column(_type(column["type"], connection.dialect), column["nullable"])
        for column in columns
    }
    filled = {column["name"] for column in columns if column["default"] is not None}
    for column in table.columns:
        expected = _column(_type(column.type, connection.dialect), bool(column.nullable))
        there = found.get(column.name, "missing")
        if there == expected and column.server_default is not None and column.name not in filled:
            expected += " with a default"
        if there != expected:
            yield Difference(name, f"column {column.name}", expected, there)
    key = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
    if key != ["id"]:
        yield Difference(name, "primary key", "id", ", ".join(key) or "missing")
    for index in _missing_indexes(connection, table):
        indexed = ", ".join(column.name for column in index.columns)
        some = " of what is unpublished" if _is_for_some(index) else ""
        yield Difference(name, f"index {index.name}", f"({indexed}){some}", "missing")
    for enum, wanted_values, values in compare_enums(connection, catalog, table):
        if set(wanted_values) - set(values):
            missing = ", ".join(sorted(set(wanted_values) - set(values)))
            yield Difference(name, enum, f"with {missing}", "without; `migrate` adds it")


def _type(kind: Any, target: Dialect) -> str:
    return str(kind.compile(target)).lower()


def _column(kind: str, nullable: bool) -> str:
    return kind if nullable else f"{kind} not null"


def _is_partial(index: Any) -> bool:
    options = index.get("dialect_options", {})
    return any(name.endswith("_where") for name in options)
