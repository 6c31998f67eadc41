"""The ambient transaction: how adapters find it, and what code inside cannot do to it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import copy_context
from threading import Event, Thread, current_thread
from typing import Any

import pytest
from sqlalchemy import Engine, event, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from tests.integration.sql.orders import SAVE, Order, remembered, run, save, saved

from conquiet.errors import ConfigError, HandlerError
from conquiet.sql import Inbox, Outbox, connection, session
from conquiet.sql import engine as make_engine
from conquiet.testing import message


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


def test_a_scoped_session_gives_a_session_of_the_transaction(engine: Engine) -> None:
    registry = scoped_session(sessionmaker(engine))

    def work() -> None:
        with session(registry) as joined:
            joined.add(Order(id="a"))
        raise ZeroDivisionError

    run(engine, work)
    assert saved(engine) == []
    with session(registry) as own:
        own.add(Order(id="b"))
    assert saved(engine) == ["b"]
    with pytest.raises(ConfigError, match="takes a sessionmaker"):
        session(Session)  # type: ignore[arg-type]


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


def test_a_thread_in_the_middle_of_a_statement_writes_into_no_later_transaction(
    engine: Engine,
) -> None:
    reached, failed, threads = Event(), Event(), []

    def pause(connection: Any, cursor: Any, statement: str, *unused: Any) -> None:
        if current_thread() in threads:
            reached.set()
            failed.wait(0.3)  # the transaction would be rolled back by then

    def fail_early() -> None:
        threads.append(Thread(target=copy_context().run, args=(save, engine, "late")))
        threads[0].start()
        reached.wait(10)
        raise ZeroDivisionError

    event.listen(engine, "before_cursor_execute", pause)
    assert isinstance(run(engine, fail_early).errors[0], ZeroDivisionError)
    failed.set()
    threads[0].join()
    assert run(engine, lambda: save(engine, "next")).acked
    assert saved(engine) == ["next"]


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


def test_another_engine_of_the_same_database_is_refused(engine: Engine) -> None:
    other = make_engine(engine.url)
    [error] = run(engine, lambda: save(other, "a")).errors
    assert isinstance(error, HandlerError)
    assert "another engine of the same database" in str(error)
    factory = sessionmaker(other)
    [error] = run(engine, lambda: session(factory)).errors
    assert "another engine of the same database" in str(error)
    assert saved(engine) == []
    save(other, "b")  # outside a transaction any engine will do
    assert saved(engine) == ["b"]
    other.dispose()


def test_a_second_connection_of_a_handler_is_logged_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def look() -> None:
        with engine.connect() as own:
            own.execute(select(1))

    for _ in range(2):
        assert run(engine, look).acked
    assert [record.getMessage().count("a second connection") for record in caplog.records] == [1]


def test_an_async_session_of_a_handlers_own_is_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    name = "sqlite+aiosqlite" if engine.name == "sqlite" else "postgresql+asyncpg"
    made = create_async_engine(engine.url.set(drivername=name))

    async def look() -> None:
        async with AsyncSession(made) as own:
            await own.execute(select(1))
        await made.dispose()

    assert run(engine, look).acked
    assert "a second connection was opened inside a transaction" in caplog.text


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
