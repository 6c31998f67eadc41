"""The FastStream example, on a real Redis and PostgreSQL: effects once, whatever is redelivered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from examples.faststream_inbox import Base, make_broker
from faststream.redis.message import RedisStreamMessage
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from conquiet import Message
from conquiet.redis import StreamSink
from conquiet.sql import engine as make_engine
from conquiet.sql import schema
from conquiet.testing import eventually


class Service:
    """The example's consumer, and what it left in Redis and PostgreSQL."""

    def __init__(self, redis_url: str, database_url: str) -> None:
        self.redis_url = redis_url
        self.client = Redis.from_url(redis_url)
        self.client.xgroup_create("orders", "billing", "0", mkstream=True)
        self.database = make_engine(database_url)
        schema.init(self.database)
        Base.metadata.create_all(self.database)

    def place(self, order: str, amount: int = 7) -> None:
        attributes = {"id": order, "type": "order.placed", "source": "/shop"}
        event = Message({"order": order, "amount": amount}, attributes)
        StreamSink(self.client, "orders").publish([event])

    def charges(self) -> list[str]:
        with self.database.connect() as looking:
            return list(looking.execute(text('SELECT "order" FROM charges ORDER BY 1')).scalars())

    def events(self) -> int:
        with self.database.connect() as looking:
            return int(looking.execute(text("SELECT count(*) FROM outbox")).scalar_one())

    def pending(self) -> int:
        return int(self.client.xpending("orders", "billing")["pending"])

    def is_settled(self) -> bool:
        [group] = self.client.xinfo_groups("orders")
        last = self.client.xinfo_stream("orders")["last-generated-id"]
        return bool(group["last-delivered-id"] == last) and self.pending() == 0

    def run_until(self, is_done: Callable[[], bool]) -> None:
        async def run() -> None:
            async with self._running():
                await asyncio.to_thread(eventually, is_done)

        asyncio.run(run())

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        url = self.database.url.set(drivername="postgresql+asyncpg")
        engine = create_async_engine(url, poolclass=NullPool)
        broker = make_broker(self.redis_url, async_sessionmaker(engine), idle_ms=50)
        client = await broker.connect()
        await broker.start()
        yield
        await broker.stop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await client.connection_pool.disconnect()  # what its readers opened after stop()
        await engine.dispose()

    def close(self) -> None:
        self.client.close()
        self.database.dispose()


@pytest.fixture
def service(redis_url: str, database_url: str) -> Any:
    made = Service(redis_url, database_url)
    yield made
    made.close()


def test_an_event_that_is_published_twice_is_charged_once(service: Service) -> None:
    for order in ("a", "b", "a"):
        service.place(order)
    service.run_until(service.is_settled)
    assert service.charges() == ["a", "b"]
    assert service.events() == 2


def test_an_ack_that_is_lost_after_the_commit_repeats_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(message: Any) -> None:
        raise RedisConnectionError("the process ends here")

    service.place("a")
    with monkeypatch.context() as crash:
        crash.setattr(RedisStreamMessage, "ack", lose)
        service.run_until(lambda: service.charges() == ["a"])
    assert service.pending() == 1
    service.run_until(service.is_settled)  # delivered again, skipped, acked
    assert service.charges() == ["a"]
    assert service.events() == 1


def test_a_handler_that_failed_leaves_nothing_and_runs_again(service: Service) -> None:
    service.place("a", amount=1 << 40)  # the column is an integer: the commit fails

    def was_redelivered() -> bool:
        rows = service.client.xpending_range("orders", "billing", "-", "+", 1)
        return bool(rows) and rows[0]["times_delivered"] > 1

    service.run_until(was_redelivered)
    assert service.charges() == []
    assert service.events() == 0
