"""Transaction, inbox and outbox with async engines, in an async worker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg as driver
import msgspec
import pytest
from sqlalchemy import Engine, NullPool, event, make_url, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import sessionmaker
from tests.integration.sql.orders import SAVE, Order, remembered, saved

from conquiet import Message, Router, Worker, bridge, worker
from conquiet.backoff import Backoff
from conquiet.errors import ConfigError, HandlerError
from conquiet.memory import Log
from conquiet.message import new_id
from conquiet.middleware import Deadline
from conquiet.sql import (
    Inbox,
    Outbox,
    Transaction,
    TransactionEnded,
    async_connection,
    async_session,
    connection,
    dialect,
    session,
)
from conquiet.sql.dialect import async_engine
from conquiet.sql.schema import OUTBOX_TABLE
from conquiet.testing import deliver
from conquiet.worker import Health, Lanes


class Place(msgspec.Struct):
    id: str


class Placed(msgspec.Struct):
    id: str


DRIVERS = {
    "asyncpg": ("postgres", "postgresql+asyncpg"),
    "psycopg": ("postgres", "postgresql+psycopg_async"),
    "aiosqlite": ("sqlite", "sqlite+aiosqlite"),
}


@dataclass
class Database:
    """One database, by a sync engine that looks into it and by an async one that is tested."""

    engine: Engine
    driver: str

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[AsyncEngine]:
        made = create_async_engine(self.engine.url.set(drivername=self.driver), **options)
        try:
            yield made
        finally:
            await made.dispose()

    def events(self) -> list[str]:
        """The orders whose events are in the outbox."""
        with self.engine.connect() as looking:
            rows = looking.execute(text(f"SELECT data FROM {OUTBOX_TABLE}")).scalars()
            return sorted(msgspec.json.decode(row)["id"] for row in rows)


@pytest.fixture(params=DRIVERS)
def database(request: pytest.FixtureRequest) -> Database:
    name, driver = DRIVERS[request.param]
    return Database(request.getfixturevalue(name), driver)


@pytest.fixture
def asyncpg(postgres: Engine) -> Database:
    return Database(postgres, "postgresql+asyncpg")


Handle = Callable[[Place], Awaitable[object]]


@dataclass
class Shop:
    """A log of commands, and a worker that handles them in transactions of an async engine."""

    engine: AsyncEngine
    log: Log = field(default_factory=Log)

    def router(self, handle: Any, *outside: Any, **options: Any) -> Router:
        router = Router()
        router.use(*outside, Transaction(self.engine, **options), Inbox("shop"), Outbox("orders"))
        router.command(source="/shop")(handle)
        return router

    def publish(self, *ids: str) -> None:
        self.log.sink("commands").publish(
            [
                Message(Place(id_), {"id": new_id(), "type": "place", "source": "/test"})
                for id_ in ids
            ]
        )

    async def work(
        self, router: Router, until: Callable[[Health], object] | None = None, **options: Any
    ) -> Worker:
        """Work until all commands are settled, or until a condition is met."""
        async with Worker(self.log.source("g"), router, **options) as worker:
            async with asyncio.timeout(20):
                while not until(worker.health()) if until else self.log.unsettled("g"):
                    await asyncio.sleep(0.005)
        return worker


def numbers(count: int) -> list[str]:
    return [f"{number:04}" for number in range(count)]


@pytest.mark.parametrize("batch_size", [1, 7])
def test_effects_inbox_and_outbox_commit_together(database: Database, batch_size: int) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> Placed:
                async with async_connection(engine) as found:
                    await found.execute(SAVE, {"id": order.id})
                return Placed(order.id)

            shop.publish(*numbers(40))
            worker = await shop.work(shop.router(place), batch_size=batch_size)
            assert worker.health().failed == 0

    asyncio.run(main())
    assert saved(database.engine) == database.events() == numbers(40)
    assert remembered(database.engine) == 40


def test_a_duplicate_is_skipped(database: Database) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)
            ran: list[str] = []

            async def place(order: Place) -> Placed:
                ran.append(order.id)
                return Placed(order.id)

            twin = Message(Place("a"), {"id": "1", "type": "place", "source": "/test"})
            router = shop.router(place)
            for _ in range(2):
                shop.log.sink("commands").publish([twin])
            await shop.work(router, concurrency=2)
            assert ran == ["a"]

    asyncio.run(main())
    assert database.events() == ["a"]


def test_an_async_session_joins_the_transaction(database: Database) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)
            factory = async_sessionmaker(engine, expire_on_commit=False)

            async def place(order: Place) -> Placed:
                async with async_session(factory) as joined:
                    joined.add(Order(id=order.id, amount=1))
                    assert await joined.get(Order, order.id) is not None
                async with async_session(factory) as again:
                    assert (await again.get(Order, order.id)) is not None
                if order.id == "bad":
                    raise ValueError("refused")
                return Placed(order.id)

            shop.publish("good", "bad")  # a log gives back in place: with one lane, bad stays first
            async with Worker(shop.log.source("g"), shop.router(place)) as worker:
                async with asyncio.timeout(20):
                    while not worker.health().failed or len(shop.log.unsettled("g")) > 1:
                        await asyncio.sleep(0.005)
            async with async_session(factory) as outside:  # its own transaction
                outside.add(Order(id="outside"))

    asyncio.run(main())
    assert saved(database.engine) == ["good", "outside"]
    assert database.events() == ["good"]


@pytest.mark.parametrize("kind", ["scoped", "without an engine"])
def test_other_factories_of_async_sessions_join_too(asyncpg: Database, kind: str) -> None:
    async def main() -> None:
        async with asyncpg.open() as engine:
            shop = Shop(engine)
            factory: Any = async_sessionmaker()
            if kind == "scoped":
                factory = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)

            async def place(order: Place) -> Placed:
                async with async_session(factory) as joined:
                    joined.add(Order(id=order.id, amount=1))
                if order.id == "bad":
                    raise ValueError("refused")
                return Placed(order.id)

            shop.publish("good", "bad")
            await shop.work(shop.router(place), lambda health: health.failed)

    asyncio.run(main())
    assert saved(asyncpg.engine) == ["good"]
    assert asyncpg.events() == ["good"]


def test_what_is_no_factory_of_async_sessions_is_refused(asyncpg: Database) -> None:
    async def main() -> None:
        async with asyncpg.open() as engine:
            given: Any = engine
            with pytest.raises(ConfigError, match=r"an async_sessionmaker, .* not AsyncEngine"):
                async_session(given)
            with pytest.raises(HandlerError, match="without an engine of its own was used outside"):
                async_session(async_sessionmaker())

    asyncio.run(main())


def test_a_plain_handler_joins_the_transaction_in_a_thread(database: Database) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)
            factory = sessionmaker(engine.sync_engine)

            def place(order: Place) -> Placed:
                with session(factory) as joined:
                    joined.add(Order(id=order.id))
                return Placed(order.id)

            shop.publish(*numbers(5))
            await shop.work(shop.router(place))

    asyncio.run(main())
    assert saved(database.engine) == database.events() == numbers(5)


def test_a_swallowed_sql_error_is_found_before_commit(database: Database) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> None:
                async with async_connection(engine) as found:
                    await found.execute(SAVE, {"id": order.id})
                    try:
                        await found.execute(SAVE, {"id": order.id})
                    except IntegrityError:
                        pass

            shop.publish("a")
            worker = await shop.work(shop.router(place), lambda health: health.failed)
            assert "duplicate key" in worker.health().last_error

    if database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite commits what was done before the error")
    asyncio.run(main())
    assert saved(database.engine) == []


@pytest.mark.parametrize("has_event", [True, False])
def test_an_error_of_the_driver_is_found_at_commit(asyncpg: Database, has_event: bool) -> None:
    """asyncpg does not say that its transaction is aborted, and COMMIT succeeds in one."""

    async def main() -> None:
        async with asyncpg.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> Placed | None:
                async with async_connection(engine) as found:
                    pooled = await found.get_raw_connection()
                    driver = pooled.driver_connection
                    try:
                        await driver.execute("SELECT 1/0")
                    except Exception:
                        pass
                return Placed(order.id) if has_event else None

            shop.publish("a")
            worker = await shop.work(shop.router(place), lambda health: health.failed)
            assert "is aborted" in worker.health().last_error
            async with engine.connect() as next_:  # the pool has no aborted transaction
                assert (await next_.execute(text("SELECT 1"))).scalar() == 1

    asyncio.run(main())
    assert remembered(asyncpg.engine) == 0


def test_two_tasks_on_one_connection_are_refused(database: Database) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> None:
                async with async_connection(engine) as found:
                    await asyncio.gather(
                        found.execute(SAVE, {"id": "a"}), found.execute(SAVE, {"id": "b"})
                    )

            shop.publish("a")
            worker = await shop.work(shop.router(place), lambda health: health.failed)
            assert "two tasks" in worker.health().last_error

    asyncio.run(main())
    assert saved(database.engine) == []


def test_a_handle_is_refused_after_its_transaction(database: Database) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)
            late: list[asyncio.Task[Any]] = []
            over = asyncio.Event()

            async def linger(found: Any) -> None:
                await over.wait()
                await found.execute(SAVE, {"id": "late"})

            async def place(order: Place) -> None:
                async with async_connection(engine) as found:
                    late.append(asyncio.create_task(linger(found)))

            shop.publish("a")
            await shop.work(shop.router(place))
            over.set()
            with pytest.raises(TransactionEnded):
                await late[0]

    asyncio.run(main())
    assert saved(database.engine) == []


def test_no_more_transactions_are_open_than_the_pool_has_connections(asyncpg: Database) -> None:
    async def main() -> None:
        async with asyncpg.open(pool_size=2, max_overflow=2, pool_timeout=0.2) as engine:
            shop = Shop(engine)
            running, most = 0, 0

            async def place(order: Place) -> None:
                nonlocal running, most
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.1)
                running -= 1

            shop.publish(*numbers(12))
            worker = await shop.work(shop.router(place), concurrency=50)
            assert most == 3, "one is left over"
            assert worker.health().failed == 0

    asyncio.run(main())


def test_workers_on_one_engine_share_its_connections(asyncpg: Database) -> None:
    """A session beside the transactions finds one: else all would wait until the pool times out."""

    async def main() -> None:
        async with asyncpg.open(pool_size=3, max_overflow=0) as engine:
            running, most = 0, 0

            async def place(order: Place) -> None:
                nonlocal running, most
                running += 1
                most = max(most, running)
                async with engine.connect() as beside:
                    await beside.execute(text("SELECT 1"))
                running -= 1

            shops = [Shop(engine) for _ in range(3)]
            async with asyncio.TaskGroup() as workers:
                for shop in shops:
                    shop.publish(*numbers(12))
                    workers.create_task(shop.work(shop.router(place)))
            assert most == 2, "one is left over"

    asyncio.run(main())


def test_handlers_with_sessions_of_their_own_do_not_wait_for_each_other(asyncpg: Database) -> None:
    """As they would if all connections were in transactions, until the pool times out."""

    async def main() -> None:
        async with asyncpg.open(pool_size=3, max_overflow=0) as engine:
            shop = Shop(engine)
            factory = async_sessionmaker(engine)
            together = asyncio.Barrier(2)

            async def place(order: Place) -> None:
                await together.wait()
                async with factory() as own:
                    await own.execute(text("SELECT 1"))

            shop.publish(*numbers(6))
            async with asyncio.timeout(10):
                worker = await shop.work(shop.router(place))
            assert worker.health().failed == 0

    asyncio.run(main())


def test_a_listener_may_change_how_connections_are_opened(database: Database) -> None:
    """As by a token of a cloud; also if it was added after the transaction."""
    opened: list[dict[str, Any]] = []

    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> None: ...

            router = shop.router(place)
            event.listen(engine.sync_engine, "do_connect", lambda *given: opened.append(given[3]))
            shop.publish("a")
            await shop.work(router)

    asyncio.run(main())
    assert opened


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_isolation_level_is_set_and_its_conflicts_are_retried(
    asyncpg: Database, level: Any
) -> None:
    async def main() -> None:
        async with asyncpg.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> None:
                async with async_connection(engine) as found:
                    shown = await found.execute(text("SHOW transaction_isolation"))
                    assert shown.scalar() == level.lower()
                    await found.execute(text("UPDATE orders SET amount = amount + 1"))

            with asyncpg.engine.begin() as writing:
                writing.execute(SAVE, {"id": "counter"})
            shop.publish(*numbers(10))
            await shop.work(shop.router(place, isolation_level=level), concurrency=5)

    asyncio.run(main())
    with asyncpg.engine.connect() as looking:
        assert looking.execute(text("SELECT amount FROM orders")).scalar() == 10


def test_savepoints_keep_the_neighbours_of_a_failed_message(database: Database) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)
            ran: list[str] = []

            async def place(order: Place) -> Placed:
                ran.append(order.id)
                async with async_connection(engine) as found:
                    await found.execute(SAVE, {"id": order.id})
                if order.id == "0001":
                    raise ValueError("refused")
                return Placed(order.id)

            shop.publish(*numbers(4))
            router = shop.router(place, isolate="savepoint")
            await shop.work(
                router,
                lambda health: len(shop.log.unsettled("g")) == 1,
                batch_size=4,
                concurrency=1,
            )
            assert ran[:4] == numbers(4)

    asyncio.run(main())
    assert saved(database.engine) == database.events() == ["0000", "0002", "0003"]


def test_a_worker_of_threads_refuses_an_async_engine(database: Database) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> None: ...

            router = shop.router(place)
            for _ in range(2):  # also after another worker has started the router
                with pytest.raises(ConfigError, match="run_async"):
                    Worker(shop.log.source("g"), router).start()
                async with Worker(shop.log.source("h"), router):
                    pass

    asyncio.run(main())


def test_a_coroutine_is_sent_to_the_async_functions(database: Database) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)
            sync, other = sessionmaker(engine.sync_engine), async_sessionmaker(engine)
            said = []

            async def place(order: Place) -> None:
                for open_ in (
                    lambda: connection(engine),
                    lambda: session(sync),
                    lambda: session(other),  # type: ignore[arg-type]
                ):
                    with (
                        pytest.raises(ConfigError, match="use async with async_") as found,
                        open_(),
                    ):
                        pass
                    said.append(str(found.value))

            shop.publish("a")
            await shop.work(shop.router(place))
            assert len(said) == 3

    asyncio.run(main())


def test_a_worker_of_threads_refuses_connections_of_another_loop(asyncpg: Database) -> None:
    """The process used to crash: asyncpg is not made for two threads."""

    async def main() -> None:
        async with asyncpg.open() as engine:
            async with engine.connect():
                pass  # the pool has a connection of this loop now
            shop = Shop(engine)
            router = Router()
            router.use(Transaction(asyncpg.engine), Inbox("shop"))

            @router.event()
            async def place(order: Place) -> None:
                async with engine.begin() as found:
                    await found.execute(SAVE, {"id": order.id})

            shop.publish("a")
            worker = Worker(shop.log.source("g"), router)
            worker.start()
            async with asyncio.timeout(20):
                while not worker.health().failed:
                    await asyncio.sleep(0.005)
            await asyncio.to_thread(worker.stop)
            assert "another event loop" in worker.health().last_error
            async with engine.connect() as unharmed:
                assert (await unharmed.execute(text("SELECT 1"))).scalar() == 1

    asyncio.run(main())
    assert saved(asyncpg.engine) == []


def test_an_async_session_of_its_own_is_warned_of(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> None:
                async with async_sessionmaker(engine)() as own:
                    await own.execute(text("SELECT 1"))

            shop.publish("a")
            await shop.work(shop.router(place), concurrency=1)

    asyncio.run(main())
    [warning] = [one for one in caplog.messages if "second connection" in one]
    assert "async_session" in warning


def test_a_sync_engine_in_an_async_handler_is_warned_of(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    router = Router()
    router.use(Transaction(engine), Inbox("shop"))

    @router.event()
    async def place(order: Place) -> None:
        with connection(engine) as found:
            found.execute(SAVE, {"id": order.id})

    deliver(router, *map(Place, numbers(2)))
    router.close()
    assert saved(engine) == numbers(2)
    assert len([one for one in caplog.messages if "blocks its event loop" in one]) == 1


def test_a_server_that_refuses_costs_no_attempt() -> None:
    async def main() -> None:
        engine = create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:1/none")
        shop = Shop(engine)

        async def place(order: Place) -> None: ...

        shop.publish("a")
        worker = await shop.work(shop.router(place), lambda health: health.given_back)
        assert "StoreError" in worker.health().last_error
        await engine.dispose()

    asyncio.run(main())


@pytest.fixture(params=["postgresql+asyncpg", "postgresql+psycopg_async"])
def server(request: pytest.FixtureRequest, postgres: Engine) -> Database:
    """PostgreSQL by each of its async drivers."""
    return Database(postgres, request.param)


def test_a_connection_lost_in_a_handler_is_the_stores_fault(server: Database) -> None:
    async def main() -> None:
        async with server.open() as engine:
            shop = Shop(engine)
            ran: list[str] = []

            async def place(order: Place) -> Placed:
                ran.append(order.id)
                async with async_connection(engine) as found:
                    await found.execute(SAVE, {"id": order.id})
                    if len(ran) == 1:
                        await found.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
                return Placed(order.id)

            shop.publish("a")
            worker = await shop.work(shop.router(place))
            assert ran == ["a", "a"]
            assert worker.health().failed == 0, "the batch was tried again"

    asyncio.run(main())
    assert saved(server.engine) == server.events() == ["a"]


def test_deadlocks_are_retried(server: Database) -> None:
    async def main() -> None:
        async with server.open() as engine:
            shop = Shop(engine)
            both = asyncio.Barrier(2)
            tries: dict[str, int] = {"0000": 0, "0001": 0}

            async def place(order: Place) -> Placed:
                tries[order.id] += 1
                first, second = ("x", "y") if order.id == "0000" else ("y", "x")
                async with async_connection(engine) as found:
                    await found.execute(COUNT, {"id": first})
                    if sum(tries.values()) <= 2:
                        await both.wait()
                    await found.execute(COUNT, {"id": second})
                return Placed(order.id)

            shop.publish(*numbers(2))
            worker = await shop.work(shop.router(place))
            assert sum(tries.values()) > 2
            assert worker.health().failed == 0

    asyncio.run(main())
    with server.engine.connect() as looking:
        assert looking.execute(text("SELECT amount FROM orders")).scalars().all() == [2, 2]
    assert server.events() == numbers(2)


def test_a_missing_table_costs_no_attempt(server: Database) -> None:
    async def main() -> None:
        async with server.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> Placed:
                return Placed(order.id)

            async with Worker(shop.log.source("g"), shop.router(place)) as worker:
                with server.engine.begin() as dropping:
                    dropping.execute(text(f"ALTER TABLE {OUTBOX_TABLE} RENAME TO hidden"))
                shop.publish("a")
                async with asyncio.timeout(20):
                    while not worker.health().given_back:
                        await asyncio.sleep(0.005)
                    with server.engine.begin() as restoring:
                        restoring.execute(text(f"ALTER TABLE hidden RENAME TO {OUTBOX_TABLE}"))
                    while shop.log.unsettled("g"):
                        await asyncio.sleep(0.005)
            assert worker.health().failed == worker.health().given_back

    asyncio.run(main())
    assert server.events() == ["a"]


def test_an_engine_that_commits_by_itself_is_refused(server: Database) -> None:
    async def main() -> None:
        async with server.open(isolation_level="AUTOCOMMIT") as engine:
            shop = Shop(engine)

            async def place(order: Place) -> None: ...

            with pytest.raises(ConfigError, match="AUTOCOMMIT"):
                await shop.work(shop.router(place))

    asyncio.run(main())


def test_a_connection_that_is_closed_while_it_is_opened_costs_no_attempt(
    asyncpg: Database,
) -> None:
    """asyncpg raises an error of its own then, which SQLAlchemy passes on."""
    url = asyncpg.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    opened = 0

    async def connect() -> Any:
        nonlocal opened
        made = await driver.connect(url)
        opened += 1
        if 1 < opened < 6:  # the first looks for the tables
            made.terminate()
        return made

    async def main() -> None:
        async with asyncpg.open(async_creator=connect, poolclass=NullPool) as engine:
            shop = Shop(engine)

            async def place(order: Place) -> Placed:
                return Placed(order.id)

            shop.publish("a")
            health = (await shop.work(shop.router(place))).health()
            assert (health.failed, health.given_back) == (1, 1), health.last_error

    asyncio.run(main())
    assert opened >= 6
    assert asyncpg.events() == ["a"]


def test_a_pool_of_an_earlier_loop_is_refused_at_start(asyncpg: Database) -> None:
    made = create_async_engine(asyncpg.engine.url.set(drivername=asyncpg.driver))

    async def use() -> None:
        async with made.connect() as found:
            await found.execute(text("SELECT 1"))

    async def work() -> None:
        async def place(order: Place) -> None: ...

        with pytest.raises(HandlerError, match=r"another event loop.*engine.dispose"):
            await Shop(made).work(Shop(made).router(place))

    with asyncio.Runner() as earlier:
        earlier.run(use())
        asyncio.run(work())
        earlier.run(made.dispose())


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_statement_that_was_cancelled_is_named(server: Database, goes_on: bool) -> None:
    """It closes the connection, also if the handler catches the error."""

    async def main() -> None:
        async with server.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> Placed:
                async with async_connection(engine) as found:
                    await found.execute(SAVE, {"id": order.id})
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.1):
                            await found.execute(text("SELECT pg_sleep(30)"))
                    if goes_on:
                        await found.execute(SAVE, {"id": f"{order.id}-2"})
                return Placed(order.id)

            shop.publish("a")
            worker = await shop.work(shop.router(place), lambda health: health.failed)
            health = worker.health()
            assert "asyncio.timeout()" in health.last_error
            assert health.given_back == 0, "the handler is to blame"

    asyncio.run(main())
    assert saved(server.engine) == server.events() == []


def test_a_url_of_asyncpg_takes_the_parameters_of_libpq(asyncpg: Database) -> None:
    """One URL opens the database by asyncpg and by psycopg, as an app does."""
    query = "sslmode=disable&application_name=shop&connect_timeout=5&command_timeout=9"
    url = make_url(f"{asyncpg.engine.url.render_as_string(hide_password=False)}?{query}")
    ask = text("SELECT current_setting('application_name')")

    async def main() -> None:
        made = async_engine(url.set(drivername=asyncpg.driver))
        async with made.connect() as connection:
            assert (await connection.execute(ask)).scalar_one() == "shop"
        await made.dispose()

    asyncio.run(main())
    made = dialect.engine(url.set(drivername=asyncpg.driver))
    with made.connect() as connection:
        assert connection.execute(ask).scalar_one() == "shop"
    made.dispose()


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("options=-c%20work_mem%3D1MB", "asyncpg has no parameter options; give an AsyncEngine"),
        ("connect_timeout=soon", "connect_timeout='soon' is not a number of seconds"),
    ],
)
def test_a_parameter_that_asyncpg_does_not_have_is_named(query: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        async_engine(make_url(f"postgresql+asyncpg://app:pa55@localhost/shop?{query}"))


@pytest.mark.parametrize("table", ["processed_messages", "orders", OUTBOX_TABLE])
def test_a_statement_longer_than_asyncpgs_command_timeout_costs_no_attempt(
    asyncpg: Database, table: str
) -> None:
    """With BEGIN, in the handler, and with COMMIT."""

    async def main() -> None:
        async with asyncpg.open(connect_args={"command_timeout": 0.1}) as engine:
            shop = Shop(engine)

            async def place(order: Place) -> Placed:
                async with async_connection(engine) as found:
                    await found.execute(SAVE, {"id": order.id})
                return Placed(order.id)

            shop.publish("a", "b", "c")
            with asyncpg.engine.connect() as other:
                other.execute(text(f"LOCK TABLE {table} IN EXCLUSIVE MODE"))
                async with Worker(shop.log.source("g"), shop.router(place)) as worker:
                    async with asyncio.timeout(20):
                        while worker.health().given_back < 3:
                            await asyncio.sleep(0.005)
                        assert "command_timeout of asyncpg" in worker.health().last_error
                        other.rollback()
                        while shop.log.unsettled("g"):
                            await asyncio.sleep(0.005)
            assert worker.health().failed == worker.health().given_back

    asyncio.run(main())
    assert saved(asyncpg.engine) == asyncpg.events() == ["a", "b", "c"]


def test_a_deadline_in_a_statement_rolls_back(server: Database) -> None:
    async def main() -> None:
        async with server.open() as engine:
            shop = Shop(engine)
            slow = True

            async def place(order: Place) -> Placed:
                nonlocal slow
                async with async_connection(engine) as found:
                    await found.execute(SAVE, {"id": order.id})
                    if slow:
                        slow = False
                        await found.execute(text("SELECT pg_sleep(30)"))
                return Placed(order.id)

            shop.publish("a")
            worker = await shop.work(shop.router(place, Deadline(0.5)))
            assert worker.health().failed == 1
            assert worker.health().given_back == 0, "the handler is to blame"
            assert "DeadlineExceeded" in worker.health().last_error

    asyncio.run(main())
    assert saved(server.engine) == server.events() == ["a"]


# --- cancellation -------------------------------------------------------------------------------


class Canceller:
    """Cancels the task of a group when it waits for the n-th time; n grows with each group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cancelled = 0
        self.longest = 0
        self._groups = 0
        run = Lanes._run

        async def run_and_cancel(lanes: Lanes, *arguments: Any) -> None:
            self._groups += 1
            await self._drive(run(lanes, *arguments), self._groups // 2 + 1)

        monkeypatch.setattr(Lanes, "_run", run_and_cancel)
        monkeypatch.setattr(Backoff, "next", lambda backoff: 0.0)

    @types.coroutine
    def _drive(self, group: Coroutine[Any, Any, None], at: int) -> Generator[Any, None, None]:
        step: Any = group.send
        argument: Any = None
        waits = 0
        while True:
            try:
                future = step(argument)
            except StopIteration:
                self.longest = max(self.longest, waits)
                return
            waits += 1
            if waits == at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                self.cancelled += 1
            try:
                yield future
                step, argument = group.send, None
            except BaseException as error:
                step, argument = group.throw, error


COUNT = text(
    "INSERT INTO orders (id, amount) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET amount = orders.amount + 1"
)


def test_a_cancellation_at_any_await_loses_and_doubles_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    canceller = Canceller(monkeypatch)
    monkeypatch.setattr(worker.logger, "disabled", True)  # its records would keep the futures

    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> Placed:
                async with async_connection(engine) as found:
                    await found.execute(COUNT, {"id": order.id})
                await asyncio.sleep(0)
                return Placed(order.id)

            shop.publish(*numbers(40))
            await shop.work(shop.router(place), concurrency=3)

    asyncio.run(main())
    with database.engine.connect() as looking:
        amounts = looking.execute(text("SELECT amount FROM orders")).scalars().all()
    assert amounts == [1] * 40
    assert database.events() == numbers(40)
    assert canceller.cancelled >= canceller.longest, "every await was met"
    gc.collect()
    assert "never retrieved" not in caplog.text, "as of a connection that was being opened"


# --- round trips of asyncpg -----------------------------------------------------------------------


def log_statements(engine: AsyncEngine) -> list[str]:
    """Collect the texts that asyncpg sends, one for each round trip."""
    sent: list[str] = []

    @event.listens_for(engine.sync_engine, "connect")
    def log(adapted: Any, record: object) -> None:
        adapted.driver_connection.add_query_logger(lambda logged: sent.append(logged.query))

    return sent


def test_inbox_and_outbox_share_the_round_trips_of_begin_and_commit(asyncpg: Database) -> None:
    async def main() -> list[str]:
        async with asyncpg.open() as engine:
            sent = log_statements(engine)
            shop = Shop(engine)
            router = Router()
            transaction = Transaction(engine, isolation_level="REPEATABLE READ")
            router.use(transaction, Inbox("shop"), Outbox("orders", notify=False))

            @router.command(source="/shop")
            async def place(order: Place) -> Placed:
                async with async_connection(engine) as found:
                    driver: Any = (await found.get_raw_connection()).driver_connection
                    await driver.execute("INSERT INTO orders VALUES ($1, 1)", order.id)
                return Placed(order.id)

            await bridge.run(router.start)  # looks for the tables
            await asyncio.sleep(0)  # asyncpg logs in the next turn of the loop
            sent.clear()
            shop.publish("a")
            await shop.work(router)
            return sent

    beginning, saving, ending = asyncio.run(main())
    assert beginning.startswith("BEGIN ISOLATION LEVEL REPEATABLE READ; INSERT INTO processed_")
    assert "orders" in saving
    assert OUTBOX_TABLE in ending
    assert ending.endswith("; COMMIT")
    assert saved(asyncpg.engine) == asyncpg.events() == ["a"]


@pytest.mark.parametrize("size", [1, 5_000])
def test_what_is_written_into_a_statement_is_stored_as_it_was(asyncpg: Database, size: int) -> None:
    hostile = "'); DROP TABLE orders; -- \\' $1 %s ü 😀 \U0001f600'" * size
    name = "'; ROLLBACK; --\\ ü"

    async def main() -> None:
        async with asyncpg.open() as engine:
            shop = Shop(engine)

            async def place(order: Place) -> Message[Any]:
                return Message(
                    Placed(order.id), {"id": name, "type": name, "subject": name, "mine": name}
                )

            command = Message(Place(hostile), {"id": name, "type": "place", "source": "/it's"})
            for _ in range(2):
                shop.log.sink("commands").publish([command])
            await shop.work(shop.router(place))

    asyncio.run(main())
    assert asyncpg.events() == [hostile], "the second was a duplicate"
    with asyncpg.engine.connect() as looking:
        [id_] = looking.execute(text("SELECT message_id FROM processed_messages")).scalars()
        [row] = looking.execute(text(f"SELECT event_type, key, attributes FROM {OUTBOX_TABLE}"))
    assert id_ == f"/it's {name}"
    assert (row.event_type, row.key, row.attributes["mine"]) == (name, name, name)


def test_a_middleware_inside_the_transaction_reads_the_outbox(asyncpg: Database) -> None:
    """The statement of the outbox waits for COMMIT, but for no other statement."""
    read: list[Any] = []

    async def main() -> None:
        async with asyncpg.open() as engine:
            shop = Shop(engine)

            def look(next: Any) -> Any:
                def process(batch: Any) -> Any:
                    results = next(batch)
                    with connection(engine) as found:
                        rows = found.execute(text(f"SELECT event_type FROM {OUTBOX_TABLE}"))
                        read.extend(rows.scalars())
                    return results

                return process

            router = Router()
            router.use(Transaction(engine), Inbox("shop"), look, Outbox("orders"))

            @router.command(source="/shop")
            async def place(order: Place) -> Placed:
                return Placed(order.id)

            shop.publish("a")
            await shop.work(router)

    asyncio.run(main())
    assert read == ["placed"]
    assert asyncpg.events() == ["a"]


@pytest.mark.parametrize("has_inbox", [True, False])
def test_statements_of_the_driver_are_in_the_transaction(
    asyncpg: Database, has_inbox: bool
) -> None:
    """Also the first one: SQLAlchemy begins with the first statement that it sends itself."""

    async def main() -> None:
        async with asyncpg.open() as engine:
            shop = Shop(engine)
            router = Router()
            router.use(Transaction(engine), *([Inbox("shop")] if has_inbox else []))

            @router.event()
            async def place(order: Place) -> None:
                async with async_connection(engine) as found:
                    driver: Any = (await found.get_raw_connection()).driver_connection
                    await driver.execute("INSERT INTO orders VALUES ($1, 1)", order.id)
                    try:
                        async with driver.transaction():  # a savepoint
                            await driver.execute("INSERT INTO orders VALUES ('inner', 1)")
                            raise LookupError
                    except LookupError:
                        pass
                if order.id == "bad":
                    raise ValueError("refused")

            shop.publish("good", "bad")
            async with Worker(shop.log.source("g"), router) as worker:
                async with asyncio.timeout(20):
                    while not worker.health().failed or len(shop.log.unsettled("g")) > 1:
                        await asyncio.sleep(0.005)

    asyncio.run(main())
    assert saved(asyncpg.engine) == ["good"]


@pytest.mark.parametrize("parts", ["_ADAPTER_PARTS", "_ASYNCPG_PARTS"])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_versions_without_the_attributes_that_are_used_take_the_plain_path(
    asyncpg: Database, monkeypatch: pytest.MonkeyPatch, parts: str, batch_size: int
) -> None:
    monkeypatch.setattr(dialect, parts, ("renamed_in_a_later_version",))
    dialect._has_parts.cache_clear()

    async def main() -> list[str]:
        async with asyncpg.open() as engine:
            sent = log_statements(engine)
            shop = Shop(engine)

            async def place(order: Place) -> Placed:
                async with async_connection(engine) as found:
                    driver: Any = (await found.get_raw_connection()).driver_connection
                    await driver.execute("INSERT INTO orders VALUES ($1, 1)", order.id)
                if order.id == "0003":
                    raise ValueError("refused")
                return Placed(order.id)

            twin = Message(Place("twin"), {"id": "1", "type": "place", "source": "/test"})
            for _ in range(2):
                shop.log.sink("commands").publish([twin])
            shop.publish(*numbers(20))
            await shop.work(
                shop.router(place),
                lambda _: len(shop.log.unsettled("g")) == 1,
                batch_size=batch_size,
            )
            return sent

    try:
        sent = asyncio.run(main())
    finally:
        dialect._has_parts.cache_clear()
    assert not [one for one in sent if one.startswith("BEGIN") and "INSERT" in one]
    right = [one for one in numbers(20) if one != "0003"] + ["twin"]
    assert saved(asyncpg.engine) == asyncpg.events() == right
    assert remembered(asyncpg.engine) == 20


def test_listeners_of_an_engine_see_each_transaction(database: Database) -> None:
    """Those of one connection see no other."""
    seen: list[str] = []

    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)
            for name in ("engine_connect", "begin", "commit"):
                event.listen(engine.sync_engine, name, lambda *_, name=name: seen.append(name))

            async def place(order: Place) -> None:
                async with async_connection(engine) as found:
                    event.listen(found.sync_connection, "commit", lambda _: seen.append(order.id))
                    await found.execute(SAVE, {"id": order.id})

            router = shop.router(place)
            await bridge.run(router.start)
            seen.clear()
            shop.publish("a", "b")
            await shop.work(router, concurrency=1)

    asyncio.run(main())
    each = ["engine_connect", "begin", "commit"]
    assert [name for name in seen if name in each] == 2 * each
    assert sorted(set(seen) - set(each)) == ["a", "b"]
    assert len(seen) == 8


# --- misuse and faults ----------------------------------------------------------------------------


def count_of(database: Database) -> dict[str, int]:
    """How often each order took effect."""
    with database.engine.connect() as looking:
        found = looking.execute(text("SELECT id, amount FROM orders")).all()
    return {row.id: row.amount for row in found}


@pytest.mark.parametrize("size", [1, 15])
def test_a_session_beside_the_transaction_is_warned_of(
    asyncpg: Database, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """Also if it waits for a connection that the transactions have."""

    async def main() -> None:
        options = {"pool_size": size, "max_overflow": 0, "pool_timeout": 0.1}
        async with asyncpg.open(**options) as engine:
            shop = Shop(engine)
            factory = async_sessionmaker(engine)

            async def place(order: Place) -> None:
                async with factory.begin() as own:
                    await own.execute(COUNT, {"id": order.id})

            shop.publish("a")
            await shop.work(shop.router(place), lambda health: health.handled)

    asyncio.run(main())
    assert "a second connection was opened inside a transaction" in caplog.text


def test_a_plain_handler_without_a_transaction_opens_one_of_an_async_engine(
    database: Database,
) -> None:
    """In its thread, where no loop runs; relays are notified by a task of the worker's loop."""

    async def main() -> None:
        async with database.open() as engine:
            shop = Shop(engine)
            factory = sessionmaker(engine.sync_engine)
            router = Router()

            @router.event()
            def place(order: Place) -> None:
                with session(factory) as own:
                    own.add(Order(id=order.id))
                    Outbox("orders", source="/shop").add(own, [Placed(order.id)])
                with connection(engine) as found:
                    found.execute(SAVE, {"id": f"{order.id}, again"})

            shop.publish("a")
            worker = await shop.work(router)
            assert worker.health().failed == 0, worker.health().last_error

    asyncio.run(main())
    assert saved(database.engine) == ["a", "a, again"]
    assert database.events() == ["a"]
