"""`conquiet.fastapi` and its example: an order and its event together, or neither; one invoice."""

import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import httpx
import pytest
import redis
import uvloop
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session
from tests.waiting import eventually

from conquiet import App, Message
from conquiet.config import MissingExtra
from conquiet.errors import ConfigError
from conquiet.fastapi import health_router, lifespan, transaction
from conquiet.redis import StreamSink
from conquiet.sql import engine as make_engine

ROOT = Path(__file__).resolve().parents[2]


def as_async(url: str) -> str:
    return url.replace("postgresql://", "postgresql+asyncpg://")


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("DATABASE_URL", as_async(database_url))
    made = make_engine(database_url)
    yield made
    made.dispose()


@pytest.fixture
def service(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], ModuleType]]:
    """Import the example for this test alone, since it connects as its environment says."""
    loaded: list[ModuleType] = []

    def load() -> ModuleType:
        monkeypatch.delitem(sys.modules, "examples.fastapi_shop", raising=False)
        loaded.append(importlib.import_module("examples.fastapi_shop"))
        return loaded[-1]

    yield load
    for module in loaded:
        module.shop.close()


def served(
    api: FastAPI, use: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]], loop: Any = None
) -> Any:
    """Start a service, use it and stop it."""

    async def main() -> Any:
        async with (
            api.router.lifespan_context(api),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(api, raise_app_exceptions=False),
                base_url="http://test",
            ) as client,
            asyncio.timeout(20),
        ):
            return await use(client)

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main())


def rows(database: Engine, statement: str) -> list[Any]:
    with database.connect() as looking:
        return [tuple(row) for row in looking.execute(text(statement))]


def test_order_event_and_invoice_of_a_request(service: Any, database: Engine) -> None:
    async def use(client: httpx.AsyncClient) -> list[int]:
        orders = [("a", 7), ("a", 8), ("b", -1)]
        answers = [
            await client.post("/orders", json={"id": id_, "amount": amount})
            for id_, amount in orders
        ]
        while not await asyncio.to_thread(rows, database, "SELECT 1 FROM invoices"):
            await asyncio.sleep(0.01)
        probes = [await client.get("/healthz"), await client.get("/readyz")]
        return [answer.status_code for answer in (*answers, *probes)]

    assert served(service().api, use) == [201, 409, 422, 200, 200]
    assert rows(database, "SELECT id FROM orders") == [("a",)]
    [stored] = rows(database, "SELECT topic, event_type, data FROM outbox")
    assert (*stored[:2], bytes(stored[2])) == (
        "shop",
        "order.placed",
        b'{"order":"a","amount":7}',
    )
    assert rows(database, 'SELECT "order", amount FROM invoices') == [("a", 7)]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_worker_bills_orders_of_a_broker_beside_the_requests(
    service: Any,
    database: Engine,
    redis_url: str,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    loop: Any,
) -> None:
    """They share one engine, whose connections belong to one event loop."""
    monkeypatch.setenv("BROKER_URL", redis_url)
    module = service()
    placed = [
        module.shop.message(module.OrderPlaced(order=f"o-{number}", amount=1), id=str(number))
        for number in range(20)
    ]
    StreamSink(redis_client, "shop").publish([*placed, *placed])

    async def use(client: httpx.AsyncClient) -> int:
        orders = 0
        count = "SELECT count(*) FROM invoices WHERE \"order\" LIKE 'o-%'"
        while (await asyncio.to_thread(rows, database, count))[0][0] < 20:
            answer = await client.post("/orders", json={"id": f"r-{orders}", "amount": 1})
            assert answer.status_code == 201
            orders += 1
        return orders

    orders = served(module.api, use, loop)
    assert rows(database, "SELECT count(*) FROM orders") == [(orders,)]
    repeated = 'SELECT "order" FROM invoices GROUP BY "order" HAVING count(*) > 1'
    assert rows(database, repeated) == []


@pytest.mark.slow
def test_a_service_killed_in_the_middle_bills_each_order_once(database: Engine) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "uvicorn", "examples.fastapi_shop:api", "--port", str(port)]

    def start() -> subprocess.Popen[bytes]:
        made = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))

        def is_ready() -> bool:
            assert made.poll() is None
            try:
                return httpx.get(f"{url}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        eventually(is_ready, timeout=60)
        return made

    process = start()
    try:
        for number in range(30):
            answer = httpx.post(f"{url}/orders", json={"id": f"o-{number}", "amount": number})
            assert answer.status_code == 201
        process.kill()
        process.wait()
        process = start()
        eventually(
            lambda: rows(database, 'SELECT count(DISTINCT "order") FROM invoices') == [(30,)],
            timeout=60,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)  # uvicorn raises the signal at its end
    finally:
        process.kill()
        process.wait()
    assert rows(database, "SELECT count(*) FROM invoices") == [(30,)]
    assert rows(database, "SELECT count(*) FROM outbox") == [(30,)]


# --- the parts, on SQLite and a sync engine -------------------------------------------------


PLACED = Message(b"{}", {"type": "order.placed"})


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[App]:
    made = App("shop", database=f"sqlite:///{tmp_path}/shop.db")
    made.create_tables()
    yield made
    made.engine.dispose()


def events(shop: App) -> int:
    return len(rows(shop.engine, "SELECT 1 FROM outbox"))


def test_a_commit_that_fails_is_answered_as_an_error(shop: App) -> None:
    """The transaction ends before the answer is sent."""
    api = FastAPI()

    @api.post("/orders", status_code=201)
    def place(session: Annotated[Session, transaction(shop)]) -> None:
        shop.emit(session, PLACED)

    @api.post("/bad", status_code=201)
    def place_badly(session: Annotated[Session, transaction(shop)]) -> None:
        shop.emit(session, PLACED)

        @event.listens_for(session, "before_commit")
        def fail(session: Session) -> None:
            raise RuntimeError("a deferred constraint")

    async def use(client: httpx.AsyncClient) -> list[int]:
        return [(await client.post(path)).status_code for path in ("/orders", "/bad")]

    assert served(api, use) == [201, 500]
    assert events(shop) == 1


def test_all_parameters_of_a_request_share_its_transaction(shop: App) -> None:
    api = FastAPI()

    def record(session: Annotated[Session, transaction(shop)]) -> Session:
        shop.emit(session, PLACED)
        return session

    @api.post("/orders")
    def place(
        session: Annotated[Session, transaction(shop)], other: Annotated[Session, Depends(record)]
    ) -> None:
        assert session is other
        raise HTTPException(409)

    async def use(client: httpx.AsyncClient) -> int:
        return (await client.post("/orders")).status_code

    assert served(api, use) == 409
    assert events(shop) == 0


def test_a_lifespan_of_your_own_is_around_workers_and_keeps_its_state(shop: App) -> None:
    steps: list[Any] = []

    @shop.on(type="order.placed")
    def ignore(placed: dict[str, Any]) -> None: ...

    @asynccontextmanager
    async def own(api: FastAPI) -> AsyncIterator[dict[str, int]]:
        steps.append(shop.running)
        yield {"answer": 42}
        steps.append(shop.running)

    api = FastAPI()

    async def main() -> Any:
        async with lifespan(shop, own)(api) as state:
            assert shop.running is not None
            return state

    assert asyncio.run(main()) == {"answer": 42}
    assert steps == [None, None]


def test_health_is_bad_when_a_worker_has_ended_or_the_database_is_away(shop: App) -> None:
    @shop.on(type="order.placed")
    def ignore(placed: dict[str, Any]) -> None: ...

    api = FastAPI(lifespan=lifespan(shop))
    api.include_router(health_router(shop), prefix="/internal")

    async def use(client: httpx.AsyncClient) -> list[int]:
        good = await client.get("/internal/healthz")
        assert shop.running is not None
        for worker in shop.running.workers:
            await worker.__aexit__()
        bad = await client.get("/internal/healthz")
        assert "worker" in bad.json()["error"]
        shop.store.reach = lambda: 1 / 0  # type: ignore[assignment, method-assign]
        away = await client.get("/internal/readyz")
        assert away.json()["checks"] == {"store": {"ok": False}}  # no details for the public
        return [good.status_code, bad.status_code, away.status_code]

    assert served(api, use) == [200, 503, 503]


def test_an_app_on_redis_has_no_transaction_for_a_request(redis_url: str) -> None:
    app = App("shop", database=redis_url)
    with pytest.raises(ConfigError, match=r"an app on Redis has no sessions"):
        transaction(app)
    app.close()


def test_without_fastapi_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "conquiet.fastapi")
    with pytest.raises(MissingExtra, match=r"pip install 'conquiet\[fastapi\]'"):
        importlib.import_module("conquiet.fastapi")
