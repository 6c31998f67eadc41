"""The outbox of PostgreSQL as the log: consumed, and with an upsert of each message.

python bench/sql_log.py [--quick] [--json FILE]

consume     LogSource beside a plain cursor over the same columns: read 200, ack 200.
upsert      a worker's chain on batches of 200, with one upsert of 200 rows: the position in the
            transaction of the effects (PositionInbox) beside a row per message (Inbox).
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

from collections.abc import Iterator
from typing import Any

import psycopg
from sqlalchemy import Engine, text

from bench.harness import Case, arguments, compare, measure, report
from conquiet import Message, Router, embedded
from conquiet.acking import settle
from conquiet.message import new_id
from conquiet.sql import (
    Inbox,
    LogSource,
    Outbox,
    PositionInbox,
    Transaction,
    connection,
    engine,
    schema,
)

BATCH = 200
ATTRIBUTES = {
    "type": "order.placed",
    "source": "/shop",
    "time": "2026-01-31T12:00:00Z",
    "datacontenttype": "application/json",
}
DATA = b'{"order": 1234567, "customer": "customer-17", "amount": 4200}'
UPSERT = text(
    "INSERT INTO orders (id, amount) SELECT id, 1 FROM unnest(CAST(:ids AS text[])) AS id"
    " ON CONFLICT (id) DO UPDATE SET amount = orders.amount + 1"
)
ROWS = (
    "SELECT xid::text::bigint, id, event_type, event_id, key, content_type, data, attributes::text"
    " FROM outbox WHERE topic = 'orders' ORDER BY xid, id"
)


def main() -> None:
    options = arguments(__doc__)
    messages, rounds = (20_000, 3) if options.quick else (50_000, 5)
    with embedded.postgres(private=True) as server:
        made = engine(server.url)
        schema.init(made)
        with made.begin() as opened:
            opened.execute(text("CREATE TABLE orders (id TEXT PRIMARY KEY, amount INTEGER)"))
        _fill(made, messages)
        report(
            [*_consume(made, server.url, messages, rounds), *_upsert(made, messages, rounds)],
            options,
        )
        made.dispose()


def _fill(made: Engine, count: int) -> None:
    outbox = Outbox("orders")
    for start in range(0, count, 1_000):
        batch = [
            Message(DATA, {**ATTRIBUTES, "id": new_id(), "subject": f"order-{number}"})
            for number in range(start, start + 1_000)
        ]
        with made.begin() as opened:
            outbox.add(opened, batch)
    with made.begin() as opened:
        opened.execute(text("ANALYZE outbox"))


def _consume(made: Engine, url: str, count: int, rounds: int) -> Iterator[Case]:
    def by_source(partitions: int) -> None:
        source = LogSource(made, "orders", new_id(), partitions=partitions)
        done = 0
        while done < count:
            batch = source.read(BATCH, 10.0)
            settle([message.acking for message in batch if message.acking is not None])
            done += len(batch)
        source.close()

    def by_cursor() -> None:
        with psycopg.connect(url) as opened, opened.cursor("plain") as cursor:
            cursor.execute(ROWS)
            while cursor.fetchmany(BATCH):
                pass

    seconds = measure(
        {
            "conquiet": lambda: by_source(1),
            "8 partitions": lambda: by_source(8),
            "cursor": by_cursor,
        },
        rounds=rounds,
    )
    for name, partitions in (("conquiet", 1), ("8 partitions", 8)):
        about = {"batch": BATCH, "partitions": partitions}
        yield compare("SQL log: consume", count, seconds, name, "cursor", **about)


def _upsert(made: Engine, count: int, rounds: int) -> Iterator[Case]:
    def work(position: bool, partitions: int) -> None:
        source = LogSource(made, "orders", new_id(), partitions=partitions)
        inbox: Any = Inbox(source.group)
        if position:
            inbox = PositionInbox(source, producers_repeat=False)
        router = Router()
        router.use(Transaction(made), inbox)

        @router.raw(name="upsert")
        def upsert(messages: list[Message[bytes]]) -> None:
            with connection(made) as found:
                found.execute(UPSERT, {"ids": [item.attributes["subject"] for item in messages]})

        done = 0
        while done < count:
            batch = source.read(BATCH, 10.0)
            router.process(batch)
            done += len(batch)
        source.close()

    contestants = {
        f"{name}, {partitions} partitions": lambda p=position, n=partitions: work(p, n)
        for partitions in (1, 8)
        for name, position in (("position", True), ("inbox", False))
    }
    seconds = measure(contestants, rounds=rounds)
    for partitions in (1, 8):
        ours, theirs = f"position, {partitions} partitions", f"inbox, {partitions} partitions"
        about = {"batch": BATCH, "partitions": partitions}
        yield compare("SQL log: upsert", count, seconds, ours, theirs, **about)


if __name__ == "__main__":
    main()
