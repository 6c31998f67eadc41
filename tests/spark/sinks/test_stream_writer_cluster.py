"""Events from Spark to a Redis Cluster and back, and behind a sentinel."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from tests.integration.redis.servers import cluster, sentinel
from tests.spark.sinks.test_stream_writer import events, expected

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = 3_000


def write_and_read(spark, url: str, directory: Path) -> tuple[list[str], list[str]]:
    """A batch and a stream to the log, each twice; the ids that are read back of each."""
    for _ in range(2):
        writing = events(spark, ROWS).write.format("conquiet").mode("append")
        writing.options(url=url, topic="batch", partitions=5, source="/shop", writeId="once").save()
    log = {"url": url, "startingOffsets": "earliest"}
    for _ in range(2):
        reading = spark.readStream.format("conquiet").options(**log, streams="batch:*").load()
        copying = reading.drop("stream").writeStream.format("conquiet").trigger(availableNow=True)
        copying.options(url=url, topic="stream", partitions=3, checkpointLocation=str(directory))
        copying.start().awaitTermination()
    return tuple(
        sorted(
            row.event_id
            for row in spark.read.format("conquiet")
            .options(**log, streams=f"{name}:*")
            .load()
            .collect()
        )
        for name in ("batch", "stream")
    )


def test_in_a_cluster(spark, tmp_path: Path) -> None:
    with cluster() as ports:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        assert write_and_read(spark, url, tmp_path) == (expected(ROWS), expected(ROWS))
        holders = 0
        for port in ports:
            with redis.Redis(port=port) as client:
                holders += bool(client.keys("batch:*"))
        assert holders > 1


def test_behind_a_sentinel(spark, private_redis, tmp_path: Path) -> None:
    with sentinel(private_redis._binary, tmp_path, private_redis.port) as port:
        url = f"redis+sentinel://127.0.0.1:{port}/shop/0"
        place = tmp_path / "checkpoint"
        assert write_and_read(spark, url, place) == (expected(ROWS), expected(ROWS))
