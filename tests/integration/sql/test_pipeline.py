"""Queued statements: nobody notices, and no error is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, event, select, text, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker
from tests.waiting import eventually

from conquiet import Router, Worker
from conquiet.errors import HandlerError
from conquiet.memory import Log
from conquiet.message import Message
from conquiet.sql import Inbox, Outbox, Transaction, connection, session
from conquiet.sql.pipeline import MOST_QUEUED, is_silent
from conquiet.testing.delivery import deliver
from conquiet.testing.messages import message

METADATA = MetaData()
ORDERS = Table(
    "orders", METADATA, Column("id", Text, primary_key=True), Column("amount", Integer, default=0)
)
DOCUMENTS = Table("documents", METADATA, Column("id", Text), Column("body", JSONB))
SAVE = insert(ORDERS)
UPSERT = SAVE.on_conflict_do_update(index_elements=["id"], set_={"amount": ORDERS.c.amount + 1})
SKIP = SAVE.on_conflict_do_nothing()


class Base(DeclarativeBase):
    metadata = METADATA


class Order(Base):
    __table__ = ORDERS


@pytest.fixture
def sent(postgres: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes to the server: each statement, each run of an executemany, each wait."""
    noted: list[str] = []
    execute, executemany = psycopg.Cursor.execute, psycopg.Cursor.executemany

    def noting_execute(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        if type(self) is psycopg.Cursor or not is_silent(str(query)):
            noted.append(str(query).split()[0])
        return execute(self, query, *arguments, **options)

    def noting_executemany(self: Any, query: Any, runs: Any, **options: Any) -> Any:
        noted.append(f"{str(query).split()[0]} x {len(runs)}")
        return executemany(self, query, runs, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", noting_execute)
    monkeypatch.setattr(psycopg.Cursor, "executemany", noting_executemany)
    return noted


def amounts(engine: Engine) -> dict[str, int]:
    with engine.connect() as looking:
        return {row.id: row.amount for row in looking.execute(select(ORDERS))}


def test_inserts_are_sent_together(postgres: Engine, sent: list[str]) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        for number in range(5):
            found.execute(UPSERT, {"id": str(number % 3)})
        assert sent == ["SELECT"]
    assert sent == ["SELECT", "INSERT x 5"]
    assert amounts(postgres) == {"0": 1, "1": 1, "2": 0}


def test_pipeline_may_be_switched_off(postgres: Engine, sent: list[str]) -> None:
    with Transaction(postgres, pipeline=False).scope(()), connection(postgres) as found:
        for number in range(3):
            found.execute(SAVE, {"id": str(number)})
    assert sent == ["INSERT"] * 3


def test_a_read_finds_what_was_queued(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "a"})
        assert found.execute(select(ORDERS.c.id)).scalars().all() == ["a"]
        found.execute(SAVE, {"id": "b"})
        found.execute(update(ORDERS).values(amount=7))
        assert found.execute(SKIP.returning(ORDERS.c.id), {"id": "c"}).scalar() == "c"
    assert amounts(postgres) == {"a": 7, "b": 7, "c": 0}


def test_row_counts_are_right_at_once_and_later(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        assert found.execute(SKIP, {"id": "a"}).rowcount == 1
        assert found.execute(SKIP, {"id": "a"}).rowcount == 0
        kept = [found.execute(SKIP, {"id": name}) for name in "abbc"]
        found.execute(SKIP, {"id": "d"})
        assert [result.rowcount for result in kept] == [0, 1, 0, 1]
        plain = "INSERT INTO orders VALUES ('e', 0) ON CONFLICT DO NOTHING"
        assert found.execute(text(plain)).rowcount == 1
        assert found.exec_driver_sql(plain).rowcount == 0
    assert sorted(amounts(postgres)) == ["a", "b", "c", "d", "e"]


def test_parameters_are_taken_as_they_were(postgres: Engine) -> None:
    METADATA.create_all(postgres, [DOCUMENTS])
    body = {"version": 1}
    values = {"id": "a", "body": body}
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        found.execute(insert(DOCUMENTS), values)
        body["version"] = 2
        values["id"] = "b"
        found.execute(SAVE, values := {"id": "first"})
        values["id"] = "changed"
        with found.connection.driver_connection.cursor() as cursor:
            for given in ({"id": "second"}, ["third"]):
                mark = "%(id)s" if isinstance(given, dict) else "%s"
                cursor.execute(f"INSERT INTO orders (id, amount) VALUES ({mark}, 0)", given)
                given["id" if isinstance(given, dict) else 0] = "changed"
    with postgres.connect() as looking:
        assert looking.execute(select(DOCUMENTS)).all() == [("a", {"version": 1})]
    assert list(amounts(postgres)) == ["first", "second", "third"]


def test_statements_keep_their_order(postgres: Engine) -> None:
    METADATA.create_all(postgres, [DOCUMENTS])
    with postgres.begin() as prepared:
        prepared.execute(text("ALTER TABLE documents ADD seq serial"))
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        kept = []
        for number in range(30):
            if number % 3 == 0:
                found.execute(insert(DOCUMENTS), {"id": str(number), "body": {}})  # sent at once
            elif number % 3 == 1:
                kept.append(found.execute(insert(DOCUMENTS), {"id": str(number)}))
            else:
                found.execute(insert(DOCUMENTS), {"id": str(number)})
    with postgres.connect() as looking:
        rows = looking.execute(text("SELECT id FROM documents ORDER BY seq")).scalars()
        assert list(rows) == [str(number) for number in range(30)]


def test_more_than_the_queue_holds(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        for number in range(2 * MOST_QUEUED + 7):
            found.execute(SAVE, {"id": str(number)})
    assert len(amounts(postgres)) == 2 * MOST_QUEUED + 7


# --- errors ---------------------------------------------------------------------------------


def run(engine: Engine, *handle: Any) -> Any:
    router = Router()
    router.use(Transaction(engine), Inbox("test"), Outbox("orders"))
    calls = iter(handle)

    @router.raw(name="handler", source="/test")
    def handler(item: Message[Any]) -> list[Message[Any]]:
        with connection(engine) as found:
            (handle[0] if len(handle) == 1 else next(calls))(found)
        return [Message(b"", {"type": "done"})]

    return deliver(router, *(message(id=str(number)) for number in range(len(handle))))


def test_an_error_surfaces_before_commit_as_that_of_its_message(postgres: Engine) -> None:
    def save_twice(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        found.execute(SAVE, {"id": "a"})

    [error] = run(postgres, save_twice).errors
    assert isinstance(error, IntegrityError)
    assert "orders_pkey" in str(error)
    assert amounts(postgres) == {}


def test_an_error_in_a_batch_is_blamed_on_its_message_alone(postgres: Engine) -> None:
    router = Router()
    router.use(Transaction(postgres), Inbox("test"), Outbox("orders"))

    @router.raw(name="handler", source="/test")
    def handler(item: Message[Any]) -> list[Message[Any]]:
        with connection(postgres) as found:
            found.execute(SAVE, {"id": item.subject})
        return [Message(b"", {"type": "done"})]

    names = ["a", "b", "a", "c"]
    batch = [message(id=str(n), subject=name) for n, name in enumerate(names)]
    delivered = deliver(router, *batch)
    assert [item.id for item in delivered.acked] == ["0", "1", "3"]
    assert isinstance(delivered.errors[0], IntegrityError)
    assert sorted(amounts(postgres)) == ["a", "b", "c"]
    with postgres.connect() as looking:
        assert looking.execute(text("SELECT count(*) FROM outbox")).scalar() == 3


def test_an_error_that_a_read_raises_names_the_queued_statement(postgres: Engine) -> None:
    def read_after(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        found.execute(SAVE, {"id": "a"})
        found.execute(select(ORDERS))

    [error] = run(postgres, read_after).errors
    assert isinstance(error, IntegrityError)
    assert any("INSERT INTO orders" in note for note in error.orig.__notes__)  # type: ignore[union-attr]


def test_a_swallowed_error_of_a_queued_statement_is_found_S2(postgres: Engine) -> None:
    def swallow(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        found.execute(SAVE, {"id": "a"})
        try:
            found.execute(select(ORDERS))
        except DBAPIError:
            pass

    assert isinstance(run(postgres, swallow).errors[0], HandlerError)
    assert amounts(postgres) == {}


def test_an_error_in_a_savepoint_surfaces_there(postgres: Engine) -> None:
    def recover(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        try:
            with found.begin_nested():
                found.execute(SAVE, {"id": "a"})
        except IntegrityError:
            found.execute(SAVE, {"id": "b"})

    assert len(run(postgres, recover).acked) == 1
    assert sorted(amounts(postgres)) == ["a", "b"]


def test_a_value_that_cannot_be_sent_fails_its_message(postgres: Engine) -> None:
    [error] = run(postgres, lambda found: found.execute(SAVE, {"id": "a\0"})).errors
    assert isinstance(error, DBAPIError | psycopg.DataError)
    assert amounts(postgres) == {}


def test_a_deferred_constraint_still_fails_the_commit(postgres: Engine) -> None:
    with postgres.begin() as prepared:
        prepared.execute(
            text("CREATE TABLE lines (o text REFERENCES orders DEFERRABLE INITIALLY DEFERRED)")
        )
    lines = Table("lines", MetaData(), Column("o", Text))
    [error] = run(postgres, lambda found: found.execute(insert(lines), {"o": "none"})).errors
    assert isinstance(error, IntegrityError)


def test_a_connection_lost_while_statements_wait_is_replaced(postgres: Engine) -> None:
    tries: list[int] = []

    def kill(found: Any) -> None:
        pid = found.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        found.execute(SAVE, {"id": "a"})
        tries.append(1)
        if len(tries) == 1:
            with postgres.connect() as other:
                other.exec_driver_sql("SELECT pg_terminate_backend(%s)", (pid,))

    assert len(run(postgres, kill).acked) == 1
    assert (len(tries), list(amounts(postgres))) == (2, ["a"])


def test_an_error_that_a_savepoint_took_care_of_is_not_blamed_for_a_lost_connection(
    postgres: Engine,
) -> None:
    tries: list[int] = []

    def kill(found: Any) -> None:
        pid = found.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        found.execute(SAVE, {"id": "a"})
        with suppress(IntegrityError), found.begin_nested():
            found.execute(SAVE, {"id": "a"})
        found.execute(SAVE, {"id": "b"})
        tries.append(1)
        if len(tries) == 1:
            with postgres.connect() as other:
                other.exec_driver_sql("SELECT pg_terminate_backend(%s)", (pid,))

    assert len(run(postgres, kill).acked) == 1
    assert (len(tries), sorted(amounts(postgres))) == (2, ["a", "b"])


# --- the connection afterwards --------------------------------------------------------------


def test_a_connection_leaves_as_it_came(postgres: Engine) -> None:
    run(postgres, lambda found: found.execute(SAVE, {"id": "a"}))
    run(
        postgres, lambda found: [found.execute(SAVE, {"id": "a"}), found.execute(SAVE, {"id": "b"})]
    )
    with postgres.connect() as plain:
        driver = plain.connection.driver_connection
        assert driver is not None
        assert driver.cursor_factory is psycopg.Cursor
        assert driver.server_cursor_factory is psycopg.ServerCursor
        assert driver.info.pipeline_status == psycopg.pq.PipelineStatus.OFF


def test_copy_and_server_side_cursors_work_inside(postgres: Engine) -> None:
    def copy(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        with found.connection.cursor().copy("COPY orders FROM STDIN") as sink:
            sink.write_row(("b", 1))
        found.execute(SAVE, {"id": "c"})
        streamed = found.execution_options(stream_results=True).execute(select(ORDERS.c.id))
        assert sorted(streamed.scalars()) == ["a", "b", "c"]
        found.execution_options(stream_results=False)
        found.execute(SAVE, {"id": "d"})

    delivered = run(postgres, copy)
    assert delivered.errors == []
    assert sorted(amounts(postgres)) == ["a", "b", "c", "d"]


def test_orm_flushes_are_queued_and_right(postgres: Engine) -> None:
    factory = sessionmaker(postgres)

    def work(found: Any) -> None:
        with session(factory) as joined:
            joined.add_all([Order(id="a"), Order(id="b")])
            joined.flush()
            joined.get_one(Order, "a").amount = 5

    assert len(run(postgres, work).acked) == 1
    assert amounts(postgres) == {"a": 5, "b": 0}
    with Session(postgres) as looking:
        assert looking.get_one(Order, "a").amount == 5


def test_two_threads_queue_apart(postgres: Engine) -> None:
    def work(name: str) -> None:
        for number in range(50):
            with Transaction(postgres).scope(()), connection(postgres) as found:
                found.execute(select(ORDERS).limit(1))
                found.execute(SAVE, {"id": f"{name}{number}"})

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(amounts(postgres)) == 100


@pytest.mark.parametrize(
    ("query", "silent"),
    [
        ("INSERT INTO a VALUES (1)", True),
        ("\n  insert into a VALUES (1)", True),
        ("INSERT INTO a VALUES (1) RETURNING id", False),
        ("INSERT INTO a VALUES (1) returning id", False),
        ("UPDATE a SET b = 1", False),
        ("SELECT 1", False),
        ("WITH x AS (SELECT 1) INSERT INTO a SELECT * FROM x", False),
        ("INSERTED", False),
        ("-- INSERT\nSELECT 1", False),
    ],
)
def test_only_inserts_that_return_nothing_are_queued(query: str, silent: bool) -> None:
    assert is_silent(query) is silent


# --- nothing is lost ------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 3, 50])
@pytest.mark.parametrize("pipeline", [True, False])
def test_inbox_without_outbox_stores_every_effect(
    postgres: Engine, batch_size: int, pipeline: bool
) -> None:
    count = 100
    commands = Log()
    commands.append([message(str(number % count), id=str(number)) for number in range(count)] * 2)
    router = Router()
    router.use(Transaction(postgres, pipeline=pipeline), Inbox("billing"))

    @router.raw(source="/shop", type="test")
    def handle(item: Message[Any]) -> None:
        with connection(postgres) as found:
            found.execute(UPSERT, {"id": item.id, "amount": 0})

    worker = Worker(commands.source("billing"), router, batch_size=batch_size, threads=2)
    worker.start()
    try:
        eventually(lambda: not commands.unsettled("billing"), timeout=60)
    finally:
        worker.stop(10)
    assert amounts(postgres) == {str(number): 0 for number in range(count)}


def in_transaction(engine: Engine, handle: Callable[[Any], object]) -> None:
    with Transaction(engine).scope(()), connection(engine) as found:
        handle(found)


@pytest.mark.parametrize("held", [False, True])
def test_a_value_that_the_driver_refuses_loses_no_neighbour_silently(
    postgres: Engine, held: bool
) -> None:
    """Such an error never reaches PostgreSQL, whose transaction would commit the rest."""
    kept: list[Any] = []

    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        for name in ("a", "b", "nul\0", "c", "d"):
            result = found.execute(SAVE, {"id": name})
            if held:
                kept.append(result)
        with suppress(DBAPIError):
            found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "e"})

    with pytest.raises(HandlerError, match="queued statement failed"):
        in_transaction(postgres, handle)
    assert amounts(postgres) == {}


def test_an_error_that_was_caught_with_a_row_count_is_not_forgotten(postgres: Engine) -> None:
    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "nul\0"})
        last = found.execute(SAVE, {"id": "a"})
        with suppress(psycopg.Error):
            last.rowcount  # noqa: B018 - it waits

    with pytest.raises(HandlerError, match="queued statement failed"):
        in_transaction(postgres, handle)
    assert amounts(postgres) == {}


def test_what_a_listener_adds_at_the_commit_is_committed(postgres: Engine) -> None:
    def add(ending: Any) -> None:
        ending.execute(SAVE, {"id": "at the commit"})

    event.listen(postgres, "commit", add)
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "a"})
    event.remove(postgres, "commit", add)
    assert sorted(amounts(postgres)) == ["a", "at the commit"]


def test_a_kept_cursor_queues_nothing_after_the_end(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        driver = found.connection.driver_connection
        cursor = driver.cursor()
        cursor.execute("INSERT INTO orders (id) VALUES ('a')")
    with psycopg.connect(driver.info.dsn) as other:
        assert other.execute("SELECT id FROM orders").fetchall() == [("a",)]
    with postgres.connect() as again:
        assert again.connection.driver_connection is driver
        again.execute(select(ORDERS))
        cursor.execute("INSERT INTO orders (id) VALUES ('b')")
        driver.commit()
    assert sorted(amounts(postgres)) == ["a", "b"]


def test_a_savepoint_of_the_driver_rolls_back_nothing_that_came_before_it(
    postgres: Engine,
) -> None:
    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "before"})
        driver = found.connection.driver_connection
        with suppress(psycopg.errors.DivisionByZero), driver.transaction():
            driver.execute("INSERT INTO orders (id) VALUES ('inside')")
            driver.execute("SELECT 1 / 0")
        found.execute(SAVE, {"id": "behind"})

    in_transaction(postgres, handle)
    assert sorted(amounts(postgres)) == ["before", "behind"]


def test_an_error_in_a_savepoint_of_the_driver_surfaces_there(postgres: Engine) -> None:
    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "a"})
        driver = found.connection.driver_connection
        cursor = driver.cursor()
        with pytest.raises(psycopg.errors.UniqueViolation), driver.transaction():
            cursor.execute("INSERT INTO orders (id) VALUES (%s)", ("a",))

    in_transaction(postgres, handle)
    assert sorted(amounts(postgres)) == ["a"]


def test_a_savepoint_of_the_driver_as_the_first_statement_commits_nothing(
    postgres: Engine,
) -> None:
    def handle(found: Any) -> None:
        driver = found.connection.driver_connection
        with driver.transaction():
            driver.execute("INSERT INTO orders (id) VALUES ('a')")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_transaction(postgres, handle)
    assert amounts(postgres) == {}


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_driver_that_ends_the_transaction_leaves_nothing_of_it(
    postgres: Engine, end: str
) -> None:
    """Else what was queued, or what follows, would be committed without the inbox's row."""

    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "before"})
        getattr(found.connection, end)()
        found.execute(SAVE, {"id": "behind"})

    with pytest.raises(HandlerError, match=rf"{end}\(\) on the connection"):
        in_transaction(postgres, handle)
    assert amounts(postgres) == {}


def test_a_text_without_parameters_may_hold_a_percent_sign(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        plain = found.execution_options(no_parameters=True)
        plain.exec_driver_sql("INSERT INTO orders (id) VALUES ('50% off')")
    assert sorted(amounts(postgres)) == ["50% off"]
