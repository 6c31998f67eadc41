"""The Litestar example on a real PostgreSQL: order and event together, one invoice."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text
from tests.waiting import eventually

from conquiet.sql import engine as make_engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    address = database_url.replace("postgresql://", "postgresql+asyncpg://")
    monkeypatch.setenv("DATABASE_URL", address)
    made = make_engine(database_url)
    yield made
    made.dispose()


@pytest.fixture
def service(database: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, imported for this test alone, since it connects as its environment says."""
    monkeypatch.delitem(sys.modules, "examples.litestar_shop", raising=False)
    module = importlib.import_module("examples.litestar_shop")
    yield module
    module.shop.close()


def served(service: Any, use: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Start the service, use it and stop it."""

    async def main() -> None:
        async with (
            service.api.lifespan(),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(service.api, raise_app_exceptions=False),
                base_url="http://test",
            ) as client,
            asyncio.timeout(20),
        ):
            await use(client)

    asyncio.run(main())


def rows(database: Engine, statement: str) -> list[Any]:
    with database.connect() as looking:
        return [tuple(row) for row in looking.execute(text(statement))]


async def billed(database: Engine, count: int) -> None:
    while len(await asyncio.to_thread(rows, database, "SELECT 1 FROM invoices")) < count:
        await asyncio.sleep(0.01)


def test_order_event_and_invoice_of_a_request(service: Any, database: Engine) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        placed = [("a", 7), ("a", 8), ("b", -1)]
        answers = [
            (await client.post("/orders", json={"id": id_, "amount": amount})).status_code
            for id_, amount in placed
        ]
        assert answers == [201, 409, 400]
        await billed(database, 1)
        assert (await client.get("/healthz")).status_code == 200

    served(service, use)
    assert rows(database, "SELECT id FROM orders") == [("a",)]
    assert rows(database, "SELECT event_type FROM outbox") == [("order.placed",)]
    assert rows(database, 'SELECT "order", amount FROM invoices') == [("a", 7)]


def test_a_commit_that_fails_is_answered_as_an_error(service: Any, database: Engine) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        unique = "ALTER TABLE orders ADD UNIQUE (amount) DEFERRABLE INITIALLY DEFERRED"
        with database.begin() as connection:
            connection.execute(text(unique))
        first = await client.post("/orders", json={"id": "a", "amount": 7})
        second = await client.post("/orders", json={"id": "b", "amount": 7})
        assert (first.status_code, second.status_code) == (201, 500)
        await billed(database, 1)

    served(service, use)
    assert rows(database, "SELECT id FROM orders") == [("a",)]
    assert rows(database, "SELECT count(*) FROM outbox") == [(1,)]


def test_sigterm_ends_the_server_and_orders_are_billed_once(database: Engine) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "uvicorn", "examples.litestar_shop:api", "--port", str(port)]

    def start() -> subprocess.Popen[bytes]:
        made = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))

        def is_ready() -> bool:
            assert made.poll() is None
            try:
                return httpx.get(f"{url}/healthz").status_code == 200
            except httpx.TransportError:
                return False

        eventually(is_ready, timeout=60)
        return made

    def stop() -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)  # uvicorn raises the signal at its end

    process = start()
    try:
        for number in range(30):
            answer = httpx.post(f"{url}/orders", json={"id": f"o-{number}", "amount": number})
            assert answer.status_code == 201
        stop()
        process = start()
        eventually(
            lambda: rows(database, 'SELECT count(DISTINCT "order") FROM invoices') == [(30,)],
            timeout=60,
        )
        stop()
    finally:
        process.kill()
        process.wait()
    assert rows(database, "SELECT count(*) FROM invoices") == [(30,)]
