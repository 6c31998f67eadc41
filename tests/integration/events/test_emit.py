"""emit: in the caller's transaction, sync and async, and the model that reads it back."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

import msgspec
import psycopg
import pytest
from sqlalchemy import Engine, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from tests.integration.events.samples import notification, one_of_each, rows
from tests.waiting import eventually

from conquiet.errors import ConfigError
from conquiet.events import AppendOnly, InvalidEvent, emit, map_outbox_events, outbox
from conquiet.events.check import check
from conquiet.sql import notification as sending
from marketplace.catalog import CATALOG

OutboxEvent = map_outbox_events(CATALOG)


def test_an_event_is_stored_by_the_commit_of_the_caller(engine: Engine) -> None:
    event = notification()
    with Session(engine) as session:
        assert emit(session, event) == [event.id]
        assert rows(engine) == []
        session.commit()
    [row] = rows(engine)
    assert row.id == event.id
    assert (row.event_type, row.aggregate_type) == ("notification_requested", "notification")
    assert row.aggregate_id == event.aggregate_id
    assert row.payload_json["eventId"] == str(event.id)
    assert (row.published_at, row.attempt_count, row.last_error) == (None, 0, None)


def test_a_rollback_of_the_caller_leaves_no_event(engine: Engine) -> None:
    with Session(engine) as session:
        emit(session, notification())
        session.rollback()
    with engine.connect() as connection:
        emit(connection, notification())
    assert rows(engine) == []


def test_every_type_of_the_marketplace_can_be_stored_and_read_back(engine: Engine) -> None:
    events = one_of_each()
    with engine.begin() as connection:
        assert emit(connection, *events) == [event.id for event in events]
    for row, event in zip(rows(engine), events, strict=True):
        received = CATALOG.open(row.event_type, msgspec.json.encode(row.payload_json))
        assert received.data == event.data
        assert row.payload_json == msgspec.json.decode(check(event).payload_json)


def test_a_refused_event_leaves_the_transaction_as_it_was(engine: Engine) -> None:
    bad = notification(data={"notification_id": "a\0b"})
    with Session(engine) as session:
        emit(session, notification())
        with pytest.raises(InvalidEvent):
            emit(session, notification(), bad)
        emit(session, notification())
        session.commit()
    assert len(rows(engine)) == 2


def test_a_refused_event_does_not_even_begin_a_transaction(engine: Engine) -> None:
    with Session(engine) as session:
        with pytest.raises(InvalidEvent):
            emit(session, notification(version=9))
        assert not session.in_transaction()


def test_rows_of_one_transaction_go_out_in_the_order_they_were_made(engine: Engine) -> None:
    events = [notification() for _ in range(50)]
    with engine.begin() as connection:
        emit(connection, *events)
    found = rows(engine)
    assert [row.id for row in found] == [event.id for event in events]
    if engine.dialect.name == "postgresql":
        assert len({row.created_at for row in found}) == 1


def test_created_at_is_the_time_of_the_database(engine: Engine) -> None:
    with engine.begin() as connection:
        emit(connection, notification())
    made = rows(engine)[0].created_at
    made = made if made.tzinfo else made.replace(tzinfo=UTC)
    assert abs(made - datetime.now(UTC)) < timedelta(minutes=1)


def asynchronous(engine: Engine, **options):
    drivers = {"postgresql": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
    url = make_url(engine.url.render_as_string(hide_password=False))
    return create_async_engine(url.set(drivername=drivers[engine.dialect.name]), **options)


def test_an_async_session_commits_and_rolls_back_events(engine: Engine) -> None:
    event = notification()

    async def run() -> None:
        made = asynchronous(engine)
        async with AsyncSession(made) as session:
            await emit(session, notification())
            await session.rollback()
            with pytest.raises(InvalidEvent):
                await emit(session, notification(version=9))
            assert await emit(session, event) == [event.id]
            await session.commit()
        async with made.begin() as connection:
            await emit(connection, notification())
        await asyncio.gather(*sending._tasks)
        await made.dispose()

    asyncio.run(run())
    assert rows(engine)[0].id == event.id
    assert len(rows(engine)) == 2


def test_emit_says_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="AsyncSession"):
        emit(object(), notification())
    with pytest.raises(ConfigError, match="at least one event"):
        emit(Session())


# --- the model ------------------------------------------------------------------------------


def test_the_model_reads_what_was_emitted(engine: Engine) -> None:
    event = notification()
    with Session(engine) as session:
        emit(session, event)
        found = session.scalars(select(OutboxEvent)).one()
        assert found.id == event.id
        assert found.payload_json["eventId"] == str(event.id)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", uuid.uuid4()),
        ("event_type", "ad_paused"),
        ("aggregate_type", "ad"),
        ("aggregate_id", uuid.uuid4()),
        ("payload_json", {}),
        ("created_at", datetime(2020, 1, 1, tzinfo=UTC)),
    ],
)
def test_the_model_refuses_to_change_what_an_event_says(engine: Engine, name, value) -> None:
    with Session(engine) as session:
        emit(session, notification())
        found = session.scalars(select(OutboxEvent)).one()
        with pytest.raises(AppendOnly, match=f"{name} of event .* cannot change"):
            setattr(found, name, value)
        setattr(found, name, getattr(found, name))  # the same is no change


def test_the_model_may_be_marked(engine: Engine) -> None:
    with Session(engine) as session:
        emit(session, notification())
        found = session.scalars(select(OutboxEvent)).one()
        found.published_at = datetime.now(UTC)
        found.attempt_count = 1
        found.last_error = "refused"
        session.commit()
    assert rows(engine)[0].last_error == "refused"


def test_a_model_may_be_added_like_any_other(engine: Engine) -> None:
    row = check(notification())
    with Session(engine) as session:
        made = OutboxEvent()
        for name, value in row._asdict().items():
            setattr(made, name, msgspec.json.decode(value) if name == "payload_json" else value)
        session.add(made)
        session.commit()
    assert rows(engine)[0].id == row.id


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that relays were told of."""
    told: list[str] = []
    monkeypatch.setattr(sending, "notify_relays", lambda engine, table: told.append(table))
    return told


def test_relays_are_woken_by_the_commit_and_not_by_a_savepoint(engine: Engine, woken) -> None:
    with Session(engine) as session, session.begin():
        with session.begin_nested():
            emit(session, notification())
        assert woken == []
        emit(session, notification(), notification())
    assert woken == ["outbox_events"]


def test_what_was_rolled_back_wakes_nobody(engine: Engine, woken) -> None:
    with Session(engine) as session:
        emit(session, notification())
        session.rollback()
        session.execute(text("SELECT 1"))
        session.commit()
        assert woken == []
        emit(session, notification())
        savepoint = session.begin_nested()
        emit(session, notification())
        savepoint.rollback()
        session.commit()
    assert woken == ["outbox_events"]


@pytest.mark.slow
def test_any_number_of_events_can_be_emitted_at_once(engine: Engine) -> None:
    """More than one statement has parameters for; but all of them are checked first."""
    events = [notification() for _ in range(14_000)]
    with Session(engine) as session, session.begin():
        assert len(emit(session, *events)) == 14_000
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outbox_events")).scalar() == 14_000
    with pytest.raises(ConfigError, match="14000 events in one statement"):
        outbox.statement(*events)


def test_commits_of_an_async_session_wake_a_waiting_relay_once(postgres: Engine) -> None:
    async def run() -> int:
        made = asynchronous(postgres)
        with psycopg.connect(
            postgres.url.set(drivername="postgresql").render_as_string(hide_password=False),
            autocommit=True,
        ) as listening:
            listening.execute('LISTEN "conquiet_outbox_events"')
            for _ in range(5):
                async with AsyncSession(made) as session, session.begin():
                    await emit(session, notification())
            got = len(
                await asyncio.to_thread(lambda: list(listening.notifies(timeout=10, stop_after=1)))
            )
        await asyncio.gather(*sending._tasks)
        await made.dispose()
        return got

    assert asyncio.run(run()) >= 1


def test_an_engine_that_was_disposed_of_keeps_no_connection_of_the_notification(
    postgres: Engine,
) -> None:
    name = {"server_settings": {"application_name": "disposed of"}}

    async def run() -> None:
        made = asynchronous(postgres, connect_args=name)
        async with AsyncSession(made) as session, session.begin():
            await emit(session, notification())
        await made.dispose()
        await asyncio.gather(*sending._tasks)
        await asyncio.to_thread(eventually, lambda: not connected())

    def connected() -> int:
        asked = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'disposed of'")
        with postgres.connect() as connection:
            return connection.scalar(asked)

    asyncio.run(run())


def test_emit_says_that_it_takes_no_time(engine: Engine) -> None:
    with Session(engine) as session:
        for when in ({"after": 60}, {"at": datetime.now(UTC)}):
            with pytest.raises(ConfigError, match=r"holds no delayed events.*app.emit"):
                emit(session, notification(), **when)
        session.commit()
    assert rows(engine) == []
