"""Every statement that runs all the time uses its index, whatever else the table holds."""

from __future__ import annotations

import json

import psycopg
import pytest
from sqlalchemy import event, text
from tests.integration.sql.claiming import made

from conquiet import Message
from conquiet.errors import TryLater
from conquiet.sql import LogSource, Outbox, claim, cleanup, log, schema
from conquiet.sql.claim import PsycopgClaimer
from conquiet.sql.outbox_source import outbox_layout
from conquiet.testing import eventually

ROWS = 100_000

FILL = """
INSERT INTO outbox (topic, event_type, event_id, key, content_type, data, attributes, published_at)
SELECT 'orders', 'order.placed', 'e-' || n, CASE WHEN mod(n, 10) > 0 THEN 'k' || mod(n, 1000) END,
       'application/json', '{}', '{}', CASE WHEN n <= %s THEN now() - interval '1 day' END
  FROM generate_series(1, %s) AS n
"""


@pytest.fixture(scope="module")
def server(postgres_server):
    return postgres_server


@pytest.fixture(scope="module", params=["backlog", "published", "stale statistics"])
def engine(request, server):
    """100,000 rows that all wait; that are published but for ten; and the latter with
    statistics from when all of them waited."""
    url = server.create_database()
    with made(url) as engine:
        with psycopg.connect(url, autocommit=True) as connection:
            waiting = 0 if request.param != "published" else ROWS - 10
            connection.execute(FILL, (waiting, ROWS))
            # Of every row: a sample may or may not hold one of the ten, and plans differ.
            connection.execute("SET default_statistics_target = 1000")
            connection.execute("VACUUM ANALYZE outbox")
            if request.param == "stale statistics":
                connection.execute("ALTER TABLE outbox SET (autovacuum_enabled = false)")
                connection.execute(
                    "UPDATE outbox SET published_at = now() - interval '1 day' WHERE id <= %s",
                    (ROWS - 10,),
                )
            connection.execute(
                "INSERT INTO processed_messages SELECT 'billing', 'm' || n, now() - n * interval"
                " '1 minute' FROM generate_series(1, 100000) AS n"
            )
            connection.execute("ANALYZE processed_messages")
        yield engine
    server.drop_database(url)


def plan(engine, statement: str, given=(), options="") -> list[dict]:
    """The steps of the plan, outermost first."""
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        found = driver.execute(f"EXPLAIN ({options}FORMAT JSON) {statement}", given).fetchone()[0]
        connection.rollback()
    document = found if isinstance(found, list) else json.loads(found)
    steps, pending = [], [document[0]["Plan"]]
    while pending:
        step = pending.pop(0)
        if "pg_publication" in json.dumps(step) and step.get("Parent Relationship") == "InitPlan":
            continue  # once for the statement: whether the outbox is published from the log
        steps.append(step)
        pending.extend(step.get("Plans", ()))
    return steps


def indexes(steps) -> set[str]:
    return {step["Index Name"] for step in steps if "Index Name" in step}


def kinds(steps) -> set[str]:
    return {step["Node Type"] for step in steps}


def test_a_claim_enters_the_index_of_waiting_rows_and_sorts_nothing(engine):
    statements = PsycopgClaimer(engine, outbox_layout(), ordered=False)
    for held in ((), ([5, 6],)):
        steps = plan(engine, statements._queries[False, bool(held)], (7, *held, 100))
        assert indexes(steps) == {"outbox_claimable"}
        assert kinds(steps).isdisjoint({"Sort", "Seq Scan", "Bitmap Heap Scan"})


def test_the_mark_goes_by_the_primary_key(engine):
    statements = PsycopgClaimer(engine, outbox_layout(), ordered=False)
    ids = list(range(1, 101))
    assert indexes(plan(engine, statements._publish_sql, (ids,))) == {"outbox_pkey"}
    failures = (ids, ["no"] * 100, [False] * 100)
    steps = plan(engine, statements._fail_sql, failures)
    assert indexes(steps) == {"outbox_pkey"}
    assert "Seq Scan" not in kinds(steps)


def test_an_ordered_claim_steps_from_key_to_key(engine):
    sql = claim.lock_keys(outbox_layout(), "outbox", engine.dialect, beyond=">=")
    for name, value in (("after", "''"), ("held", "'{}'"), ("name", "'outbox'"), ("count", "100")):
        sql = sql.replace(f":{name}", value)
    steps = plan(engine, sql)
    assert indexes(steps) == {"outbox_claimable_key", "outbox_parked"}
    assert kinds(steps).isdisjoint({"Sort", "Seq Scan", "Hash Join"})


def test_the_rows_of_a_key_are_found_by_the_key(engine):
    statements = PsycopgClaimer(engine, outbox_layout(), ordered=True)
    steps = plan(engine, statements._of_keys_sql, (50, ["k1", "k2"], 50))
    assert indexes(steps) == {"outbox_claimable_key", "outbox_parked"}
    assert kinds(steps).isdisjoint({"Sort", "Seq Scan", "Hash Join"})


@pytest.mark.parametrize(
    ("table", "column", "index"),
    [
        ("processed_messages", "created_at", "processed_messages_created_at"),
        ("outbox", "published_at", "outbox_published_at"),
    ],
)
def test_cleanup_starts_at_the_oldest(engine, table, column, index):
    sql = cleanup._POSTGRESQL.format(table=table, column=column, needs="")
    steps = plan(engine, sql.replace(":seconds", "604800").replace(":batch", "1000"))
    assert indexes(steps) == {index}
    assert "Tid Scan" in kinds(steps)
    assert kinds(steps).isdisjoint({"Sort", "Seq Scan"})


def test_a_reader_of_the_log_enters_at_its_position(engine):
    sql = log._POSTGRESQL.format(table="outbox")
    with engine.connect() as connection:
        last = connection.execute(text("SELECT max(xid::text::bigint) FROM outbox")).scalar_one()
    for name, value in ((":xid", f"'{last}'"), (":id", "5000"), (":limit", "1000")):
        sql = sql.replace(name, value)
    steps = plan(engine, sql)
    assert indexes(steps) == {"outbox_log"}
    [entry] = [step for step in steps if "Index Name" in step]
    assert "ROW(xid, id) > ROW(" in entry["Index Cond"]
    assert kinds(steps).isdisjoint({"Sort", "Seq Scan"})


def test_sqlite_claims_by_the_index_of_waiting_rows(sqlite):
    columns = "published_at IS NULL AND parked_at IS NULL ORDER BY id LIMIT 100"
    with sqlite.connect() as connection:
        query = f"EXPLAIN QUERY PLAN SELECT id, data FROM outbox WHERE {columns}"
        steps = " ".join(step[-1] for step in connection.execute(text(query)))
    assert "outbox_claimable" in steps
    assert "TEMP B-TREE" not in steps


WAITING = 20_000
RETRIES = """
INSERT INTO outbox_retries (id, consumer_group, topic, partition, xid, key, attempts, next_try)
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count})
SELECT -n, 'billing', 'orders', 0, 0, {key}, 1, 4e9 + n FROM numbers
"""
KEYS = {"keys": "'far-' || n", "one key": "'far'", "no keys": "NULL"}


def fail_and_come_back(engine) -> None:
    """Let messages of two keys fail, others wait behind them, and all come back."""
    source = LogSource(engine, "orders", "billing", partitions=1)
    source.allow_delays(3, ordered=True)
    keys = ["near", "far", "near"]
    with engine.begin() as connection:
        named = [{"id": str(place), "type": "x", "subject": key} for place, key in enumerate(keys)]
        Outbox("orders", source="/shop").add(connection, [Message(b"{}", one) for one in named])
    read = []

    def is_read() -> bool:
        for message in source.read(1, 0.05):
            if message.deliveries == 1 and message.id == "0":
                message.nack(TryLater(0.01, ValueError("no stock")))
                continue
            message.ack()
            read.append(message.id)
        return {"0", "2"} <= set(read)

    eventually(is_read, timeout=60)
    source.close()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("has_statistics", [False, True])
def test_a_retry_visits_none_of_those_that_wait(server, key, has_statistics):
    url = server.create_database()
    with made(url) as engine:
        schema.init(engine)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ALTER TABLE outbox_retries SET (autovacuum_enabled = false)"))
            connection.exec_driver_sql(RETRIES.format(count=WAITING, key=KEYS[key]))
            if has_statistics:
                connection.exec_driver_sql("ANALYZE outbox_retries")
        seen = {}

        @event.listens_for(engine, "before_cursor_execute")
        def note(connection, cursor, statement, given, context, is_many) -> None:
            if "outbox_retries" in statement and isinstance(given, dict):
                seen[statement] = given

        fail_and_come_back(engine)
        event.remove(engine, "before_cursor_execute", note)
        assert len(seen) >= 5
        for statement, given in seen.items():
            steps = plan(engine, statement, given, options="ANALYZE, ")
            parts = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
            visited = sum(
                step.get(part, 0) * step["Actual Loops"] for step in steps for part in parts
            )
            assert visited < 200, statement
    server.drop_database(url)


@pytest.mark.parametrize("key", KEYS)
def test_on_sqlite_a_retry_visits_none_of_those_that_wait(sqlite, key):
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    def watch(connection, record) -> None:
        connection.set_progress_handler(count, 1_000)

    with sqlite.begin() as connection:
        connection.exec_driver_sql(RETRIES.format(count=WAITING, key=KEYS[key]))
    sqlite.dispose()
    event.listen(sqlite, "connect", watch)
    fail_and_come_back(sqlite)
    assert steps < WAITING / 1_000  # in thousands: less than one for each that waits
