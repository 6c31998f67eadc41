"""An outbox as a stream: offsets are positions, and no late commit, crash or cleanup is missed."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from sqlalchemy import text
from tests.spark.outbox.rows import fill, fill_at_once, message, numbered

from conquiet.spark import register
from conquiet.spark.outbox.source import OutboxSource, OutboxStreamReader
from conquiet.spark.progress import DataLoss
from conquiet.sql import Outbox

ALL = ReadAllAvailable()


@pytest.fixture
def stream() -> Iterator[Any]:
    """Readers of a stream, as Spark makes them; stopped after the test."""
    readers = []

    def make(url: str, **options: object) -> OutboxStreamReader:
        source = OutboxSource({"url": url, **{name: str(one) for name, one in options.items()}})
        readers.append(source.streamReader(source.schema()))
        return readers[-1]

    yield make
    for reader in readers:
        reader.stop()


def ids(reader, start, end) -> list[str]:
    batches = [batch for part in reader.partitions(start, end) for batch in reader.read(part)]
    return [id_ for batch in batches for id_ in batch.column("event_id").to_pylist()]


def forget(engine, *numbers: int) -> None:
    with engine.begin() as connection:
        for number in numbers:
            connection.execute(text(f"DELETE FROM outbox WHERE event_id = 'e-{number}'"))


# --- by the reader, as Spark calls it --------------------------------------------------------


def test_a_row_that_commits_late_is_not_missed(stream, database_url, postgres):
    reader = stream(database_url)
    start = reader.initialOffset()
    with postgres.connect() as slow:
        Outbox("orders").add(slow, [message(1)])
        fill(postgres, [2])  # takes the larger id and commits first
        assert reader.latestOffset(start, ALL) == start
        told = reader.reportLatestOffset()
        assert "idle in transaction" in told["heldUpBy"]
        slow.commit()
    end = reader.latestOffset(start, ALL)
    assert sorted(ids(reader, start, end)) == ["e-1", "e-2"]


def test_a_trigger_reads_exactly_as_many_rows_as_it_may(stream, url, engine):
    fill(engine, range(7))
    reader = stream(url)
    offsets = [reader.initialOffset()]
    for _ in range(4):
        offsets.append(reader.latestOffset(offsets[-1], ReadMaxRows(3)))
    assert [offset["rows"] for offset in offsets] == [0, 3, 6, 7, 7]
    assert offsets[3] == offsets[4]
    read = [ids(reader, a, b) for a, b in itertools.pairwise(offsets)]
    assert [len(part) for part in read] == [3, 3, 1, 0]
    assert sorted(functools.reduce(operator.iadd, read, [])) == numbered(range(7))


def test_offsets_survive_as_json_and_a_retried_batch_is_the_same(stream, url, engine):
    fill(engine, range(20))
    first = stream(url)
    start = first.initialOffset()
    end = first.latestOffset(start, ReadMaxRows(11))
    read = ids(first, start, end)
    fill(engine, range(20, 30))
    again = stream(url)
    kept = json.loads(json.dumps([start, end]))
    assert ids(again, *kept) == read
    assert len(read) == 11


def test_many_rows_are_cut_into_tasks(stream, url, engine):
    fill_at_once(engine, range(3000))
    reader = stream(url, minPartitions=3)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    tasks = [part.value.rows for part in reader.partitions(start, end)]
    assert tasks == [1000, 1000, 1000]
    assert sorted(ids(reader, start, end)) == numbered(range(3000))


def test_what_cleanup_took_from_a_planned_batch_is_an_error(stream, url, engine):
    fill(engine, range(10))
    first = stream(url)
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    forget(engine, 3, 4)
    with pytest.raises(DataLoss, match=r"2 rows of outbox between .* are gone"):
        ids(first, start, end)  # noticed by the task
    again = stream(url)
    with pytest.raises(DataLoss, match="failOnDataLoss=false"):
        again.partitions(start, end)  # noticed when the batch is planned again


def test_what_cleanup_took_is_a_warning_where_allowed(stream, url, engine, caplog):
    fill(engine, range(10))
    reader = stream(url, failOnDataLoss=False)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    forget(engine, 3)
    with caplog.at_level(logging.WARNING, "conquiet.spark"):
        assert len(ids(reader, start, end)) == 9
        assert len(ids(stream(url, failOnDataLoss=False), start, end)) == 9
    assert "1 rows of outbox" in caplog.text


def test_what_cleanup_took_is_counted_in_the_offsets_that_follow(stream, url, engine):
    fill(engine, range(10))
    planned = stream(url)
    start = planned.initialOffset()
    end = planned.latestOffset(start, ALL)
    forget(engine, 3, 4)
    again = stream(url, failOnDataLoss=False)  # after a crash: the batch is planned once more
    assert len(ids(again, start, end)) == 8
    told = again.latestOffset(end, ALL)
    assert told == end | {"lost": [1, 2]}
    assert again.latestOffset(told, ALL) == told
    fill(engine, [10])
    later = again.latestOffset(told, ALL)
    assert ids(again, told, later) == ["e-10"]
    assert later["lost"] == [1, 2]


def test_rows_that_were_read_may_be_cleaned_up(stream, url, engine):
    fill(engine, range(5))
    reader = stream(url)
    read = reader.latestOffset(reader.initialOffset(), ALL)
    forget(engine, *range(5))
    assert reader.latestOffset(read, ALL) == read
    fill(engine, [9])
    assert ids(reader, read, reader.latestOffset(read, ALL)) == ["e-9"]


def test_a_position_of_another_database_is_an_error(stream, url, engine):
    fill(engine, [1])
    reader = stream(url)
    ahead = {"position": "999999999-999999999", "rows": 5}
    with pytest.raises(DataLoss, match="restored from a backup"):
        reader.latestOffset(ahead, ALL)


def test_a_stream_may_begin_at_the_end_or_at_a_position(stream, url, engine):
    fill(engine, range(3))
    late = stream(url, startingOffsets="latest")
    start = late.initialOffset()
    middle = stream(url).latestOffset(stream(url).initialOffset(), ReadMaxRows(2))["position"]
    fill(engine, [7])
    assert ids(late, start, late.latestOffset(start, ALL)) == ["e-7"]
    reader = stream(url, startingOffsets=middle)
    start = reader.initialOffset()
    assert ids(reader, start, reader.latestOffset(start, ALL)) == ["e-2", "e-7"]


def test_available_now_does_not_run_after_new_rows(stream, url, engine):
    fill(engine, range(3))
    reader = stream(url)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    fill(engine, range(3, 6))
    end = reader.latestOffset(start, ReadMaxRows(2))
    end = reader.latestOffset(end, ReadMaxRows(2))
    assert end["rows"] == 3
    assert reader.latestOffset(end, ReadMaxRows(2)) == end


# --- on Spark ---------------------------------------------------------------------------------


def run(spark, url, directory, **options):
    """What AvailableNow reads, batch by batch; the checkpoint stays in the directory."""
    batches: dict[int, list[str]] = {}

    def keep(frame, batch):
        batches[batch] = sorted(row.event_id for row in frame.select("event_id").collect())

    query = (
        spark.readStream.format("conquiet-outbox")
        .options(url=url, **options)
        .load()
        .writeStream.foreachBatch(keep)
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    return batches


def test_a_query_goes_on_from_its_checkpoint(spark, database_url, postgres, tmp_path):
    register(spark)
    fill(postgres, range(5))
    first = run(spark, database_url, tmp_path, maxOffsetsPerTrigger=3)
    assert [len(batch) for batch in first.values()] == [3, 2]
    fill(postgres, range(5, 8))
    last = run(spark, database_url, tmp_path, maxOffsetsPerTrigger=3)
    assert list(last.values()) == [numbered(range(5, 8))]


def test_a_batch_that_failed_is_read_again_as_it_was(spark, database_url, postgres, tmp_path):
    register(spark)
    fill(postgres, range(4))
    failed = []

    def fail(frame, batch):
        failed.extend(sorted(row.event_id for row in frame.collect()))
        raise RuntimeError("the driver dies here")

    def start(write):
        return (
            spark.readStream.format("conquiet-outbox")
            .options(url=database_url)
            .load()
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )

    with pytest.raises(Exception, match="the driver dies here"):
        start(fail).awaitTermination(100)
    fill(postgres, range(4, 6))
    read = run(spark, database_url, tmp_path)
    assert failed == numbered(range(4))
    assert list(read.values()) == [numbered(range(4)), numbered([4, 5])]
