"""What a query goes on without (`failOnDataLoss=false`) is counted, where its user looks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.spark.log.conftest import Query
from tests.waiting import eventually

from conquiet.spark import lag, losses
from conquiet.spark.log.offsets import NOTHING, Position

LENIENT = {"failOnDataLoss": "false"}


def progress_of(offset):
    source = SimpleNamespace(endOffset=json.dumps(offset), latestOffset=None)
    return SimpleNamespace(sources=[source])


def trim(log, left):
    log.client.xtrim("orders", maxlen=left, approximate=False)


def read_ten(log):
    """A query that may go on, and has read ten events."""
    log.add("orders", *range(10))
    query = Query(log, **LENIENT)
    assert query.batch() == list(range(10))
    return query


def restarted(log, query):
    return Query(log, query.offset, **LENIENT)


@pytest.mark.parametrize("text", ["5-0", "5-0@7", "5-0@7!2:60", "5-0!1:0", "5-0@7!1:0~"])
def test_a_position_is_read_as_it_was_written(text) -> None:
    assert str(Position.read(text)) == text


def test_a_query_that_misses_nothing_tells_nothing(plain_log) -> None:
    assert losses(progress_of(read_ten(plain_log).offset)) == {}


def test_losses_add_up_and_outlive_a_restart(plain_log) -> None:
    log = plain_log
    query = read_ten(log)
    log.add("orders", *range(10, 20))
    trim(log, 4)
    assert query.batch() == list(range(16, 20))
    assert losses(progress_of(query.offset)) == {"orders": (1, 6)}
    query = restarted(log, query)
    assert query.batch() == []
    log.add("orders", *range(20, 25))
    trim(log, 2)
    assert query.batch() == [23, 24]
    missed = losses(progress_of(query.offset))["orders"]
    assert (missed.times, missed.entries) == (2, 9)
    assert read_again(log, query) == {"orders": (2, 9)}


def read_again(log, query):
    """What is told after a further restart, with and without something new."""
    query = restarted(log, query)
    query.batch()
    log.add("orders", 99)
    assert query.batch() == [99]
    return losses(progress_of(query.offset))


def test_a_loss_is_told_although_nothing_is_left_to_read(plain_log) -> None:
    query = read_ten(plain_log)
    plain_log.add("orders", *range(10, 13))
    trim(plain_log, 0)
    assert query.batch() == []
    assert query.batch() == []
    assert losses(progress_of(query.offset)) == {"orders": (1, 3)}


def test_a_loss_whose_size_nobody_knows_is_counted_by_times(plain_log) -> None:
    query = read_ten(plain_log)
    plain_log.client.delete("orders")
    assert [query.batch() for _ in range(3)] == [[], [], []]
    assert losses(progress_of(query.offset)) == {"orders": (1, 0)}
    plain_log.add("orders", 11, ids="5-0")
    assert query.batch() == [11]
    assert losses(progress_of(query.offset)) == {"orders": (2, 0)}  # it is gone, and it began anew


def test_a_stream_that_stays_gone_is_counted_once_however_often_the_query_restarts(
    plain_log,
) -> None:
    query = read_ten(plain_log)
    plain_log.client.delete("orders")
    query.batch()
    told = query.offset
    for _ in range(3):
        query = restarted(plain_log, query)
        assert query.batch() == []
        assert query.offset == told  # so Spark makes no batch of it
    assert losses(progress_of(told)) == {"orders": (1, 0)}
    assert Query(plain_log, told).batch() == []  # known, and so no error any more
    plain_log.add("orders", 11)
    assert query.batch() == [11]
    assert "~" not in query.offset["orders"]


def test_a_stream_that_goes_before_a_batch_is_repeated_is_counted_once(plain_log) -> None:
    query = read_ten(plain_log)
    plain_log.add("orders", *range(10, 13))
    start, end = query.offset, query.reader.latestOffset(query.offset, None)
    plain_log.client.delete("orders")
    query = Query(plain_log, end, **LENIENT)
    assert query.between(start, end) == []
    assert [query.batch() for _ in range(2)] == [[], []]
    assert losses(progress_of(query.offset)) == {"orders": (1, 0)}


@pytest.mark.parametrize("before", [0, 4], ids=["whole when planned", "trimmed when planned"])
def test_a_batch_that_has_shrunk_when_it_is_read_again_is_counted_once(plain_log, before) -> None:
    """The driver died after it had written what the batch holds, and before it was read."""
    log = plain_log
    query = read_ten(log)
    log.add("orders", *range(10, 20))
    trim(log, 20 - 10 - before)
    start, query.offset = query.offset, query.reader.latestOffset(query.offset, None)
    trim(log, 3)
    again = restarted(log, query)
    assert again.between(start, query.offset) == [17, 18, 19]
    log.add("orders", *range(20, 23))
    trim(log, 2)
    assert again.batch() == [21, 22]
    assert losses(progress_of(again.offset))["orders"].entries == 8


def test_the_lag_counts_a_stream_whose_turn_has_not_come(plain_log) -> None:
    for number in range(3):
        plain_log.add(f"s{number}", *range(10 * number, 10 * number + 10), ids="{}-5")
    plain_log.client.xtrim("s2", maxlen=4, approximate=False)
    query = Query(plain_log, {}, streams="s*", maxOffsetsPerTrigger=2)
    assert len(query.batch()) == 2
    newest = json.dumps(query.reader.reportLatestOffset())
    source = SimpleNamespace(endOffset=json.dumps(query.offset), latestOffset=newest)
    waiting = lag(SimpleNamespace(sources=[source]))
    assert sum(waiting.values()) == 10 + 10 + 4 - 2


def test_an_outbox_counts_under_its_own_name() -> None:
    assert losses(progress_of({"position": "812-40017", "rows": 3, "lost": [1, 20]})) == {
        "outbox": (1, 20)
    }


def test_the_progress_of_a_query_tells_what_it_has_missed(log) -> None:
    log.add("orders", *range(10))
    log.run(**LENIENT)
    log.add("orders", *range(10, 20))
    trim(log, 4)
    query = log.start({"processingTime": "100 milliseconds"}, **LENIENT)
    try:
        eventually(lambda: query.lastProgress is not None, timeout=60)
        progress = query.lastProgress
    finally:
        query.stop()
    assert losses(progress) == {"orders": (1, 6)}
    assert lag(progress) == {"orders": 0}
    assert log.written() == [*range(10), *range(16, 20)]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 12)),
        st.tuples(st.just("trim"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["batch", "restart"]), st.just(0)),
        st.tuples(st.just("crash"), st.integers(0, 12)),
    ),
    max_size=25,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps, st.sampled_from([None, 1, 5]))
def test_every_entry_is_read_once_or_counted_as_lost(plain_log, steps, limit) -> None:
    """Whatever is trimmed meanwhile, and wherever the driver dies: before or after a plan."""
    log, added, read = plain_log, 0, []
    options = LENIENT | ({} if limit is None else {"maxOffsetsPerTrigger": limit})
    log.client.delete("orders")
    log.client.xgroup_create("orders", "any", mkstream=True)
    query = Query(log, **options)
    for step, number in steps:
        if step == "add":
            log.add("orders", *range(added, added + number))
            added += number
        elif step == "trim":
            trim(log, number)
        elif step == "restart":
            query = Query(log, query.offset, **options)
        elif step == "batch":
            read += query.batch()
        else:
            start = query.offset
            end = query.reader.latestOffset(start, query.reader.getDefaultReadLimit())
            trim(log, number)
            query = Query(log, end, **options)
            read += query.between(start, end)
            read += query.batch()  # which tells what the repeated one has missed
    before = None
    while query.offset != before:
        before = query.offset
        read += query.batch()
    missed = losses(progress_of(query.offset)).get("orders", NOTHING)
    assert sorted(set(read)) == sorted(read)
    assert len(read) + missed.entries == added
