"""Everything works through PgBouncer in transaction mode, on two connections for all."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    async_sessionmaker,
    create_async_engine,
)
from tests.integration.sql.claiming import ListSink, fill, unpublished
from tests.waiting import eventually

from conquiet import App, Message, Router, Worker, bridge
from conquiet.errors import StoreError
from conquiet.memory import Log
from conquiet.relay import Relay
from conquiet.sql import (
    Cleanup,
    Inbox,
    LogSource,
    Outbox,
    OutboxLog,
    OutboxSource,
    Transaction,
    async_connection,
    connection,
    schema,
)
from conquiet.sql import engine as make_engine
from conquiet.sql.dialect import async_engine

ORDERS = Table(
    "orders", MetaData(), Column("id", Text, primary_key=True), Column("amount", Integer)
)
SAVE = insert(ORDERS)
UPSERT = SAVE.on_conflict_do_update(index_elements=["id"], set_={"amount": ORDERS.c.amount + 1})


class PlaceOrder(msgspec.Struct):
    id: str


class OrderPlaced(msgspec.Struct):
    id: str


def behind(url: str, **options: Any) -> Engine:
    """As docs/sql.md says."""
    return make_engine(url, connect_args={"prepare_threshold": None}, **options)


@pytest.fixture
def bounced(bounced_url: str) -> Iterator[Engine]:
    made = behind(bounced_url)
    schema.init(made)
    with made.begin() as started:
        started.execute(
            text("CREATE TABLE orders (id TEXT PRIMARY KEY, amount INTEGER NOT NULL DEFAULT 0)")
        )
    yield made
    made.dispose()


def send(commands: Log, count: int, times: int = 1) -> None:
    commands.append(
        [
            Message(
                msgspec.json.encode({"id": f"o-{number}"}),
                {"id": f"c-{number}", "type": "place.order", "source": "/web", "subject": "s"},
            )
            for number in range(count)
            for _ in range(times)
        ]
    )


def service(
    engine: Engine, commands: Log, upsert: Callable[[Any, str], object], **options: Any
) -> Worker:
    router = Router()
    router.use(Transaction(engine), Inbox("billing"), Outbox("orders"))

    @router.command(source="/shop")
    def place_order(order: PlaceOrder) -> list[OrderPlaced]:
        with connection(engine) as found:
            upsert(found, order.id)
        return [OrderPlaced(order.id)]

    return Worker(commands.source("billing", lease=60.0), router, **options)


@contextmanager
def running(*workers: Worker) -> Iterator[None]:
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stopped = [worker.stop(10) for worker in workers]
    assert all(stopped)


def queued(found: Any, id_: str) -> None:
    found.execute(UPSERT, {"id": id_, "amount": 1})


def read_amid(found: Any, id_: str) -> None:
    queued(found, id_)
    assert found.execute(select(ORDERS.c.amount).where(ORDERS.c.id == id_)).scalar() == 1
    with found.begin_nested():
        found.execute(update(ORDERS).where(ORDERS.c.id == id_).values(amount=1))


def amounts(engine: Engine) -> dict[str, int]:
    with engine.connect() as looking:
        return {row.id: row.amount for row in looking.execute(select(ORDERS))}


def test_the_server_is_shared_by_transaction(bounced: Engine) -> None:
    """Else the tests below would show nothing: a client meets several servers, and the reverse."""

    def backend(found: Any) -> int:
        return int(found.execute(text("SELECT pg_backend_pid()")).scalar())

    with bounced.connect() as one, bounced.connect() as other:
        first = backend(one)
        one.rollback()
        assert backend(other) == first  # the same server, for another client
        assert backend(one) != first  # the other one is in a transaction
        other.rollback()


@pytest.mark.parametrize("upsert", [queued, read_amid])
@pytest.mark.parametrize("batch_size", [1, 40])
def test_two_workers_store_each_effect_and_each_event_once(
    bounced: Engine, bounced_url: str, upsert: Callable[[Any, str], object], batch_size: int
) -> None:
    others = behind(bounced_url)
    commands = Log()
    send(commands, 120, times=2)
    workers = [
        service(engine, commands, upsert, threads=2, batch_size=batch_size)
        for engine in (bounced, others)
    ]
    with running(*workers):
        eventually(lambda: not commands.unsettled("billing"), timeout=60)
    others.dispose()
    expected = {f"o-{number}": 1 for number in range(120)}
    assert amounts(bounced) == expected
    with bounced.connect() as looking:
        events = looking.execute(text("SELECT data FROM outbox")).scalars().all()
    assert Counter(msgspec.json.decode(data)["id"] for data in events) == expected


def test_a_failing_message_costs_its_neighbours_nothing(bounced: Engine) -> None:
    def refuses_seven(found: Any, id_: str) -> None:
        queued(found, id_)
        if id_ == "o-7":
            found.execute(text("SELECT 1 / 0"))

    commands = Log()
    send(commands, 20)
    with running(service(bounced, commands, refuses_seven, batch_size=20)):
        eventually(lambda: len(commands.unsettled("billing")) == 1, timeout=60)
    assert sorted(amounts(bounced)) == sorted(f"o-{n}" for n in range(20) if n != 7)


@pytest.mark.parametrize("clash", ["already exists", "does not exist"])
def test_prepared_statements_that_were_mixed_up_blame_no_message(
    postgres: Engine, clash: str
) -> None:
    """What a PgBouncer without prepared statements does to those who leave them on."""
    ask = "SELECT count(*) FROM orders WHERE amount = %s"

    def handle() -> None:
        with Transaction(postgres).scope(()), connection(postgres) as found:
            if clash == "already exists":
                for number in range(3):
                    found.exec_driver_sql(f"PREPARE _pg3_{number} AS SELECT 1")
            for _ in range(10):
                found.exec_driver_sql(ask, (1,))
            # in a block, so that psycopg does not notice
            found.exec_driver_sql("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")
            found.exec_driver_sql(ask, (1,))

    with pytest.raises(StoreError, match=f"{clash}.*prepare_threshold"):
        handle()
    postgres.dispose()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async"])
@pytest.mark.parametrize("batch_size", [1, 40])
def test_async_workers_store_each_effect_and_each_event_once(
    bounced: Engine, bounced_url: str, driver: str, batch_size: int
) -> None:
    url = make_url(f"{bounced_url}?prepare_threshold=none").set(drivername=f"postgresql+{driver}")
    commands = Log()
    send(commands, 120, times=2)

    def start(engine: AsyncEngine) -> Worker:
        router = Router()
        router.use(Transaction(engine), Inbox("billing"), Outbox("orders"))

        @router.command(source="/shop")
        async def place_order(order: PlaceOrder) -> list[OrderPlaced]:
            async with async_connection(engine) as found:
                await found.run_sync(read_amid, order.id)
            return [OrderPlaced(order.id)]

        return Worker(commands.source("billing", lease=60.0), router, batch_size=batch_size)

    async def main() -> None:
        engines = [async_engine(url) for _ in range(2)]
        async with asyncio.timeout(60), start(engines[0]), start(engines[1]):
            while commands.unsettled("billing"):
                await asyncio.sleep(0.02)
        for engine in engines:
            async with async_sessionmaker(engine).begin() as session:  # the other half
                await Outbox("orders", source="/shop").add(session, [OrderPlaced("by hand")])
            await engine.dispose()

    asyncio.run(main())
    expected = {f"o-{number}": 1 for number in range(120)}
    assert amounts(bounced) == expected
    with bounced.connect() as looking:
        events = looking.execute(text("SELECT data FROM outbox")).scalars().all()
    stored = Counter(msgspec.json.decode(data)["id"] for data in events)
    assert stored == {**expected, "by hand": 2}


def test_an_async_app_gives_the_setting_to_both_of_its_drivers(
    bounced: Engine, bounced_url: str
) -> None:
    url = make_url(f"{bounced_url}?prepare_threshold=none").set(drivername="postgresql+asyncpg")
    app = App("shop", database=url)

    @app.on
    async def bill(placed: OrderPlaced, found: AsyncConnection) -> None:
        await found.execute(UPSERT, {"id": placed.id, "amount": 1})

    async def main() -> None:
        async with asyncio.timeout(60), app:
            for number in range(60):
                async with app.sessions.begin() as session:
                    await app.emit(session, OrderPlaced(f"o-{number}"))
            while len(await asyncio.to_thread(amounts, bounced)) < 60:
                await asyncio.sleep(0.05)
            assert app.running is not None
            assert [health.last_error for health in app.running.health()] == [""]

    asyncio.run(main())
    assert amounts(bounced) == {f"o-{number}": 1 for number in range(60)}


@pytest.mark.parametrize("clash", ["already exists", "does not exist"])
def test_prepared_statements_of_asyncpg_that_were_mixed_up_blame_no_message(
    postgres: Engine, clash: str
) -> None:
    ask = "SELECT count(*) FROM orders WHERE amount = $1"

    async def main() -> None:
        names: list[str] = []
        arguments = {"prepared_statement_name_func": lambda: names[0] if names else None}
        url = postgres.url.set(drivername="postgresql+asyncpg")
        engine = create_async_engine(url, connect_args=arguments)

        def handle() -> None:
            with Transaction(engine).scope(()), connection(engine) as found:
                found.exec_driver_sql(ask, (1,))
                if clash == "already exists":
                    names.append("__asyncpg_1__")
                    found.exec_driver_sql("SELECT 1")
                    found.exec_driver_sql("SELECT 2")
                found.exec_driver_sql("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")
                found.exec_driver_sql(ask, (1,))

        try:
            with pytest.raises(StoreError, match=f"{clash}.*'statement_cache_size': 0"):
                await bridge.run(handle)
        finally:
            await engine.dispose()

    asyncio.run(main())


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_options_of_a_transaction_end_with_it(bounced: Engine, level: Any) -> None:
    shown = text("SELECT current_setting('transaction_isolation'), pg_backend_pid()")
    read_only = text("SELECT current_setting('transaction_read_only')")
    strict = Transaction(bounced, isolation_level=level, read_only=True)
    with strict.scope(()), connection(bounced) as found:
        isolation, first = found.execute(shown).one()
        assert isolation == level.lower()
        assert found.execute(read_only).scalar() == "on"
    with bounced.connect() as other:
        assert other.execute(shown).one() == ("read committed", first)
        assert other.execute(read_only).scalar() == "off"


@pytest.mark.parametrize("wakeup", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_two_relays_publish_each_row_once(
    bounced: Engine, bounced_url: str, ordered: bool, wakeup: bool
) -> None:
    for number in range(10):
        fill(bounced, 10, first=1 + 10 * number, key=f"k-{number}" if ordered else None)
    others = behind(bounced_url)
    sink = ListSink()
    relays = [
        Relay(
            OutboxSource(engine, ordered=ordered, poll=0.05, wakeup=wakeup),
            sink,
            batch_size=7,
            ordered=ordered,
        )
        for engine in (bounced, others)
    ]
    threads = [threading.Thread(target=relay.run) for relay in relays]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: unpublished(bounced) == 0, timeout=60)
    finally:
        for relay in relays:
            relay.stop()
        for thread in threads:
            thread.join(20)
    others.dispose()
    assert Counter(sink.ids) == {f"e-{number}": 1 for number in range(1, 101)}
    if ordered:
        for number in range(10):
            sent = [message.id for message in sink.sent if message.key == f"k-{number}"]
            assert sent == [f"e-{10 * number + place}" for place in range(1, 11)]


def test_a_refused_row_uses_up_an_attempt(bounced: Engine) -> None:
    fill(bounced, 3)
    sink = ListSink()
    sink.bad = {"e-2"}
    source = OutboxSource(bounced, wakeup=False, max_attempts=1)
    outcome = Relay(source, sink).run_once()
    source.close()
    assert (outcome.published, outcome.failed) == (2, 1)
    with bounced.connect() as looking:
        parked = looking.execute(text("SELECT event_id FROM outbox WHERE parked_at IS NOT NULL"))
        assert parked.scalars().all() == ["e-2"]


@pytest.mark.parametrize("mode", ["inbox", "position"])
def test_workers_of_a_log_find_new_events_by_polling(bounced: Engine, mode: Any) -> None:
    def log_worker() -> Worker:
        source = LogSource(
            *(bounced, "orders", "billing"), poll=0.05, exactly_once=mode, producers_repeat=False
        )
        router = Router()
        router.use(Transaction(bounced), *([Inbox("billing")] if mode == "inbox" else []))

        @router.raw(name="count")
        def count(message: Message[Any]) -> None:
            with connection(bounced) as found:
                queued(found, message.id)

        return Worker(source, router, threads=2, batch_size=5)

    with running(log_worker(), log_worker()):
        for part in range(3):  # with LISTEN left on, and no notification that comes through
            events = [
                Message(b"{}", {"id": f"o-{part}-{n}", "type": "t", "subject": f"k{n}"})
                for n in range(20)
            ]
            with bounced.begin() as writer:
                Outbox("orders", source="/shop", notify=False).add(writer, events)
            eventually(lambda part=part: len(amounts(bounced)) == 20 * (part + 1), timeout=30)
    assert set(amounts(bounced).values()) == {1}


def test_cleanup_and_log_work(bounced: Engine) -> None:
    fill(bounced, 30)
    assert len(OutboxLog(bounced).read(None, 100)) == 30
    source = OutboxSource(bounced, wakeup=False)
    assert Relay(source, ListSink(), batch_size=20).run_once().published == 20
    source.close()
    cleanup = Cleanup(bounced, retention=1e-6)
    assert cleanup.run_once().outbox == 20
    assert unpublished(bounced) == 10


def test_many_may_create_and_upgrade_the_tables_at_once(bounced_url: str) -> None:
    errors: list[BaseException] = []

    def start() -> None:
        made = behind(bounced_url)
        try:
            schema.init(made)
            schema.migrate(made)
        except BaseException as error:
            errors.append(error)
        finally:
            made.dispose()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    made = behind(bounced_url)
    assert schema.verify(made) == []
    made.dispose()
