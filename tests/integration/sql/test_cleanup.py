"""Cleanup by the database's clock, in small batches, beside the work."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, insert, select, text
from tests.integration.sql.claiming import INBOX, OUTBOX, fill, row, rows, store
from tests.waiting import eventually

from conquiet.errors import ConfigError, StoreError
from conquiet.sql.cleanup import Cleanup, Removed
from conquiet.sql.outbox_source import OutboxSource

OLD = datetime.now(UTC) - timedelta(days=8)
YOUNG = datetime.now(UTC) - timedelta(days=6)


def remember(engine, count, created_at, prefix="m"):
    entries = [
        {"subscriber": "billing", "message_id": f"{prefix}{n}", "created_at": created_at}
        for n in range(count)
    ]
    with engine.begin() as connection:
        connection.execute(insert(INBOX), entries)


def remembered(engine):
    with engine.connect() as connection:
        return set(connection.execute(select(INBOX.c.message_id)).scalars())


def test_both_tables_keep_seven_days(engine):
    remember(engine, 3, OLD, "old")
    remember(engine, 2, YOUNG, "young")
    fill(engine, 4, 1, published_at=OLD, created_at=OLD)
    fill(engine, 2, 5, published_at=YOUNG, created_at=OLD)
    assert Cleanup(engine).run_once() == Removed(inbox=3, outbox=4)
    assert remembered(engine) == {"young0", "young1"}
    assert [found.event_id for found in rows(engine)] == ["e-5", "e-6"]


def test_a_row_that_waits_or_is_parked_is_never_removed(engine):
    fill(engine, 2, 1, created_at=OLD)
    fill(engine, 2, 3, created_at=OLD, parked_at=OLD, attempts=10)
    assert Cleanup(engine, retention=1).run_once() == Removed()
    assert len(rows(engine)) == 4


def test_a_row_that_waits_is_spared_in_another_partition_too(postgres):
    """Rows of two partitions have the same place, by which a batch is deleted."""
    with postgres.begin() as connection:
        for statement in (
            "CREATE TABLE parted (id bigint, created_at timestamptz, published_at timestamptz)"
            " PARTITION BY RANGE (id)",
            "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
            "INSERT INTO parted VALUES (1, now() - interval '8 days', now() - interval '8 days'),"
            " (11, now() - interval '8 days', NULL)",
        ):
            connection.execute(text(statement))
    assert Cleanup(postgres, inbox=None, outbox="parted").run_once() == Removed(outbox=1)
    with postgres.connect() as connection:
        assert connection.scalars(text("SELECT id FROM parted")).all() == [11]


def test_batches_are_transactions_of_their_own(engine):
    remember(engine, 25, OLD)
    commits = []
    event.listen(engine, "commit", commits.append)
    assert Cleanup(engine, batch_size=10).run_once().inbox == 25
    assert len(commits) == 4  # 10, 10, 5; and a look at the outbox


def test_a_row_that_somebody_holds_is_left_alone_and_nobody_waits(postgres):
    fill(postgres, 3, 1, published_at=OLD)
    with postgres.begin() as connection:
        connection.execute(text("SELECT id FROM outbox WHERE event_id = 'e-2' FOR UPDATE"))
        began = time.monotonic()
        assert Cleanup(postgres).run_once().outbox == 2
        assert time.monotonic() - began < 5
    assert Cleanup(postgres).run_once().outbox == 1


def test_claims_go_on_while_cleanup_works(engine):
    fill(engine, 500, 1, published_at=OLD)
    fill(engine, 5, 501)
    source = OutboxSource(engine, wakeup=False)
    cleanup = Cleanup(engine, batch_size=10)
    thread = threading.Thread(target=cleanup.run_once)
    thread.start()
    messages = source.read(10, 5)
    assert [message.ack() for message in messages] == [True] * 5
    thread.join(30)
    source.close()
    assert len(rows(engine)) == 5


def test_the_clock_of_the_application_does_not_matter(engine, monkeypatch):
    remember(engine, 1, YOUNG)
    monkeypatch.setattr(time, "time", lambda: 4_000_000_000.0)
    assert Cleanup(engine).run_once() == Removed()


def test_a_thread_cleans_at_once_and_then_every_interval(engine):
    remember(engine, 2, OLD)
    with Cleanup(engine, interval=0.05):
        eventually(lambda: remembered(engine) == set())
        remember(engine, 1, OLD)
        eventually(lambda: remembered(engine) == set())


def test_stop_is_at_once(engine):
    cleanup = Cleanup(engine, interval=3600)
    cleanup.start()
    began = time.monotonic()
    cleanup.stop()
    assert time.monotonic() - began < 5


def test_stop_does_not_wait_for_the_rest_of_a_long_round(engine):
    remember(engine, 2_000, OLD)
    cleanup = Cleanup(engine, batch_size=1)
    cleanup.start()
    eventually(lambda: len(remembered(engine)) < 2_000)
    cleanup.stop()
    assert len(remembered(engine)) > 0


def test_one_table_can_be_left_out(engine):
    remember(engine, 1, OLD)
    fill(engine, 1, published_at=OLD)
    assert Cleanup(engine, inbox=None).run_once() == Removed(outbox=1)
    assert Cleanup(engine, outbox=None).run_once() == Removed(inbox=1)


def test_a_database_without_tables_is_an_error_and_the_thread_tries_again(engine):
    cleanup = Cleanup(engine, inbox="nowhere", interval=0.02)
    with pytest.raises(StoreError, match="nowhere"):
        cleanup.run_once()
    cleanup.start()
    store(engine, row(1, published_at=OLD))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE nowhere AS SELECT * FROM processed_messages"))
    eventually(lambda: rows(engine) == [])
    cleanup.stop()
    assert OUTBOX.name == "outbox"


@pytest.mark.parametrize(
    "options",
    [{"retention": 0}, {"interval": 0}, {"batch_size": 0}, {"batch_size": True}],
)
def test_settings_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        Cleanup("sqlite://", **options)
