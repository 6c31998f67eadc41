"""Claims of `outbox_events` use their indexes, whatever else the table holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine

from conquiet.events import schema
from conquiet.events.source import events_layout
from conquiet.sql import claim, cleanup
from conquiet.sql import engine as make_engine
from conquiet.sql.claim import PsycopgClaimer
from marketplace.catalog import CATALOG

ROWS = 20_000
LAYOUT = events_layout("outbox_events", 10)
FILL = """
INSERT INTO outbox_events (id, event_type, aggregate_type, aggregate_id, payload_json, created_at,
    published_at)
SELECT gen_random_uuid(), 'ad_paused', 'ad', md5(mod(n, 1000)::text)::uuid, '{}',
       now() - n * interval '1 second', CASE WHEN n > %s THEN now() END
  FROM generate_series(1, %s) AS n
"""
SLOW_STEPS = {"Sort", "Seq Scan", "Hash Join", "Bitmap Heap Scan"}


@pytest.fixture(scope="module", params=["backlog", "published", "stale statistics"])
def engine(request: pytest.FixtureRequest, postgres_server: Any) -> Iterator[Engine]:
    """Rows that all wait; rows that are published but for ten; and a backlog with statistics
    from before it came."""
    url = postgres_server.create_database()
    made = make_engine(url)
    schema.init(made, CATALOG, ordered=True)
    with psycopg.connect(url, autocommit=True) as connection:
        if request.param == "stale statistics":
            connection.execute("ALTER TABLE outbox_events SET (autovacuum_enabled = false)")
        connection.execute(FILL, (ROWS if request.param == "backlog" else 10, ROWS))
        connection.execute("VACUUM ANALYZE outbox_events")
        if request.param == "stale statistics":
            connection.execute(FILL, (ROWS, ROWS))
    yield made
    made.dispose()
    postgres_server.drop_database(url)


def plan(engine: Engine, statement: str, given: Any = ()) -> tuple[set[str], set[str]]:
    """The indexes of a plan, and the kinds of its steps."""
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute(LAYOUT.setting("outbox_events"))
        found = driver.execute("EXPLAIN (FORMAT JSON) " + statement, given).fetchone()[0]
    document = found if isinstance(found, list) else json.loads(found)
    indexes, kinds, pending = set(), set(), [document[0]["Plan"]]
    while pending:
        step = pending.pop()
        kinds.add(step["Node Type"])
        indexes |= {step["Index Name"]} if "Index Name" in step else set()
        pending.extend(step.get("Plans", ()))
    return indexes, kinds


def test_a_claim_reads_the_partial_index_and_sorts_nothing(engine: Engine) -> None:
    statements = PsycopgClaimer(engine, LAYOUT, ordered=False)
    indexes, kinds = plan(engine, statements._queries[False, False], (*LAYOUT.start, 50))
    assert indexes == {"outbox_events_unpublished"}
    assert kinds.isdisjoint(SLOW_STEPS)


def test_an_ordered_claim_steps_from_aggregate_to_aggregate(engine: Engine) -> None:
    sql = claim.lock_keys(LAYOUT, "outbox_events", engine.dialect, beyond=">=")
    first = f"'{LAYOUT.first_key}'"
    given = {"after": first, "held": "'{}'", "name": "'outbox_events'", "count": "50"}
    for name, value in given.items():
        sql = sql.replace(f":{name}", value)
    indexes, kinds = plan(engine, sql)
    assert indexes == {"outbox_events_by_aggregate"}
    assert kinds.isdisjoint(SLOW_STEPS)


def test_the_rows_of_an_aggregate_are_found_by_it(engine: Engine) -> None:
    statements = PsycopgClaimer(engine, LAYOUT, ordered=True)
    indexes, kinds = plan(engine, statements._of_keys_sql, (50, [LAYOUT.first_key] * 2, 50))
    assert indexes == {"outbox_events_by_aggregate"}
    assert kinds.isdisjoint(SLOW_STEPS)


def test_cleanup_starts_at_the_oldest(engine: Engine) -> None:
    sql = cleanup._POSTGRESQL.format(table="outbox_events", column="published_at", needs="")
    sql = sql.replace(":seconds", "604800").replace(":batch", "1000")
    indexes, kinds = plan(engine, sql)
    assert indexes == {"outbox_events_published_at"}
    assert kinds.isdisjoint({"Sort", "Seq Scan"})
