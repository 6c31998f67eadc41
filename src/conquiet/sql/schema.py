"""The tables of conquiet: create, upgrade, print, compare. Never from a constructor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, Dialect, Engine, Index, MetaData, Table, inspect
from sqlalchemy.dialects import registry
from sqlalchemy.schema import CreateIndex, CreateTable

from conquiet.errors import ConfigError
from conquiet.sql import dialect
from conquiet.sql.tables import INBOX_TABLE, OUTBOX_TABLE, inbox_table, outbox_table

VERSION_TABLE = "conquiet_alembic_version"
DIALECTS = ("postgresql", "sqlite")
_LOCK = 0x636F6E71  # "conq": whoever holds it changes the tables of conquiet


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as conquiet needs it."""

    table: str
    what: str
    """What it is about: `table`, or the name of a column, an index, a constraint."""
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.table}: {self.what} should be {self.expected}, is {self.found}"


def init(
    engine: Engine | str | URL,
    inbox: str | None = INBOX_TABLE,
    outbox: str | None = OUTBOX_TABLE,
    *,
    version_table: str = VERSION_TABLE,
) -> None:
    """Create what is missing, at the newest version; safe to call again, and by many at once.

    What exists is left as it is: `migrate` upgrades it, `verify` says whether it has to be.
    None leaves a table out.
    """
    with _locked(engine) as connection:
        metadata = _metadata(inbox, outbox)
        metadata.create_all(connection)
        if not inspect(connection).has_table(version_table):
            command.stamp(_config(connection, inbox, outbox, version_table), "head")


def migrate(
    engine: Engine | str | URL,
    inbox: str | None = INBOX_TABLE,
    outbox: str | None = OUTBOX_TABLE,
    *,
    version_table: str = VERSION_TABLE,
    revision: str = "head",
) -> None:
    """Upgrade the tables, from nothing or from an older conquiet, by Alembic's migrations.

    A second pair of tables in one database needs a version table of its own.
    """
    with _locked(engine) as connection:
        command.upgrade(_config(connection, inbox, outbox, version_table), revision)


def ddl(
    dialect_name: str, inbox: str | None = INBOX_TABLE, outbox: str | None = OUTBOX_TABLE
) -> str:
    """The statements that create the tables, for migrations of one's own."""
    if dialect_name not in DIALECTS:
        raise ConfigError(f"dialect {dialect_name!r}: choose one of {', '.join(DIALECTS)}")
    target: Dialect = registry.load(dialect_name)()
    statements: list[str] = []
    for table in _metadata(inbox, outbox).sorted_tables:
        statements.append(_compiled(CreateTable(table, if_not_exists=True), target))
        statements.extend(
            _compiled(CreateIndex(index, if_not_exists=True), target)
            for index in _sorted_indexes(table)
        )
    return ";\n\n".join(statements) + ";\n"


def verify(
    engine: Engine | str | URL,
    inbox: str | None = INBOX_TABLE,
    outbox: str | None = OUTBOX_TABLE,
) -> list[Difference]:
    """What differs from what conquiet needs; nothing, if all is well.

    Names of indexes are free; columns, types and what is indexed are not. What is there
    besides does no harm.
    """
    with _engine(engine) as checked, checked.connect() as connection:
        found: list[Difference] = []
        for table in _metadata(inbox, outbox).sorted_tables:
            found.extend(_differences(connection, table))
        return found


# --- creating -------------------------------------------------------------------------------


@contextmanager
def _engine(given: Engine | str | URL) -> Iterator[Engine]:
    """The engine that was given, or one for a URL, which is closed after use."""
    made = dialect.as_engine(given)
    try:
        yield made
    finally:
        if made is not given:
            made.dispose()


@contextmanager
def _locked(given: Engine | str | URL) -> Iterator[Connection]:
    """One transaction that nobody else changes tables in meanwhile."""
    with _engine(given) as engine, engine.connect() as connection:
        if dialect.is_sqlite(engine.dialect):
            # Kept in the file. Readers then never wait for the writer, nor it for them.
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            connection.rollback()
        with connection.begin():
            if dialect.is_sqlite(engine.dialect):
                dialect.begin_immediate(connection)
            else:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
            yield connection


def _metadata(inbox: str | None, outbox: str | None) -> MetaData:
    metadata = MetaData()
    if inbox is not None:
        inbox_table(inbox, metadata)
    if outbox is not None:
        outbox_table(outbox, metadata)
    return metadata


def _config(
    connection: Connection, inbox: str | None, outbox: str | None, version_table: str
) -> Config:
    config = Config()
    config.set_main_option("script_location", "conquiet.sql:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes.update(
        connection=connection, inbox=inbox, outbox=outbox, version_table=version_table
    )
    return config


def _compiled(element: Any, target: Dialect) -> str:
    lines = str(element.compile(dialect=target)).strip().splitlines()
    return "\n".join(line.rstrip().replace("\t", "    ") for line in lines)


def _sorted_indexes(table: Table) -> list[Index]:
    return sorted(table.indexes, key=lambda index: str(index.name))


# --- comparing ------------------------------------------------------------------------------


def _differences(connection: Connection, table: Table) -> Iterator[Difference]:
    name = table.fullname
    columns = _columns(connection, table)
    if not columns:
        yield Difference(name, "table", "there", "missing")
        return
    for column in table.columns:
        expected = _column_text(
            column.type.compile(connection.dialect).lower(), bool(column.nullable)
        )
        if columns.get(column.name, "missing") != expected:
            yield Difference(
                name, f"column {column.name}", expected, columns.get(column.name, "missing")
            )
    inspector = inspect(connection)
    key = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
    expected_key = [column.name for column in table.primary_key]
    if key != expected_key:
        yield Difference(name, "primary key", ", ".join(expected_key), ", ".join(key) or "missing")
    indexes = _indexes(connection, table)
    for index in _sorted_indexes(table):
        wanted = _index_text(index, connection.dialect)
        if wanted not in indexes.values():
            found = indexes.get(str(index.name), "missing")
            yield Difference(name, f"index {index.name}", wanted, found)


def _column_text(kind: str, nullable: bool) -> str:
    return kind if nullable else f"{kind} not null"


def _columns(connection: Connection, table: Table) -> dict[str, str]:
    # Not by reflection, which does not know xid8.
    if dialect.is_sqlite(connection.dialect):
        rows = connection.exec_driver_sql(f"PRAGMA table_info({table.name})").all()
        return {row[1]: _column_text(row[2].lower(), not row[3]) for row in rows}
    rows = connection.exec_driver_sql(
        "SELECT attname, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute"
        " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
        (table.fullname,),
    ).all()
    return {row[0]: _column_text(row[1], not row[2]) for row in rows}


def _indexes(connection: Connection, table: Table) -> dict[str, str]:
    """What each index covers, as text, by name."""
    if dialect.is_sqlite(connection.dialect):
        rows = connection.exec_driver_sql(
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ?"
            " AND sql IS NOT NULL",
            (table.name,),
        ).all()
    else:
        rows = connection.exec_driver_sql(
            "SELECT c.relname, pg_get_indexdef(i.indexrelid) FROM pg_index i"
            " JOIN pg_class c ON c.oid = i.indexrelid"
            " WHERE i.indrelid = to_regclass(%s) AND i.indisvalid",
            (table.fullname,),
        ).all()
    return {row[0]: _normal(row[1]) for row in rows}


def _index_text(index: Index, target: Dialect) -> str:
    return _normal(str(CreateIndex(index).compile(dialect=target)))


def _normal(create_index: str) -> str:
    """`(columns) where …` of a CREATE INDEX, however a database writes it."""
    _, _, rest = create_index.partition("(")
    columns, where, condition = rest.lower().partition(" where ")
    text = f"({columns.strip().rstrip(')')})"
    if where:
        text += " where " + condition.replace("(", "").replace(")", "")
    return " ".join(text.replace('"', "").split())
