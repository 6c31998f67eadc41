"""An outbox read as a log misses no row, whenever it commits."""

from __future__ import annotations

import threading
import time

import pytest
from sqlalchemy import insert
from tests.integration.sql.claiming import OUTBOX, fill, row, store

from conquiet.errors import ConfigError, StoreError
from conquiet.sql.log import POSITION, OutboxLog, Position


def ids(messages) -> list[str]:
    return [message.id for message in messages]


def test_a_row_that_commits_late_is_not_missed(postgres):
    log = OutboxLog(postgres)
    with postgres.connect() as slow:
        slow.execute(insert(OUTBOX).values(**row(1)))  # takes the smaller id …
        store(postgres, row(2))  # … and commits after this one
        assert log.read() == []  # nothing beyond a transaction that still runs
        horizon = log.horizon()
        assert horizon.seconds > 0
        assert "idle in transaction" in horizon.holder
        slow.commit()
    assert ids(log.follow()) == ["e-1", "e-2"]
    assert log.horizon().holder == ""


def test_whoever_reads_while_others_write_sees_each_row_once(postgres):
    log = OutboxLog(postgres)
    done = threading.Event()

    def write(writer):
        for number in range(60):
            with postgres.begin() as connection:
                connection.execute(insert(OUTBOX).values(**row(writer * 1000 + number)))
                if number % 7 == writer:
                    time.sleep(0.01)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(1, 5)]
    for thread in threads:
        thread.start()
    seen, position = [], None
    while not done.is_set():
        if not any(thread.is_alive() for thread in threads):
            done.set()  # one more round, for what came last
        for message in log.follow(position, limit=7):
            seen.append(message.id)
            position = message.locals[POSITION]
    assert len(seen) == 240
    assert len(set(seen)) == 240


def test_a_log_is_read_page_by_page_from_any_position(engine):
    fill(engine, 10)
    log = OutboxLog(engine)
    first = log.read(limit=4)
    assert ids(first) == ["e-1", "e-2", "e-3", "e-4"]
    position = Position.parse(first[-1].locals[POSITION])
    assert ids(log.read(position, limit=3)) == ["e-5", "e-6", "e-7"]
    assert len(list(log.follow(str(position), limit=2))) == 6


def test_a_log_holds_what_is_published_too(engine):
    fill(engine, 2, published_at=None)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox SET published_at = created_at")
    [first, _] = OutboxLog(engine).read()
    assert first.data == b'{"number": 1}'
    assert first.topic == "orders"
    assert first.attributes["source"] == "/shop"


def test_xids_compare_as_numbers(postgres):
    """As text, transaction 1000 would come before transaction 999."""
    fill(postgres, 3)
    with postgres.begin() as connection:
        for number, xid in ((1, 9), (2, 10), (3, 100)):
            connection.exec_driver_sql(
                f"UPDATE outbox SET xid = '{xid}' WHERE event_id = 'e-{number}'"
            )
    assert ids(OutboxLog(postgres).read()) == ["e-1", "e-2", "e-3"]
    assert ids(OutboxLog(postgres).read(Position(9, 10**9))) == ["e-2", "e-3"]


def test_sqlite_has_no_horizon(sqlite):
    assert OutboxLog(sqlite).horizon().seconds == 0


def test_a_wrong_position_or_table_is_refused(engine):
    with pytest.raises(ConfigError, match="812-40017"):
        OutboxLog(engine).read("yesterday")
    with pytest.raises(ConfigError):
        OutboxLog(engine).read(limit=0)
    with pytest.raises(StoreError, match="nowhere"):
        OutboxLog(engine, "nowhere").read()
