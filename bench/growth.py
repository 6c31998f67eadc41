"""What inbox and outbox cost on PostgreSQL as they grow, as one table and by day.

python bench/growth.py [--quick] [--json FILE]

claim    100 rows claimed and given back
handle   100 messages with random ids in a transaction: a row of inbox and outbox each
cleanup  expired rows deleted, by batches of 1,000 rows; by day, whole days dropped

All rows of an outbox but the last 500 are published, over the last 8 days. Each size is compared
with the smallest, in turns; `pages` of tables and indexes that one operation visits do not depend
on the load of the machine. Rows have 100 bytes of data. fsync and synchronous_commit are on.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import psycopg

from bench.harness import Case, arguments, measure, report
from conquiet import Message, Router, embedded
from conquiet.acking import settle
from conquiet.errors import GivenBack
from conquiet.sql import Cleanup, Inbox, Outbox, OutboxSource, Transaction, engine, schema

WAITING = 500
EXPIRED = 2_000
DAYS = 8
TIMES = 20
ORDER = {"type": "order.placed", "source": "/shop"}

OUTBOX = f"""
INSERT INTO outbox (topic, event_type, event_id, key, content_type, data, attributes, published_at,
                    created_at)
SELECT 'orders', 'order.placed', 'e-' || n, 'k' || mod(n, 1000), 'application/json',
       convert_to(repeat('x', 100), 'UTF8'),
       '{{"id": "e", "type": "order.placed", "source": "/shop", "specversion": "1.0"}}',
       CASE WHEN n <= %(rows)s - {WAITING} THEN at END, at
  FROM (SELECT n, now() - interval '{DAYS} days' * (1 - n::float8 / %(rows)s) AS at
          FROM generate_series(1, %(rows)s::bigint) AS n) AS made
"""
INBOX = """
INSERT INTO processed_messages (subscriber, message_id, created_at)
SELECT 'billing', '/web ' || md5(n::text), now() - interval '6 days' * (1 - n::float8 / %(rows)s)
  FROM generate_series(1, %(rows)s::bigint) AS n
"""
EXPIRE = """
UPDATE {table} SET {column} = now() - interval '30 days' WHERE ctid IN (
    SELECT ctid FROM {table} WHERE {column} IS NOT NULL ORDER BY {column} LIMIT %(rows)s)
"""


def main() -> None:
    options = arguments(__doc__)
    sizes = (10_000, 100_000) if options.quick else (100_000, 1_000_000, 10_000_000)
    with embedded.postgres(private=True) as server:
        grown = [Grown(server, size, by_day) for by_day in (False, True) for size in sizes]
        rounds = 3 if options.quick else 7
        cases: list[Case] = []
        for name, operation in OPERATIONS.items():
            runs = {one.label: partial(operation, one) for one in grown}
            seconds = measure(runs, rounds=rounds)
            for one in grown:
                case = Case(name=name, rate=TIMES / seconds[one.label].median)
                case.settings = {**one.settings, "pages": one.count_pages(operation)}
                cases.append(case)
        cases += [case for one in grown for case in clean(one)]
        for one in grown:
            one.close()
    report(compare_sizes(cases, sizes[0]), options)


def compare_sizes(cases: list[Case], smallest: int) -> list[Case]:
    first: dict[tuple[str, object], Case] = {}
    for case in cases:
        base = first.setdefault((case.name, case.settings["table"]), case)
        if base is not case:
            case.floor, case.floor_rate = f"{smallest:,} rows", base.rate
            case.ratio = case.rate / base.rate
    return cases


class Grown:
    """Is a database whose inbox and outbox have many rows."""

    def __init__(self, server: embedded.PostgresServer, size: int, by_day: bool) -> None:
        self._server = server
        self.by_day = by_day
        self.settings: dict[str, Any] = {"rows": size, "table": "by day" if by_day else "one"}
        self.label = f"{size} {by_day}"
        self.url = server.create_database()
        self.engine = engine(self.url)
        schema.init(self.engine, by_day=by_day)
        with psycopg.connect(self.url, autocommit=True) as direct:
            if by_day:
                add_past(direct)
            with without_indexes(direct):
                direct.execute("SET synchronous_commit = off")
                direct.execute(OUTBOX, {"rows": size})
                direct.execute(INBOX, {"rows": size})
            direct.execute("VACUUM ANALYZE outbox, processed_messages")
            print(f"filled with {size:,} rows{' by day' if by_day else ''}", file=sys.stderr)
            direct.execute("CHECKPOINT")
        self.free = OutboxSource(self.engine, wakeup=False)
        self.ordered = OutboxSource(self.engine, wakeup=False, ordered=True)
        self.router = Router()
        self.router.use(Transaction(self.engine), Inbox("billing"), Outbox("orders"))
        self.router.command(source="/billing")(bill)

    def count_pages(self, operation: Callable[[Grown], None]) -> int:
        """Count the pages of tables and indexes that one of `TIMES` operations visits."""
        operation(self)
        before = self._pages()
        operation(self)
        return round((self._pages() - before) / TIMES)

    def _pages(self) -> int:
        self.engine.dispose()  # the end of a connection adds what it has counted
        query = (
            "SELECT sum(blks_hit + blks_read), (SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid())"
            " FROM pg_stat_database WHERE datname = current_database()"
        )
        with psycopg.connect(self.url, autocommit=True) as direct:
            while True:
                pages, others = direct.execute(query).fetchone() or (0, 0)
                if not others:
                    return int(pages)

    def close(self) -> None:
        for one in (self.free, self.ordered, self.router):
            one.close()
        self.engine.dispose()
        self._server.drop_database(self.url)


class OrderPlaced(msgspec.Struct):
    total: int


class OrderBilled(msgspec.Struct):
    total: int


def bill(order: OrderPlaced) -> list[OrderBilled]:
    return [OrderBilled(order.total)]


def claim(one: Grown) -> None:
    give_back(one.free)


def claim_in_order(one: Grown) -> None:
    give_back(one.ordered)


def give_back(source: OutboxSource) -> None:
    for _ in range(TIMES):
        messages = source.read(100, 0)
        assert len(messages) >= 50
        settle([], [(m.acking, GivenBack("")) for m in messages if m.acking])


def insert(one: Grown) -> None:
    for _ in range(TIMES):
        ids = [str(uuid.uuid4()) for _ in range(100)]
        one.router.process([Message(b'{"total": 7}', {"id": id_, **ORDER}) for id_ in ids])


OPERATIONS = {"claim of 100": claim, "ordered claim of 100": claim_in_order, "100 handled": insert}


def clean(one: Grown) -> Iterator[Case]:
    """Expire rows, or let a day be old enough, and remove them."""
    for table, column in (("processed_messages", "created_at"), ("outbox", "published_at")):
        names: dict[str, Any] = {"inbox": None, "outbox": None}
        names["outbox" if table == "outbox" else "inbox"] = table
        if one.by_day and table == "outbox":
            cleanup = Cleanup(one.engine, retention=(DAYS - 2) * 86_400.0, **names)
        else:
            with psycopg.connect(one.url, autocommit=True) as direct:
                direct.execute(EXPIRE.format(table=table, column=column), {"rows": EXPIRED})
                direct.execute(f"VACUUM {table}")
            cleanup = Cleanup(one.engine, retention=20 * 86_400.0, **names)
        start = time.perf_counter()
        removed = cleanup.run_once()
        taken = time.perf_counter() - start
        count = removed.inbox + removed.outbox
        assert count
        settings = {**one.settings, "removed": count, "ms": round(taken * 1000)}
        yield Case(name=f"cleanup of {table}", rate=count / taken, settings=settings)


def add_past(direct: psycopg.Connection[Any]) -> None:
    """Give the outbox the days that it would have after DAYS days."""
    direct.execute("ALTER TABLE outbox DETACH PARTITION outbox_first")
    direct.execute("DROP TABLE outbox_first")
    for ago in range(DAYS + 1):
        row = direct.execute(
            "SELECT format('FOR VALUES FROM (%%L) TO (%%L)', to_char(day, 'YYYY-MM-DD 00:00+00'),"
            " to_char(day + interval '1 day', 'YYYY-MM-DD 00:00+00')), to_char(day, 'YYYYMMDD')"
            " FROM (SELECT (now() AT TIME ZONE 'UTC') - make_interval(days => %s) AS day) AS d",
            (ago,),
        ).fetchone()
        assert row is not None
        bounds, name = row
        direct.execute(f"CREATE TABLE outbox_d{name} (LIKE outbox INCLUDING ALL, PRIMARY KEY (id))")
        direct.execute(f"ALTER TABLE outbox ATTACH PARTITION outbox_d{name} {bounds}")
        quoted = bounds.replace("'", "''")
        direct.execute(f"COMMENT ON TABLE outbox_d{name} IS '{quoted}'")


@contextmanager
def without_indexes(direct: psycopg.Connection[Any]) -> Iterator[None]:
    """Create the indexes again when the tables are filled, which is quicker."""
    found = direct.execute(
        "SELECT indexrelid::regclass::text, indrelid::regclass::text, indisprimary,"
        " replace(pg_get_indexdef(indexrelid), ' ON ONLY ', ' ON '),"
        " pg_get_constraintdef((SELECT oid FROM pg_constraint WHERE conindid = indexrelid"
        " AND contype = 'p')) FROM pg_index WHERE indrelid IN ('outbox'::regclass,"
        " 'processed_messages'::regclass)"
    ).fetchall()
    for name, table, is_key, *_ in found:
        direct.execute(
            f"ALTER TABLE {table} DROP CONSTRAINT {name}" if is_key else f"DROP INDEX {name}"
        )
    yield
    direct.execute("SET maintenance_work_mem = '512MB'")
    for name, table, is_key, definition, key in found:
        direct.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} {key}" if is_key else definition)


if __name__ == "__main__":
    main()
