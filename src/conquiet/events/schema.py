"""`outbox_events`: create, upgrade, print, compare. The enums are those of a catalog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, Dialect, Engine, Index, MetaData, Table, inspect
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql import CreateEnumType
from sqlalchemy.schema import CreateIndex, CreateTable

from conquiet.errors import ConfigError
from conquiet.events import enums, trigger
from conquiet.events.catalog import Catalog
from conquiet.events.table import (
    EVENTS_TABLE,
    aggregate_types,
    event_types,
    events_table,
    ordered_index,
)
from conquiet.sql import dialect
from conquiet.sql.schema import DIALECTS, Difference, checked_name

VERSION_TABLE = "conquiet_events_alembic_version"
_LOCK = 0x636F6E76  # whoever holds it changes the table of events


def init(
    engine: Engine | str | URL,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    append_only: bool = True,
    ordered: bool = False,
    version_table: str = VERSION_TABLE,
) -> None:
    """Create what is missing, at the newest version; safe to call again, and by many at once.

    `append_only=False` leaves the trigger out; the model refuses changes all the same. `ordered`
    adds the index that relays need to keep the order of aggregates behind a long backlog.
    """
    with _locked(engine) as connection:
        schema, name = checked_name(table)
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
    """Create table, enums, indexes and trigger in the caller's transaction: for a migration of
    one's own, `schema.create(op.get_bind(), CATALOG)`."""
    metadata = MetaData()
    events_table(catalog, table, metadata)
    metadata.create_all(connection)
    if append_only:
        for statement in trigger.create_statements(connection.dialect.name, table):
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
    """Upgrade from nothing, from an older conquiet or catalog, or from a table of one's own.

    Values that the catalog has and the database lacks are added; none is ever removed. The same
    goes for indexes, those of `ordered` included.
    """
    with _locked(engine) as connection:
        given = _config(connection, catalog, table, append_only, version_table)
        schema, name = checked_name(table)
        there = inspect(connection)
        if there.has_table(name, schema=schema) and not there.has_table(version_table):
            command.stamp(given, "0001")  # made by other means, such as the ticket's own migration
        command.upgrade(given, revision)
        if revision == "head":
            enums.extend(connection, catalog, table)
            _add_indexes(connection, catalog, table, ordered)


def downgrade(
    engine: Engine | str | URL,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    version_table: str = VERSION_TABLE,
    revision: str = "base",
) -> None:
    """Go back to an older version; `base` drops the table and all that is in it."""
    with _locked(engine) as connection:
        command.downgrade(_config(connection, catalog, table, True, version_table), revision)


def ddl(
    dialect_name: str,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    append_only: bool = True,
    ordered: bool = False,
) -> str:
    """The statements that create it all, for migrations of one's own."""
    if dialect_name not in DIALECTS:
        raise ConfigError(f"dialect {dialect_name!r}: choose one of {', '.join(DIALECTS)}")
    target: Dialect = registry.load(dialect_name)()
    made = _table(catalog, table, ordered)
    statements: list[str] = []
    if dialect_name == "postgresql":
        for enum in (event_types(catalog, made.schema), aggregate_types(catalog, made.schema)):
            native = enum.dialect_impl(target)
            statements.append(_compiled(CreateEnumType(native), target))
    statements.append(_compiled(CreateTable(made), target))
    indexes = sorted(made.indexes, key=lambda index: str(index.name))
    statements.extend(_compiled(CreateIndex(index), target) for index in indexes)
    if append_only:
        statements.extend(trigger.create_statements(dialect_name, table))
    return ";\n\n".join(statements) + ";\n"


def verify(
    engine: Engine | str | URL,
    catalog: Catalog,
    table: str = EVENTS_TABLE,
    *,
    ordered: bool = False,
) -> list[Difference]:
    """What differs from the locked schema; nothing, if all is well.

    Names of indexes are free; columns, types, enums and what is indexed are not. The trigger may
    be there or not.
    """
    with _engine(engine) as checked, checked.connect() as connection:
        return list(_differences(connection, catalog, _table(catalog, table, ordered)))


# --- inside ---------------------------------------------------------------------------------


@contextmanager
def _engine(given: Engine | str | URL) -> Iterator[Engine]:
    made = dialect.as_engine(given)
    try:
        yield made
    finally:
        if made is not given:
            made.dispose()


@contextmanager
def _locked(given: Engine | str | URL) -> Iterator[Connection]:
    """One transaction in which nobody else changes the table."""
    with _engine(given) as engine, engine.connect() as connection, connection.begin():
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
        ordered_index(made)  # joins the table's
    return made


def _add_indexes(connection: Connection, catalog: Catalog, name: str, ordered: bool) -> None:
    for index in _missing_indexes(connection, _table(catalog, name, ordered)):
        index.create(connection)


def _missing_indexes(connection: Connection, table: Table) -> Iterator[Index]:
    """Those that no index of the database is like, whatever its name."""
    found = [
        (tuple(index["column_names"]), _is_partial(index))
        for index in inspect(connection).get_indexes(table.name, schema=table.schema)
    ]
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        if (tuple(column.name for column in index.columns), _is_for_some(index)) not in found:
            yield index


def _is_for_some(index: Index) -> bool:
    return index.dialect_options["postgresql"]["where"] is not None


def _compiled(element: Any, target: Dialect) -> str:
    lines = str(element.compile(dialect=target)).strip().splitlines()
    return "\n".join(line.rstrip().replace("\t", "    ") for line in lines)


def _differences(connection: Connection, catalog: Catalog, table: Table) -> Iterator[Difference]:
    name = table.fullname
    inspector = inspect(connection)
    if not inspector.has_table(table.name, schema=table.schema):
        yield Difference(name, "table", "there", "missing")
        return
    found = {
        column["name"]: _column(_type(column["type"], connection.dialect), column["nullable"])
        for column in inspector.get_columns(table.name, schema=table.schema)
    }
    for column in table.columns:
        expected = _column(_type(column.type, connection.dialect), bool(column.nullable))
        if found.get(column.name, "missing") != expected:
            there = found.get(column.name, "missing")
            yield Difference(name, f"column {column.name}", expected, there)
    key = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
    if key != ["id"]:
        yield Difference(name, "primary key", "id", ", ".join(key) or "missing")
    for index in _missing_indexes(connection, table):
        columns = ", ".join(column.name for column in index.columns)
        some = " of what is unpublished" if _is_for_some(index) else ""
        yield Difference(name, f"index {index.name}", f"({columns}){some}", "missing")
    for enum, wanted_values, values in enums.compare(connection, catalog, table):
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
