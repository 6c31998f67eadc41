"""Every statement that runs all the time uses its index, whatever else the table holds."""

from __future__ import annotations

import json

import psycopg
import pytest
from sqlalchemy import text
from tests.integration.sql.claiming import made

from conquiet.sql import claim, cleanup, log
from conquiet.sql.claim import PsycopgClaimer
from conquiet.sql.outbox_source import outbox_layout

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


def plan(engine, statement: str, given=()) -> list[dict]:
    """The steps of the plan, outermost first."""
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        found = driver.execute("EXPLAIN (FORMAT JSON) " + statement, given).fetchone()[0]
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
