"""PostgreSQL: an outbox read into a frame, and a frame upserted into a table."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
from pyspark.sql import DataFrame

from bench import spark_floors as floors
from bench.harness import Case, compare
from bench.spark_ground import Ground, Run, in_turn, judged
from conquiet.events import emit
from conquiet.events import schema as events_schema
from conquiet.sql import engine, schema
from marketplace.catalog import CATALOG, NotificationRequested

TWO_COPIES, ONE_COPY = "two COPY processes", "COPY"
STAGED = "INSERT … ON CONFLICT alone"

OUTBOX = """
INSERT INTO outbox (topic, event_type, event_id, key, content_type, data, attributes)
SELECT 'orders', 'order.placed', 'e-' || lpad(n::text, 12, '0'), 'k' || mod(n, 1000),
       'application/json',
       convert_to('{"order": "o-' || n || '", "text": "' || repeat('x', 150) || '"}', 'UTF8'),
       jsonb_build_object('specversion', '1.0', 'id', 'e-' || lpad(n::text, 12, '0'),
                          'type', 'order.placed', 'source', '/shop',
                          'subject', 'k' || mod(n, 1000), 'partitionkey', 'k' || mod(n, 1000),
                          'time', '2026-01-31T12:00:00.000000Z',
                          'datacontenttype', 'application/json')
  FROM generate_series(1, %s) AS n
"""
# Ids as emit() demands them, UUIDv7: rows lie in their order, as they do in every such table.
DOMAIN_EVENTS = """
INSERT INTO outbox_events (id, event_type, aggregate_type, aggregate_id, payload_json)
SELECT CAST(lpad(to_hex(1767225600000 + n / 10), 12, '0') || '7' || lpad(to_hex(mod(n, 10)), 3, '0')
            || '8' || substr(md5(n::text), 1, 15) AS uuid),
       event_type, aggregate_type, gen_random_uuid(), payload_json
  FROM outbox_events, generate_series(2, %s) AS n
"""
MIDDLE = "SELECT id FROM {} ORDER BY id OFFSET {} LIMIT 1"
ORDERS = (
    "CREATE TABLE orders (id text PRIMARY KEY, type text, subject text, at timestamptz, data text)"
)
STAGE = "CREATE UNLOGGED TABLE staged (id text, type text, subject text, at timestamptz, data text)"
INSERT = """
INSERT INTO orders SELECT * FROM staged ON CONFLICT (id) DO UPDATE
   SET type = excluded.type, subject = excluded.subject, at = excluded.at, data = excluded.data
"""
_BLOCK_ROWS = 5_000
_DATA = "y" * 200


def outbox(ground: Ground) -> Iterator[Case]:
    url = ground.postgres.create_database()
    made = engine(url)
    schema.init(made)
    events_schema.init(made, CATALOG)
    with made.begin() as connection:  # one of each, of which the others are copies
        event = NotificationRequested(uuid.uuid4(), uuid.uuid4(), "email", "x" * 130)
        emit(connection, CATALOG.event(event, aggregate_id=event.notification_id))
    made.dispose()
    generic, domain = ground.events, max(2, ground.events // 2)
    with psycopg.connect(url, autocommit=True) as direct:
        direct.execute(OUTBOX, (generic,))
        direct.execute(DOMAIN_EVENTS, (domain,))
        direct.execute("VACUUM ANALYZE")
        direct.execute("CHECKPOINT")
    yield _read_outbox(ground, url, "outbox", generic)
    yield _read_outbox(ground, url, "outbox_events", domain)
    ground.postgres.drop_database(url)


def _read_outbox(ground: Ground, url: str, table: str, rows: int) -> Case:
    with psycopg.connect(url) as direct:
        [(middle,)] = direct.execute(MIDDLE.format(table, rows // 2)).fetchall()
    halves = (f"SELECT * FROM {table} WHERE id {side} '{middle}'" for side in ("<=", ">"))
    reader = ground.spark.read.format("conquiet-outbox").options(url=url, table=table)
    runs = {
        TWO_COPIES: Run(
            ground.in_two_processes(floors.copy_out, *((url, half) for half in halves))
        ),
        "outbox": Run(lambda: reader.load().count()),
    }
    seconds = in_turn(runs, rows, ground.rounds)
    case = compare("outbox, count", rows, seconds, "outbox", TWO_COPIES, table=table, rows=rows)
    return judged(case, 0.5, ground.events)


# --- upsert ---------------------------------------------------------------------------------


def upsert(ground: Ground) -> Iterator[Case]:
    rows = max(2, ground.events // 4)
    url = ground.postgres.create_database()
    frame = _orders(ground, rows)
    blocks = _blocks(rows)

    def by_copy(table: str = "orders") -> None:
        with (
            psycopg.connect(url) as connection,
            connection.cursor() as cursor,
            cursor.copy(f"COPY {table} FROM STDIN") as copying,
        ):
            for block in blocks:
                copying.write(block)

    def by_upsert() -> None:
        writer = frame.write.format("conquiet-upsert").mode("append")
        writer.options(url=url, table="orders", keys="id").save()

    with psycopg.connect(url, autocommit=True) as direct:

        def empty() -> None:
            direct.execute("DROP TABLE IF EXISTS orders")
            direct.execute(ORDERS)
            direct.execute("CHECKPOINT")

        def count() -> int:
            [(found,)] = direct.execute("SELECT count(*) FROM orders").fetchall()
            return int(found)

        direct.execute(STAGE)
        by_copy("staged")
        runs = {
            ONE_COPY: Run(by_copy, count, empty),
            STAGED: Run(lambda: direct.execute(INSERT), count, empty),
            "upsert": Run(by_upsert, count, empty),
        }
        seconds = in_turn(runs, rows, ground.rounds)
        yield compare(STAGED, rows, seconds, STAGED, ONE_COPY, rows=rows)
        case = compare("upsert, an empty table", rows, seconds, "upsert", ONE_COPY, rows=rows)
        yield judged(case, 0.7, ground.events)
        again = in_turn({"again": Run(by_upsert, count)}, rows, 1)
        again[ONE_COPY] = seconds[ONE_COPY]
        yield compare("upsert, every row is there", rows, again, "again", ONE_COPY, rows=rows)
    frame.unpersist()
    ground.postgres.drop_database(url)


def _orders(ground: Ground, rows: int) -> DataFrame:
    frame = (
        ground.spark.range(0, rows, 1, 2)
        .selectExpr(
            "concat('018f3a4e-7c1b-7000-8000-', lpad(id, 12, '0')) AS id",
            "'order.placed' AS type",
            "concat('customer-', lpad(id, 12, '0')) AS subject",
            "timestamp'2026-01-31 12:00:00Z' AS at",
            f"'{_DATA}' AS data",
        )
        .persist()
    )
    frame.count()
    return frame


def _blocks(rows: int) -> list[bytes]:
    """The same rows as text for COPY, made before anything is timed."""
    blocks = []
    for start in range(0, rows, _BLOCK_ROWS):
        lines = [
            f"018f3a4e-7c1b-7000-8000-{n:012d}\torder.placed\tcustomer-{n:012d}"
            f"\t2026-01-31 12:00:00+00\t{_DATA}\n"
            for n in range(start, min(rows, start + _BLOCK_ROWS))
        ]
        blocks.append("".join(lines).encode())
    return blocks
