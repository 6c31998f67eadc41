"""The FastAPI example, with a real PostgreSQL: an order and its event together, or neither."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
import uvloop
from examples.fastapi_outbox import OrderPlaced, app
from sqlalchemy import Engine, text

from conquiet import Message
from conquiet.redis import StreamSink
from conquiet.sql import engine as make_engine


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("DATABASE_URL", database_url)
    made = make_engine(database_url)
    yield made
    made.dispose()


def post(*orders: dict[str, Any]) -> list[int]:
    """Start the service, place orders one after the other, stop it; the codes it answered."""

    async def place() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            return [(await client.post("/orders", json=order)).status_code for order in orders]

    return asyncio.run(place())


def stored(database: Engine) -> tuple[list[str], list[tuple[str, str, bytes]]]:
    with database.connect() as looking:
        orders = looking.execute(text("SELECT id FROM orders")).scalars().all()
        events = looking.execute(text("SELECT topic, event_type, data FROM outbox")).all()
    return list(orders), [(row[0], row[1], bytes(row[2])) for row in events]


def test_an_order_and_its_event_are_stored_together(database: Engine) -> None:
    assert post({"id": "a", "amount": 7}) == [201]
    event = ("orders", "order.placed", b'{"order":"a","amount":7}')
    assert stored(database) == (["a"], [event])


def test_a_request_that_fails_leaves_neither(database: Engine) -> None:
    assert post({"id": "a", "amount": -1}) == [422]
    assert stored(database) == ([], [])


def test_a_second_order_of_the_same_id_brings_no_second_event(database: Engine) -> None:
    assert post({"id": "a", "amount": 7}, {"id": "a", "amount": 7}) == [201, 409]
    assert len(stored(database)[1]) == 1


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_worker_bills_orders_beside_the_requests(
    database: Engine, redis_url: str, redis_client: redis.Redis, monkeypatch: Any, loop: Any
) -> None:
    """They share one engine, whose connections belong to one event loop."""
    monkeypatch.setenv("BROKER_URL", redis_url)
    placed = [
        Message(
            OrderPlaced(f"o-{number}", number),
            {"id": str(number), "type": "order.placed", "source": "/orders"},
        )
        for number in range(20)
    ]
    StreamSink(redis_client, "orders").publish([*placed, *placed])

    async def main() -> int:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
            asyncio.timeout(20),
        ):
            orders = 0
            while invoices(database) < 20:
                answer = await client.post("/orders", json={"id": f"r-{orders}", "amount": 1})
                assert answer.status_code == 201
                orders += 1
            return orders

    with asyncio.Runner(loop_factory=loop) as runner:
        orders = runner.run(main())
    assert len(stored(database)[0]) == orders
    assert invoices(database) == 20


def invoices(database: Engine) -> int:
    with database.connect() as looking:
        return looking.execute(text("SELECT count(*) FROM invoices")).scalar_one()
