"""The outbox: XADD in the transaction's EXEC; seed 000 from end to end."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio
from sqlalchemy import text
from tests.integration.redis.conftest import ids, numbered
from tests.waiting import eventually

from conquiet import sql
from conquiet.errors import ConfigError, HandlerError
from conquiet.message import Message
from conquiet.redis import (
    Inbox,
    Outbox,
    OutboxSource,
    StreamSink,
    StreamSource,
    Transaction,
    commands,
)
from conquiet.relay import Relay
from conquiet.router import Router
from conquiet.sql import schema
from conquiet.testing import deliver, message
from conquiet.worker import Worker

EVENTS = "outbox:events"
GREETINGS = ("HELLO", "CLIENT", "SELECT")


class PlaceOrder(msgspec.Struct):
    order: str


class OrderPlaced(msgspec.Struct):
    order: str


def produce(item: Message[bytes]) -> list[Message[Any]]:
    return [Message({"order": item.id}, {"type": "order.placed", "id": f"{item.id}/placed"})]


@pytest.fixture
def router(redis_client):
    def make(outbox, handle=produce):
        made = Router()
        made.use(Transaction(redis_client), outbox)
        made.raw(name="handler", source="/orders")(handle)
        return made

    return make


def entry(client, stream=EVENTS):
    [(_, fields)] = client.xrange(stream)
    return fields


def test_an_event_is_an_entry_in_binary_mode_that_names_its_topic(redis_client, router):
    delivered = deliver(router(Outbox("orders", EVENTS)), *numbered(1))
    assert delivered.outputs == []
    fields = entry(redis_client)
    assert fields[b":topic"] == b"orders"
    assert fields[b"id"] == b"m-0/placed"
    assert fields[b"source"] == b"/orders"
    assert fields[b"specversion"] == b"1.0"
    assert fields[b"data"] == b'{"order":"m-0"}'


def test_structured_mode_writes_json_in_one_field(redis_client, router):
    deliver(router(Outbox("orders", EVENTS, mode="structured")), *numbered(1))
    fields = entry(redis_client)
    assert set(fields) == {b":topic", b"cloudevent"}
    assert msgspec.json.decode(fields[b"cloudevent"])["data"] == {"order": "m-0"}


def test_a_marshaller_of_ones_own_writes_what_it_likes(redis_client, router):
    outbox = Outbox("orders", EVENTS, marshal=lambda event: {"kind": event.type, "n": 7, "f": 1.5})
    deliver(router(outbox), *numbered(1))
    assert entry(redis_client) == {
        b":topic": b"orders",
        b"kind": b"order.placed",
        b"n": b"7",
        b"f": b"1.5",
    }


@pytest.mark.parametrize(
    "event",
    [
        Message(b"", {"type": "t", "id": "1", "not a name": "x"}),
        Message(b"", {"type": "t", "id": "\ud800"}),
        Message(b"", {"type": "t", "id": "1", "number": 1.5}),
        Message(object(), {"type": "t", "id": "1"}),
    ],
)
def test_an_event_that_cannot_be_written_is_the_handlers_fault(redis_client, router, event):
    def handle(item: Message[bytes]) -> list[Message[Any]]:
        commands(redis_client).set("effect", 1)
        return [event]

    [error] = deliver(router(Outbox("orders", EVENTS), handle), *numbered(1)).errors
    assert isinstance(error, HandlerError)
    assert redis_client.keys() == []


def test_without_a_transaction_it_is_an_error():
    with pytest.raises(HandlerError, match="Transaction"):
        Outbox("orders", EVENTS).store([message()])
    made = Router()
    made.use(Outbox("orders", EVENTS))
    made.raw(name="handler", source="/orders")(produce)
    with pytest.raises(ConfigError, match="transaction"):
        made.start()


@pytest.mark.parametrize("settings", [{"stream": ""}, {"mode": "both"}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        Outbox("orders", **settings)


# --- without a router ---------------------------------------------------------------------------


OUTBOX = Outbox("orders", EVENTS, source="/shop")


def test_add_queues_events_in_the_callers_transaction(redis_client, recorded):
    pipeline = redis_client.pipeline()
    pipeline.hset("order:1", "status", "placed")
    ids = OUTBOX.add(pipeline, [OrderPlaced("1"), Message(b"{}", {"type": "billed", "id": "b-1"})])
    assert redis_client.keys() == []
    names = [command.split()[0] for command in recorded(pipeline.execute)]
    assert [name for name in names if name not in GREETINGS] == [
        *("MULTI", "HSET", "XADD", "XADD", "EXEC")
    ]
    placed, billed = [fields for _, fields in redis_client.xrange(EVENTS)]
    assert [placed[b"id"].decode(), billed[b"id"].decode()] == ids
    assert ids[1] == "b-1"
    assert (placed[b"type"], placed[b"source"]) == (b"order.placed", b"/shop")
    assert placed[b":topic"] == b"orders"


def test_what_add_queued_is_relayed(redis_client):
    pipeline = redis_client.pipeline()
    OUTBOX.add(pipeline, [OrderPlaced("1")], source="/other")
    pipeline.execute()
    [event] = OutboxSource(redis_client, EVENTS, consumer="relay").read(10, 1.0)
    assert (event.topic, event.data, event.source) == ("orders", b'{"order":"1"}', "/other")


def test_add_works_after_watch_and_multi(redis_client):
    with redis_client.pipeline(transaction=False) as pipeline:
        pipeline.watch("order:1")
        with pytest.raises(ConfigError, match="multi"):
            OUTBOX.add(pipeline, [OrderPlaced("1")])
        pipeline.multi()
        OUTBOX.add(pipeline, [OrderPlaced("1")])
        assert redis_client.xlen(EVENTS) == 0
        pipeline.execute()
    assert redis_client.xlen(EVENTS) == 1


def test_add_works_in_a_pipeline_of_asyncio(redis_url, redis_client):
    async def place():
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            pipeline = client.pipeline()
            OUTBOX.add(pipeline, [OrderPlaced("1")])
            await pipeline.execute()

    asyncio.run(place())
    assert redis_client.xlen(EVENTS) == 1


def test_add_works_in_the_ambient_transaction(redis_client, router):
    def handle(item: Message[bytes]) -> None:
        OUTBOX.add(commands(redis_client), [OrderPlaced("1")])
        assert redis_client.xlen(EVENTS) == 0

    assert len(deliver(router(Outbox("other", EVENTS), handle), *numbered(1)).acked) == 1
    assert entry(redis_client)[b":topic"] == b"orders"


def test_an_event_that_cannot_be_written_queues_nothing(redis_client):
    pipeline = redis_client.pipeline()
    with pytest.raises(HandlerError, match="price"):
        OUTBOX.add(pipeline, [OrderPlaced("1"), Message(b"", {"type": "t", "price": 1.5})])
    assert len(pipeline) == 0
    assert OUTBOX.add(pipeline, []) == []


def test_what_add_cannot_take_it_says(redis_client):
    with pytest.raises(ConfigError, match=r"client\.pipeline\(\)"):
        OUTBOX.add(redis_client, [OrderPlaced("1")])
    with pytest.raises(ConfigError, match="transaction=True"):
        OUTBOX.add(redis_client.pipeline(transaction=False), [OrderPlaced("1")])
    with pytest.raises(ConfigError, match="source"):
        Outbox("orders", EVENTS).add(redis_client.pipeline(), [OrderPlaced("1")])
    with pytest.raises(ConfigError, match="list"):
        OUTBOX.add(redis_client.pipeline(), OrderPlaced("1"))


# --- seed 000, from end to end ------------------------------------------------------------------


class RedisOrders:
    """An adapter: all that knows of Redis."""

    def __init__(self, client):
        self.client = client

    def save(self, order):
        commands(self.client).hset(f"order:{order}", mapping={"status": "placed"})


def place_orders(*middlewares, orders):
    router = Router()
    router.use(*middlewares)

    @router.command(source="/orders")
    def place_order(order: PlaceOrder) -> list[OrderPlaced]:
        orders.save(order.order)
        return [OrderPlaced(order.order)]

    return router


def place_orders_in_redis(client):
    chain = (Transaction(client), Inbox("orders"), Outbox("orders", EVENTS))
    return place_orders(*chain, orders=RedisOrders(client))


def command(order, **attributes):
    return message(PlaceOrder(order), id=f"c-{order}", **attributes)


def test_the_trace_of_the_seed_step_by_step(redis_client, recorded, publish_commands):
    router = place_orders_in_redis(redis_client)
    deliver(router, command("warm"))
    publish_commands("abc")
    source = StreamSource(redis_client, "commands", "orders")
    seen = recorded(lambda: router.process(source.read(1, 1)))
    source.close()
    steps = [step.split()[0] for step in seen if step.split()[0] not in GREETINGS]
    assert steps[steps.index("SET") :] == [
        *("SET", "WATCH", "MGET"),  # the inbox: is it new, is it ours
        *("MULTI", "HSET", "XADD", "SET", "XACK", "EXEC"),  # effect, event, done, ack
    ]


@pytest.fixture
def publish_commands(redis_client):
    def publish(*orders):
        sink = StreamSink(redis_client, "commands")
        assert not any(sink.publish_each([command(order) for order in orders]))

    return publish


def test_a_command_goes_the_whole_way_to_the_next_service_once(redis_client, publish_commands):
    router = place_orders_in_redis(redis_client)
    publish_commands("a", "b", "a")  # one of them twice
    worker = Worker(StreamSource(redis_client, "commands", "orders"), router)
    worker.start()
    eventually(lambda: worker.health().handled == 3)
    worker.stop()
    relay = Relay(OutboxSource(redis_client, EVENTS), StreamSink(redis_client))
    assert relay.run_once(1).published == 2
    relay.source.close()
    events = list(StreamSource(redis_client, "orders", "billing").replay())
    assert [(e.type, e.source, e.data) for e in events] == [
        ("order.placed", "/orders", b'{"order":"a"}'),
        ("order.placed", "/orders", b'{"order":"b"}'),
    ]
    assert sorted(redis_client.keys("order:*")) == [b"order:a", b"order:b"]
    assert redis_client.xlen(EVENTS) == 0
    assert redis_client.xpending("commands", "orders")["pending"] == 0


def test_handlers_and_the_core_know_nothing_of_redis():
    module = sys.modules["conquiet.router"]
    assert not [name for name in vars(module) if "redis" in name.lower()]


# --- the same router with other middlewares -----------------------------------------------------


class SqlOrders:
    def __init__(self, engine):
        self.engine = engine

    def save(self, order):
        with sql.connection(self.engine) as connection:
            connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": order})


def test_a_worker_with_sql_effects_and_a_redis_source(redis_client, publish_commands, sqlite_url):
    engine = sql.engine(sqlite_url)
    schema.init(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id TEXT PRIMARY KEY)"))
    router = place_orders(
        sql.Transaction(engine),
        sql.Inbox("orders"),
        sql.Outbox("orders"),
        orders=SqlOrders(engine),
    )
    publish_commands("a", "b", "a")
    worker = Worker(StreamSource(redis_client, "commands", "orders"), router)
    worker.start()
    eventually(lambda: worker.health().handled == 3)
    worker.stop()
    with engine.connect() as connection:
        orders = connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars().all()
        events = connection.execute(text("SELECT count(*) FROM outbox")).scalar()
    engine.dispose()
    assert (orders, events) == (["a", "b"], 2)
    assert redis_client.xpending("commands", "orders")["pending"] == 0


def test_a_source_on_one_redis_and_effects_on_another(redis_client, publish_commands):
    settings = redis_client.connection_pool.connection_kwargs
    publish_commands("a", "b", "a")
    with redis.Redis(port=settings["port"], db=4) as other:
        router = place_orders_in_redis(other)
        source = StreamSource(redis_client, "commands", "orders")
        batch = source.read(10, 1)
        assert ids(batch) == ["c-a", "c-b", "c-a"]
        router.process(batch)
        source.close()
        assert other.xlen(EVENTS) == 2
        other.flushdb()
    assert redis_client.xpending("commands", "orders")["pending"] == 0
