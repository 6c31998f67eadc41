"""Inbox in SQL: one statement per batch, no duplicate-key errors, no deadlocks."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from conquiet import Router
from conquiet.errors import ConfigError, InvalidMessage, StoreError
from conquiet.message import Message
from conquiet.sql import Inbox, Outbox, Transaction, connection
from conquiet.testing import Delivered, deliver, message


def router_of(engine: Engine, runs: list[str], *, inbox: str = "test", **options: Any) -> Router:
    router = Router()
    router.use(Transaction(engine, **options), Inbox(inbox), Outbox("orders"))

    @router.raw(name="handler")
    def handle(item: Message[Any]) -> None:
        runs.append(item.id)

    return router


def test_a_duplicate_is_acked_and_the_transaction_commits(engine: Engine) -> None:
    runs: list[str] = []
    router = router_of(engine, runs)
    first = deliver(router, message(id="a"))
    again = deliver(router, message(id="a"), message(id="b"))
    assert [len(first.acked), len(again.acked)] == [1, 2]
    assert runs == ["a", "b"]


def test_a_row_holds_subscriber_handler_source_and_id(engine: Engine) -> None:
    deliver(router_of(engine, []), message(id="a", source="/shop"))
    with engine.connect() as looking:
        row = looking.execute(text("SELECT * FROM processed_messages")).one()
    assert tuple(row)[:2] == ("test/handler", "/shop a")
    assert row.created_at is not None


@pytest.mark.parametrize("size", [1, 400, 5000])
def test_a_batch_of_any_size_is_one_statement(engine: Engine, size: int) -> None:
    inbox = Inbox("test")
    entries = [("test", f"/s {number}") for number in range(size)]
    with Transaction(engine).scope(()):
        assert set(inbox.remember(entries[::2])) == set(entries[::2])
        assert set(inbox.remember(entries)) == set(entries[1::2])
        assert list(inbox.remember(entries)) == []


@pytest.mark.parametrize(
    "attributes",
    [{"id": "a\0b"}, {"source": "/s\0"}, {"id": "x" * 2001}, {"id": "\ud800"}, {"id": "ü" * 1100}],
)
def test_an_id_that_no_row_can_hold_fails_for_good(
    engine: Engine, attributes: dict[str, str]
) -> None:
    delivered = deliver(router_of(engine, []), message(**attributes), message(id="good"))
    assert [item.id for item in delivered.acked] == ["good"]
    assert isinstance(delivered.errors[0], InvalidMessage)


def test_an_id_of_the_greatest_length_fits(engine: Engine) -> None:
    long = "".join(chr(33 + (number * 7919) % 90) for number in range(1994))
    assert len(deliver(router_of(engine, []), message(id=long, source="/test")).acked) == 1


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_concurrent_duplicate_under_a_snapshot_is_a_retryable_error(
    postgres: Engine, level: Any
) -> None:
    """The second has its snapshot before the first commits, and then meets its row."""
    inside, go = threading.Event(), threading.Event()
    second = Transaction(postgres, isolation_level=level)

    def first() -> None:
        with Transaction(postgres).scope(()):
            Inbox("test").remember([("test", "a")])
            inside.set()
            go.wait(20)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)

    def duplicate() -> None:
        with second.scope(()), connection(postgres) as found:
            found.exec_driver_sql("SELECT count(*) FROM processed_messages")  # takes the snapshot
            go.set()
            thread.join(20)
            Inbox("test").remember([("test", "a")])

    with pytest.raises(StoreError):
        duplicate()


def test_two_workers_with_the_same_messages_in_opposite_order_do_not_deadlock(
    postgres: Engine,
) -> None:
    runs: list[str] = []
    results: list[Delivered] = []
    batch = [f"m-{number}" for number in range(300)]

    def work(names: list[str]) -> None:
        router = router_of(postgres, runs)
        results.append(deliver(router, *(message(id=name) for name in names)))

    threads = [threading.Thread(target=work, args=(names,)) for names in (batch, batch[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [len(delivered.acked) for delivered in results] == [300, 300]
    assert sorted(runs) == sorted(batch)


def test_rows_are_locked_in_one_order_whatever_the_order_of_the_batch(postgres: Engine) -> None:
    entries = [("billing", f"m-{number}") for number in (3, 1, 2)]
    with Transaction(postgres).scope(()):
        Inbox("billing").remember(entries)
    with postgres.connect() as looking:
        found = looking.execute(text("SELECT message_id FROM processed_messages ORDER BY ctid"))
        assert found.scalars().all() == ["m-1", "m-2", "m-3"]


@pytest.mark.parametrize("name", ['x"; DROP TABLE x', "Upper", "a.b.c", "a" * 49, "", "a b"])
def test_names_that_would_need_quoting_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="table name"):
        Inbox("test", table=name)
    with pytest.raises(ConfigError, match="table name"):
        Outbox("orders", table=name)


# --- in the caller's transaction ------------------------------------------------------------


def seen(engine: Engine) -> list[tuple[str, str]]:
    with engine.connect() as looking:
        query = text("SELECT subscriber, message_id FROM processed_messages ORDER BY 2, 1")
        return [(name, id_) for name, id_ in looking.execute(query)]


def test_a_message_is_fresh_once_in_the_transaction_of_a_session_or_connection(
    engine: Engine,
) -> None:
    inbox, item = Inbox("billing"), message(id="a", source="/shop")
    with Session(engine) as session:
        assert inbox.fresh(session, item)
        session.rollback()  # the effects are gone, so it is fresh again
        assert inbox.fresh(session, item)
        assert not inbox.fresh(session, item)
        session.commit()
    with engine.begin() as found:
        assert not inbox.fresh(found, item)
        assert inbox.fresh(found, "a")  # without a source it is another message
        assert Inbox("audit").fresh(found, item)
    assert seen(engine) == [("billing", " a"), ("audit", "/shop a"), ("billing", "/shop a")]


def test_a_message_is_fresh_once_in_an_async_transaction(engine: Engine) -> None:
    inbox, item = Inbox("billing"), message(id="a", source="/shop")
    drivers = {
        "sqlite": ["sqlite+aiosqlite"],
        "postgresql": ["postgresql+asyncpg", "postgresql+psycopg_async"],
    }

    async def consume(driver: str, item: Message[Any]) -> None:
        made = create_async_engine(engine.url.set(drivername=driver))
        async with AsyncSession(made) as session:
            assert await inbox.fresh(session, item)
            await session.rollback()
            assert await inbox.fresh(session, item)
            await session.commit()
        async with made.begin() as found:
            assert not await inbox.fresh(found, item)
        await made.dispose()

    for driver in drivers[engine.name]:
        asyncio.run(consume(driver, item.copy(id=driver)))
    assert seen(engine) == [("billing", f"/shop {name}") for name in sorted(drivers[engine.name])]


def test_a_message_is_fresh_once_for_the_connection_of_a_driver(
    postgres: Engine, sqlite: Engine, database_url: str
) -> None:
    inbox, path = Inbox("billing"), str(sqlite.url.database)

    async def consume() -> None:
        connection = await asyncpg.connect(database_url)
        with pytest.raises(ConfigError, match=r"Inbox.fresh\(\).*in no transaction"):
            await inbox.fresh(connection, "1")
        async with connection.transaction():
            assert await inbox.fresh(connection, "1")
            assert not await inbox.fresh(connection, "1")
        await connection.close()
        async with await psycopg.AsyncConnection.connect(database_url) as other:
            assert not await inbox.fresh(other, "1")
            assert await inbox.fresh(other, "2")
        async with aiosqlite.connect(path) as file:
            assert await inbox.fresh(file, "1")
            await file.commit()

    asyncio.run(consume())
    with psycopg.connect(database_url, row_factory=psycopg.rows.dict_row) as found:
        assert not inbox.fresh(found, "2")
        assert inbox.fresh(found, "3")
    with closing(sqlite3.connect(path)) as file:
        assert not inbox.fresh(file, "1")
        assert inbox.fresh(file, "2")
        file.commit()
    assert [id_ for _, id_ in seen(postgres)] == [" 1", " 2", " 3"]
    assert [id_ for _, id_ in seen(sqlite)] == [" 1", " 2"]


def test_a_statement_returns_a_row_if_the_message_is_fresh(engine: Engine) -> None:
    inbox, item = Inbox("billing"), message(id="a:b %s ?", source="/shop")
    with Session(engine) as session, session.begin():
        assert session.execute(inbox.statement(item)).all() == [("billing", "/shop a:b %s ?")]
        assert session.execute(inbox.statement(item)).all() == []
        assert not inbox.fresh(session, item)


def test_fresh_refuses_what_no_row_can_hold_and_names_what_it_takes(sqlite: Engine) -> None:
    with sqlite.begin() as found:
        for wrong in ("", "a\0b", "x" * 2001):
            with pytest.raises(InvalidMessage):
                Inbox("billing").fresh(found, wrong)
    with pytest.raises(ConfigError, match=r"Inbox.fresh\(\) cannot use Engine; it takes"):
        Inbox("billing").fresh(sqlite, "a")  # type: ignore[call-overload]
