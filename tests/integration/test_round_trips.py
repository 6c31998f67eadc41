"""Statements, commands and round trips per message, compared with `tests/round_trips.toml`.

They depend on the code alone, not on the machine: a path that asks its server more often fails
here, before a benchmark could show it. `make round-trips` writes what it counts into the file.
"""

from __future__ import annotations

import asyncio
import os
import tomllib
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import create_async_engine
from tests.round_trips import Count, PostgresCounter, count_sockets, count_statements

from conquiet import Message, Router, Worker, events
from conquiet.acking import settle
from conquiet.memory import Log
from conquiet.queue import QueueConfig, RedisStreamsQueue
from conquiet.redis import Inbox as RedisInbox
from conquiet.redis import Outbox as RedisOutbox
from conquiet.redis import StreamSink, StreamSource, commands
from conquiet.redis import Transaction as RedisTransaction
from conquiet.redis.wire import server_of
from conquiet.relay import publish_batch
from conquiet.source import Source
from conquiet.sql import (
    Inbox,
    LogSource,
    Outbox,
    OutboxSource,
    PositionInbox,
    Transaction,
    WalSource,
    async_connection,
    connection,
    engine,
    schema,
)
from marketplace.catalog import CATALOG, NotificationRequested

FILE = Path(__file__).resolve().parents[1] / "round_trips.toml"
WARM_UP, BATCHES = 8, 5
"""Batches that are not counted, since psycopg prepares statements by then, and those that are."""
LEASE = 600.0
"""No lease is renewed in between, however slow the machine is."""

orders = Table("orders", MetaData(), Column("id", Text, primary_key=True), Column("total", Integer))
_save = insert(orders)
SAVE = _save.on_conflict_do_update(
    index_elements=[orders.c.id], set_={"total": orders.c.total + _save.excluded.total}
)


class PlaceOrder(msgspec.Struct):
    order_id: str
    total: int


class OrderPlaced(msgspec.Struct):
    order_id: str


@dataclass
class Servers:
    """What a path may use; both are counted."""

    redis: redis.Redis
    redis_count: Count
    engine: Engine | None = None
    sql_count: Count | None = None

    @property
    def counts(self) -> dict[str, Count]:
        kept = {"redis": self.redis_count.copy()}
        if self.sql_count is not None:
            kept["sql"] = self.sql_count.copy()
        return kept


class Window:
    """Counts from the first message of each batch to the first message of the next.

    The least of several batches: what happens once in a while, such as the beat of a member, is no
    part of a message's path.
    """

    def __init__(self, servers: Servers, batch: int) -> None:
        self._servers = servers
        self._batch = batch
        self._handled = 0
        self._counts: list[dict[str, Count]] = []

    @property
    def size(self) -> int:
        """How many messages to publish: some are left, so that each read finds enough."""
        return (WARM_UP + 2 * BATCHES) * self._batch

    @property
    def is_over(self) -> bool:
        return len(self._counts) > BATCHES

    def note(self, messages: int = 1) -> None:
        """Note that the next messages are begun."""
        batches, begun = divmod(self._handled, self._batch)
        if not begun and batches >= WARM_UP and not self.is_over:
            self._counts.append(self._servers.counts)
        self._handled += messages

    def per_message(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for name, what in (("sql", "statements"), ("redis", "commands")):
            if name in self._counts[0]:
                counts = [kept[name] for kept in self._counts]
                used = [later.since(earlier) for earlier, later in pairwise(counts)]
                figures = {
                    what: min(count.asked for count in used) / self._batch,
                    "round_trips": min(count.trips for count in used) / self._batch,
                }
                found[name] = {key: round(value, 4) for key, value in figures.items() if value}
        return {name: figures for name, figures in found.items() if figures}


def order(number: int) -> Message[bytes]:
    data = msgspec.json.encode(PlaceOrder(f"o-{number}", 7))
    return Message(data, {"id": f"{number}", "type": "place.order", "source": "/web"})


# --- workers ------------------------------------------------------------------------------------


def work(router: Router, source: Source, servers: Servers, batch: int, effect: Any) -> Window:
    window = Window(servers, batch)

    @router.command(source="/shop")
    def place_order(order: PlaceOrder) -> OrderPlaced:
        window.note()
        if window.is_over:
            worker.stop()
        effect(order)
        return OrderPlaced(order.order_id)

    worker = Worker(source, router, batch_size=batch)
    assert worker.run()
    return window


def worker_by_sql(servers: Servers, batch: int) -> Window:
    engine = servers.engine
    assert engine is not None
    router = Router()
    router.use(Transaction(engine), Inbox("billing"), Outbox("orders", notify=False))

    def save(order: PlaceOrder) -> None:
        with connection(engine) as found:
            found.execute(SAVE, {"id": order.order_id, "total": order.total})

    return work(router, stream_of_orders(servers, batch), servers, batch, save)


def async_worker_by_sql(servers: Servers, batch: int) -> Window:
    """One group at a time, by asyncpg; the messages come from memory."""
    assert servers.engine is not None
    address = servers.engine.url.set(drivername="postgresql+asyncpg")
    window = Window(servers, batch)
    log = Log()
    log.sink().publish([order(number) for number in range(window.size)])

    async def run() -> None:
        made = create_async_engine(address, connect_args={"ssl": False})
        router = Router()
        router.use(Transaction(made), Inbox("billing"), Outbox("orders", notify=False))

        @router.command(source="/shop")
        async def place_order(order: PlaceOrder) -> OrderPlaced:
            window.note()
            if window.is_over:
                worker.stop()
            async with async_connection(made) as found:
                await found.execute(SAVE, {"id": order.order_id, "total": order.total})
            return OrderPlaced(order.order_id)

        worker = Worker(log.source("billing"), router, batch_size=batch, concurrency=1)
        assert await worker.run_async()
        await made.dispose()

    asyncio.run(run())
    return window


def worker_on_redis(servers: Servers, batch: int) -> Window:
    client = servers.redis
    router = Router()
    router.use(RedisTransaction(client), RedisInbox("billing"), RedisOutbox("orders"))

    def save(order: PlaceOrder) -> None:
        commands(client).hset(f"order:{order.order_id}", "status", "placed")

    return work(router, stream_of_orders(servers, batch), servers, batch, save)


def worker_over_log(servers: Servers, batch: int, *, position: bool) -> Window:
    engine = servers.engine
    assert engine is not None
    with engine.begin() as opened:
        size = Window(servers, batch).size
        Outbox("commands", notify=False).add(opened, [order(number) for number in range(size)])
    source = LogSource(engine, "commands", "billing", lease=LEASE, wakeup=False, partitions=1)
    inbox = PositionInbox(source, producers_repeat=False) if position else Inbox("billing")
    router = Router()
    router.use(Transaction(engine), inbox, Outbox("orders", notify=False))

    def save(order: PlaceOrder) -> None:
        with connection(engine) as found:
            found.execute(SAVE, {"id": order.order_id, "total": order.total})

    return work(router, source, servers, batch, save)


def stream_of_orders(servers: Servers, batch: int) -> StreamSource:
    size = Window(servers, batch).size
    StreamSink(servers.redis, "commands").publish([order(number) for number in range(size)])
    return StreamSource(servers.redis, "commands", "billing", lease=LEASE)


# --- sources, sinks, relay, queue ---------------------------------------------------------------


def stream_source(servers: Servers, batch: int) -> Window:
    source = stream_of_orders(servers, batch)
    window = Window(servers, batch)
    while not window.is_over:
        messages = source.read(batch, 10.0)
        window.note(len(messages))
        settle([message.acking for message in messages if message.acking is not None])
    source.close()
    return window


def stream_sink(servers: Servers, batch: int) -> Window:
    sink = StreamSink(servers.redis, "orders")
    window = Window(servers, batch)
    while not window.is_over:
        window.note(batch)
        sink.publish([order(number) for number in range(batch)])
    return window


def relay(servers: Servers, batch: int, *, ordered: bool = False) -> Window:
    engine = servers.engine
    assert engine is not None
    window = Window(servers, batch)
    with engine.begin() as opened:
        messages = [order(number) for number in range(window.size)]
        for number, message in enumerate(messages):
            message.attributes["subject"] = f"{number % 1000}"
        Outbox("orders", notify=False).add(opened, messages)
    return publish(OutboxSource(engine, wakeup=False, ordered=ordered), servers, window, batch)


def relay_from_the_log(servers: Servers, batch: int) -> Window:
    engine = servers.engine
    assert engine is not None
    window = Window(servers, batch)
    source = WalSource(engine)
    source.read(1, 0.0)  # the slot begins before the rows
    with engine.begin() as opened:
        messages = [order(number) for number in range(window.size)]
        Outbox("orders", notify=False).add(opened, messages)
    sink = StreamSink(servers.redis, "orders")
    while not window.is_over:
        window.note(batch)
        messages: list[Message[bytes]] = []
        while len(messages) < batch:  # they come when PostgreSQL has sent them
            messages += source.read(batch - len(messages), 10.0)
        sink.publish(messages)
        settle([message.acking for message in messages if message.acking is not None])
    source.close()
    return window


def relay_of_events(servers: Servers, batch: int) -> Window:
    engine = servers.engine
    assert engine is not None
    window = Window(servers, batch)
    events.schema.init(engine, CATALOG)
    with engine.begin() as opened:
        for _ in range(window.size):
            user = uuid.uuid4()
            asked = NotificationRequested(uuid.uuid4(), user, "email", "hello")
            events.emit(opened, CATALOG.event(asked, aggregate_id=asked.notification_id))
    source = events.EventSource(engine, wakeup=False, cloudevents=True)
    return publish(source, servers, window, batch)


def publish(source: Source, servers: Servers, window: Window, batch: int) -> Window:
    sink = StreamSink(servers.redis, "orders")
    while not window.is_over:
        window.note(batch)
        assert publish_batch(source, sink, batch).published == batch
    source.close()
    return window


def queue_enqueue(servers: Servers, batch: int) -> Window:
    queue = RedisStreamsQueue(servers.redis, QueueConfig("tasks", "workers", "one"))
    window = Window(servers, batch)
    while not window.is_over:
        window.note()
        queue.enqueue({"order": 1})
    return window


def queue_read(servers: Servers, batch: int) -> Window:
    queue = RedisStreamsQueue(servers.redis, QueueConfig("tasks", "workers", "one"))
    window = Window(servers, batch)
    for _ in range(window.size):
        queue.enqueue({"order": 1})
    while not window.is_over:
        messages = queue.read(10_000, batch)
        window.note(len(messages))
        for message in messages:
            queue.ack(message)
    return window


# --- Kombu --------------------------------------------------------------------------------------


def kombu_channel(servers: Servers) -> Any:
    from kombu import Connection

    import conquiet.kombu  # noqa: F401 - registers redis-streams

    settings = servers.redis.connection_pool.connection_kwargs
    url = f"redis-streams://{settings['host']}:{settings['port']}/{settings['db']}"
    return Connection(url, transport_options={"lease": LEASE}).channel()


def kombu_publish(servers: Servers, batch: int) -> Window:
    from kombu import Producer, Queue

    channel = kombu_channel(servers)
    Queue("tasks")(channel).declare()
    producer = Producer(channel, serializer="json")
    window = Window(servers, batch)
    while not window.is_over:
        window.note(batch)
        if batch == 1:
            producer.publish({"order": 1}, routing_key="tasks")
            continue
        with producer.batch(batch):
            for _ in range(batch):
                producer.publish({"order": 1}, routing_key="tasks")
    channel.connection.client.release()
    return window


def kombu_get(servers: Servers, batch: int) -> Window:
    channel = kombu_channel(servers)
    window = Window(servers, batch)
    fill_kombu(channel, window.size)
    while not window.is_over:
        window.note()
        message = channel.basic_get("tasks")
        channel.basic_ack(message.delivery_tag)
    channel.connection.client.release()
    return window


def kombu_consume(servers: Servers, batch: int) -> Window:
    from kombu import Consumer, Queue

    channel = kombu_channel(servers)
    window = Window(servers, batch)
    fill_kombu(channel, window.size)

    def receive(body: Any, message: Any) -> None:
        window.note()
        message.ack()

    client = channel.connection.client
    with Consumer(channel, [Queue("tasks")], callbacks=[receive], prefetch_count=batch):
        while not window.is_over:
            client.drain_events(timeout=60)
    client.release()
    return window


def fill_kombu(channel: Any, count: int) -> None:
    from kombu import Producer, Queue

    Queue("tasks")(channel).declare()
    producer = Producer(channel, serializer="json")
    with producer.batch(count):
        for number in range(count):
            producer.publish({"order": number}, routing_key="tasks")


# --- all of them --------------------------------------------------------------------------------

PATHS: dict[str, Callable[[Servers], Window]] = {
    "worker over PostgreSQL, batches of 1": lambda it: worker_by_sql(it, 1),
    "worker over PostgreSQL, batches of 200": lambda it: worker_by_sql(it, 200),
    "async worker over PostgreSQL, batches of 1": lambda it: async_worker_by_sql(it, 1),
    "async worker over PostgreSQL, batches of 200": lambda it: async_worker_by_sql(it, 200),
    "worker over SQLite, batches of 1": lambda it: worker_by_sql(it, 1),
    "worker over SQLite, batches of 200": lambda it: worker_by_sql(it, 200),
    "worker over Redis, batches of 1": lambda it: worker_on_redis(it, 1),
    "worker over Redis, batches of 200": lambda it: worker_on_redis(it, 200),
    "log over PostgreSQL, position, batches of 200": lambda it: worker_over_log(
        it, 200, position=True
    ),
    "log over PostgreSQL, inbox, batches of 1": lambda it: worker_over_log(it, 1, position=False),
    "log over PostgreSQL, inbox, batches of 200": lambda it: worker_over_log(
        it, 200, position=False
    ),
    "stream source, batches of 100": lambda it: stream_source(it, 100),
    "stream sink, batches of 1": lambda it: stream_sink(it, 1),
    "stream sink, batches of 100": lambda it: stream_sink(it, 100),
    "relay over PostgreSQL, batches of 100": lambda it: relay(it, 100),
    "relay over PostgreSQL, ordered, batches of 100": lambda it: relay(it, 100, ordered=True),
    "relay over PostgreSQL, from the log, batches of 100": lambda it: relay_from_the_log(it, 100),
    "relay over PostgreSQL, outbox_events, batches of 100": lambda it: relay_of_events(it, 100),
    "relay over SQLite, batches of 100": lambda it: relay(it, 100),
    "queue, enqueue": lambda it: queue_enqueue(it, 1),
    "queue, read and ack": lambda it: queue_read(it, 1),
    "queue, read 100 and ack each": lambda it: queue_read(it, 100),
    "Kombu, publish": lambda it: kombu_publish(it, 1),
    "Kombu, publish, batches of 100": lambda it: kombu_publish(it, 100),
    "Kombu, get and ack": lambda it: kombu_get(it, 1),
    "Kombu, consume and ack, prefetch 1": lambda it: kombu_consume(it, 1),
    "Kombu, consume and ack, prefetch 100": lambda it: kombu_consume(it, 100),
}


@pytest.fixture
def servers(request: pytest.FixtureRequest, redis_client: redis.Redis) -> Iterator[Servers]:
    """Redis, and the database that the path names."""
    if not server_of(redis_client).at_least("7.0"):
        pytest.skip("the file has the counts of Redis 7, which is also asked what was trimmed")
    path = request.getfixturevalue("path")
    with ExitStack() as opened:
        port = redis_client.connection_pool.connection_kwargs["port"]
        made = Servers(redis_client, opened.enter_context(count_sockets(port)).count)
        if "PostgreSQL" in path:
            proxy = opened.enter_context(PostgresCounter(request.getfixturevalue("database_url")))
            made.engine, made.sql_count = engine(proxy.url), proxy.count
        elif "SQLite" in path:
            made.engine = engine(request.getfixturevalue("sqlite_url"))
            made.sql_count = opened.enter_context(count_statements(made.engine))
        if made.engine is not None:
            opened.callback(made.engine.dispose)
            schema.init(made.engine)
            orders.create(made.engine)
        yield made


@pytest.mark.parametrize("path", PATHS)
def test_a_message_takes_no_more_statements_and_round_trips_than_the_file_says(path, servers):
    counted = PATHS[path](servers).per_message()
    if os.environ.get("ROUND_TRIPS") == "write":
        write(path, counted)
    assert counted == tomllib.loads(FILE.read_text()).get(path), (
        f"{path}: {counted} per message; if that is meant, run `make round-trips` and look at what"
        f" changed in {FILE.name}"
    )


def test_the_file_has_no_path_that_is_not_counted():
    assert list(tomllib.loads(FILE.read_text())) == list(PATHS)


def write(path: str, counted: dict[str, dict[str, float]]) -> None:
    kept = tomllib.loads(FILE.read_text())
    kept[path] = counted
    lines = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
    for name in PATHS:
        if name in kept:
            lines += ["", f'["{name}"]']
            for store, figures in kept[name].items():
                inside = ", ".join(f"{what} = {value}" for what, value in figures.items())
                lines.append(f"{store} = {{ {inside} }}")
    FILE.write_text("\n".join(lines) + "\n")
