"""What becomes of rows that cannot be published or marked, and of their neighbours."""

from __future__ import annotations

import threading
import time

from tests.integration.sql.claiming import (
    ListSink,
    fill,
    rested,
    row,
    rows,
    store,
    the,
    unpublished,
)
from tests.waiting import eventually

from conquiet.acking import settle
from conquiet.errors import InvalidMessage, PermanentError, SinkUnavailable, StoreError
from conquiet.relay import Outcome, Relay, publish_batch
from conquiet.sql.claim import MAX_ERROR_CHARACTERS, error_text


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


def test_a_sink_that_will_never_take_anything_parks_one_row_and_no_more(engine, open_source):
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


def test_a_blameless_error_costs_no_attempt(engine, open_source):
    fill(engine, 1)
    source = open_source(max_attempts=1)
    for _ in range(3):
        [message] = source.read(10, 0)
        message.nack(SinkUnavailable("away"))
        rested(source)
    untouched = the(engine, "e-1")
    assert (untouched.attempts, untouched.last_error, untouched.parked_at) == (0, None, None)


def test_an_outage_pauses_the_relay_and_burns_no_attempts(engine, open_source):
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


def test_a_batch_of_which_nothing_went_out_is_an_outage(engine, open_source):
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


def test_a_row_that_cannot_be_marked_costs_its_neighbours_nothing(engine, open_source):
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
