"""The database fails in all the ways it has; the service recovers by itself."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager

import msgspec
import pytest
from sqlalchemy import event, text
from tests.waiting import eventually

from conquiet import Message, Router, Worker
from conquiet.memory import Log
from conquiet.relay import Relay
from conquiet.sql import Inbox, Outbox, OutboxSource, Transaction, connection, engine, schema

UPSERT = (
    "INSERT INTO orders (id, amount) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET amount = orders.amount + 1"
)


class PlaceOrder(msgspec.Struct):
    id: str


class OrderPlaced(msgspec.Struct):
    id: str


class Service:
    """Worker and relay over one database; commands and events are logs in memory."""

    def __init__(self, made, *, threads=1, batch_size=10, handler=None, **transaction):
        self.engine = made
        self.commands, self.events = Log(), Log()
        self.router = Router()
        self.router.use(Transaction(made, **transaction), Inbox("billing"), Outbox("orders"))
        self.handler = handler or self.upsert

        @self.router.command(source="/shop")
        def place_order(order: PlaceOrder) -> list[OrderPlaced]:
            with connection(made) as found:
                self.handler(found, order)
            return [OrderPlaced(order.id)]

        source = self.commands.source("billing", lease=60.0)
        self.worker = Worker(source, self.router, threads=threads, batch_size=batch_size)
        self.relay = Relay(
            OutboxSource(made, poll=0.05), self.events.sink(), batch_size=7, longest_pause=0.5
        )
        self._publishing = threading.Thread(target=self.relay.run)

    def upsert(self, found, order):
        found.execute(text(UPSERT), {"id": order.id})

    def send(self, first, count):
        self.commands.append(
            [
                Message(
                    msgspec.json.encode({"id": f"o-{number}"}),
                    {"id": f"c-{number}", "type": "place.order", "source": "/web"},
                )
                for number in range(first, first + count)
            ]
        )

    def __enter__(self):
        self.worker.start()
        self._publishing.start()
        return self

    def __exit__(self, *exception):
        self.worker.stop(10)
        self.relay.stop()
        self._publishing.join(20)

    def published(self) -> Counter[str]:
        return Counter(message.id for message in self.events.replay())

    def check(self, count, *, repeats=0):
        """Every order took effect once; every event went out, few of them twice."""
        eventually(lambda: len(self.published()) == count, timeout=60, message="all events")
        with self.engine.connect() as found:
            amounts = dict(found.execute(text("SELECT id, amount FROM orders")).all())
            seen = found.execute(text("SELECT count(*) FROM processed_messages")).scalar_one()
        assert amounts == {f"o-{number}": 1 for number in range(count)}
        assert seen == count
        assert sum(self.published().values()) - count <= repeats


def prepare(made):
    schema.init(made)
    with made.begin() as found:
        found.execute(text("CREATE TABLE orders (id TEXT PRIMARY KEY, amount INTEGER NOT NULL)"))


@contextmanager
def opened(url, **options):
    made = engine(url, **options)
    prepare(made)
    yield made
    made.dispose()


@pytest.fixture
def postgres(database_url):
    with opened(database_url) as made:
        yield made


def test_a_server_that_stops_at_once_and_comes_back(private_postgres):
    with opened(private_postgres.url) as made, Service(made) as service:
        for round_ in range(3):
            service.send(round_ * 100, 100)
            eventually(lambda seen=round_ * 100: len(service.published()) > seen, timeout=60)
            private_postgres.stop(keep=True, mode="immediate")
            time.sleep(0.3)
            private_postgres.start()
        service.check(300, repeats=3 * 7)
        assert service.worker.health().ok


def test_connections_that_are_killed_again_and_again(postgres):
    kill = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    killer = engine(postgres.url.render_as_string(hide_password=False))
    with Service(postgres) as service:
        for round_ in range(10):
            service.send(round_ * 30, 30)
            with killer.begin() as found:
                found.execute(kill)
            time.sleep(0.05)
        service.check(300, repeats=10 * 7)
    killer.dispose()


def test_a_pool_that_is_exhausted(database_url):
    with opened(database_url, pool_size=2, max_overflow=0, pool_timeout=0.1) as made:
        held = [made.connect(), made.connect()]
        with Service(made) as service:
            service.send(0, 50)
            eventually(lambda: service.relay.last_error is not None)
            assert service.published() == {}
            for one in held:
                one.close()
            service.check(50)


def collect_deadlocks(engine, timeout):
    """Let the database look for deadlocks after `timeout`; return the list that they go to."""
    with engine.begin() as found:
        found.execute(
            text(f"ALTER DATABASE {engine.url.database} SET deadlock_timeout='{timeout}'")
        )
    engine.dispose()
    deadlocks = []
    event.listen(
        engine,
        "handle_error",
        lambda c: deadlocks.append(c) if "deadlock" in str(c.original_exception) else None,
    )
    return deadlocks


def test_deadlocks_are_tried_again_and_blame_no_message(postgres):
    with postgres.begin() as found:
        found.execute(text("CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER)"))
        found.execute(text("INSERT INTO account VALUES ('a', 0), ('b', 0)"))
    deadlocks = collect_deadlocks(postgres, timeout="20ms")

    def transfer(found, order):
        number = int(order.id[2:])
        accounts = ("a", "b") if number % 2 else ("b", "a")
        for account in accounts:
            found.execute(
                text("UPDATE account SET balance = balance + 1 WHERE id = :id"), {"id": account}
            )
            time.sleep(0.002)
        found.execute(text(UPSERT), {"id": order.id})

    with Service(postgres, threads=4, batch_size=1, handler=transfer) as service:
        service.send(0, 60)
        service.check(60)
        with postgres.connect() as found:
            balances = found.execute(text("SELECT balance FROM account")).scalars().all()
    assert balances == [60, 60]
    assert deadlocks


def test_batches_that_deadlock_get_smaller_and_none_is_given_back(postgres):
    with postgres.begin() as found:
        found.execute(text("CREATE TABLE hot (id INTEGER PRIMARY KEY, hits INTEGER)"))
        found.execute(text("INSERT INTO hot SELECT number, 0 FROM generate_series(0, 9) number"))
    deadlocks = collect_deadlocks(postgres, timeout="100ms")

    def hit(found, order):
        row = int(order.id[2:]) * 7 % 11 % 10
        found.execute(text("UPDATE hot SET hits = hits + 1 WHERE id = :row"), {"row": row})
        time.sleep(0.001)
        found.execute(text(UPSERT), {"id": order.id})

    with Service(postgres, threads=4, batch_size=15, handler=hit) as service:
        service.send(0, 240)
        service.check(240)
        assert service.worker.health().failed == 0
    assert 0 < len(deadlocks) < 16


def test_serialization_failures_are_tried_again(postgres):
    with postgres.begin() as found:
        found.execute(text("CREATE TABLE counter (value INTEGER)"))
        found.execute(text("INSERT INTO counter VALUES (0)"))

    def count(found, order):
        value = found.execute(text("SELECT value FROM counter")).scalar_one()
        time.sleep(0.001)
        found.execute(text("UPDATE counter SET value = :value"), {"value": value + 1})
        found.execute(text(UPSERT), {"id": order.id})

    options = {"threads": 4, "batch_size": 1, "isolation_level": "SERIALIZABLE"}
    with Service(postgres, handler=count, **options) as service:
        service.send(0, 60)
        service.check(60)
        with postgres.connect() as found:
            assert found.execute(text("SELECT value FROM counter")).scalar_one() == 60


def test_a_full_disk_blames_no_message_and_work_goes_on_when_there_is_room(postgres):
    """PostgreSQL says 53100 when its disk is full; here a trigger says it."""
    with postgres.begin() as found:
        found.execute(text("CREATE TABLE disk (is_full BOOLEAN)"))
        found.execute(text("INSERT INTO disk VALUES (true)"))
        found.execute(
            text(
                """CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF (SELECT is_full FROM disk) THEN
                    RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100';
                END IF; RETURN NEW; END $$"""
            )
        )
        found.execute(
            text(
                "CREATE TRIGGER fill BEFORE INSERT OR UPDATE ON outbox"
                " FOR EACH ROW EXECUTE FUNCTION fill()"
            )
        )

    def full(value):
        with postgres.begin() as found:
            found.execute(text("UPDATE disk SET is_full = :value"), {"value": value})

    with Service(postgres) as service:
        service.send(0, 20)
        eventually(lambda: "could not extend" in service.worker.health().last_error)
        full(False)
        service.check(20)
        full(True)
        service.send(20, 20)
        time.sleep(0.3)
        full(False)
        service.check(40, repeats=7)


def test_a_full_sqlite_blames_no_message_and_work_goes_on_when_there_is_room(sqlite_url):
    with opened(sqlite_url) as made:
        with made.connect() as found:
            pages = found.exec_driver_sql("PRAGMA page_count").scalar_one()
        limit = {"pages": pages + 2}

        @event.listens_for(made, "checkout")
        def bound(driver, record, proxy):
            driver.execute(f"PRAGMA max_page_count={limit['pages']}").close()

        with Service(made) as service:
            service.send(0, 300)
            eventually(lambda: "full" in service.worker.health().last_error, timeout=30)
            limit["pages"] = 1_000_000
            service.check(300, repeats=7)


def test_a_database_that_is_away_is_an_outage_for_the_relay(private_postgres):
    with opened(private_postgres.url) as made, Service(made) as service:
        service.send(0, 10)
        service.check(10)
        private_postgres.stop(keep=True)
        eventually(lambda: service.relay.last_error is not None, timeout=30)
        private_postgres.start()
        service.send(10, 10)
        service.check(20, repeats=7)


def test_a_relay_that_dies_leaves_its_rows_claimable_at_once(postgres):
    with postgres.begin() as found:
        Outbox("orders", source="/shop").add(found, [OrderPlaced(f"o-{n}") for n in range(5)])
    source = OutboxSource(postgres, wakeup=False)
    [*messages] = source.read(10, 0)
    assert len(messages) == 5
    with postgres.connect() as found:
        kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in%'"
        found.execute(text(kill))
    other = OutboxSource(postgres, wakeup=False)
    assert len(eventually(lambda: other.read(10, 0))) == 5
    other.close()
    source.close()
