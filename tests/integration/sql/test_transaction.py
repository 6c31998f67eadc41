"""Transaction: what is committed, what is blamed on whom, and how adapters find it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, String, create_engine, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from conquiet import Router
from conquiet.errors import ConfigError, HandlerError, StoreError
from conquiet.message import Message
from conquiet.sql import Inbox, Outbox, Transaction, connection, session
from conquiet.sql import engine as make_engine
from conquiet.testing.delivery import Delivered, deliver
from conquiet.testing.messages import message

SAVE = text("INSERT INTO orders (id) VALUES (:id)")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(String, primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


def save(engine: Engine, id_: str) -> None:
    with connection(engine) as found:
        found.execute(SAVE, {"id": id_})


def saved(engine: Engine) -> list[str]:
    with engine.connect() as looking:
        return list(looking.execute(text("SELECT id FROM orders ORDER BY id")).scalars())


def run(engine: Engine, handle: Callable[[], object], **options: Any) -> Delivered:
    """One message through a handler that does what the test says."""
    router = Router()
    router.use(Transaction(engine, **options), Inbox("test"), Outbox("orders"))
    router.raw(name="handler")(_raw(handle))
    try:
        return deliver(router, message())
    finally:
        router.close()


def _raw(handle: Callable[[], object]) -> Callable[..., Any]:
    if asyncio.iscoroutinefunction(handle):

        async def handle_async(item: Message[Any]) -> None:
            await handle()

        return handle_async

    def handle_sync(item: Message[Any]) -> None:
        handle()

    return handle_sync


def remembered(engine: Engine) -> int:
    with engine.connect() as looking:
        count = looking.execute(text("SELECT count(*) FROM processed_messages")).scalar()
        assert count is not None
        return count


# --- S2: what is swallowed is not committed -------------------------------------------------


def test_a_swallowed_sql_error_is_found_before_commit_S2(postgres: Engine) -> None:
    def swallow() -> None:
        save(postgres, "a")
        try:
            save(postgres, "a")
        except IntegrityError:
            pass

    delivered = run(postgres, swallow)
    assert isinstance(delivered.errors[0], HandlerError)
    assert "duplicate key" in str(delivered.errors[0])
    assert (saved(postgres), remembered(postgres)) == ([], 0)


def test_an_error_swallowed_in_a_savepoint_harms_nobody_S2(engine: Engine) -> None:
    def recover() -> None:
        save(engine, "a")
        with connection(engine) as found:
            try:
                with found.begin_nested():
                    save(engine, "a")
            except IntegrityError:
                save(engine, "b")

    assert len(run(engine, recover).acked) == 1
    assert saved(engine) == ["a", "b"]


def test_a_failed_flush_that_is_swallowed_is_found_before_commit_S2(engine: Engine) -> None:
    factory = sessionmaker(engine)

    def swallow() -> None:
        save(engine, "a")
        try:
            with session(factory) as joined:
                joined.add(Order(id="a"))
        except IntegrityError:
            pass

    # Where the flush was queued, it fails at the commit, and there was nothing to swallow.
    assert isinstance(run(engine, swallow).errors[0], HandlerError | IntegrityError)
    assert saved(engine) == []


@pytest.mark.parametrize(
    "statement",
    [
        *("COMMIT", "commit work;", "ROLLBACK", "end", "ABORT", "begin", "Start  Transaction"),
        *("PREPARE TRANSACTION 'x'", "-- done\n/* really */ ;COMMIT", "COMMIT AND CHAIN"),
    ],
)
@pytest.mark.parametrize("pipeline", [True, False])
def test_statements_that_end_the_transaction_are_refused_before_they_are_sent(
    engine: Engine, statement: str, pipeline: bool
) -> None:
    factory = sessionmaker(engine)
    ways = [
        lambda found: found.exec_driver_sql(statement),
        lambda found: found.execute(text(statement)),
        lambda found: found.scalar(text(statement)),
    ]
    word = statement.split()[-1 if "--" in statement else 0].strip(";").upper()
    with Transaction(engine, pipeline=pipeline).scope(()), connection(engine) as found:
        save(engine, "a")
        for way in ways:
            with pytest.raises(HandlerError, match=word):
                way(found)
        with session(factory) as joined, pytest.raises(HandlerError, match=word):
            joined.execute(text(statement))
        assert saved(engine) == []  # another connection does not see it: nothing was committed
        save(engine, "b")
    assert saved(engine) == ["a", "b"]


def test_a_handler_that_commits_by_text_leaves_nothing(engine: Engine) -> None:
    def end() -> None:
        save(engine, "a")
        with connection(engine) as found:
            found.exec_driver_sql("COMMIT")

    assert isinstance(run(engine, end).errors[0], HandlerError)
    assert (saved(engine), remembered(engine)) == ([], 0)


def test_a_cursor_of_the_driver_refuses_to_commit_too(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        save(postgres, "a")
        driver = found.connection.driver_connection
        with pytest.raises(HandlerError, match="COMMIT"):
            driver.execute("COMMIT")
        assert saved(postgres) == []


@pytest.mark.parametrize(
    "statement",
    [
        *("ROLLBACK TO SAVEPOINT mine", "rollback work to mine", "ROLLBACK TO mine"),
        *("PREPARE transactions AS SELECT 1", "SELECT 1 AS commit", "/* COMMIT */ SELECT 1"),
    ],
)
def test_savepoints_and_words_that_only_look_alike_are_let_through(
    postgres: Engine, statement: str
) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(text("SAVEPOINT mine"))
        found.execute(text(statement))


def test_a_transaction_ended_by_the_driver_is_an_error(engine: Engine) -> None:
    def end() -> None:
        with connection(engine) as found:
            found.connection.driver_connection.commit()

    assert isinstance(run(engine, end).errors[0], HandlerError)


def test_sqlite_that_rolls_back_by_itself_is_noticed_S2(sqlite: Engine) -> None:
    def conflict() -> None:
        save(sqlite, "a")
        with connection(sqlite) as found:
            try:
                found.exec_driver_sql("INSERT OR ROLLBACK INTO orders (id) VALUES ('a')")
            except IntegrityError:
                pass

    assert isinstance(run(sqlite, conflict).errors[0], HandlerError)
    assert (saved(sqlite), remembered(sqlite)) == ([], 0)


# --- who is to blame ------------------------------------------------------------------------


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


# --- options --------------------------------------------------------------------------------


def test_isolation_level_and_read_only_reach_the_database(postgres: Engine) -> None:
    seen: list[Any] = []

    def look() -> None:
        with connection(postgres) as found:
            seen.append(found.exec_driver_sql("SHOW transaction_isolation").scalar())
            seen.append(found.exec_driver_sql("SHOW transaction_read_only").scalar())

    for options in ({"isolation_level": "SERIALIZABLE", "read_only": True}, {}):
        with Transaction(postgres, **options).scope(()):  # type: ignore[arg-type]
            look()
    assert seen == ["serializable", "on", "read committed", "off"]


def test_a_write_in_a_read_only_transaction_is_the_handlers_fault(engine: Engine) -> None:
    reading = Transaction(engine, read_only=True)
    with pytest.raises(Exception, match=r"read.?only") as raised, reading.scope(()):
        save(engine, "a")
    assert not isinstance(raised.value, StoreError)
    save(engine, "b")  # and the connection is as it was
    assert saved(engine) == ["b"]


def test_an_isolation_level_that_commits_by_itself_is_refused(database_url: str) -> None:
    with pytest.raises(ConfigError, match="isolation_level"):
        Transaction(database_url, isolation_level="AUTOCOMMIT")  # type: ignore[arg-type]
    engine = make_engine(database_url, isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigError, match="AUTOCOMMIT"), Transaction(engine).scope(()):
        pass
    engine.dispose()


def test_an_async_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="statement"):
        Transaction(create_async_engine("sqlite+aiosqlite://").sync_engine)


def test_a_url_is_as_good_as_an_engine(sqlite_url: str) -> None:
    transaction = Transaction(sqlite_url)
    with transaction.scope(()), connection(transaction.engine) as found:
        assert found.exec_driver_sql("SELECT 1").scalar() == 1
    transaction.engine.dispose()


def test_an_engine_that_was_made_by_hand_works_as_well(sqlite: Engine) -> None:
    plain = create_engine(sqlite.url)
    assert len(run(plain, lambda: save(plain, "a")).acked) == 1
    assert isinstance(run(plain, lambda: [save(plain, "b"), 1 / 0]).errors[0], ZeroDivisionError)
    assert saved(plain) == ["a"]
    plain.dispose()


def test_sqlite_waits_for_the_writer_before_it_and_never_fails_to_upgrade(sqlite: Engine) -> None:
    """A transaction that reads first and writes then would get SQLITE_BUSY at once."""
    errors: list[object] = []

    def count_up() -> None:
        with connection(sqlite) as found:
            amount = found.execute(text("SELECT amount FROM orders WHERE id = 'a'")).scalar()
            found.execute(
                text("UPDATE orders SET amount = :n WHERE id = 'a'"), {"n": (amount or 0) + 1}
            )

    def work() -> None:
        for _ in range(20):
            errors.extend(run(sqlite, count_up).errors)

    save(sqlite, "a")
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with sqlite.connect() as looking:
        assert looking.execute(text("SELECT amount FROM orders")).scalar() == 60
    assert errors == []


def test_sqlite_writes_ahead(sqlite: Engine) -> None:
    with sqlite.connect() as looking:
        assert looking.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


# --- the ambient transaction ----------------------------------------------------------------


def test_outside_a_transaction_a_block_is_one_of_its_own(engine: Engine) -> None:
    save(engine, "a")
    with suppress(ZeroDivisionError), connection(engine) as own:
        own.execute(SAVE, {"id": "b"})
        raise ZeroDivisionError
    with session(sessionmaker(engine)) as joined:
        joined.add(Order(id="c"))
    assert saved(engine) == ["a", "c"]


@pytest.mark.parametrize("verb", ["commit", "rollback", "close"])
def test_code_inside_cannot_end_the_transaction(engine: Engine, verb: str) -> None:
    def end() -> None:
        save(engine, "a")
        with connection(engine) as found:
            getattr(found, verb)()

    assert isinstance(run(engine, end).errors[0], HandlerError)
    assert saved(engine) == []


def test_begin_inside_is_a_savepoint(engine: Engine) -> None:
    def recover() -> None:
        save(engine, "a")
        with connection(engine) as found, suppress(ZeroDivisionError), found.begin():
            save(engine, "b")
            raise ZeroDivisionError

    assert len(run(engine, recover).acked) == 1
    assert saved(engine) == ["a"]


def test_a_session_is_flushed_at_the_end_of_its_block_and_before_the_commit(
    engine: Engine,
) -> None:
    factory = sessionmaker(engine)

    def work() -> None:
        with session(factory) as joined:
            order = Order(id="a")
            joined.add(order)
        with connection(engine) as found:
            assert found.execute(select(Order.id)).scalars().all() == ["a"]
        order.amount = 7

    assert len(run(engine, work).acked) == 1
    with Session(engine) as looking:
        assert looking.get_one(Order, "a").amount == 7


def test_session_commit_leaves_the_commit_to_the_transaction(engine: Engine) -> None:
    factory = sessionmaker(engine)

    def fail() -> None:
        with session(factory) as joined:
            joined.add(Order(id="a"))
            joined.commit()
        raise ZeroDivisionError

    assert isinstance(run(engine, fail).errors[0], ZeroDivisionError)
    assert saved(engine) == []


def test_session_rollback_inside_fails_the_message(engine: Engine) -> None:
    factory = sessionmaker(engine)

    def undo() -> None:
        with session(factory) as joined:
            joined.add(Order(id="a"))
            joined.flush()
            joined.rollback()

    assert isinstance(run(engine, undo).errors[0], HandlerError)
    assert remembered(engine) == 0


def test_what_a_failed_block_had_not_written_is_never_written(engine: Engine) -> None:
    factory = sessionmaker(engine)

    def work() -> None:
        try:
            with session(factory) as joined:
                joined.add(Order(id="a"))
                raise LookupError
        except LookupError:
            save(engine, "b")

    assert len(run(engine, work).acked) == 1
    assert saved(engine) == ["b"]


def test_handles_are_of_no_use_after_the_end(engine: Engine) -> None:
    kept: list[Any] = []
    factory = sessionmaker(engine)

    def keep() -> None:
        with connection(engine) as found, session(factory) as joined:
            kept.extend((found, joined))
            joined.add(Order(id="a"))

    run(engine, keep)
    with pytest.raises(HandlerError, match="has ended"):
        kept[0].execute(SAVE, {"id": "late"})
    with pytest.raises(HandlerError, match="has ended"):
        kept[1].execute(SAVE, {"id": "late"})


def test_a_thread_that_outlives_its_handler_cannot_write(engine: Engine) -> None:
    contexts: list[Any] = []
    run(engine, lambda: contexts.append(copy_context()))
    with pytest.raises(HandlerError, match="has ended"):
        contexts[0].run(save, engine, "late")
    assert saved(engine) == []


def test_an_async_handler_finds_the_transaction(engine: Engine) -> None:
    async def handle() -> None:
        await asyncio.sleep(0)
        save(engine, "a")
        raise ZeroDivisionError

    assert isinstance(run(engine, handle).errors[0], ZeroDivisionError)
    assert saved(engine) == []


def test_another_engine_has_its_own_transactions(sqlite: Engine, postgres: Engine) -> None:
    def work() -> None:
        save(sqlite, "a")
        save(postgres, "a")
        raise ZeroDivisionError

    run(postgres, work)
    assert (saved(sqlite), saved(postgres)) == (["a"], [])


def test_an_engine_with_options_is_the_same_engine(engine: Engine) -> None:
    def work() -> None:
        save(engine.execution_options(logging_token="orders"), "a")
        raise ZeroDivisionError

    run(engine, work)
    assert saved(engine) == []


def test_inbox_and_outbox_need_a_transaction(engine: Engine) -> None:
    with pytest.raises(HandlerError, match="outside a SQL transaction"):
        Inbox("billing").remember([("billing", "1")])
    with pytest.raises(HandlerError, match="outside a SQL transaction"):
        Outbox("orders").store([message()])
