"""`outbox_events` as it is locked: asserted from what the database itself says."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum

import pytest
from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import DBAPIError
from tests import zygote
from tests.integration.events.samples import notification, rows, store

from conquiet.errors import ConfigError
from conquiet.events import Catalog, schema
from conquiet.events.schema import stored_values
from conquiet.events.table import events_table
from conquiet.sql import engine as make_engine
from marketplace.catalog import CATALOG, AggregateType, EventType


def by_ddl(engine: Engine) -> None:
    with engine.begin() as connection:
        for statement in schema.ddl(engine.dialect.name, CATALOG).split(";\n\n"):
            connection.exec_driver_sql(statement.rstrip(";\n").replace("%", "%%"))


WAYS = {
    "init": lambda engine: schema.init(engine, CATALOG),
    "migrate": lambda engine: schema.migrate(engine, CATALOG),
    "ddl": by_ddl,
}

LOCKED = [
    ("id", "uuid", True, None),
    ("event_type", "event_type_enum", True, None),
    ("aggregate_type", "aggregate_type_enum", True, None),
    ("aggregate_id", "uuid", True, None),
    ("payload_json", "jsonb", True, None),
    ("created_at", "timestamp with time zone", True, "now()"),
    ("published_at", "timestamp with time zone", False, None),
    ("attempt_count", "integer", True, "0"),
    ("last_error", "text", False, None),
]
INDEXES = {
    "outbox_events_pkey": "(id)",
    "outbox_events_published_at": "(published_at)",
    "outbox_events_event_type": "(event_type)",
    "outbox_events_aggregate": "(aggregate_type, aggregate_id)",
    "outbox_events_unpublished": "(created_at, id) WHERE (published_at IS NULL)",
}


@pytest.mark.parametrize("way", WAYS)
def test_columns_types_and_defaults_are_as_locked(database_url: str, way: str) -> None:
    engine = make_engine(database_url)
    WAYS[way](engine)
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT attname, format_type(atttypid, atttypmod), attnotnull,"
            " pg_get_expr(adbin, adrelid) FROM pg_attribute"
            " LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum"
            " WHERE attrelid = 'outbox_events'::regclass AND attnum > 0 ORDER BY attnum"
        ).all()
    engine.dispose()
    assert [tuple(row) for row in found] == LOCKED


@pytest.mark.parametrize("way", WAYS)
def test_the_three_locked_indexes_and_the_one_on_unpublished_rows(
    database_url: str, way: str
) -> None:
    engine = make_engine(database_url)
    WAYS[way](engine)
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'outbox_events'"
        ).all()
    engine.dispose()
    assert {name: text.partition("btree ")[2] for name, text in found} == INDEXES


@pytest.mark.parametrize("way", WAYS)
def test_the_enums_of_the_code_are_those_of_the_database(empty: Engine, way: str) -> None:
    WAYS[way](empty)
    table = events_table(CATALOG)
    with empty.connect() as connection:
        assert stored_values(connection, "event_type_enum", table) == [
            str(one) for one in EventType
        ]
        assert stored_values(connection, "aggregate_type_enum", table) == [
            str(e) for e in AggregateType
        ]


def test_the_enums_are_types_of_postgresql(postgres: Engine) -> None:
    with postgres.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT typname, enumlabel FROM pg_enum JOIN pg_type t ON t.oid = enumtypid"
            " ORDER BY typname, enumsortorder"
        ).all()
    assert [tuple(row) for row in found] == [
        *(("aggregate_type_enum", str(one)) for one in AggregateType),
        *(("event_type_enum", str(one)) for one in EventType),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_creates_what_conquiet_needs(empty: Engine, way: str) -> None:
    WAYS[way](empty)
    assert schema.verify(empty, CATALOG) == []


@pytest.mark.parametrize("first", WAYS)
def test_init_may_follow_anything_and_be_called_again(empty: Engine, first: str) -> None:
    WAYS[first](empty)
    schema.init(empty, CATALOG)
    schema.migrate(empty, CATALOG)
    assert schema.verify(empty, CATALOG) == []


INIT = """
import sys
from conquiet.events import schema
from marketplace.catalog import CATALOG
schema.init(sys.argv[1], CATALOG)
"""


def test_many_processes_may_init_at_once(empty: Engine) -> None:
    url = empty.url.render_as_string(hide_password=False)
    command = [sys.executable, "-W", "error", "-c", INIT, url]
    started = [zygote.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=60)[1].decode() for process in started] == [""] * 3
    assert schema.verify(empty, CATALOG) == []


def test_a_downgrade_leaves_nothing_behind(empty: Engine) -> None:
    schema.migrate(empty, CATALOG)
    schema.downgrade(empty, CATALOG)
    assert [found.found for found in schema.verify(empty, CATALOG)] == ["missing"]
    schema.migrate(empty, CATALOG)
    assert schema.verify(empty, CATALOG) == []


@pytest.mark.parametrize("way", [schema.init, schema.migrate])
def test_the_index_for_ordered_claims_is_made_for_those_who_ask(engine: Engine, way) -> None:
    store(engine, 2)
    before = rows(engine)
    [difference] = schema.verify(engine, CATALOG, ordered=True)
    assert "(aggregate_id, created_at, id) of what is unpublished" in str(difference)
    way(engine, CATALOG, ordered=True)
    way(engine, CATALOG, ordered=True)
    assert schema.verify(engine, CATALOG, ordered=True) == []
    assert rows(engine) == before
    schema.migrate(engine, NEWER)  # which makes the table anew on SQLite
    assert schema.verify(engine, NEWER, ordered=True) == []


@pytest.mark.parametrize("way", [schema.init, schema.migrate])
def test_a_table_of_the_tickets_own_migration_gets_the_index_of_the_claim(
    empty: Engine, way
) -> None:
    """With the three locked indexes, under names of their own."""
    with empty.begin() as connection:
        schema.create(connection, CATALOG, append_only=False)
        connection.execute(text("DROP INDEX outbox_events_unpublished"))
        connection.execute(text("DROP INDEX outbox_events_event_type"))
        connection.execute(text("CREATE INDEX idx_type ON outbox_events (event_type)"))
    store(empty, 1)
    way(empty, CATALOG)
    assert schema.verify(empty, CATALOG) == []
    with empty.connect() as connection:
        assert len(inspect(connection).get_indexes("outbox_events")) == 4
    assert len(rows(empty)) == 1


def test_it_stands_beside_the_tables_of_conquiet_sql(empty: Engine) -> None:
    from conquiet.sql import schema as tables

    tables.migrate(empty)
    schema.migrate(empty, CATALOG)
    assert tables.verify(empty) == []
    assert schema.verify(empty, CATALOG) == []


def test_it_may_stand_in_a_schema_of_postgresql(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA sales"))
    schema.init(engine, CATALOG, "sales.outbox_events")
    assert schema.verify(engine, CATALOG, "sales.outbox_events") == []
    engine.dispose()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("DROP TABLE outbox_events", "table should be there, is missing"),
        ("DROP INDEX outbox_events_unpublished", "(created_at, id) of what is unpublished"),
        ("DROP INDEX outbox_events_event_type", "index outbox_events_event_type should be"),
        ("ALTER TABLE outbox_events DROP COLUMN last_error", "column last_error should be text"),
    ],
)
def test_verify_says_what_is_missing(engine: Engine, change: str, found: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(change))
    [difference] = schema.verify(engine, CATALOG)
    assert found in str(difference)


def test_ddl_knows_two_dialects() -> None:
    with pytest.raises(ConfigError, match="choose one of postgresql, sqlite"):
        schema.ddl("oracle", CATALOG)


# --- a newer catalog ------------------------------------------------------------------------


class Newer(StrEnum):
    CHECKOUT_CONVERTED = "checkout_converted"
    PAYMENT_FAILED = "payment_failed"


NEWER = Catalog(
    StrEnum("All", {one.name: one.value for one in (*EventType, *Newer)}),  # type: ignore[arg-type]
    AggregateType,
)


def test_a_migration_adds_the_values_of_a_newer_catalog_and_keeps_the_rows(engine: Engine) -> None:
    store(engine, 3)
    before = rows(engine)
    [difference] = schema.verify(engine, NEWER)
    assert "with checkout_converted, payment_failed" in str(difference)
    schema.migrate(engine, NEWER)
    assert schema.verify(engine, NEWER) == []
    assert rows(engine) == before
    with engine.connect() as connection:
        added = stored_values(connection, "event_type_enum", events_table(NEWER))
    assert added == [*map(str, EventType), "checkout_converted", "payment_failed"]


def test_the_trigger_and_the_indexes_outlive_the_migration_of_an_enum(engine: Engine) -> None:
    store(engine, 1)
    schema.migrate(engine, NEWER)
    with engine.connect() as connection:
        assert len(inspect(connection).get_indexes("outbox_events")) == 4
    with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
        connection.execute(text("UPDATE outbox_events SET event_type = 'ad_paused'"))


def test_an_older_catalog_takes_nothing_away(engine: Engine) -> None:
    schema.migrate(engine, NEWER)
    schema.migrate(engine, CATALOG)
    assert schema.verify(engine, NEWER) == []


# --- what never changes ---------------------------------------------------------------------

CHANGES = {
    "id": "'01900000-0000-7000-8000-000000000001'",
    "event_type": "'ad_paused'",
    "aggregate_type": "'ad'",
    "aggregate_id": "'01900000-0000-7000-8000-000000000001'",
    "payload_json": """'{"version": 2}'""",
    "created_at": "'2020-01-01 00:00:00'",
}


@pytest.mark.parametrize("column", CHANGES)
def test_the_trigger_refuses_to_change_what_an_event_says(engine: Engine, column: str) -> None:
    store(engine, 1)
    before = rows(engine)
    refused = pytest.raises(DBAPIError, match="only published_at, attempt_count, last_error")
    with refused, engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_events SET {column} = {CHANGES[column]}"))
    assert rows(engine) == before


def test_the_trigger_lets_a_relay_mark(engine: Engine) -> None:
    store(engine, 1)
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outbox_events SET published_at = created_at, attempt_count = 3,"
                " last_error = 'x', event_type = event_type"
            )
        )
    assert rows(engine)[0].attempt_count == 3


@pytest.mark.parametrize("way", [schema.init, schema.migrate])
def test_the_trigger_may_be_left_out(empty: Engine, way) -> None:
    way(empty, CATALOG, append_only=False)
    assert schema.verify(empty, CATALOG) == []
    store(empty, 1)
    with empty.begin() as connection:
        connection.execute(text("UPDATE outbox_events SET event_type = 'ad_paused'"))


@pytest.mark.parametrize("column", ["event_type", "aggregate_type"])
def test_the_database_refuses_values_that_are_in_no_enum(empty: Engine, column: str) -> None:
    schema.init(empty, CATALOG, append_only=False)
    store(empty, 1)
    with pytest.raises(DBAPIError), empty.begin() as connection:
        connection.execute(text(f"UPDATE outbox_events SET {column} = 'telemetry'"))


def test_an_id_is_stored_once(engine: Engine) -> None:
    from conquiet.events import emit

    event = notification()
    with engine.begin() as connection:
        emit(connection, event)
    with pytest.raises(DBAPIError), engine.begin() as connection:
        emit(connection, event)
