"""Outbox in SQL: rows in order, bytes as they are, in whatever transaction the caller has."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import aiosqlite
import asyncpg
import msgspec
import psycopg
import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from conquiet import Router
from conquiet.errors import ConfigError, HandlerError
from conquiet.message import Message
from conquiet.sql import Outbox, Transaction, connection, notification
from conquiet.testing import deliver, message


class OrderPlaced(msgspec.Struct):
    order: int


@dataclass
class OrderPaid:
    order: int


class OrderSent(BaseModel):
    order: int


OUTBOX = Outbox("orders", source="/orders")
EVENTS = [OrderPlaced(1), OrderPaid(2), OrderSent(order=3)]
TYPES = ["order.placed", "order.paid", "order.sent"]


def rows(engine: Engine, columns: str = "event_type") -> list[Any]:
    with engine.connect() as looking:
        found = looking.execute(text(f"SELECT {columns} FROM outbox ORDER BY id")).all()
        return [row[0] if len(row) == 1 else tuple(row) for row in found]


def stored(engine: Engine, *outputs: Message[Any]) -> Any:
    """What becomes of a message whose handler returns these."""
    router = Router()
    router.use(Transaction(engine), Outbox("orders"))

    @router.raw(source="/shop")
    def handle(item: Message[Any]) -> list[Message[Any]]:
        return list(outputs)

    return deliver(router, message())


def test_ids_ascend_in_the_order_of_the_events(engine: Engine) -> None:
    names = [f"event-{number}" for number in range(2000)]
    stored(engine, *(Message(b"", {"type": "t", "id": name}) for name in names))
    assert rows(engine, "event_id") == names


def test_columns_say_what_the_attributes_say(engine: Engine) -> None:
    event = Message(b"\x00\xff", {"type": "t", "id": "1", "datacontenttype": "image/png"})
    event.attributes["subject"] = "order-7"
    stored(engine, event)
    columns = "topic, event_type, event_id, key, content_type, data, attempts, published_at"
    assert rows(engine, columns) == [
        ("orders", "t", "1", "order-7", "image/png", b"\x00\xff", 0, None)
    ]


def test_an_event_without_a_key_has_none(engine: Engine) -> None:
    stored(engine, Message(b"", {"type": "t"}))
    assert rows(engine, "key") == [None]


@pytest.mark.parametrize("name", ["id", "type", "subject", "extension"])
def test_nul_is_refused_before_the_transaction_is_harmed(engine: Engine, name: str) -> None:
    bad = Message(b"\0", {"type": "t", "id": "1", name: "a\0b"})
    delivered = stored(engine, bad)
    assert isinstance(delivered.errors[0], HandlerError)
    assert "NUL" in str(delivered.errors[0])


@pytest.mark.parametrize(
    "wrong", [{"weight": 1.5}, {"tags": ["a"]}, {"subject": 7}, {"Größe": "L"}]
)
def test_what_no_sink_could_send_is_refused_before_the_transaction_is_harmed(
    engine: Engine, wrong: dict[str, Any]
) -> None:
    bad = Message(b"", {"type": "t", "id": "1", "source": "/mine", **wrong})
    with Transaction(engine).scope(()), connection(engine) as found:
        with pytest.raises(HandlerError, match=next(iter(wrong))):
            Outbox("orders").store([bad])
        with pytest.raises(HandlerError, match="no relay could publish it"):
            OUTBOX.add(found, [bad])
        OUTBOX.add(found, EVENTS)
    assert len(rows(engine)) == len(EVENTS)


def test_numbers_booleans_and_bytes_are_attributes_too(engine: Engine) -> None:
    event = Message(b"", {"type": "t", "count": 3, "urgent": True, "digest": b"abc"})
    assert len(stored(engine, event).acked) == 1
    assert len(rows(engine)) == 1


def test_a_backslash_before_u0000_is_no_nul(engine: Engine) -> None:
    stored(engine, Message(b"", {"type": "t", "extension": "\\u0000"}))
    assert len(rows(engine)) == 1


def test_nul_in_data_is_kept(engine: Engine) -> None:
    stored(engine, Message(b"a\0b", {"type": "t"}))
    assert rows(engine, "data") == [b"a\0b"]


def test_an_event_that_no_relay_could_publish_is_refused(engine: Engine) -> None:
    router = Router()
    router.use(Transaction(engine), Outbox("orders"))

    @router.raw()  # no source
    def handle(item: Message[Any]) -> list[Message[Any]]:
        return [Message(b"", {"type": "t"})]

    assert "source" in str(deliver(router, message()).errors[0])


# --- in the caller's transaction ------------------------------------------------------------


def test_add_writes_in_the_transaction_of_a_session(engine: Engine) -> None:
    with Session(engine) as session:
        OUTBOX.add(session, EVENTS)
        session.rollback()
        ids = OUTBOX.add(session, EVENTS)
        session.commit()
    assert rows(engine) == TYPES
    assert rows(engine, "event_id") == ids


def test_add_writes_in_the_transaction_of_a_connection(engine: Engine) -> None:
    with engine.connect() as connection:
        OUTBOX.add(connection, EVENTS)
        connection.rollback()
        OUTBOX.add(connection, EVENTS)
        connection.commit()
    assert rows(engine) == TYPES


def test_add_writes_by_a_raw_psycopg_connection(postgres: Engine, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        OUTBOX.add(connection, EVENTS)
        connection.rollback()
        OUTBOX.add(connection, EVENTS)
    assert rows(postgres) == TYPES


def test_add_writes_by_a_raw_sqlite_connection(sqlite: Engine) -> None:
    with closing(sqlite3.connect(str(sqlite.url.database))) as connection, connection:
        OUTBOX.add(connection, EVENTS)
    assert rows(sqlite) == TYPES


def test_a_statement_goes_through_an_async_session(engine: Engine, database_url: str) -> None:
    url = engine.url.set(
        drivername="sqlite+aiosqlite" if engine.name == "sqlite" else "postgresql+asyncpg"
    )

    async def place() -> None:
        made = create_async_engine(url)
        async with AsyncSession(made) as session:
            await session.execute(OUTBOX.statement(EVENTS))
            await session.rollback()
            await session.execute(OUTBOX.statement(EVENTS))
            await session.commit()
        async with made.begin() as connection:
            await connection.execute(OUTBOX.statement(EVENTS[:1]))
        await made.dispose()

    asyncio.run(place())
    assert rows(engine) == [*TYPES, TYPES[0]]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_statement_has_no_limit_of_events(engine: Engine, is_async: bool) -> None:
    sent = [
        Message(b"\x00\xff" * (n % 3), {"type": "t", "id": f"ü-{n}", "partitionkey": "k" * (n % 2)})
        for n in range(10_000)
    ]
    made = OUTBOX.statement(sent)

    async def place() -> None:
        name = "sqlite+aiosqlite" if engine.name == "sqlite" else "postgresql+asyncpg"
        async_engine = create_async_engine(engine.url.set(drivername=name))
        async with async_engine.begin() as connection:
            await connection.execute(made)
        await async_engine.dispose()

    if is_async:
        asyncio.run(place())
    else:
        with Session(engine) as session, session.begin():
            session.execute(made)
    query = text("SELECT event_id, data, coalesce(key, '') FROM outbox ORDER BY id")
    with engine.connect() as connection:
        stored = [(id_, bytes(data), key) for id_, data, key in connection.execute(query)]
    assert stored == [(one.id, one.data, one.key) for one in sent]


ASYNC_DRIVERS = {
    "sqlite": ["sqlite+aiosqlite"],
    "postgresql": ["postgresql+asyncpg", "postgresql+psycopg_async"],
}


@pytest.mark.parametrize("events", [EVENTS, EVENTS[:1]], ids=["three", "one"])
def test_add_is_awaited_with_an_async_session_or_connection(
    engine: Engine, events: list[Any]
) -> None:
    async def place(driver: str) -> list[str]:
        made = create_async_engine(engine.url.set(drivername=driver))
        async with AsyncSession(made) as session:
            await OUTBOX.add(session, events)
            await session.rollback()
            ids = await OUTBOX.add(session, events)
            await session.commit()
        async with made.connect() as connection:
            await OUTBOX.add(connection, events)
            await connection.rollback()
            ids += await OUTBOX.add(connection, events)
            assert await OUTBOX.add(connection, []) == []
            await connection.commit()
        await asyncio.gather(*notification._tasks)
        await made.dispose()
        return ids

    ids = [id_ for driver in ASYNC_DRIVERS[engine.name] for id_ in asyncio.run(place(driver))]
    assert rows(engine, "event_id") == ids
    assert len(ids) == 2 * len(events) * len(ASYNC_DRIVERS[engine.name])


def test_add_is_awaited_with_a_connection_of_an_async_driver(
    postgres: Engine, sqlite: Engine, database_url: str
) -> None:
    async def place(handle: Any) -> None:
        await OUTBOX.add(handle, EVENTS)
        await OUTBOX.add(handle, EVENTS[:1])

    async def place_all() -> None:
        async with (
            asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool,
            pool.acquire() as proxy,
            proxy.transaction(),
        ):
            await place(proxy)
        connection = await asyncpg.connect(database_url)
        async with connection.transaction():
            await place(connection)
        await connection.close()
        async with await psycopg.AsyncConnection.connect(database_url) as other:
            await place(other)
            await other.rollback()
            await place(other)
        async with aiosqlite.connect(str(sqlite.url.database)) as file:
            await place(file)
            await file.rollback()
            await place(file)
            await file.commit()

    asyncio.run(place_all())
    assert rows(postgres) == [*TYPES, TYPES[0]] * 3
    assert rows(sqlite) == [*TYPES, TYPES[0]]


def test_a_connection_that_commits_each_statement_is_refused(
    postgres: Engine, sqlite: Engine, database_url: str
) -> None:
    """The event would be stored, and published, although the effects are rolled back."""

    async def refused() -> None:
        connection = await asyncpg.connect(database_url)
        with pytest.raises(ConfigError, match=r"async with connection.transaction\(\)"):
            await OUTBOX.add(connection, EVENTS)
        await connection.close()

    asyncio.run(refused())
    with psycopg.connect(database_url, autocommit=True) as connection:
        with pytest.raises(ConfigError, match="psycopg is in no transaction"):
            OUTBOX.add(connection, EVENTS)
        with connection.transaction():
            OUTBOX.add(connection, EVENTS)
    path = str(sqlite.url.database)
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        with pytest.raises(ConfigError, match="sqlite3 is in no transaction"):
            OUTBOX.add(file, EVENTS)
        file.execute("BEGIN IMMEDIATE")
        OUTBOX.add(file, EVENTS)
        file.commit()
    assert [rows(postgres), rows(sqlite)] == [TYPES, TYPES]


def test_every_way_stores_the_same(postgres: Engine, database_url: str) -> None:
    event = Message(
        b"\x00\xff",
        {"type": "t", "id": "1", "time": "2026-01-31T12:00:00Z", "source": "/s", "count": 7},
    )
    with postgres.begin() as connection:
        OUTBOX.add(connection, [event])
        connection.execute(OUTBOX.statement([event]))

    async def place() -> None:
        connection = await asyncpg.connect(database_url)
        # As many services do; what is JSON already must not be encoded again.
        await connection.set_type_codec(
            "jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog"
        )
        async with connection.transaction():
            await OUTBOX.add(connection, [event])
            await OUTBOX.add(connection, [event, event])
        await connection.close()

    asyncio.run(place())
    columns = "topic, event_type, event_id, key, content_type, data, attributes"
    first, *others = rows(postgres, columns)
    assert others == [first] * 4
    assert first[-1]["count"] == 7


def test_a_message_keeps_its_attributes_and_topic(engine: Engine) -> None:
    event = Message({"order": 1}, {"type": "t", "id": "1", "source": "/mine"}, topic="audit")
    with engine.begin() as connection:
        assert OUTBOX.add(connection, [event]) == ["1"]
    assert rows(engine, "topic, event_type, data") == [("audit", "t", b'{"order":1}')]
    assert set(event.attributes) == {"type", "id", "source"}  # the caller's own is left alone


def test_nothing_to_add_is_nothing_to_do(engine: Engine) -> None:
    with engine.begin() as connection:
        assert OUTBOX.add(connection, []) == []


def test_what_add_cannot_take_it_says(sqlite: Engine) -> None:
    with sqlite.begin() as connection:
        with pytest.raises(ConfigError, match="source"):
            Outbox("orders").add(connection, [OrderPlaced(1)])
        with pytest.raises(ConfigError, match="a list of them"):
            OUTBOX.add(connection, OrderPlaced(1))  # type: ignore[arg-type]
        with pytest.raises(HandlerError, match="'type'"):
            OUTBOX.add(connection, [{"order": 1}])
    for wrong in (object(), sqlite, sqlite.pool):
        with pytest.raises(ConfigError, match="it takes SQLAlchemy's Session"):
            OUTBOX.add(wrong, EVENTS)  # type: ignore[call-overload]
