"""Define, create, upgrade and compare the tables of inbox and outbox, on PostgreSQL and SQLite.

    row of the outbox:   stored ──published──▶ published_at set ──retention──▶ deleted
                           └─max_attempts───▶ parked_at set ──retry by hand──▶ stored

An outbox has more tables: `outbox_delayed` holds events until they are due, `outbox_positions` and
`outbox_retries` are for groups that read it as a log, `outbox_schedules` for the schedules of an
app, `outbox_history` for the charts of the dashboard.

Constructors never create tables: call `init` or `migrate`, or run `ddl` in your own migrations. In
an Alembic project of your own, `include_object` keeps autogenerate from dropping the tables, or
`add_tables` puts them into your metadata.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import (
    DDL,
    JSON,
    URL,
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    DateTime,
    DefaultClause,
    Dialect,
    Double,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    event,
    inspect,
)
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.sql.functions import now
from sqlalchemy.types import TypeEngine, UserDefinedType

from conquiet.config import TABLE_NAME
from conquiet.errors import ConfigError
from conquiet.sql import days, dialect

if TYPE_CHECKING:
    from alembic.config import Config

INBOX_TABLE = "processed_messages"
OUTBOX_TABLE = "outbox"


def split_name(name: str) -> tuple[str | None, str]:
    """Split a table name into schema and name; refuse names that need quotes.

    The limit is 48 characters, so that names of indexes stay within PostgreSQL's 63.
    """
    if not isinstance(name, str) or not TABLE_NAME.fullmatch(name):
        raise ConfigError(
            f"table name {name!r:.80}: use a-z, 0-9 and _, at most 48 characters, with"
            " schema if need be, as in 'sales.outbox'"
        )
    schema, _, table = name.rpartition(".")
    return schema or None, table


class Xid8(UserDefinedType[int]):
    """Declares PostgreSQL's 64-bit transaction id; an integer elsewhere."""

    cache_ok = True


ischema_names.setdefault("xid8", Xid8)  # SQLAlchemy reflects no other type under this name


@compiles(Xid8, "postgresql")
def _xid8_on_postgresql(element: Xid8, compiler: Any, **options: Any) -> str:
    return "xid8"


@compiles(Xid8)
def _xid8_elsewhere(element: Xid8, compiler: Any, **options: Any) -> str:
    return "INTEGER"


class CurrentTransaction(FunctionElement[int]):
    """Returns the id of the running transaction; 0 on SQLite, where commits are in order."""

    inherit_cache = True
    type = Xid8()


@compiles(CurrentTransaction, "postgresql")
def _current_on_postgresql(element: CurrentTransaction, compiler: Any, **options: Any) -> str:
    return "pg_current_xact_id()"


@compiles(CurrentTransaction)
def _current_elsewhere(element: CurrentTransaction, compiler: Any, **options: Any) -> str:
    return "0"


_ATTRIBUTES = JSON(none_as_null=True).with_variant(JSONB(), "postgresql")
AUTOVACUUM = {
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_analyze_scale_factor": 0.02,
}
"""Of the tables that grow with the traffic. By default a fifth of a table may be dead rows before
they are vacuumed: two millions of ten, each with an entry in the indexes that claims read."""
_AUTOVACUUM = ", ".join(f"{name} = {value}" for name, value in AUTOVACUUM.items())


def _set_autovacuum(table: Table) -> Table:
    """Let a table that grows with the traffic get its settings when it is created."""
    # The argument `postgresql_with` of a Table is unknown to SQLAlchemy 2.0.
    statement = f"ALTER TABLE {table.fullname} SET ({_AUTOVACUUM})"
    settings = DDL(statement)  # type: ignore[no-untyped-call]  # SQLAlchemy's own
    event.listen(table, "after_create", settings.execute_if(dialect="postgresql"))
    return table


def inbox_table(name: str = INBOX_TABLE, metadata: MetaData | None = None) -> Table:
    """Define the inbox: one row per subscriber and handled message."""
    schema, table = split_name(name)
    made = Table(
        table,
        metadata if metadata is not None else MetaData(),
        Column("subscriber", Text, nullable=False),
        Column("message_id", Text, nullable=False),
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=now()),
        PrimaryKeyConstraint("subscriber", "message_id", name=f"{table}_pkey"),
        # For cleanup, which deletes the oldest rows.
        Index(f"{table}_created_at", "created_at"),
        schema=schema,
    )
    return _set_autovacuum(made)


def outbox_table(name: str = OUTBOX_TABLE, metadata: MetaData | None = None) -> Table:
    """Define the outbox: one row per event, data byte for byte."""
    schema, table = split_name(name)
    published_at = Column("published_at", DateTime(timezone=True))
    parked_at = Column("parked_at", DateTime(timezone=True))
    last_error = Column("last_error", Text)
    key = Column("key", Text)
    id_ = Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    claimable = published_at.is_(None) & parked_at.is_(None)
    made = Table(
        table,
        metadata if metadata is not None else MetaData(),
        id_,
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=now()),
        Column("topic", Text, nullable=False),
        Column("event_type", Text, nullable=False),
        Column("event_id", Text, nullable=False),
        key,
        Column("content_type", Text, nullable=False),
        Column("data", LargeBinary, nullable=False),
        Column("attributes", _ATTRIBUTES, nullable=False),
        Column("attempts", Integer, nullable=False, server_default="0"),
        last_error,
        published_at,
        parked_at,
        Column("xid", Xid8(), nullable=False, server_default=CurrentTransaction()),
        CheckConstraint(
            "published_at IS NULL OR parked_at IS NULL", name=f"{table}_published_or_parked"
        ),
        # A claim reads unpublished rows only; a million published rows cost it nothing.
        Index(f"{table}_claimable", id_, postgresql_where=claimable, sqlite_where=claimable),
        # An ordered claim looks up the oldest unpublished row of a key.
        Index(
            f"{table}_claimable_key",
            key,
            id_,
            postgresql_where=claimable & key.is_not(None),
            sqlite_where=claimable & key.is_not(None),
        ),
        # For ordered claims, whether a key is blocked; for operators, the parked rows.
        Index(
            f"{table}_parked",
            key,
            id_,
            postgresql_where=parked_at.is_not(None),
            sqlite_where=parked_at.is_not(None),
        ),
        Index(
            f"{table}_published_at",
            published_at,
            postgresql_where=published_at.is_not(None),
            sqlite_where=published_at.is_not(None),
        ),
        # Where rows are published from the write-ahead log, those that failed are claimed.
        Index(
            f"{table}_deferred",
            id_,
            postgresql_where=claimable & last_error.is_not(None),
            sqlite_where=claimable & last_error.is_not(None),
        ),
        Index(
            f"{table}_deferred_key",
            key,
            id_,
            postgresql_where=claimable & last_error.is_not(None) & key.is_not(None),
            sqlite_where=claimable & last_error.is_not(None) & key.is_not(None),
        ),
        # Readers of the log go by (transaction, id): ids alone become visible out of order.
        Index(f"{table}_log", "xid", id_),
        schema=schema,
        sqlite_autoincrement=True,  # an id is a position of the log and must not be reused
    )
    return _set_autovacuum(made)


def delayed_table(outbox: str = OUTBOX_TABLE, metadata: MetaData | None = None) -> Table:
    """Define the events that wait until they are due; then they become rows of `outbox`."""
    schema, table = split_name(outbox)
    id_ = Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    due_at = Column("due_at", DateTime(timezone=True), nullable=False)
    made = Table(
        f"{table}_delayed",
        metadata if metadata is not None else MetaData(),
        id_,
        due_at,
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=now()),
        Column("topic", Text, nullable=False),
        Column("event_type", Text, nullable=False),
        Column("event_id", Text, nullable=False),
        Column("key", Text),
        Column("content_type", Text, nullable=False),
        Column("data", LargeBinary, nullable=False),
        Column("attributes", _ATTRIBUTES, nullable=False),
        # What is due is found by one step, whatever number of events waits behind it.
        Index(f"{table}_delayed_due", due_at, id_),
        Index(f"{table}_delayed_event", "event_id"),
        schema=schema,
    )
    return _set_autovacuum(made)


def positions_table(outbox: str = OUTBOX_TABLE, metadata: MetaData | None = None) -> Table:
    """Define how far groups have read `outbox` as a log: one row per partition of a group."""
    schema, table = split_name(outbox)
    return Table(
        f"{table}_positions",
        metadata if metadata is not None else MetaData(),
        Column("consumer_group", Text, nullable=False),
        Column("topic", Text, nullable=False),
        Column("partition", Integer, nullable=False),
        Column("xid", BigInteger, nullable=False, server_default="0"),
        Column("id", BigInteger, nullable=False, server_default="0"),
        # Ranges behind the position that are settled already, as JSON.
        Column("settled", Text, nullable=False, server_default="[]"),
        # Changes with each write: a member that lost the partition cannot write any more.
        Column("version", BigInteger, nullable=False, server_default="0"),
        Column("owner", Text),
        Column("claimant", Text),
        Column("lease_until", Double, nullable=False, server_default="0"),
        Column("crashes", Integer, nullable=False, server_default="0"),
        PrimaryKeyConstraint(
            "consumer_group", "topic", "partition", name=f"{table}_positions_pkey"
        ),
        schema=schema,
    )


def retries_table(outbox: str = OUTBOX_TABLE, metadata: MetaData | None = None) -> Table:
    """Define the messages of `outbox` that a group failed to handle, for a retry or dead."""
    schema, table = split_name(outbox)
    dead_at = Column("dead_at", DateTime(timezone=True))
    return Table(
        f"{table}_retries",
        metadata if metadata is not None else MetaData(),
        Column("id", BigInteger, nullable=False),
        Column("consumer_group", Text, nullable=False),
        Column("topic", Text, nullable=False),
        Column("partition", Integer, nullable=False),
        Column("xid", BigInteger, nullable=False),
        Column("key", Text),
        Column("attempts", Integer, nullable=False),
        Column("next_try", Double, nullable=False),
        Column("last_error", Text),
        Column("traceback", Text),
        dead_at,
        # The errors of its attempts, as `conquiet.attempts` writes them.
        Column("errors", Text),
        PrimaryKeyConstraint("id", "consumer_group", name=f"{table}_retries_pkey"),
        Index(
            f"{table}_retries_due",
            "consumer_group",
            "topic",
            "next_try",
            postgresql_where=dead_at.is_(None),
            sqlite_where=dead_at.is_(None),
        ),
        # Whether an earlier message of a key waits.
        Index(
            f"{table}_retries_key",
            "consumer_group",
            "key",
            "next_try",
            postgresql_where=dead_at.is_(None),
            sqlite_where=dead_at.is_(None),
        ),
        schema=schema,
    )


def schedules_table(outbox: str = OUTBOX_TABLE, metadata: MetaData | None = None) -> Table:
    """Define the states of schedules, whose ticks are written into `outbox`."""
    schema, table = split_name(outbox)
    return Table(
        f"{table}_schedules",
        metadata if metadata is not None else MetaData(),
        Column("topic", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("definition", Text, nullable=False),
        Column("next_at", Double, nullable=False),
        Column("paused", Integer, nullable=False, server_default="0"),
        Column("last_at", Double),
        PrimaryKeyConstraint("topic", "name", name=f"{table}_schedules_pkey"),
        schema=schema,
    )


def history_table(outbox: str = OUTBOX_TABLE, metadata: MetaData | None = None) -> Table:
    """Define what handlers and relays of `outbox` did per minute of a day, for the dashboard."""
    schema, table = split_name(outbox)
    return Table(
        f"{table}_history",
        metadata if metadata is not None else MetaData(),
        Column("minute", BigInteger, nullable=False),
        Column("kind", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("type", Text, nullable=False),
        Column("figure", Text, nullable=False),
        Column("value", Double, nullable=False),
        # The minute first: readers take the last minutes, and the oldest are deleted.
        PrimaryKeyConstraint(
            "minute", "kind", "name", "type", "figure", name=f"{table}_history_pkey"
        ),
        schema=schema,
    )


VERSION_TABLE = "conquiet_alembic_version"
OWN_TABLES = (
    INBOX_TABLE,
    OUTBOX_TABLE,
    VERSION_TABLE,
    "outbox_events",
    "conquiet_events_alembic_version",
)
"""The tables that `include_object` leaves alone: those of `conquiet.events` too."""
_SUFFIXES = ("_delayed", "_history", "_positions", "_retries", "_schedules", "_wal")
"""Of the tables beside an outbox."""
_day = re.compile(r"_(first|d\d{8})\Z")
DIALECTS = ("postgresql", "sqlite")
LOCK = 0x636F6E71  # "conq": the advisory lock for changes of the tables


@dataclass(frozen=True, slots=True)
class Difference:
    """Describes one difference between a table and what conquiet needs."""

    table: str
    what: str
    """`table`, or the name of a column, an index or a constraint."""
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
    by_day: bool = False,
) -> None:
    """Create missing tables at the newest version; safe to repeat, also concurrently.

    `inbox` and `outbox` are names of tables, perhaps with a schema; None leaves a table out.
    Existing tables stay as they are: `migrate` upgrades them, `verify` reports differences. The
    version is kept in `version_table`. `by_day` is as for `migrate`.
    """
    from alembic import command  # for migrations alone, and slow to import

    with lock_tables(engine) as connection:
        metadata = _metadata(inbox, outbox)
        metadata.create_all(connection)
        if not inspect(connection).has_table(version_table):
            command.stamp(_config(connection, inbox, outbox, version_table), "head")
        _divide(connection, outbox, by_day)


def migrate(
    engine: Engine | str | URL,
    inbox: str | None = INBOX_TABLE,
    outbox: str | None = OUTBOX_TABLE,
    *,
    version_table: str = VERSION_TABLE,
    revision: str = "head",
    by_day: bool = False,
) -> None:
    """Create or upgrade the tables by Alembic's migrations.

    `inbox` and `outbox` are as for `init`; `revision` is a version to stop at. A second pair of
    tables in one database needs a `version_table` of its own, or only the first pair would be
    upgraded.

    `by_day` divides the outbox into a partition per day, on PostgreSQL, so that `Cleanup` drops
    whole days; writers wait while its rows are read once. There is no way back. The days to come
    are added by each `migrate`, and by `Cleanup`.
    """
    from alembic import command

    with lock_tables(engine) as connection:
        command.upgrade(_config(connection, inbox, outbox, version_table), revision)
        if revision == "head":
            # The version may be that of other tables: of a second pair, or after init(outbox=None).
            _metadata(inbox, outbox).create_all(connection)
            _divide(connection, outbox, by_day)


def ddl(
    dialect_name: str, inbox: str | None = INBOX_TABLE, outbox: str | None = OUTBOX_TABLE
) -> str:
    """Return the statements that create the tables, for your own migrations.

    `dialect_name` is `postgresql` or `sqlite`; `inbox` and `outbox` are as for `init`.
    """
    if dialect_name not in DIALECTS:
        raise ConfigError(f"dialect {dialect_name!r}: choose one of {', '.join(DIALECTS)}")
    target: Dialect = registry.load(dialect_name)()
    statements: list[str] = []
    growing = _growing(inbox, outbox) if dialect.is_postgresql(target) else ()
    for table in _metadata(inbox, outbox).sorted_tables:
        settings = f" WITH ({_AUTOVACUUM})" if table.fullname in growing else ""
        create = dialect.compile_ddl(CreateTable(table, if_not_exists=True), target)
        statements.append(create + settings)
        statements.extend(
            dialect.compile_ddl(CreateIndex(index, if_not_exists=True), target)
            for index in _sorted_indexes(table)
        )
    return ";\n\n".join(statements) + ";\n"


def verify(
    engine: Engine | str | URL,
    inbox: str | None = INBOX_TABLE,
    outbox: str | None = OUTBOX_TABLE,
) -> list[Difference]:
    """Return the differences from what conquiet needs; an empty list if there are none.

    `inbox` and `outbox` are as for `init`. Columns, their types, whether they have a default, and
    what is indexed must match; names of indexes may differ, and other indexes may exist, and other
    columns that an INSERT can leave out.
    """
    with dialect.use_engine(engine) as checked, checked.connect() as connection:
        found: list[Difference] = []
        for table in _metadata(inbox, outbox).sorted_tables:
            found.extend(_differences(connection, table))
        return found


def add_tables(
    metadata: MetaData, inbox: str | None = INBOX_TABLE, outbox: str | None = OUTBOX_TABLE
) -> None:
    """Add the tables to `metadata` of your own, so that your migrations create and upgrade them.

    `inbox` and `outbox` are as for `init`.
    """
    if inbox is not None:
        inbox_table(inbox, metadata)
    if outbox is not None:
        for define in (
            outbox_table,
            delayed_table,
            positions_table,
            retries_table,
            schedules_table,
            history_table,
        ):
            define(outbox, metadata)


def include_object(
    item: Any,
    name: str | None,
    kind: str,
    reflected: bool,
    compare_to: Any,
    *,
    tables: Collection[str] = OWN_TABLES,
) -> bool:
    """Keep Alembic's autogenerate from dropping our tables where your metadata lacks them.

    In `env.py`: `context.configure(…, include_object=schema.include_object)`. Tables of other names
    are given by `functools.partial(schema.include_object, tables=["sales.outbox"])`. The tables
    beside an outbox are left alone with it.
    """
    if kind != "table" or not reflected or compare_to is not None:
        return True
    full: str = _day.sub("", item.fullname)
    return full not in tables and not any(
        full.endswith(suffix) and full.removesuffix(suffix) in tables for suffix in _SUFFIXES
    )


def render_item(kind: str, item: Any, context: Any) -> str | bool:
    """Render our types and defaults for every dialect, for `context.configure(render_item=…)`."""
    given = item.arg if kind == "server_default" and isinstance(item, DefaultClause) else item
    if isinstance(given, (Xid8, CurrentTransaction)):
        name = type(given).__name__
    elif given is _ATTRIBUTES:
        name = "attributes_type"
    else:
        return False
    context.imports.add(f"from conquiet.sql.schema import {name}")
    return f"{name}()"


def attributes_type() -> TypeEngine[Any]:
    """Return the type of the column `attributes`."""
    return _ATTRIBUTES


@contextmanager
def lock_tables(given: Engine | str | URL) -> Iterator[Connection]:
    """Open a transaction on the `given` database that excludes other changes of the tables."""
    with dialect.use_engine(given) as engine, engine.connect() as connection:
        if dialect.is_sqlite(engine.dialect):
            dialect.keep_wal(dialect.driver_connection(connection))
        with connection.begin():
            if dialect.is_sqlite(engine.dialect):
                dialect.begin_immediate(connection)
            else:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK})")
            yield connection


def vacuum_sooner(inbox: str | None, outbox: str | None) -> list[str]:
    """Return the statements that give tables of PostgreSQL their settings of autovacuum.

    `inbox` and `outbox` are as for `init`. A table that has some already keeps them: they are an
    operator's.
    """
    return [
        _VACUUM_SOONER.format(table=name, options=_AUTOVACUUM) for name in _growing(inbox, outbox)
    ]


def _growing(inbox: str | None, outbox: str | None) -> list[str]:
    """Return the names of the tables that grow with the traffic."""
    tables = [inbox_table(inbox)] if inbox is not None else []
    if outbox is not None:
        tables += outbox_table(outbox), delayed_table(outbox)
    return [table.fullname for table in tables]


# A partitioned table has no settings of its own; its partitions have.
_VACUUM_SOONER = """\
DO $$ BEGIN
    IF EXISTS (SELECT 1 FROM pg_class WHERE oid = to_regclass('{table}') AND relkind = 'r'
                  AND strpos(coalesce(array_to_string(reloptions, ' '), ''), 'autovacuum') = 0) THEN
        ALTER TABLE {table} SET ({options});
    END IF;
END $$"""


def _metadata(inbox: str | None, outbox: str | None) -> MetaData:
    metadata = MetaData()
    add_tables(metadata, inbox, outbox)
    return metadata


def _divide(connection: Connection, outbox: str | None, by_day: bool) -> None:
    """Divide the outbox by day if that is wanted; add the days to come if it is divided."""
    if outbox is None:
        if by_day:
            raise ConfigError("by_day divides the outbox: give it, too")
        return
    if by_day:
        days.divide(connection, outbox)
    if days.is_divided(connection, outbox):
        days.add(connection, outbox)


def _config(
    connection: Connection, inbox: str | None, outbox: str | None, version_table: str
) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "conquiet.sql:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes.update(
        connection=connection, inbox=inbox, outbox=outbox, version_table=version_table
    )
    return config


def _sorted_indexes(table: Table) -> list[Index]:
    return sorted(table.indexes, key=lambda index: str(index.name))


def _differences(connection: Connection, table: Table) -> Iterator[Difference]:
    name = table.fullname
    columns = _columns(connection, table)
    if not columns:
        yield Difference(name, "table", "there", "missing")
        return
    for column in table.columns:
        fills = column.server_default is not None or column is table.autoincrement_column
        kind = column.type.compile(connection.dialect).lower()
        expected = _Column(kind, not column.nullable, fills)
        there = columns.pop(column.name, None)
        if there is not None and not fills:
            there = there._replace(has_default=False)  # one more does no harm
        if there != expected:
            yield Difference(name, f"column {column.name}", str(expected), str(there or "missing"))
    for other, there in columns.items():
        if there.is_required and not there.has_default:
            filled = there._replace(has_default=True)
            yield Difference(name, f"column {other}, which is yours,", str(filled), str(there))
    if days.is_divided(connection, name):  # by its own primary key, each day
        for what, should, found in days.differences(connection, name):
            yield Difference(name, what, should, found)
    else:
        inspector = inspect(connection)
        key = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
        wanted_key = [column.name for column in table.primary_key]
        if key != wanted_key:
            yield Difference(
                name, "primary key", ", ".join(wanted_key), ", ".join(key) or "missing"
            )
    indexes = _indexes(connection, table)
    for index in _sorted_indexes(table):
        wanted = _index_text(index, connection.dialect)
        if wanted not in indexes.values():
            found = indexes.get(str(index.name), "missing")
            yield Difference(name, f"index {index.name}", wanted, found)


class _Column(NamedTuple):
    kind: str
    is_required: bool
    has_default: bool

    def __str__(self) -> str:
        required = " not null" if self.is_required else ""
        return f"{self.kind}{required}{' with a default' if self.has_default else ''}"


def _columns(connection: Connection, table: Table) -> dict[str, _Column]:
    # Not by SQLAlchemy's reflection, which omits the defaults of SQLite's keys.
    if dialect.is_sqlite(connection.dialect):
        rows = connection.exec_driver_sql(f"PRAGMA table_info({table.name})").all()
        keys = [row[1] for row in rows if row[5]]
        return {
            # SQLite itself numbers a single INTEGER PRIMARY KEY.
            row[1]: _Column(
                row[2].lower(),
                bool(row[3]),
                row[4] is not None or (keys == [row[1]] and row[2].lower() == "integer"),
            )
            for row in rows
        }
    rows = connection.exec_driver_sql(
        "SELECT attname, format_type(atttypid, atttypmod), attnotnull,"
        " atthasdef OR attidentity <> '' FROM pg_attribute"
        " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
        (table.fullname,),
    ).all()
    return {row[0]: _Column(*row[1:]) for row in rows}


def _indexes(connection: Connection, table: Table) -> dict[str, str]:
    """Return what each index covers, as text, by name."""
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
    """Normalize a CREATE INDEX to `(columns) where …`."""
    _, _, rest = create_index.partition("(")
    columns, where, condition = rest.lower().partition(" where ")
    text = f"({columns.strip().rstrip(')')})"
    if where:
        text += " where " + condition.replace("(", "").replace(")", "")
    return " ".join(text.replace('"', "").split())
