"""Events from Spark to Redis Streams, in batches and streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from conquiet.spark import register

ROWS = 3_000


@pytest.fixture(autouse=True)
def formats(spark) -> None:
    register(spark)


def events(spark, rows: int = ROWS, partitions: int = 2):
    columns = ("concat('e-', id) AS event_id", "cast(id % 7 AS string) AS key", "'sold' AS type")
    return spark.range(0, rows, 1, partitions).selectExpr(*columns, "repeat('x', 500) AS data")


def ids_in(client, *streams: str) -> list[str]:
    return [fields[b"id"].decode() for name in streams for _, fields in client.xrange(name)]


def expected(rows: int = ROWS) -> list[str]:
    return sorted(f"e-{number}" for number in range(rows))


def failing_once(mark: Path, redis_url: str):
    """A step that fails one task, once rows that it has passed on are in Redis."""

    def passing(batches):
        import redis
        from tests.waiting import eventually

        seen = 0
        with redis.Redis.from_url(redis_url) as client:
            for batch in batches:
                yield batch
                seen += batch.num_rows
                if seen >= 1_000 and not mark.exists():
                    eventually(lambda: client.xlen("orders") > 0)
                    mark.touch()
                    raise RuntimeError("a task was made to fail")

    return passing


def test_a_batch_goes_to_the_partitions_of_a_topic(spark, redis_client, redis_url) -> None:
    writing = events(spark).write.format("conquiet").mode("append")
    writing.options(url=redis_url, topic="orders", partitions=2, source="/shop").save()
    streams = ("orders:{0}", "orders:{1}")
    assert sorted(ids_in(redis_client, *streams)) == expected()
    keys = [{fields[b"partitionkey"] for _, fields in redis_client.xrange(s)} for s in streams]
    assert not keys[0] & keys[1]
    assert keys[0] | keys[1] == {b"%d" % number for number in range(7)}


def test_a_batch_with_a_write_id_is_written_once(
    spark, redis_client, redis_url, tmp_path: Path
) -> None:
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 100)
    try:
        step = failing_once(tmp_path / "failed", redis_url)
        frame = events(spark)
        writing = frame.mapInArrow(step, frame.schema).write.format("conquiet").mode("append")
        writing.options(url=redis_url, topic="orders", source="/shop", writeId="backfill")
        with pytest.raises(Exception, match="a task was made to fail"):
            writing.save()
        assert 0 < redis_client.xlen("orders") < ROWS
        writing.save()
        writing.save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert sorted(ids_in(redis_client, "orders")) == expected()


def test_a_stream_that_fails_in_a_batch_adds_nothing_twice(
    spark, redis_client, redis_url, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    events(spark).write.parquet(str(source))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 100)
    try:
        frame = spark.readStream.schema(events(spark, 0).schema).parquet(str(source))
        frame = frame.mapInArrow(failing_once(tmp_path / "failed", redis_url), frame.schema)
        writing = frame.writeStream.format("conquiet").trigger(availableNow=True)
        writing.options(url=redis_url, topic="orders", source="/shop", denseIds=True)
        writing.option("checkpointLocation", str(tmp_path / "checkpoint"))
        with pytest.raises(Exception, match="a task was made to fail"):
            writing.start().awaitTermination()
        assert 0 < redis_client.xlen("orders") < ROWS
        writing.start().awaitTermination()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert sorted(ids_in(redis_client, "orders")) == expected()
    assert [entry for entry, _ in redis_client.xrange("orders")] == [
        b"0-%d" % number for number in range(1, ROWS + 1)
    ]


def test_what_a_log_cannot_do_is_refused(spark, redis_url) -> None:
    writing = events(spark, 1).write.format("conquiet").options(url=redis_url, topic="orders")
    with pytest.raises(Exception, match="needs a source"):
        writing.mode("append").save()
    with pytest.raises(Exception, match="a log is appended to"):
        writing.option("source", "/shop").mode("overwrite").save()
