"""The source of a relay, on PostgreSQL and SQLite alike: claims, settling, rivals."""

from __future__ import annotations

import threading
import time

import pytest
from sqlalchemy import event, insert
from tests.integration.sql.claiming import (
    OUTBOX,
    ListSink,
    fill,
    made,
    rested,
    row,
    running,
    store,
    the,
    unpublished,
)
from tests.waiting import eventually

from conquiet.acking import settle
from conquiet.errors import ConfigError, GivenBack, StoreError
from conquiet.relay import Relay
from conquiet.sql.outbox_source import OutboxSource


def test_a_message_comes_back_exactly_as_it_was_stored(engine, open_source):
    attributes = {
        "specversion": "1.0",
        "id": "ü-1",
        "type": "photo.taken",
        "source": "/camera",
        "subject": "cat",
        "size": 12,
        "nice": True,
        "datacontenttype": "image/png",
    }
    stored = row(
        1,
        topic="photos",
        event_id="ü-1",
        event_type="photo.taken",
        key="cat",
        content_type="image/png",
        data=bytes(range(256)),
        attributes=attributes,
        attempts=3,
    )
    store(engine, stored)
    [message] = open_source().read(10, 0)
    assert message.data == bytes(range(256))
    assert message.attributes == attributes
    assert (message.topic, message.key, message.deliveries) == ("photos", "cat", 4)


def test_columns_complete_the_attributes_of_rows_that_were_written_by_hand(engine, open_source):
    store(engine, row(7, attributes={}, key="k", content_type="text/plain"))
    [message] = open_source().read(10, 0)
    assert (message.id, message.type, message.key) == ("e-7", "order.placed", "k")
    assert message.datacontenttype == "text/plain"


def test_a_row_whose_attributes_are_no_object_fails_alone(engine, open_source):
    store(engine, row(1, attributes=[1]), row(2))
    source = open_source()
    [message] = source.read(10, 0)
    message.ack()
    assert the(engine, "e-2").published_at is not None
    assert "not a JSON object" in the(engine, "e-1").last_error


def test_ack_marks_a_row_published_and_nack_leaves_it(engine, open_source):
    store(engine, row(1), row(2))
    source = open_source()
    first, second = source.read(10, 0)
    settle([first.acking], [(second.acking, ValueError("too long"))])
    assert the(engine, "e-1").published_at is not None
    failed = the(engine, "e-2")
    assert (failed.published_at, failed.parked_at) == (None, None)
    assert (failed.attempts, failed.last_error) == (1, "ValueError: too long")
    rested(source)
    [again] = source.read(10, 0)
    assert (again.id, again.deliveries) == ("e-2", 2)


def test_a_claim_ends_with_the_last_of_its_messages_in_however_many_calls(engine, open_source):
    fill(engine, 3)
    source = open_source()
    first, second, third = source.read(10, 0)
    first.ack()
    second.ack()
    assert unpublished(engine) == 3
    third.nack(GivenBack("not now"))
    assert unpublished(engine) == 1


def test_close_marks_what_was_settled_and_lets_go_of_the_rest_at_once(engine, open_source):
    fill(engine, 3)
    source = open_source()
    first, *_ = source.read(10, 0)
    first.ack()
    source.close()
    assert the(engine, "e-1").published_at is not None
    assert [message.id for message in open_source().read(10, 0)] == ["e-2", "e-3"]


def test_a_message_that_nobody_settles_is_given_up_after_a_while(engine, open_source):
    fill(engine, 1)
    source = open_source(hold=0.05)
    [lost] = source.read(10, 0)
    [again] = eventually(lambda: source.read(10, 0))
    lost.ack()
    assert source.late == 1
    assert unpublished(engine) == 1
    again.ack()
    assert unpublished(engine) == 0


def test_close_ends_a_read_that_waits(open_source):
    source = open_source(poll=60)
    reads = []
    thread = threading.Thread(target=lambda: reads.append(source.read(10, 60)))
    thread.start()
    source.close()
    thread.join(5)
    assert reads == [()]


def test_close_lets_go_of_a_claim_that_comes_too_late_for_it(engine, open_source, monkeypatch):
    fill(engine, 3)
    source = open_source()
    claim = source._claimer.claim

    def claim_while_it_closes(*given):
        opened = claim(*given)
        source.close()
        return opened

    monkeypatch.setattr(source._claimer, "claim", claim_while_it_closes)
    assert list(source.read(10, 0)) == []
    assert len(open_source().read(10, 0)) == 3


def test_two_relays_publish_every_row_once(engine):
    fill(engine, 600)
    sink = ListSink()
    relays = [
        Relay(OutboxSource(engine, poll=0.02, wakeup=False), sink, batch_size=7) for _ in range(3)
    ]
    with running(relays):
        eventually(lambda: unpublished(engine) == 0, timeout=30)
    assert len(sink.ids) == 600
    assert len(set(sink.ids)) == 600


def test_a_claim_sees_what_others_have_committed_however_strict_the_engine_is(database_url):
    """With a snapshot, what another relay has just marked would be an error, or out of order."""
    with made(database_url, isolation_level="SERIALIZABLE") as strict:
        fill(strict, 1)
        source = OutboxSource(strict, wakeup=False)
        opened = source._claimer.claim(1, source.backoff)
        level = opened.connection.exec_driver_sql("SHOW transaction_isolation").scalar()
        opened.settle((), ())
        source.close()
    assert level == "read committed"


def test_a_row_in_flight_is_not_claimed_again(engine, open_source):
    fill(engine, 5)
    ours, theirs = open_source(), open_source()
    assert len(ours.read(3, 0)) == 3
    for _ in range(3):
        seen = {message.id for message in theirs.read(10, 0)}
        assert seen <= {"e-4", "e-5"}


def test_nothing_is_read_from_the_database_while_the_sink_works(engine, open_source):
    """The rows are in memory and the cursor is closed before the first message is out."""
    fill(engine, 3)
    source = open_source()
    messages = source.read(10, 0)
    statements = []
    event.listen(engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    assert [message.data for message in messages]
    assert statements == []


def test_a_row_that_commits_behind_the_last_claim_is_found_soon(postgres):
    source = OutboxSource(postgres, wakeup=False)
    with postgres.connect() as slow:
        slow.execute(insert(OUTBOX).values(**row(1)))
        fill(postgres, 200, 2)
        assert len(source.read(5, 0)) == 5  # from now on claims go on behind this one
        slow.commit()
    seen = set()
    began = time.monotonic()
    while "e-1" not in seen and time.monotonic() < began + 10:
        messages = source.read(5, 1)
        seen |= {message.id for message in messages}
        settle([message.acking for message in messages])
        fill(postgres, 5, 1_000 + len(seen))  # there is always something newer
    assert "e-1" in seen
    source.close()


def test_published_at_is_the_databases_clock_after_the_publish(engine, open_source):
    fill(engine, 1)
    [message] = open_source().read(10, 0)
    if engine.dialect.name == "postgresql":
        with engine.connect() as connection:
            published = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
        message.ack()
        assert the(engine, "e-1").published_at > published
    else:
        message.ack()
        assert the(engine, "e-1").published_at is not None


def test_an_unknown_table_is_an_error_of_the_store_and_names_it(engine):
    source = OutboxSource(engine, "nowhere", wakeup=False)
    with pytest.raises(StoreError, match="nowhere"):
        source.read(1, 0)
    source.close()


@pytest.mark.parametrize(
    "options", [{"max_attempts": 0}, {"max_attempts": True}, {"poll": 0}, {"hold": -1}]
)
def test_settings_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        OutboxSource("sqlite://", **options)
