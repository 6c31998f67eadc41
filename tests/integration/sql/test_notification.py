"""A waiting relay learns of new rows at once, and nobody pays for it in a transaction."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
from sqlalchemy import StaticPool, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from tests.integration.sql.claiming import fill
from tests.round_trips import PostgresCounter
from tests.waiting import eventually

from conquiet import sql
from conquiet.errors import ConfigError
from conquiet.message import Message
from conquiet.sql import Outbox, Transaction, notification, schema
from conquiet.sql.notification import (
    Listener,
    Notifier,
    Timer,
    Watcher,
    notify_relays,
    notify_statement,
)
from conquiet.sql.outbox_source import OutboxSource


@pytest.fixture
def listener(postgres):
    made = Listener(postgres, "outbox")
    assert made.wait(5)  # listening now; it says that something may have come before
    yield made
    made.close()


def test_a_waiting_read_is_woken_by_a_write(engine):
    source = OutboxSource(engine, poll=30)
    source.read(1, 0.01)
    source.read(1, 0.01)
    found = []
    thread = threading.Thread(target=lambda: found.extend(source.read(10, 20)))
    thread.start()
    began = time.monotonic()
    fill(engine, 3)
    notify_relays(engine)
    thread.join(20)
    assert len(found) == 3
    assert time.monotonic() - began < 5
    source.close()


@pytest.mark.parametrize("outcome", ["committed", "rolled back", "not to be told"])
def test_a_transaction_that_filled_an_outbox_wakes_after_its_commit(postgres, listener, outcome):
    transaction, outbox = Transaction(postgres), Outbox("orders", notify=outcome == "committed")
    event_ = Message(b"{}", {"id": "1", "type": "order.placed", "source": "/orders"})
    try:
        with transaction.scope([]), transaction.scope([]):  # the inner one is a savepoint
            outbox.store([event_])
            assert not listener.wait(0.1)
            if outcome == "rolled back":
                raise ValueError
    except ValueError:
        pass
    assert listener.wait(5 if outcome == "committed" else 0.3) is (outcome == "committed")


def test_nobody_is_woken_before_the_commit_is_done(postgres, listener):
    woken = []
    event.listen(postgres, "commit", lambda connection: woken.append(listener.wait(0.2)))
    with Transaction(postgres).scope([]):
        Outbox("orders").store([Message(b"{}", {"id": "1", "type": "t", "source": "/orders"})])
    assert woken == [False]
    assert listener.wait(5)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_commit_of_a_session_that_events_were_added_to_wakes(postgres, listener, is_async):
    outbox, event_ = Outbox("orders"), Message(b"{}", {"type": "t", "source": "/orders"})

    async def place():
        made = create_async_engine(postgres.url.set(drivername="postgresql+asyncpg"))
        async with AsyncSession(made) as session:
            await outbox.add(session, [event_])
            assert not listener.wait(0.1)
            await session.commit()
        await asyncio.gather(*notification._tasks)
        await made.dispose()

    if is_async:
        asyncio.run(place())
    else:
        with Session(postgres) as session:
            outbox.add(session, [event_])
            assert not listener.wait(0.1)
            session.commit()
    assert listener.wait(5)


def test_a_notification_by_asyncpg_costs_one_round_trip(postgres, listener):
    url = postgres.url.set(drivername="postgresql").render_as_string(hide_password=False)

    async def notify(counter):
        made = create_async_engine(make_url(counter.url).set(drivername="postgresql+asyncpg"))
        trips = []
        for _ in range(2):  # the first one opens the connection
            before = counter.count.copy()
            notify_relays(made.sync_engine)
            await asyncio.sleep(0)  # the task begins
            await asyncio.gather(*notification._tasks)
            trips.append(counter.count.since(before))
        await made.dispose()
        return trips[1]

    with PostgresCounter(url) as counter:
        count = asyncio.run(notify(counter))
    assert (count.asked, count.trips) == (1, 1)
    assert listener.wait(5)


def test_events_added_inside_a_handler_wake_when_its_transaction_commits(postgres, listener):
    outbox, event_ = Outbox("orders"), Message(b"{}", {"type": "t", "source": "/orders"})
    with Transaction(postgres).scope([]):
        with sql.session(sessionmaker(postgres)) as session:
            outbox.add(session, [event_])
        with sql.connection(postgres) as connection:
            outbox.add(connection, [event_])
        assert not listener.wait(0.1)
    assert listener.wait(5)


def test_a_hundred_writes_are_a_few_notifications(postgres, listener):
    notifier = Notifier(postgres, interval=0.2)
    began = time.monotonic()
    for _ in range(100):
        notifier.notify("outbox")
        time.sleep(0.005)
    assert listener.wait(5)
    assert 1 <= notifier.sent <= 2 + (time.monotonic() - began) / 0.2


def test_the_writer_pays_a_flag_and_no_statement(postgres):
    statements = []
    event.listen(postgres, "before_cursor_execute", lambda *a: statements.append(a[2]))
    began = time.perf_counter()
    for _ in range(1_000):
        notify_relays(postgres)
    assert time.perf_counter() - began < 0.5
    assert statements == []


def test_polling_finds_what_was_not_announced(engine):
    source = OutboxSource(engine, poll=0.05, wakeup=False)
    threading.Timer(0.1, lambda: fill(engine, 1)).start()
    assert len(source.read(10, 10)) == 1
    source.close()


def test_wakeup_can_be_switched_off(postgres, sqlite):
    assert isinstance(notification.wakeup_of(postgres, enabled=False), Timer)
    assert isinstance(notification.wakeup_of(sqlite, enabled=False), Timer)
    with postgres.connect() as connection:
        source = OutboxSource(postgres, wakeup=False)
        source.read(1, 0.01)
        query = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        assert connection.execute(text(query)).scalar_one() == 0
        source.close()


def test_a_listener_holds_no_connection_of_the_pool(postgres, listener):
    assert postgres.pool.checkedout() == 0


def test_a_listener_whose_connection_was_killed_listens_again(postgres, listener):
    listener._retries._cap = 0.01
    with postgres.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
            )
        )
    assert not listener.wait(5)
    assert eventually(lambda: listener.wait(0.1))
    notify_relays(postgres)
    assert listener.wait(5)


def test_a_server_that_is_away_leaves_the_time_to_pass(postgres, monkeypatch):
    def refuse(pool):
        raise postgres.dialect.loaded_dbapi.OperationalError("away")

    monkeypatch.setattr(notification, "_connect", refuse)
    waiting = Listener(postgres, "outbox")
    assert not waiting.wait(0.01)
    waiting.close()


def test_another_tables_rows_wake_nobody(postgres, listener):
    notify_relays(postgres, "others")
    assert not listener.wait(0.3)


def test_close_ends_a_wait(listener):
    thread = threading.Thread(target=lambda: listener.wait(60))
    thread.start()
    listener.close()
    thread.join(5)
    assert not thread.is_alive()
    assert not listener.wait(60)


def test_a_statement_of_ones_own_wakes_too(postgres, listener):
    with postgres.begin() as connection:
        connection.execute(text(notify_statement()))
    assert listener.wait(5)


def test_the_thread_that_notifies_ends_when_there_is_nothing_to_say(postgres, monkeypatch):
    monkeypatch.setattr(notification, "_IDLE_SECONDS", 0.05)
    notifier = Notifier(postgres, interval=0.01)
    notifier.notify("outbox")
    eventually(lambda: notifier._thread is None)
    notifier.notify("outbox")
    eventually(lambda: notifier.sent == 2)
    eventually(lambda: notifier._thread is None)


def test_sqlite_is_watched_without_reading_it(sqlite):
    watcher = Watcher(sqlite)
    assert watcher.wait(1)  # the first look is always worth a claim
    assert not watcher.wait(0.05)
    fill(sqlite, 1)
    assert watcher.wait(5)
    assert not watcher.wait(0.05)
    watcher.close()
    assert not watcher.wait(60)


def test_a_database_in_memory_outlives_its_relay():
    """Its one connection must not be taken from the pool to watch it, and then be closed."""
    for options in ({}, {"poolclass": StaticPool}):
        made = sql.engine("sqlite://", **options)
        schema.init(made)
        source = OutboxSource(made)
        assert not source.read(1, 0.1)
        source.close()
        fill(made, 1)
        assert len(OutboxSource(made).read(1, 0)) == 1
        made.dispose()


def test_a_notification_that_cannot_be_sent_fails_nobody_who_has_committed(postgres, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    notify_relays(postgres)


def test_a_forked_process_has_notifiers_of_its_own(postgres):
    notify_relays(postgres)
    notifier = notification._notifiers[postgres]
    with notifier._changed, notification._notifiers_lock:  # as another thread might, at the fork
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            notify_relays(postgres)
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)


def test_a_table_name_cannot_smuggle_sql():
    with pytest.raises(ConfigError):
        notify_statement("x'; DROP TABLE outbox; --")


def test_a_look_tells_delayed_events_from_others_and_takes_nothing_from_a_wait(postgres, listener):
    assert listener.look()  # some may have been delayed before it listened
    assert not listener.look()
    notify_relays(postgres)
    assert listener.wait(60)
    assert not listener.look()
    notify_relays(postgres, "outbox_delayed")
    eventually(listener.look)
    assert listener.wait(60)
    assert not listener.look()


def test_a_busy_reader_does_not_ask_for_delayed_events_unless_some_were_written(postgres):
    """It polls as well, but seldom."""
    asked = []

    @event.listens_for(postgres, "before_cursor_execute")
    def note(connection, cursor, statement, *rest):
        asked.append("pg_try_advisory_xact_lock" in statement)

    source = OutboxSource(postgres, poll=60)
    fill(postgres, 210)
    for _ in range(10):  # listening since the second look
        source.read(1, 60)[0].ack()
    asked.clear()
    began = time.monotonic()
    for _ in range(200):
        [message] = source.read(1, 60)
        message.ack()
    assert sum(asked) <= 1 + (time.monotonic() - began) / 0.5
    with Session(postgres) as session, session.begin():
        Outbox("orders").add(session, [_order("late")], after=0.05)
    [message] = source.read(1, 60)
    assert message.id == "late"
    message.ack()
    source.close()


def test_an_idle_reader_wakes_for_each_of_two_delayed_events(postgres):
    """Also for one that is written a moment after it has looked."""
    source = OutboxSource(postgres, poll=60)
    source.read(1, 0.1)
    found = []
    thread = threading.Thread(target=lambda: found.extend(_read_until(source, 4)))
    thread.start()
    with sessionmaker(postgres)() as session:
        for number in range(4):
            with session.begin():
                Outbox("orders").add(session, [_order(f"e-{number}")], after=0.05)
            time.sleep(0.006)
    thread.join(50)
    source.close()
    assert sorted(found) == ["e-0", "e-1", "e-2", "e-3"]


def _read_until(source, count):
    found = []
    while len(found) < count:
        for message in source.read(10, 50):
            found.append(message.id)
            message.ack()
    return found


def _order(id_):
    return Message(b"{}", {"id": id_, "type": "order.placed", "source": "/orders"})
