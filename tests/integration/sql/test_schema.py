"""The schema: three ways to the same tables, and what `verify` finds in others."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from io import StringIO
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, event, inspect, text
from tests import zygote

from conquiet.errors import ConfigError
from conquiet.sql import Cleanup, Inbox, Outbox, OutboxLog, OutboxSource, Transaction, schema
from conquiet.sql import engine as make_engine
from conquiet.testing import message


@pytest.fixture(params=["sqlite_url", "database_url"])
def empty(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = make_engine(request.getfixturevalue(request.param))
    yield made
    made.dispose()


def by_ddl(engine: Engine) -> None:
    with engine.begin() as connection:
        for statement in schema.ddl(engine.dialect.name).split(";"):
            if statement.strip():
                connection.exec_driver_sql(statement)


WAYS = {"init": schema.init, "migrate": schema.migrate, "ddl": by_ddl}


def catalog(engine: Engine) -> list[tuple[str, ...]]:
    """All that the database says about the tables, but for Alembic's own."""
    with engine.connect() as connection:
        if engine.name == "sqlite":
            found = connection.exec_driver_sql(
                "SELECT type, name, replace(replace(sql, 'IF NOT EXISTS ', ''), char(9), '')"
                " FROM sqlite_master WHERE name NOT LIKE 'conquiet%' AND sql IS NOT NULL"
                " AND tbl_name NOT LIKE 'conquiet%'"
            ).all()
            return sorted((row[0], row[1], " ".join(row[2].split())) for row in found)
        parts = (
            "SELECT attrelid::regclass::text, attnum::text, attname::text,"
            " format_type(atttypid, atttypmod), attnotnull::text,"
            " coalesce(pg_get_expr(adbin, adrelid), '')"
            " FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum"
            " WHERE attrelid IN (to_regclass('outbox'), to_regclass('processed_messages'))"
            " AND attnum > 0",
            "SELECT indexname::text, indexdef FROM pg_indexes WHERE schemaname = 'public'"
            " AND indexname NOT LIKE 'conquiet%%'",
            "SELECT conname::text, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE connamespace = 'public'::regnamespace AND conname NOT LIKE 'conquiet%%'",
            "SELECT relname::text, reloptions::text FROM pg_class WHERE reloptions IS NOT NULL"
            " AND relnamespace = 'public'::regnamespace",
        )
        return sorted(tuple(row) for part in parts for row in connection.exec_driver_sql(part))


@pytest.mark.parametrize("way", WAYS)
def test_each_way_creates_what_conquiet_needs(empty: Engine, way: str) -> None:
    WAYS[way](empty)
    assert schema.verify(empty) == []


def test_init_migrations_and_ddl_create_the_same(empty: Engine) -> None:
    catalogs = []
    for way in WAYS.values():
        way(empty)
        catalogs.append(catalog(empty))
        with empty.begin() as connection:
            for table in inspect(connection).get_table_names():
                connection.exec_driver_sql(f"DROP TABLE {table}")
    assert catalogs[0] == catalogs[1] == catalogs[2]


@pytest.mark.parametrize("first", WAYS)
def test_init_may_follow_anything_and_be_called_again(empty: Engine, first: str) -> None:
    WAYS[first](empty)
    schema.init(empty)
    schema.init(empty)
    assert schema.verify(empty) == []


def test_migrate_after_init_has_nothing_to_do(empty: Engine) -> None:
    schema.init(empty)
    schema.migrate(empty)
    schema.migrate(empty)
    assert schema.verify(empty) == []


INIT = "import sys; from conquiet.sql import schema; schema.init(sys.argv[1])"


def test_many_processes_may_init_at_once(empty: Engine) -> None:
    url = empty.url.render_as_string(hide_password=False)
    command = [sys.executable, "-W", "error", "-c", INIT, url]
    started = [zygote.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    errors = [process.communicate(timeout=60)[1].decode() for process in started]
    assert errors == [""] * 4
    assert schema.verify(empty) == []


def test_tables_have_the_names_one_gives_them(empty: Engine) -> None:
    schema.init(empty, inbox="seen", outbox="events_out")
    assert schema.verify(empty, inbox="seen", outbox="events_out") == []
    assert {difference.found for difference in schema.verify(empty)} == {"missing"}
    with Transaction(empty).scope(()):
        assert Inbox("test", table="seen").remember([("test", "a")])
    with empty.begin() as connection:
        Outbox("t", table="events_out", source="/s").add(connection, [])


def test_tables_may_stand_in_a_schema_of_postgresql(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA sales"))
    names = {"inbox": "sales.seen", "outbox": "sales.outbox"}
    schema.init(engine, **names)
    assert schema.verify(engine, **names) == []
    engine.dispose()


def test_a_table_may_be_left_out(empty: Engine) -> None:
    schema.init(empty, inbox=None)
    assert schema.verify(empty, inbox=None) == []
    assert [difference.table for difference in schema.verify(empty)] == ["processed_messages"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("DROP TABLE outbox", "outbox: table should be there, is missing"),
        ("DROP INDEX outbox_claimable", "index outbox_claimable should be (id) where"),
        (
            "ALTER TABLE outbox DROP COLUMN content_type",
            "column content_type should be text not null, is missing",
        ),
    ],
)
def test_verify_says_what_is_missing(empty: Engine, change: str, found: str) -> None:
    schema.init(empty)
    with empty.begin() as connection:
        connection.execute(text(change))
    [difference] = schema.verify(empty)
    assert found in str(difference)


def test_a_second_pair_of_tables_is_created_beside_the_first(empty: Engine) -> None:
    schema.migrate(empty)
    names = {"inbox": "seen", "outbox": "events_out"}
    schema.migrate(empty, **names)
    assert schema.verify(empty, **names) == []
    # A second outbox that shares the inbox, with a version table of its own.
    schema.migrate(empty, outbox="letters_out", version_table="letters_version")
    assert schema.verify(empty, outbox="letters_out") == []
    assert schema.verify(empty) == []


def test_migrate_creates_what_init_left_out(empty: Engine) -> None:
    schema.init(empty, outbox=None)
    schema.migrate(empty)
    assert schema.verify(empty) == []


def test_migrate_takes_over_what_ddl_created(empty: Engine) -> None:
    by_ddl(empty)
    schema.migrate(empty)
    assert schema.verify(empty) == []


def options_of(engine: Engine) -> dict[str, list[str]]:
    query = text("SELECT relname, reloptions FROM pg_class WHERE reloptions IS NOT NULL")
    with engine.connect() as connection:
        return dict(connection.execute(query).all())


@pytest.mark.parametrize("way", WAYS)
def test_tables_that_grow_are_vacuumed_before_a_fifth_of_them_is_dead(
    database_url: str, way: str
) -> None:
    engine = make_engine(database_url)
    WAYS[way](engine)
    wanted = [f"{name}={value}" for name, value in schema.AUTOVACUUM.items()]
    grow = ("outbox", "outbox_delayed", "processed_messages")
    found = options_of(engine)
    engine.dispose()
    assert {name: found.get(name) for name in grow} == dict.fromkeys(grow, wanted)


def test_migrate_gives_an_older_table_the_settings_and_leaves_those_of_an_operator(
    database_url: str,
) -> None:
    engine = make_engine(database_url)
    schema.migrate(engine, revision="0007")
    mine = ["autovacuum_vacuum_scale_factor=0.3"]
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE outbox SET ({mine[0]})"))
    schema.migrate(engine)
    found = options_of(engine)
    assert schema.verify(engine) == []
    engine.dispose()
    assert found["outbox"] == mine
    assert len(found["processed_messages"]) == len(schema.AUTOVACUUM)


@pytest.mark.parametrize("column", ["id", "created_at", "attempts", "xid"])
def test_verify_finds_a_lost_default(database_url: str, column: str) -> None:
    engine = make_engine(database_url)
    schema.init(engine)
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE outbox ALTER COLUMN {column} DROP DEFAULT"))
    [difference] = schema.verify(engine)
    engine.dispose()
    assert f"column {column} should be" in str(difference)
    assert "with a default, is" in str(difference)


def test_verify_finds_a_lost_default_in_sqlite(sqlite_url: str) -> None:
    engine = make_engine(sqlite_url)
    with engine.begin() as connection:
        for statement in schema.ddl("sqlite").split(";"):
            lost = statement.replace("attempts INTEGER DEFAULT '0'", "attempts INTEGER")
            if statement.strip():
                connection.exec_driver_sql(lost)
    assert ["column attempts" in str(found) for found in schema.verify(engine)] == [True]
    engine.dispose()


def test_a_column_of_ones_own_must_take_rows_without_it(database_url: str) -> None:
    engine = make_engine(database_url)
    schema.init(engine)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox ADD tenant text NOT NULL DEFAULT 'a'"))
    assert schema.verify(engine) == []
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox ALTER tenant DROP DEFAULT"))
    [difference] = schema.verify(engine)
    engine.dispose()
    assert "column tenant, which is yours, should be text not null with a d" in str(difference)


# --- a project of the user's own, with Alembic ------------------------------------------------

ENV = """
from alembic import context
from sqlalchemy import Column, MetaData, Table, Text, create_engine

from conquiet.sql import schema

metadata = MetaData()
Table("customers", metadata, Column("id", Text, primary_key=True))
{more}

engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=metadata{hooks})
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""


@pytest.fixture
def project(empty: Engine, tmp_path: Path) -> Callable[..., Config]:
    """Makes a project by `alembic init` and writes its env.py."""

    def make(more: str = "", hooks: str = "") -> Config:
        config = Config(tmp_path / "alembic.ini", stdout=StringIO())
        command.init(config, str(tmp_path / "migrations"))
        url = empty.url.render_as_string(hide_password=False).replace("%", "%%")
        config = Config(tmp_path / "alembic.ini", stdout=StringIO())
        config.set_main_option("sqlalchemy.url", url)
        (tmp_path / "migrations" / "env.py").write_text(ENV.format(more=more, hooks=hooks))
        return config

    return make


def written(tmp_path: Path) -> str:
    """The migrations of the project."""
    versions = (tmp_path / "migrations" / "versions").glob("*.py")
    return "".join(path.read_text() for path in versions)


def test_autogenerate_of_a_users_project_leaves_the_tables_alone(
    empty: Engine, project: Callable[..., Config], tmp_path: Path
) -> None:
    schema.init(empty)
    schema.init(empty, inbox="seen", outbox="letters_out", version_table="letters_version")
    names = '"seen", "letters_out", "letters_version"'
    config = project(
        "from functools import partial",
        f", include_object=partial(schema.include_object, tables=[*schema.OWN_TABLES, {names}])",
    )
    command.revision(config, "customers", autogenerate=True)
    assert "create_table('customers'" in written(tmp_path)
    assert "drop_table('customers'" in written(tmp_path)  # in downgrade()
    for name in ("outbox", "processed_messages", "conquiet", "seen", "letters"):
        assert name not in written(tmp_path)
    command.upgrade(config, "head")
    command.check(config)
    assert schema.verify(empty) == []


def test_autogenerate_creates_the_tables_that_were_added_to_the_metadata(
    empty: Engine, project: Callable[..., Config], tmp_path: Path
) -> None:
    config = project("schema.add_tables(metadata)", ", render_item=schema.render_item")
    command.revision(config, "customers and outbox", autogenerate=True)
    assert "create_table('outbox'" in written(tmp_path)
    command.upgrade(config, "head")
    assert schema.verify(empty) == []
    command.check(config)


@pytest.mark.parametrize("empty", ["sqlite_url"], indirect=True)
def test_a_migration_that_was_generated_on_sqlite_fits_postgresql(
    project: Callable[..., Config], empty: Engine, database_url: str, tmp_path: Path
) -> None:
    config = project("schema.add_tables(metadata)", ", render_item=schema.render_item")
    command.revision(config, "outbox", autogenerate=True)
    config.set_main_option("sqlalchemy.url", make_engine(database_url).url.render_as_string(False))
    command.upgrade(config, "head")
    assert schema.verify(database_url) == []


def test_verify_says_what_has_the_wrong_type(database_url: str) -> None:
    engine = make_engine(database_url)
    schema.init(engine)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox ALTER COLUMN attributes TYPE text"))
        connection.execute(
            text("ALTER TABLE processed_messages DROP CONSTRAINT processed_messages_pkey")
        )
    found = [str(difference) for difference in schema.verify(engine)]
    engine.dispose()
    assert found == [
        "outbox: column attributes should be jsonb not null, is text not null",
        "processed_messages: primary key should be subscriber, message_id, is missing",
    ]


def test_an_index_may_have_another_name(empty: Engine) -> None:
    schema.init(empty)
    with empty.begin() as connection:
        connection.execute(text("DROP INDEX processed_messages_created_at"))
        connection.execute(text("CREATE INDEX mine ON processed_messages (created_at)"))
    assert schema.verify(empty) == []


def test_constructors_open_no_connection() -> None:
    opened: list[object] = []
    engine = make_engine("postgresql://nobody@127.0.0.1:1/none")
    event.listen(engine, "do_connect", lambda *arguments: opened.append(arguments))
    Transaction(engine)
    Cleanup(engine)
    OutboxLog(engine)
    OutboxSource(engine).close()
    Inbox("billing")
    Outbox("orders")
    assert opened == []


IMPORT = """
import sys
for name in ("psycopg", "asyncpg", "greenlet", "aiosqlite"):
    sys.modules[name] = None
from conquiet.sql import Transaction, connection, schema
transaction = Transaction(sys.argv[1])
schema.init(transaction.engine)
with transaction.scope(()), connection(transaction.engine) as found:
    assert found.exec_driver_sql("SELECT 1").scalar() == 1
transaction.engine.dispose()
"""


def test_sqlite_needs_no_driver_of_another_database(sqlite_url: str) -> None:
    zygote.run([sys.executable, "-W", "error", "-c", IMPORT, sqlite_url], check=True)


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(ConfigError, match="postgresql, sqlite"):
        schema.ddl("oracle")


def test_sqlite_never_gives_a_deleted_id_again(sqlite: Engine) -> None:
    _add(sqlite)
    with sqlite.begin() as connection:
        connection.execute(text("DELETE FROM outbox"))
    _add(sqlite)
    with sqlite.connect() as connection:
        assert connection.execute(text("SELECT id FROM outbox")).scalars().all() == [2]


def _add(engine: Engine) -> None:
    with engine.begin() as connection:
        Outbox("orders").add(connection, [message()])


def test_the_first_connections_to_a_file_wait_for_each_other(tmp_path: Path) -> None:
    """A change to WAL fails at once while another connection writes, whatever its time-out."""
    first = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    first.execute("BEGIN IMMEDIATE")
    first.execute("CREATE TABLE orders (id TEXT)")
    engine = make_engine(f"sqlite:///{tmp_path}/shop.db")
    with ThreadPoolExecutor(1) as pool:
        connected = pool.submit(lambda: engine.connect().close())
        assert not wait([connected], timeout=0.2).done
        first.execute("COMMIT")
        connected.result(timeout=20)
    first.close()
    engine.dispose()
