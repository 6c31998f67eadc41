"""The log as a stream of micro-batches, by Spark itself."""

from __future__ import annotations

import json

import pytest
from tests.waiting import eventually

from conquiet.redis import Readers
from conquiet.spark import lag


def test_a_query_goes_on_where_its_checkpoint_ends(log) -> None:
    log.add("orders", *range(5))
    assert log.run() == [5]
    log.add("orders", *range(5, 9))
    assert log.run() == [4]
    assert log.written() == list(range(9))


def test_streams_that_come_later_are_read_from_their_beginning(log) -> None:
    log.add("shop:1", 1)
    query = log.start(
        {"processingTime": "100 milliseconds"},
        streams="shop:*",
        startingOffsets="latest",
        discoverySeconds="0",
    )
    try:
        eventually(lambda: query.lastProgress is not None, timeout=60)
        log.add("shop:1", 2)
        log.add("shop:2", 3)
        eventually(lambda: query.exception() is not None or log.written() == [2, 3], timeout=60)
        progress = query.lastProgress.sources[0]
        assert set(json.loads(progress.endOffset)) == {"shop:1", "shop:2"}
    finally:
        query.stop()
    assert query.exception() is None


def test_available_now_ends_although_more_is_added(log) -> None:
    """What comes while a query runs is for the next run, also from a new stream."""
    ids = log.add("shop:1", *range(4))
    seen = []

    def write(frame, batch):
        seen.extend(log.numbers(frame))
        log.add("shop:1", 100 + batch)
        log.add(f"shop:new-{batch}", 200 + batch)

    options = {"streams": "shop:*", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "2"}
    options |= {"discoverySeconds": "0", "readerName": "spark/shop"}
    query = (
        log.spark.readStream.format("conquiet")
        .options(**log._all(options))
        .load()
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(log.directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    assert sorted(seen) == [0, 1, 2, 3]
    assert [lag(progress)["shop:1"] for progress in query.recentProgress] == [2, 1]
    # The position is known of the last batch too, although Spark does not commit it to a source.
    assert Readers(log.client, "shop:1").positions() == {"spark/shop": ids[-1]}


def test_a_micro_batch_that_is_tried_again_reads_the_same_entries(log) -> None:
    """The checkpoint says what the batch holds; entries that came since are for the next one."""
    log.add("orders", *range(5))
    log.run(sink="noop")
    log.add("orders", 5, 6)
    log.run(sink="noop")
    commits = log.directory / "query" / "checkpoint" / "commits"
    (commits / "1").unlink()  # as if the process had died before it
    (commits / ".1.crc").unlink()
    log.add("orders", 7)
    assert log.run(sink="noop") == [2, 1]


def test_a_trimmed_stream_ends_the_query_with_what_is_missing(log) -> None:
    ids = log.add("orders", *range(10))
    log.run()
    log.add("orders", *range(10, 20))
    log.client.xtrim("orders", maxlen=4, approximate=False)
    first = log.client.xrange("orders", count=1)[0][0].decode()
    with pytest.raises(Exception, match="'orders' was trimmed: 6 entries are gone") as raised:
        log.run()
    assert f"wanted the entries after {ids[-1]}, available from {first}" in str(raised.value)


def test_streams_that_are_empty_or_absent_are_waited_for(log) -> None:
    log.client.xgroup_create("empty", "group", mkstream=True)
    options = {"streams": "empty,absent,late:*"}
    assert sum(log.run(**options)) == 0
    log.add("empty", 1)
    log.add("absent", 2)
    log.add("late:1", 3)
    assert sum(log.run(**options)) == 3
    assert log.written() == [1, 2, 3]


def test_a_restarted_query_may_have_another_schema(log) -> None:
    """Fields come and go; what no longer fits is told in a row, and the query lives."""

    def run(schema):
        log.run(schema=schema)
        path = str(log.directory / "query" / "out")
        rows = log.spark.read.option("mergeSchema", "true").parquet(path).collect()
        return {int(row.event_id): row for row in rows}

    log.add("orders", 1)
    assert run("n INT")[1].data.n == 1
    log.add("orders", 2)
    fields = {"id": "3", "type": "sold", "source": "/shop", "specversion": "1.0"}
    log.client.xadd("orders", fields | {"data": '{"n": 3, "total": "1.50", "more": [1]}'})
    log.client.xadd("orders", fields | {"id": "4", "data": '{"n": "four"}'})
    rows = run("n INT, total DECIMAL(10,2)")
    assert (rows[1].data.n, rows[2].data.n, rows[2].data.total) == (1, 2, None)
    assert str(rows[3].data.total) == "1.50"
    assert rows[4].data is None
    assert "got `str`" in rows[4]._malformed
