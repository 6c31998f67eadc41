"""The source of a relay, on PostgreSQL and SQLite alike."""

from __future__ import annotations

import threading
import time

import pytest
from sqlalchemy import event, func, insert, update
from tests.integration.sql.claiming import (
    OUTBOX,
    ListSink,
    fill,
    made,
    row,
    rows,
    store,
    the,
    unpublished,
)
from tests.waiting import eventually

from conquiet.acking import settle
from conquiet.errors import (
    ConfigError,
    GivenBack,
    InvalidMessage,
    PermanentError,
    SinkUnavailable,
    StoreError,
)
from conquiet.message import Message
from conquiet.relay import Outcome, Relay, publish_batch
from conquiet.sql.claim import OutboxSource
from conquiet.sql.claimed import MAX_ERROR_CHARACTERS, error_text


@pytest.fixture
def open_source(engine):
    opened = []

    def make(**options) -> OutboxSource:
        opened.append(OutboxSource(engine, **{"poll": 0.05, "wakeup": False, **options}))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


def rested(source: OutboxSource) -> None:
    """Let every failed row be claimable at once."""
    source.resting._rows.clear()


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
    claim = source._rows.claim

    def claim_while_it_closes(*given):
        opened = claim(*given)
        source.close()
        return opened

    monkeypatch.setattr(source._rows, "claim", claim_while_it_closes)
    assert list(source.read(10, 0)) == []
    assert len(open_source().read(10, 0)) == 3


def test_a_row_is_parked_at_its_last_attempt_and_never_claimed_again(engine, open_source):
    store(engine, row(1, attempts=2))
    source = open_source(max_attempts=3)
    [message] = source.read(10, 0)
    message.nack(ValueError("no such topic"))
    parked = the(engine, "e-1")
    assert parked.attempts == 3
    assert parked.parked_at is not None
    rested(source)
    assert source.read(10, 0) == []


def test_a_row_that_can_never_be_published_is_parked_at_once(engine, open_source):
    fill(engine, 2)
    source = open_source(max_attempts=5)
    first, second = source.read(2, 0.0)
    settle([second.acking], [(first.acking, InvalidMessage("it will never fit"))])
    assert the(engine, "e-1").parked_at is not None
    assert the(engine, "e-1").attempts == 1
    assert the(engine, "e-2").parked_at is None


def test_S7_a_sink_that_will_never_take_anything_parks_one_row_and_no_more(engine, open_source):
    fill(engine, 8)
    sink = ListSink()
    sink.bad = {f"e-{number}" for number in range(1, 9)}
    sink.refusal = PermanentError
    source = open_source()
    relay = Relay(source, sink, batch_size=4)
    for _ in range(30):
        rested(source)
        relay.run_once()
    assert sum(row.parked_at is not None for row in rows(engine)) == 1
    assert sum(row.attempts for row in rows(engine)) == 1
    sink.bad = set()
    rested(source)
    while relay.run_once() != Outcome():
        rested(source)
    assert unpublished(engine) == 1


def test_S7_a_blameless_error_costs_no_attempt(engine, open_source):
    fill(engine, 1)
    source = open_source(max_attempts=1)
    for _ in range(3):
        [message] = source.read(10, 0)
        message.nack(SinkUnavailable("away"))
        rested(source)
    untouched = the(engine, "e-1")
    assert (untouched.attempts, untouched.last_error, untouched.parked_at) == (0, None, None)


def test_S7_an_outage_pauses_the_relay_and_burns_no_attempts(engine, open_source):
    fill(engine, 50)
    sink = ListSink()
    sink.out = True
    relay = Relay(open_source(max_attempts=2), sink, batch_size=10, longest_pause=0.05)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        eventually(lambda: relay.last_error is not None)
        time.sleep(0.3)
        assert {found.attempts for found in rows(engine)} == {0}
        sink.out = False
        eventually(lambda: unpublished(engine) == 0)
    finally:
        relay.stop()
        thread.join(10)
    assert sorted(sink.ids) == sorted(f"e-{n}" for n in range(1, 51))
    assert sink.closed


def test_S7_a_batch_of_which_nothing_went_out_is_an_outage(engine, open_source):
    fill(engine, 5)
    sink = ListSink()
    sink.bad = {f"e-{n}" for n in range(1, 6)}
    outcome = publish_batch(open_source(), sink, 10)
    assert isinstance(outcome.outage, SinkUnavailable)
    assert {found.attempts for found in rows(engine)} == {0}


def test_failed_rows_neither_spin_nor_starve_the_others(engine, open_source):
    fill(engine, 40)
    sink = ListSink()
    sink.bad = {f"e-{n}" for n in range(1, 21)}  # the oldest twenty, two whole batches
    relay = Relay(open_source(), sink, batch_size=10, longest_pause=0.05)
    began = time.monotonic()
    while len(sink.sent) < 20 and time.monotonic() < began + 10:
        outcome = relay.run_once()
        if outcome.outage:
            time.sleep(0.01)
    assert sorted(sink.ids) == sorted(f"e-{n}" for n in range(21, 41))
    assert sum(sink.calls) < 150
    assert max(found.attempts for found in rows(engine)) <= 4


def test_a_failed_row_in_a_batch_fails_alone(engine, open_source):
    fill(engine, 10)
    sink = ListSink()
    sink.bad = {"e-4"}
    outcome = publish_batch(open_source(), sink, 10)
    assert (outcome.published, outcome.failed, outcome.outage) == (9, 1, None)
    assert unpublished(engine) == 1
    assert the(engine, "e-4").attempts == 1


def test_last_error_is_cut_on_a_character_and_holds_no_nul(engine, open_source):
    fill(engine, 2)
    source = open_source()
    good, bad = source.read(10, 0)
    settle([good.acking], [(bad.acking, ValueError("\0\ud800" + "🐈" * 5_000))])
    kept = the(engine, "e-2").last_error
    assert len(kept) == MAX_ERROR_CHARACTERS
    assert kept.startswith("ValueError: \ufffd?🐈")
    assert kept.endswith("🐈…")


def test_an_error_without_words_is_named_by_its_kind():
    assert error_text(KeyError()) == "KeyError: "
    assert error_text(None) == "nacked without a reason"
    assert error_text(StoreError("gone")) == "gone"


def test_S4_two_relays_publish_every_row_once(engine):
    fill(engine, 600)
    sink = ListSink()
    relays = [
        Relay(OutboxSource(engine, poll=0.02, wakeup=False), sink, batch_size=7) for _ in range(3)
    ]
    threads = [threading.Thread(target=relay.run) for relay in relays]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: unpublished(engine) == 0, timeout=30)
    finally:
        for relay in relays:
            relay.stop()
        for thread in threads:
            thread.join(10)
    assert len(sink.ids) == 600
    assert len(set(sink.ids)) == 600


def test_S4_a_claim_sees_what_others_have_committed_however_strict_the_engine_is(database_url):
    """With a snapshot, what another relay has just marked would be an error, or out of order."""
    with made(database_url, isolation_level="SERIALIZABLE") as strict:
        fill(strict, 1)
        source = OutboxSource(strict, wakeup=False)
        opened = source._rows.claim(1, source.resting)
        level = opened.connection.exec_driver_sql("SHOW transaction_isolation").scalar()
        opened.settle((), ())
        source.close()
    assert level == "read committed"


def test_S4_a_row_in_flight_is_not_claimed_again(engine, open_source):
    fill(engine, 5)
    ours, theirs = open_source(), open_source()
    assert len(ours.read(3, 0)) == 3
    for _ in range(3):
        seen = {message.id for message in theirs.read(10, 0)}
        assert seen <= {"e-4", "e-5"}


def test_S5_nothing_is_read_from_the_database_while_the_sink_works(engine, open_source):
    """The rows are in memory and the cursor is closed before the first message is out."""
    fill(engine, 3)
    source = open_source()
    messages = source.read(10, 0)
    statements = []
    event.listen(engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    assert [message.data for message in messages]
    assert statements == []


def test_S6_a_row_that_cannot_be_marked_costs_its_neighbours_nothing(engine, open_source):
    fill(engine, 5)
    with engine.begin() as connection:
        for statement in REFUSE_E3[engine.dialect.name]:
            connection.exec_driver_sql(statement)
    source = open_source()
    messages = source.read(10, 0)
    settle([message.acking for message in messages])
    assert unpublished(engine) == 1
    stuck = the(engine, "e-3")
    assert stuck.attempts == 1
    assert "published, but not marked" in stuck.last_error
    assert source.read(10, 0) == []  # and it rests


REFUSE_E3 = {
    "postgresql": [
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN RAISE EXCEPTION 'the row is refused'; END $$""",
        """CREATE TRIGGER refuse BEFORE UPDATE ON outbox FOR EACH ROW
           WHEN (NEW.event_id = 'e-3' AND NEW.published_at IS NOT NULL)
           EXECUTE FUNCTION refuse()""",
    ],
    "sqlite": [
        """CREATE TRIGGER refuse BEFORE UPDATE ON outbox
           WHEN NEW.event_id = 'e-3' AND NEW.published_at IS NOT NULL
           BEGIN SELECT RAISE(ABORT, 'the row is refused'); END"""
    ],
}


def test_S8_a_row_that_commits_behind_the_last_claim_is_found_soon(postgres):
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


# --- ordered by key -------------------------------------------------------------------------


def test_S12_the_rows_of_a_key_come_in_order_and_several_at_once(engine, open_source):
    store(engine, *(row(n, key="ab"[n % 2]) for n in range(1, 9)))
    messages = open_source(ordered=True).read(8, 0)
    for key in "ab":
        numbers = [int(m.id[2:]) for m in messages if m.key == key]
        assert numbers == sorted(numbers)
        assert len(numbers) == 4


def test_S12_a_key_is_published_by_one_relay_at_a_time(engine, open_source):
    store(engine, *(row(n, key="ab"[n % 2]) for n in range(1, 9)))
    ours, theirs = open_source(ordered=True), open_source(ordered=True)
    mine = ours.read(1, 0)
    assert len(mine) == 1
    others = theirs.read(10, 0)
    assert {message.key for message in others}.isdisjoint({mine[0].key})


def test_S12_a_stuck_key_blocks_only_itself(engine, open_source):
    store(engine, row(1, key="stuck"), row(2, key="stuck"), row(3, key="free"), row(4))
    source = open_source(ordered=True, max_attempts=1)
    sink = ListSink()
    sink.bad = {"e-1"}
    publish_batch(source, sink, 10, ordered=True)
    for _ in range(3):
        rested(source)
        publish_batch(source, sink, 10, ordered=True)
    assert sorted(sink.ids) == ["e-3", "e-4"]
    assert the(engine, "e-1").parked_at is not None
    with engine.begin() as connection:  # what `conquiet outbox retry` does
        connection.execute(update(OUTBOX).values(parked_at=None, attempts=0))
    sink.bad = set()
    rested(source)
    publish_batch(source, sink, 10, ordered=True)
    assert sink.ids[-2:] == ["e-1", "e-2"]


def test_S12_a_key_that_got_stuck_while_it_was_claimed_is_left_alone(postgres, monkeypatch):
    """Its last holder parks a row and lets go between the two statements of a claim."""
    store(postgres, row(1, key="k"), row(2, key="k"), row(3, key="free"))
    source = OutboxSource(postgres, ordered=True, wakeup=False)
    lock_keys = source._rows._lock_keys

    def lock_then_park(*arguments):
        keys = lock_keys(*arguments)
        with postgres.begin() as connection:
            parked = update(OUTBOX).where(OUTBOX.c.event_id == "e-1")
            connection.execute(parked.values(parked_at=func.now()))
        return keys

    monkeypatch.setattr(source._rows, "_lock_keys", lock_then_park)
    assert [message.id for message in source.read(10, 0)] == ["e-3"]
    source.close()


def test_S12_a_resting_key_rests_whole(engine, open_source):
    store(engine, row(1, key="k"), row(2, key="k"))
    source = open_source(ordered=True)
    first, second = source.read(10, 0)
    settle([], [(first.acking, ValueError("no")), (second.acking, GivenBack("its turn"))])
    assert source.read(10, 0) == []
    rested(source)
    assert [message.id for message in source.read(10, 0)] == ["e-1", "e-2"]


def test_S12_an_empty_key_is_a_key_too(engine, open_source):
    store(engine, row(1, key=""), row(2, key="a"))
    assert len(open_source(ordered=True).read(10, 0)) == 2


def test_S12_rows_without_key_are_not_starved_by_keys(engine, open_source):
    store(engine, *(row(n, key=f"k{n}") for n in range(1, 21)), row(21))
    source = open_source(ordered=True)
    messages = source.read(4, 0)
    seen = {message.id for message in messages}
    while messages and "e-21" not in seen and len(seen) <= 20:
        settle([message.acking for message in messages])
        messages = source.read(4, 0)
        seen |= {message.id for message in messages}
    assert "e-21" in seen


def test_S12_every_key_gets_its_turn(engine, open_source):
    """A key that is written all the time does not keep the others from being claimed."""
    store(engine, *(row(n, key=f"k{n % 5}") for n in range(1, 51)))
    source = open_source(ordered=True)
    seen = set()
    for number in range(10):
        store(engine, row(100 + number, key="k0"))
        messages = source.read(1, 0)
        seen |= {message.key for message in messages}
        settle([message.acking for message in messages])
    assert seen == {f"k{n}" for n in range(5)} or engine.dialect.name == "sqlite"


def test_S12_several_relays_keep_the_order_of_every_key(engine):
    store(engine, *(row(n, key=f"k{n % 7}") for n in range(1, 301)))
    sink = ListSink()
    relays = [
        Relay(
            OutboxSource(engine, poll=0.02, wakeup=False, ordered=True),
            sink,
            batch_size=9,
            ordered=True,
        )
        for _ in range(3)
    ]
    threads = [threading.Thread(target=relay.run) for relay in relays]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: unpublished(engine) == 0, timeout=30)
    finally:
        for relay in relays:
            relay.stop()
        for thread in threads:
            thread.join(10)
    assert len(sink.ids) == 300
    for key in range(7):
        numbers = [int(id_[2:]) for id_ in sink.ids if int(id_[2:]) % 7 == key]
        assert numbers == sorted(numbers)


def test_S12_an_ordered_batch_leaves_to_the_next_what_there_is_no_time_for(engine, open_source):
    fill(engine, 3, key="a")
    sink = ListSink()
    relay = Relay(open_source(ordered=True), sink, ordered=True, publish_seconds=0)
    assert relay.run_once() == Outcome(published=1)
    assert unpublished(engine) == 2
    while relay.run_once().published:
        pass
    assert sink.ids == ["e-1", "e-2", "e-3"]
    assert {row.attempts for row in rows(engine)} == {0}


def test_S12_a_relay_publishes_nothing_after_a_failed_row_of_the_same_key():
    sink = ListSink()
    sink.bad = {"2"}
    messages = [
        Message(b"", {"id": str(n), "type": "t", "partitionkey": "k" if n < 4 else "other"})
        for n in range(1, 6)
    ]

    class Once:
        def read(self, limit, timeout):
            return messages

        def close(self): ...

    publish_batch(Once(), sink, 10, ordered=True)
    assert sorted(sink.ids) == ["1", "4", "5"]
