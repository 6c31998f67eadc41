"""Transaction: which errors are blamed on the message, and which on the store."""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import sessionmaker
from tests.integration.sql.orders import Order, run, save, saved

from conquiet import Message, Router, Worker
from conquiet.errors import Blameless, ConfigError, DeadlineExceeded, StoreError
from conquiet.memory import Log
from conquiet.middleware import DeadLetter, Deadline
from conquiet.sql import Inbox, Outbox, Transaction, connection, dialect, session
from conquiet.sql import engine as make_engine
from conquiet.testing import deliver, eventually, message


def test_an_integrity_error_is_the_fault_of_its_message(engine: Engine) -> None:
    delivered = run(engine, lambda: [save(engine, "a"), save(engine, "a")])
    assert isinstance(delivered.errors[0], IntegrityError)


@pytest.mark.parametrize("code", ["40001", "40P01", "55P03", "57P01", "53300", "08006", "25006"])
def test_errors_of_the_store_blame_no_message(postgres: Engine, code: str) -> None:
    raising = f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{code}'; END $$"

    def fail() -> None:
        with connection(postgres) as found:
            found.exec_driver_sql(raising)

    assert isinstance(run(postgres, fail).errors[0], StoreError)


def test_an_error_of_the_store_inside_the_handlers_own_error_blames_no_message(
    postgres: Engine,
) -> None:
    def fail() -> None:
        with connection(postgres) as found:
            try:
                found.exec_driver_sql("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$")
            except OperationalError as error:
                raise LookupError("no such order") from error

    assert isinstance(run(postgres, fail).errors[0], StoreError)


def test_a_swallowed_deadlock_is_tried_again(postgres: Engine) -> None:
    tries: list[int] = []

    def fail_once() -> None:
        tries.append(1)
        with connection(postgres) as found:
            try:
                if len(tries) == 1:
                    found.exec_driver_sql("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$")
            except OperationalError:
                pass

    assert len(run(postgres, fail_once).acked) == 1
    assert len(tries) == 2


def test_a_swallowed_deadlock_is_blamed_for_what_the_handler_raises_later(
    postgres: Engine,
) -> None:
    def fail() -> None:
        with connection(postgres) as found, suppress(OperationalError):
            found.exec_driver_sql("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$")
        raise LookupError("no such order")

    assert isinstance(run(postgres, fail).errors[0], StoreError)


def test_a_real_deadlock_is_resolved_and_effects_happen_once(postgres: Engine) -> None:
    save(postgres, "a")
    save(postgres, "b")
    both = threading.Barrier(2, timeout=20)
    tries: list[str] = []

    def add(first: str, second: str) -> None:
        tries.append(first)
        with connection(postgres) as found:
            for name in (first, second):
                found.execute(
                    text("UPDATE orders SET amount = amount + 1 WHERE id = :i"), {"i": name}
                )
                if len(tries) <= 2 and name == first:
                    both.wait()

    threads = [
        threading.Thread(target=run, args=(postgres, lambda pair=pair: add(*pair)))
        for pair in ("ab", "ba")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    with postgres.connect() as looking:
        amounts = looking.execute(text("SELECT amount FROM orders")).scalars().all()
    assert (list(amounts), len(tries)) == ([2, 2], 3)


def test_a_connection_killed_inside_is_replaced_and_the_message_handled(postgres: Engine) -> None:
    tries: list[int] = []

    def kill() -> None:
        tries.append(1)
        save(postgres, "a")
        if len(tries) == 1:
            with connection(postgres) as found, postgres.connect() as other:
                pid = found.exec_driver_sql("SELECT pg_backend_pid()").scalar()
                other.exec_driver_sql("SELECT pg_terminate_backend(%s)", (pid,))

    assert len(run(postgres, kill).acked) == 1
    assert saved(postgres) == ["a"]


def test_connections_that_died_in_the_pool_cost_one_try_together(
    postgres: Engine, database_url: str
) -> None:
    idle = [postgres.connect() for _ in range(5)]
    for one in idle:
        one.close()
    with psycopg.connect(database_url) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert len(run(postgres, lambda: save(postgres, "a")).acked) == 1


def test_an_exhausted_pool_blames_no_message(postgres: Engine) -> None:
    small = make_engine(postgres.url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    with small.connect():
        assert isinstance(run(small, lambda: None).errors[0], StoreError)
    assert len(run(small, lambda: None).acked) == 1
    small.dispose()


def test_a_server_that_is_away_blames_no_message() -> None:
    away = make_engine("postgresql://nobody@127.0.0.1:1/none")
    assert isinstance(run(away, lambda: None).errors[0], StoreError)


def test_the_password_stays_out_of_errors() -> None:
    away = make_engine("postgresql://nobody:secret@127.0.0.1:1/none")
    assert "secret" not in str(run(away, lambda: None).errors[0])


def test_a_locked_sqlite_blames_no_message(sqlite: Engine) -> None:
    hasty = make_engine(sqlite.url, connect_args={"timeout": 0.01})
    with sqlite.connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        assert isinstance(run(hasty, lambda: None).errors[0], StoreError)
    hasty.dispose()


def test_a_handler_that_exceeds_its_time_is_to_blame_also_if_the_interrupt_breaks_the_connection(
    engine: Engine, untraced: None
) -> None:
    def never_end() -> None:
        with connection(engine) as found:
            try:
                while True:
                    time.sleep(0.001)
            finally:
                dialect.driver_connection(found).close()
                found.execute(text("SELECT 1"))  # a clean-up that fails like a lost connection

    delivered = run(engine, never_end, outside=[Deadline(0.02)])
    assert isinstance(delivered.errors[0], DeadlineExceeded)


# --- errors of other connections, and messages that fail as the store does ---------------------


def meet_a_lock(engine: Engine) -> None:
    with connection(engine) as found:
        found.execute(text("SELECT * FROM orders WHERE id = 'locked' FOR UPDATE NOWAIT"))


def meet_a_missing_file(engine: Engine) -> None:
    with connection(engine) as found:
        found.execute(text("LOAD 'no-such-library'"))


def meet_a_missing_database(engine: Engine) -> None:
    psycopg.connect("postgresql://nobody@127.0.0.1:1/none").close()


def meet_an_engine_that_is_away(engine: Engine) -> None:
    make_engine("postgresql://nobody@127.0.0.1:1/none").connect().close()


def meet_a_transaction_that_is_away(engine: Engine) -> None:
    with Transaction("postgresql://nobody@127.0.0.1:1/none").scope(()):
        pass


def meet_a_router_whose_database_is_away(engine: Engine) -> None:
    inner = Router()
    inner.use(Transaction("postgresql://nobody@127.0.0.1:1/none"))
    inner.raw(name="inner")(handle_nothing)
    [result] = inner.process([message()])
    assert isinstance(result, StoreError)
    raise result


def meet_itself(engine: Engine) -> None:
    """Write by a connection of its own, while the transaction has SQLite's write lock."""
    save(engine, "mine")
    with closing(sqlite3.connect(str(engine.url.database), timeout=0.01)) as own:
        own.execute("INSERT INTO orders (id) VALUES ('other')")


def deliver_twenty(engine: Engine, fail: Callable[[Engine], None]) -> tuple[Worker, Log]:
    """Run 20 messages through a worker until none is left; the message 7 fails."""
    router, log, dead = Router(), Log(), Log()
    router.use(DeadLetter(dead.sink("dead"), 3), Transaction(engine), Inbox("t"), Outbox("orders"))

    @router.raw(name="handler")
    def handle(item: Message[Any]) -> None:
        save(engine, item.id)
        if item.id == "m-07":
            fail(engine)

    log.append([message(id=f"m-{number:02}") for number in range(20)])
    worker = Worker(log.source("group"), router)
    worker.start()
    eventually(lambda: not log.unsettled("group"), timeout=20)
    worker.stop()
    return worker, dead


@pytest.mark.parametrize(
    "fail",
    [
        meet_a_lock,
        meet_a_missing_file,
        meet_a_missing_database,
        meet_an_engine_that_is_away,
        meet_a_transaction_that_is_away,
        meet_a_router_whose_database_is_away,
    ],
)
def test_a_message_that_fails_as_the_store_does_is_dead_in_the_end_and_its_neighbours_are_done(
    postgres: Engine, fail: Callable[[Engine], None]
) -> None:
    save(postgres, "locked")
    with postgres.connect() as holder:
        holder.execute(text("SELECT * FROM orders WHERE id = 'locked' FOR UPDATE"))
        _, dead = deliver_twenty(postgres, fail)
    [letter] = dead.replay()
    assert (letter.id, letter.attributes["deadattempts"]) == ("m-07", "3")
    good = [f"m-{number:02}" for number in range(20) if number != 7]
    assert saved(postgres) == ["locked", *good]


def test_a_connection_of_the_handlers_own_to_sqlite_blames_its_message(sqlite: Engine) -> None:
    _, dead = deliver_twenty(sqlite, meet_itself)
    [letter] = dead.replay()
    assert "database is locked" in letter.attributes["deadreason"]
    assert len(saved(sqlite)) == 19


@pytest.mark.parametrize("fail", [meet_a_missing_database, meet_an_engine_that_is_away])
def test_an_error_of_another_connection_is_the_fault_of_its_message(
    postgres: Engine, fail: Callable[[Engine], None]
) -> None:
    assert not isinstance(run(postgres, lambda: fail(postgres)).errors[0], Blameless)


def test_a_lost_connection_that_the_driver_meets_blames_no_message(postgres: Engine) -> None:
    """Statements by psycopg itself are not seen by SQLAlchemy, nor are their errors."""

    def lose() -> None:
        with connection(postgres) as found:
            driver: Any = found.connection.driver_connection
            driver.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    assert isinstance(run(postgres, lose).errors[0], StoreError)


def test_a_deadlock_that_the_driver_meets_blames_no_message(postgres: Engine) -> None:
    def fail() -> None:
        with connection(postgres) as found:
            driver: Any = found.connection.driver_connection
            driver.execute("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$")

    assert isinstance(run(postgres, fail).errors[0], StoreError)


def test_a_probe_commits_or_raises(engine: Engine) -> None:
    Transaction(engine).probe()
    Transaction(engine, read_only=True).probe()
    with pytest.raises(StoreError):
        Transaction("postgresql://nobody@127.0.0.1:1/none").probe()


# An interrupt inside a weakref callback is ignored by Python, with this warning, and comes again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_handler_that_is_interrupted_inside_a_statement_is_to_blame_and_leaves_no_lock(
    engine: Engine, untraced: None
) -> None:
    factory = sessionmaker(engine)

    def never_end() -> None:
        for number in itertools.count():
            with session(factory) as found:
                found.add(Order(id=str(number)))
                found.flush()
                found.get(Order, "none")

    # The errors are kept, as in a batch: their tracebacks hold the statements.
    delivered = [run(engine, never_end, outside=[Deadline(0.02)]) for _ in range(10)]
    assert {type(item.errors[0]) for item in delivered} == {DeadlineExceeded}
    assert run(engine, lambda: save(engine, "a")).acked
    assert saved(engine) == ["a"]


# --- missing tables ----------------------------------------------------------------------------


def router_without(engine: Engine, *tables: str) -> Router:
    """A started router whose tables are dropped, and not of the handler's own."""
    router = Router()
    router.use(Transaction(engine), Inbox("t"), Outbox("orders"))

    @router.raw(name="handler", source="/t")
    def handle(item: Message[Any]) -> list[Message[Any]]:
        if item.id == "bad":
            with connection(engine) as found:
                # The name of our table is in the error too.
                found.execute(text('INSERT INTO missing SELECT 1 FROM "processed_messages"'))
        return [Message(b"{}", {"type": "done"})] if item.id != "silent" else []

    router.start()
    with engine.begin() as found:
        for table in tables:
            found.execute(text(f"DROP TABLE {table}"))
    return router


@pytest.mark.parametrize("table", ["processed_messages", "outbox"])
def test_a_missing_table_of_inbox_or_outbox_is_an_outage(engine: Engine, table: str) -> None:
    router = router_without(engine, table)
    delivered = deliver(router, message(id="silent"), message(id="a"), message(id="b"))
    assert delivered.nacked
    for error in delivered.errors:
        assert isinstance(error, StoreError)
        assert table in str(error)
        assert "conquiet outbox migrate" in str(error)


def test_a_missing_table_of_the_handlers_own_blames_its_message(engine: Engine) -> None:
    delivered = deliver(router_without(engine), message(id="bad"), message(id="a"))
    assert [item.id for item in delivered.acked] == ["a"]
    assert not isinstance(delivered.errors[0], Blameless)


@pytest.mark.parametrize("table", ["processed_messages", "outbox"])
def test_a_chain_without_its_tables_is_refused_at_start(engine: Engine, table: str) -> None:
    with engine.begin() as found:
        found.execute(text(f"DROP TABLE {table}"))
    router = Router()
    router.use(Transaction(engine), Inbox("t"), Outbox("orders"))
    router.raw(name="handler")(handle_nothing)
    with pytest.raises(ConfigError, match=rf"no table {table}.*conquiet outbox migrate"):
        Worker(Log().source("group"), router).start()


def test_a_chain_whose_database_is_away_at_start_is_not_refused() -> None:
    router = Router()
    router.use(Transaction("postgresql://nobody@127.0.0.1:1/none"), Inbox("t"), Outbox("orders"))
    router.raw(name="handler")(handle_nothing)
    router.start()


def handle_nothing(item: Message[Any]) -> None: ...
