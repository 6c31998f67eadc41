"""The same router on Spark and in plain workers: inbox, one upsert by the handler, one event."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import psycopg
import redis
from sqlalchemy import Column, MetaData, Table, Text
from sqlalchemy.dialects.postgresql import insert

from bench import spark_floors as floors
from bench.harness import Case, compare
from bench.spark_ground import Ground, Run, in_turn
from conquiet import Router, Worker
from conquiet.redis import StreamSource
from conquiet.spark import SparkWorker
from conquiet.sql import Inbox, Outbox, Transaction, connection, engine, schema

BATCH = 500
ORDERS = "CREATE TABLE orders (id text PRIMARY KEY, customer text NOT NULL)"
orders = Table("orders", MetaData(), Column("id", Text), Column("customer", Text))
_save = insert(orders)
SAVE = _save.on_conflict_do_update(
    index_elements=[orders.c.id], set_={"customer": _save.excluded.customer}
)


class PlaceOrder(msgspec.Struct):
    order: str
    customer: str
    text: str


class OrderPlaced(msgspec.Struct):
    order: str
    customer: str


def _nothing() -> None:
    """Nobody counts: Spark knows when its rows are done."""


def make_router(url: str, seen: Callable[[], None] = _nothing) -> Router:
    """Runs where the handlers run: in the tasks of Spark, or in a plain process."""
    made = engine(url)
    router = Router()
    router.use(Transaction(made), Inbox("shop"), Outbox("orders"))

    @router.command(source="/orders")
    def place_order(order: PlaceOrder) -> OrderPlaced:
        seen()
        with connection(made) as found:
            found.execute(SAVE, {"id": order.order, "customer": order.customer})
        return OrderPlaced(order.order, order.customer)

    return router


def handle(url: str, redis_url: str, stream: str, events: int) -> int:
    """A plain worker over a stream, until it has handled all of it."""
    left = events

    def seen() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            worker.stop()

    with redis.Redis.from_url(redis_url) as client:
        source = StreamSource(client, stream, uuid.uuid4().hex)
        worker = Worker(source, make_router(url, seen), batch_size=BATCH)
        worker.run()
    return worker.health().handled


def router(ground: Ground) -> Iterator[Case]:
    events = max(1_000, ground.events // 25) // 2 * 2
    url = ground.postgres.create_database()
    made = engine(url)
    schema.init(made)
    made.dispose()
    with psycopg.connect(url, autocommit=True) as direct:
        direct.execute(ORDERS)
        for cores, streams in ((1, ["alone"]), (2, ["pair:0", "pair:1"])):
            floors.add(ground.redis_url, streams, 0, events)
            yield _on_cores(ground, direct, url, cores, streams, events)
    with redis.Redis.from_url(ground.redis_url) as client:
        client.delete("alone", "pair:0", "pair:1")
    ground.postgres.drop_database(url)


def _on_cores(
    ground: Ground,
    direct: psycopg.Connection,
    url: str,
    cores: int,
    streams: list[str],
    events: int,
) -> Case:
    def empty() -> None:
        direct.execute("TRUNCATE orders, outbox, processed_messages")
        direct.execute("CHECKPOINT")

    def count() -> int:
        """As many orders as events, and each has told of itself."""
        tables = ("orders", "outbox", "processed_messages")
        found = {
            direct.execute(f"SELECT count(*) FROM {one}".encode()).fetchall()[0] for one in tables
        }
        return int(min(found)[0]) if len(found) == 1 else -1

    def on_spark() -> None:
        reader = ground.spark.read.format("conquiet").options(url=ground.redis_url)
        reader = reader.options(streams=",".join(streams), minPartitions=cores)
        frame = reader.load().coalesce(cores)
        SparkWorker(partial(make_router, url), frame, batch_size=BATCH).run()

    shares = [(url, ground.redis_url, stream, events // cores) for stream in streams]
    floor = f"{cores} plain worker{'s' if cores > 1 else ''}"
    runs = {
        floor: Run(ground.in_two_processes(handle, *shares), count, empty),
        "spark": Run(on_spark, count, empty),
    }
    seconds = in_turn(runs, events, ground.rounds)
    return compare(
        "router on Spark", events, seconds, "spark", floor, tasks=cores, batch=BATCH, events=events
    )
