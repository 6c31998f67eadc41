"""An app on real servers: PostgreSQL sync and async, Redis as broker and as database, Kafka."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from tests.integration.sinks.kafka_cluster import Cluster

from conquiet import App, sql
from conquiet.app.app import Running, make_health
from conquiet.errors import ConfigError, ConquietError
from conquiet.testing import eventually


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)


@dataclass
class PlaceOrder:
    id: str


@dataclass
class OrderPlaced:
    id: str


@pytest.fixture
def looking(database_url: str) -> Iterator[Engine]:
    engine = sql.engine(database_url)
    yield engine
    engine.dispose()


def shop(database: Any, broker: str | None = None) -> App:
    app = App("shop", database, broker, metadata=Base.metadata)

    @app.on
    def place_order(order: PlaceOrder, session: Session) -> OrderPlaced:
        session.add(Order(id=order.id))
        return OrderPlaced(order.id)

    return app


def billing(database: Any, broker: str | None, seen: list[str]) -> App:
    """Another app, which reads the events of the shop."""
    app = App("billing", database, broker)

    @app.on(topic="shop")
    def bill(placed: OrderPlaced) -> None:
        seen.append(placed.id)

    return app


@contextmanager
def at_work(*apps: App) -> Iterator[None]:
    running: list[Running] = []
    try:
        for app in apps:
            running.append(app.open())
            running[-1].start()
        yield
    finally:
        finished = [one.stop() for one in running]
        for app in apps:
            app.close()
    assert all(finished)


def count(engine: Engine, table: str = "orders") -> int:
    with engine.connect() as connection:
        return int(connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0)


def send_some_twice(app: App) -> None:
    for number in (1, 2, 3, 2):
        app.send(PlaceOrder(f"o-{number}"), id=f"c-{number}")


def test_two_apps_on_one_postgres_need_no_broker(database_url: str, looking: Engine) -> None:
    seen: list[str] = []
    app, other = shop(database_url), billing(database_url, None, seen)
    app.create_tables()
    with at_work(app, other):
        send_some_twice(app)
        eventually(lambda: sorted(seen) == ["o-1", "o-2", "o-3"])
    assert count(looking) == 3


def test_an_async_app_on_postgres(database_url: str, looking: Engine) -> None:
    app = App(
        "shop",
        make_url(database_url).set(drivername="postgresql+asyncpg"),
        metadata=Base.metadata,
    )
    done: list[str] = []

    @app.on
    async def place_order(order: PlaceOrder, session: AsyncSession) -> OrderPlaced:
        session.add(Order(id=order.id))
        return OrderPlaced(order.id)

    @app.on
    def note(placed: OrderPlaced, session: Session) -> None:
        assert session.get(Order, placed.id) is not None
        done.append(placed.id)

    async def main() -> None:
        async with app:
            await asyncio.to_thread(send_some_twice, app)
            async with app.sessions.begin() as session:  # a request, on the same loop
                await app.emit(session, OrderPlaced("o-1"), id="e-1")
            async with asyncio.timeout(20):
                while len(done) < 4:
                    await asyncio.sleep(0.01)

    app.create_tables()
    asyncio.run(main())
    assert sorted(done) == ["o-1", "o-1", "o-2", "o-3"]
    assert count(looking) == 3


def test_redis_as_broker_is_fed_by_the_relay(
    database_url: str, redis_url: str, redis_client: Any, looking: Engine
) -> None:
    seen: list[str] = []
    app, other = shop(database_url, redis_url), billing(database_url, redis_url, seen)
    app.create_tables()
    with at_work(app, other):
        send_some_twice(app)
        eventually(lambda: sorted(seen) == ["o-1", "o-2", "o-3"])
    assert count(looking) == 3
    assert redis_client.xlen("shop") == 4 + 3  # commands, and events
    [source] = app.sources()
    assert getattr(source, "lease", None) == 10  # as without a broker: a kill costs seconds
    source.close()


def test_the_metrics_of_an_app_have_those_of_its_relay(database_url: str, redis_url: str) -> None:
    app = shop(database_url, redis_url)
    app.create_tables()
    with app.sessions.begin() as session:
        app.emit(session, OrderPlaced("o-1"), OrderPlaced("o-2"))
    running = app.open(worker=False)
    health = make_health(app, running.find_trouble, details=True, relay=running.relay)

    def read() -> list[str]:
        return health.respond("/metrics")[2].decode().splitlines()

    assert "conquiet_relay_pending 2.0" in read()
    running.start()
    eventually(lambda: "conquiet_relay_published_total 2.0" in read())
    eventually(lambda: "conquiet_relay_pending 0.0" in read())
    assert running.stop()
    app.close()


def test_redis_alone_keeps_effects_inbox_and_log(redis_url: str, redis_client: Any) -> None:
    app = App("shop", redis_url)
    seen: list[str] = []

    @app.on
    def place_order(order: PlaceOrder, client: redis.Redis) -> OrderPlaced:
        client.incr(f"orders:{order.id}")
        return OrderPlaced(order.id)

    @app.on
    def note(placed: OrderPlaced) -> None:
        seen.append(placed.id)

    with at_work(app):
        send_some_twice(app)
        eventually(lambda: sorted(seen) == ["o-1", "o-2", "o-3"])
    assert redis_client.mget("orders:o-1", "orders:o-2", "orders:o-3") == [b"1"] * 3
    with pytest.raises(ConfigError, match=r"app\.test\(\) needs an app on SQL"):
        app.test()
    with pytest.raises(ConfigError, match=f"^{re.escape(redis_url)} has no tables"):
        app.create_tables()


@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_processes_that_start_at_once_create_the_tables_once(
    kind: str, database_url: str, tmp_path: Path
) -> None:
    url = database_url if kind == "postgresql" else f"sqlite:///{tmp_path}/shop.db"
    apps = [shop(url) for _ in range(6)]
    together = threading.Barrier(len(apps))

    def create(app: App) -> None:
        together.wait()
        app.create_tables()
        app.check_tables()

    with ThreadPoolExecutor(len(apps)) as pool:
        list(pool.map(create, apps))
    for app in apps:
        app.close()


def test_send_raises_if_the_log_is_out_of_reach(database_url: str) -> None:
    app = App("shop", make_url(database_url).set(database="no_such_database"))
    with pytest.raises(ConquietError):
        app.send(PlaceOrder("o-1"))
    app.close()
    on_redis = App("shop", database_url, "redis://127.0.0.1:1/0")
    with pytest.raises(ConquietError):
        on_redis.send(PlaceOrder("o-1"))
    on_redis.close()


def test_a_stop_waits_for_what_is_in_flight(database_url: str, looking: Engine) -> None:
    app = App("shop", database_url, metadata=Base.metadata)
    begun, go_on = threading.Event(), threading.Event()

    @app.on
    def place_order(order: PlaceOrder, session: Session) -> None:
        begun.set()
        go_on.wait(10)
        session.add(Order(id=order.id))

    app.create_tables()
    running = app.open()
    running.start()
    app.send(PlaceOrder("o-1"))
    assert begun.wait(10)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(running.stop()))
    stopping.start()
    go_on.set()
    stopping.join(20)
    assert stopped == [True]
    assert count(looking) == 1
    app.close()


def test_an_app_sends_handles_and_publishes_by_kafka(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.create("shop", 1)
    app = App("shop", f"sqlite:///{tmp_path}/shop.db", f"kafka://{cluster.servers}?log_level=0")
    placed: list[str] = []

    @app.on
    def place_order(order: PlaceOrder) -> OrderPlaced:
        return OrderPlaced(order.id)

    @app.on
    def note(event: OrderPlaced) -> None:
        placed.append(event.id)

    app.create_tables()
    with at_work(app):
        send_some_twice(app)
        eventually(lambda: sorted(placed) == ["o-1", "o-2", "o-3"], timeout=30)
    cluster.close()
