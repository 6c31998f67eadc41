"""The SQL half against the same work by hand, with psycopg and redis-py, on PostgreSQL.

python bench/sql.py [--quick] [--json FILE]

handle   a message takes effect once: inbox, one upsert by the handler, one outbox row, ack;
         also by handlers of list[T], and with a savepoint per message, beside the default
relay    rows of the outbox to a Redis stream: claim, XADD, mark
claim    what a claim costs, with more and more rows in the table
memory   of a worker, after a tenth of its messages and at the end

fsync and synchronous_commit are on. Messages have 300 bytes of JSON.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import gc
import itertools
import resource
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import redis
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    bindparam,
    func,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from bench.harness import Case, Options, Seconds, arguments, compare, measure, report
from conquiet import Acking, Message, Router, Worker, embedded
from conquiet.acking import settle
from conquiet.errors import GivenBack, SinkUnavailable
from conquiet.relay import publish_batch
from conquiet.sink import Sink
from conquiet.source import EndOfSource
from conquiet.sql import Inbox, Outbox, OutboxSource, Transaction, connection, engine, schema

UPSERT = (
    "INSERT INTO orders (id, total) VALUES (%s, %s)"
    " ON CONFLICT (id) DO UPDATE SET total = orders.total + excluded.total"
)
ORDERS = "CREATE TABLE orders (id text PRIMARY KEY, total integer NOT NULL)"
FILLING = "x" * 200
SAVEPOINTS = "a savepoint per message"
LISTS = "list[T], one statement"
MANY = "list[T], executemany"

orders = Table("orders", MetaData(), Column("id", Text), Column("total", Integer))
_save = insert(orders)
SAVE = _save.on_conflict_do_update(
    index_elements=[orders.c.id], set_={"total": orders.c.total + _save.excluded.total}
)


_bulk = insert(orders).from_select(
    ["id", "total"],
    select(
        func.unnest(bindparam("ids", type_=ARRAY(Text))),
        func.unnest(bindparam("totals", type_=ARRAY(Integer))),
    ),
)
SAVE_ALL = _bulk.on_conflict_do_update(
    index_elements=[orders.c.id], set_={"total": orders.c.total + _bulk.excluded.total}
)


class PlaceOrder(msgspec.Struct):
    order_id: str
    total: int
    note: str


class OrderPlaced(msgspec.Struct):
    order_id: str
    total: int
    note: str


_names = itertools.count()
_encode = msgspec.json.Encoder().encode
_order = msgspec.json.Decoder(PlaceOrder).decode
_attributes = msgspec.json.Decoder(dict[str, str]).decode


def main() -> None:
    options = arguments(__doc__)
    cases: list[Case] = []
    with embedded.postgres(private=True) as server, embedded.redis(private=True) as streams:
        cases.extend(handle(server, options))
        cases.extend(relay(server, streams.url, options))
        cases.extend(claim(server, options))
        cases.append(memory(server, options))
    report(cases, options)


def prepared(server: embedded.PostgresServer) -> tuple[str, Engine]:
    url = server.create_database()
    made = engine(url)
    schema.init(made)
    with psycopg.connect(url, autocommit=True) as direct:
        direct.execute(ORDERS)
    return url, made


# --- handle ---------------------------------------------------------------------------------


def handle(server: embedded.PostgresServer, options: Options) -> list[Case]:
    cases: list[Case] = []
    rounds = 3 if options.quick else 7
    for batch in (1, 50, 200, 500):
        url, made = prepared(server)
        count = 500 if batch == 1 else 5_000
        if options.quick:
            count = 100 if batch == 1 else 1_000
        router, isolating = orders_router(made), orders_router(made, isolate="savepoint")
        lists, many = list_router(made, save_all), list_router(made, save_many)
        with psycopg.connect(url) as direct:
            hand = ByHand(direct)
            contestants: dict[str, Callable[[], object]] = {
                "conquiet": partial(run, router.process, count, batch)
            }
            if batch == 1:
                contestants["a transaction per message"] = partial(
                    run, hand.one_upsert_each, count, 1
                )
            else:
                contestants[LISTS] = partial(run, lists.process, count, batch)
                contestants[MANY] = partial(run, many.process, count, batch)
                contestants[SAVEPOINTS] = partial(run, isolating.process, count, batch)
                contestants["everything in bulk"] = partial(run, hand.in_bulk, count, batch)
                contestants["an upsert per message"] = partial(
                    run, hand.one_upsert_each, count, batch
                )
            seconds = measure(contestants, rounds=rounds)
            if batch == 200:
                few = 100 if options.quick else 500
                slow = {"slow": partial(run, hand.one_upsert_each, few, 1)}
                taken = measure(slow, rounds=rounds)["slow"]
                scale = count / few
                seconds["a transaction per message"] = Seconds(
                    taken.best * scale, taken.median * scale
                )
        cases += [
            compare("handle", count, seconds, "conquiet", floor, batch=batch)
            for floor in seconds
            if floor not in ("conquiet", LISTS, MANY, SAVEPOINTS)
        ]
        cases += [
            compare(f"handle, {name}", count, seconds, name, "everything in bulk", batch=batch)
            for name in (LISTS, MANY)
            if name in seconds
        ]
        if SAVEPOINTS in seconds:
            name = f"handle, {SAVEPOINTS}"
            cases.append(compare(name, count, seconds, SAVEPOINTS, "conquiet", batch=batch))
        for one in (router, isolating, lists, many):
            one.close()
        made.dispose()
    return cases


def run(process: Callable[[Sequence[Message[bytes]]], object], count: int, batch: int) -> None:
    for messages in batches(count, batch):
        process(messages)


def orders_router(made: Engine, **options: Any) -> Router:
    router = Router()
    router.use(Transaction(made, **options), Inbox("billing"), Outbox("orders"))

    @router.command(source="/shop")
    def place_order(order: PlaceOrder) -> list[OrderPlaced]:
        with connection(made) as found:
            found.execute(SAVE, {"id": order.order_id, "total": order.total})
        return [OrderPlaced(order.order_id, order.total, order.note)]

    return router


def list_router(made: Engine, save: Callable[[Connection, list[PlaceOrder]], object]) -> Router:
    router = Router()
    router.use(Transaction(made), Inbox("billing"), Outbox("orders"))

    @router.command(source="/shop")
    def place_orders(orders: list[PlaceOrder]) -> list[OrderPlaced]:
        with connection(made) as found:
            save(found, orders)
        return [OrderPlaced(order.order_id, order.total, order.note) for order in orders]

    return router


def save_all(found: Connection, orders: list[PlaceOrder]) -> None:
    found.execute(
        SAVE_ALL, {"ids": [o.order_id for o in orders], "totals": [o.total for o in orders]}
    )


def save_many(found: Connection, orders: list[PlaceOrder]) -> None:
    found.execute(SAVE, [{"id": order.order_id, "total": order.total} for order in orders])


def batches(count: int, size: int) -> Sequence[Sequence[Message[bytes]]]:
    """Messages that were never seen before; making them is part of everybody's time."""
    name = next(_names)
    made = [message(f"{name}-{number}") for number in range(count)]
    return [made[start : start + size] for start in range(0, count, size)]


def message(name: str) -> Message[bytes]:
    data = _encode(PlaceOrder(f"o-{name}", 7, FILLING))
    return Message(
        data, {"id": name, "type": "place.order", "source": "/web"}, acking=Acking(_done)
    )


class _Done:
    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Exception | None]]) -> None:
        if nacked:
            raise AssertionError(f"failed: {nacked[0][1]!r}")


_done = _Done()


class ByHand:
    """What a careful user of psycopg writes: one statement for all, in one transaction."""

    INBOX = (
        "INSERT INTO processed_messages (subscriber, message_id)"
        " SELECT 'billing', m FROM unnest(%s::text[]) AS m"
        " ON CONFLICT DO NOTHING RETURNING message_id"
    )
    BULK = (
        "INSERT INTO orders (id, total) SELECT * FROM unnest(%s::text[], %s::integer[])"
        " ON CONFLICT (id) DO UPDATE SET total = orders.total + excluded.total"
    )
    OUTBOX = (
        "INSERT INTO outbox (topic, event_type, event_id, content_type, data, attributes)"
        " SELECT 'orders', 'order.placed', e, 'application/json', d, a::jsonb"
        " FROM unnest(%b::text[], %b::bytea[], %b::text[]) AS row (e, d, a)"
    )

    def __init__(self, direct: psycopg.Connection[Any]) -> None:
        self._direct = direct

    def in_bulk(self, messages: Sequence[Message[bytes]]) -> None:
        self._handle(messages, self._upsert_all)

    def one_upsert_each(self, messages: Sequence[Message[bytes]]) -> None:
        self._handle(messages, self._upsert_each)

    def _handle(
        self,
        messages: Sequence[Message[bytes]],
        upsert: Callable[[psycopg.Cursor[Any], list[PlaceOrder]], None],
    ) -> None:
        with self._direct.cursor() as cursor:
            ids = [f"/web {item.attributes['id']}" for item in messages]
            fresh = {row[0] for row in cursor.execute(self.INBOX, (ids,)).fetchall()}
            placed = [
                _order(item.data) for item, id_ in zip(messages, ids, strict=True) if id_ in fresh
            ]
            upsert(cursor, placed)
            names = [str(uuid.uuid4()) for _ in placed]
            data = [_encode(OrderPlaced(o.order_id, o.total, o.note)) for o in placed]
            attributes = [
                _encode(
                    {
                        "specversion": "1.0",
                        "id": name,
                        "type": "order.placed",
                        "source": "/shop",
                        "time": datetime.now(UTC).isoformat(),
                        "datacontenttype": "application/json",
                    }
                ).decode()
                for name in names
            ]
            cursor.execute(self.OUTBOX, (names, data, attributes))
        self._direct.commit()
        settle([item.acking for item in messages if item.acking])

    def _upsert_all(self, cursor: psycopg.Cursor[Any], orders: list[PlaceOrder]) -> None:
        cursor.execute(self.BULK, ([o.order_id for o in orders], [o.total for o in orders]))

    def _upsert_each(self, cursor: psycopg.Cursor[Any], orders: list[PlaceOrder]) -> None:
        for order in orders:
            cursor.execute(UPSERT, (order.order_id, order.total))


# --- relay ----------------------------------------------------------------------------------


FILL = """
INSERT INTO outbox (topic, event_type, event_id, key, content_type, data, attributes, published_at)
SELECT 'orders', 'order.placed', 'e-' || n, 'k' || mod(n, 1000), 'application/json',
       convert_to('{"order_id": "o-' || n || '", "note": "' || repeat('x', 260) || '"}', 'UTF8'),
       jsonb_build_object('specversion', '1.0', 'id', 'e-' || n, 'type', 'order.placed',
                          'source', '/shop', 'time', '2026-01-31T12:00:00.000000Z',
                          'partitionkey', 'k' || mod(n, 1000)),
       CASE WHEN n <= %s THEN now() END
  FROM generate_series(1, %s) AS n
"""


def fill(direct: psycopg.Connection[Any], count: int, published: int = 0) -> None:
    direct.execute("TRUNCATE outbox")
    direct.execute(FILL, (published, count))
    direct.commit()
    direct.autocommit = True
    direct.execute("VACUUM ANALYZE outbox")
    direct.execute("CHECKPOINT")
    direct.autocommit = False


class StreamSink(Sink):
    """A pipeline of XADD: what a sink does at the least."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Exception | None]:
        pipeline = self._client.pipeline(transaction=False)
        for item in messages:
            pipeline.execute_command(*xadd(item.topic or "", item.attributes, item.data))
        try:
            replies = pipeline.execute(raise_on_error=False)
        except redis.ConnectionError as error:
            raise SinkUnavailable(str(error)) from error
        return [reply if isinstance(reply, Exception) else None for reply in replies]

    def close(self) -> None:
        self._client.close()


def xadd(topic: str, attributes: dict[str, Any], data: bytes) -> list[Any]:
    parts: list[Any] = ["XADD", topic, "*"]
    for name, value in attributes.items():
        parts += (name, value)
    parts += ("data", data)
    return parts


def relay(server: embedded.PostgresServer, redis_url: str, options: Options) -> list[Case]:
    count = 5_000 if options.quick else 100_000
    cases: list[Case] = []
    url, made = prepared(server)
    with psycopg.connect(url) as direct, redis.Redis.from_url(redis_url) as client:
        sink = StreamSink(client)

        def refill() -> None:
            client.flushall()
            fill(direct, count)

        for batch in (50, 500):
            contestants: dict[str, Callable[[], int]] = {
                "conquiet": partial(drain, made, sink, batch),
                "by hand": partial(drain_by_hand, direct, client, batch),
            }
            if batch == 500:
                contestants["ordered by key"] = partial(drain, made, sink, batch, ordered=True)
            seconds = alternately(contestants, refill, count, rounds=3 if options.quick else 5)
            cases.append(compare("relay", count, seconds, "conquiet", "by hand", batch=batch))
            if batch == 500:
                name = "ordered by key"
                keys = {"batch": batch, "keys": 1000}
                cases.append(compare(f"relay, {name}", count, seconds, name, "by hand", **keys))
    made.dispose()
    return cases


def drain(made: Engine, sink: StreamSink, limit: int, ordered: bool = False) -> int:
    source = OutboxSource(made, wakeup=False, ordered=ordered)
    done = 0
    while published := publish_batch(source, sink, limit).published:
        done += published
    source.close()
    return done


def drain_by_hand(direct: psycopg.Connection[Any], client: Any, limit: int) -> int:
    done = 0
    while True:
        with direct.cursor(binary=True) as cursor:
            cursor.execute(
                "SELECT id, topic, data, attributes::text FROM outbox"
                " WHERE published_at IS NULL AND parked_at IS NULL"
                " ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED",
                (limit,),
            )
            rows = cursor.fetchall()
            if not rows:
                direct.rollback()
                return done
            pipeline = client.pipeline(transaction=False)
            for _, topic, data, attributes in rows:
                pipeline.execute_command(*xadd(topic, _attributes(attributes), data))
            pipeline.execute()
            cursor.execute(
                "UPDATE outbox SET published_at = now() WHERE id = ANY(%s)",
                ([row[0] for row in rows],),
            )
        direct.commit()
        done += len(rows)


def alternately(
    contestants: dict[str, Callable[[], int]],
    prepare: Callable[[], None],
    count: int,
    *,
    rounds: int,
) -> dict[str, Seconds]:
    """As measure(), with a preparation before each that is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            prepare()
            gc.collect()
            start = time.perf_counter()
            done = run()
            taken[name].append(time.perf_counter() - start)
            if done != count:
                raise AssertionError(f"{name} published {done} of {count} rows")
    return {name: Seconds(min(all_), statistics.median(all_)) for name, all_ in taken.items()}


# --- claim ----------------------------------------------------------------------------------


def claim(server: embedded.PostgresServer, options: Options) -> list[Case]:
    """100 rows claimed and given back, with ever more rows around them."""
    sizes = (1_000, 100_000) if options.quick else (1_000, 100_000, 1_000_000)
    cases: list[Case] = []
    for kind in ("published", "waiting"):
        first: Case | None = None
        for size in sizes:
            url, made = prepared(server)
            with psycopg.connect(url) as direct:
                fill(direct, size, published=size - 200 if kind == "published" else 0)
            source = OutboxSource(made, wakeup=False)

            def claims(source: OutboxSource = source) -> None:
                for _ in range(50):
                    messages = source.read(100, 0)
                    assert len(messages) == 100
                    settle([], [(m.acking, GivenBack("")) for m in messages if m.acking])

            seconds = measure({"conquiet": claims}, rounds=3 if options.quick else 7)
            case = compare("claim of 100", 50, seconds, "conquiet", rows=size, most=kind)
            if first is None:
                first = case
            else:
                case.floor, case.floor_rate = "1,000 rows", first.rate
                case.ratio = case.rate / first.rate
            cases.append(case)
            source.close()
            made.dispose()
            server.drop_database(url)
    return cases


# --- memory ---------------------------------------------------------------------------------


class Endless:
    """Makes messages until it has made enough of them."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._count = count
        self.early = 0.0

    def read(self, limit: int, timeout: float) -> Sequence[Message[bytes]]:
        if not self._left:
            raise EndOfSource
        if not self.early and self._left <= self._count * 0.9:
            self.early = resident()
        taken = min(limit, self._left)
        self._left -= taken
        return [message(f"memory-{self._left + number}") for number in range(taken)]

    def close(self) -> None:
        """Nothing is held."""


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def memory(server: embedded.PostgresServer, options: Options) -> Case:
    count = 10_000 if options.quick else 1_000_000
    _, made = prepared(server)
    source = Endless(count)
    worker = Worker(source, orders_router(made), batch_size=500)
    start = time.perf_counter()
    worker.run()
    seconds = time.perf_counter() - start
    late = resident()
    health = worker.health()
    made.dispose()
    if health.failed or health.handled != count:
        raise AssertionError(f"{health.failed} of {health.handled} messages failed")
    return Case(
        name="worker, memory",
        rate=count / seconds,
        settings={
            "messages": count,
            "MB_after_a_tenth": round(source.early, 1),
            "MB_at_the_end": round(late, 1),
        },
    )


if __name__ == "__main__":
    main()
