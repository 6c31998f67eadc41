"""A log to read: streams of a real Redis, and queries over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conquiet.spark.columns import ARROW_SCHEMA
from conquiet.spark.log.connection import disconnect


@dataclass
class Log:
    """Adds events to streams, and reads them back by Spark."""

    spark: Any
    client: Any
    url: str
    directory: Path
    options: dict[str, str] = field(default_factory=dict)

    def add(self, stream, *numbers, ids="*", **more):
        """Events with these numbers; returns the ids of their entries."""
        pipeline = self.client.pipeline(transaction=False)
        for number in numbers:
            fields = {"id": str(number), "type": "sold", "source": "/shop", "specversion": "1.0"}
            fields |= {"subject": f"c-{number}"} | more | {"data": f'{{"n": {number}}}'}
            pipeline.xadd(stream, fields, id=ids.format(number))
        return [entry_id.decode() for entry_id in pipeline.execute()]

    def _all(self, options):
        given = {"url": self.url, "streams": "orders"} | self.options | options
        return {name: str(value) for name, value in given.items()}

    def read(self, **options):
        """A batch."""
        return self.spark.read.format("conquiet").options(**self._all(options)).load()

    def numbers(self, frame):
        return sorted(int(row.event_id) for row in frame.select("event_id").collect())

    def start(self, trigger=None, name="query", sink="parquet", **options):
        """A query that writes the events to files."""
        frame = self.spark.readStream.format("conquiet").options(**self._all(options)).load()
        return (
            frame.select("stream", "entry_id", "event_id", "data", "_malformed")
            .writeStream.format(sink)
            .option("path", str(self.directory / name / "out"))
            .option("checkpointLocation", str(self.directory / name / "checkpoint"))
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )

    def run(self, name="query", **options):
        """A query over all that there is now; returns the rows of each of its batches."""
        query = self.start(name=name, **{"startingOffsets": "earliest"} | options)
        try:
            query.awaitTermination()
        finally:
            query.stop()
        return [progress.numInputRows for progress in query.recentProgress]

    def written(self, name="query"):
        path = self.directory / name / "out"
        return self.numbers(self.spark.read.parquet(str(path)))


class Query:
    """What Spark does with a stream reader, without Spark: a restart is a new one of these."""

    def __init__(self, log, offset=None, **options):
        from pyspark.sql.pandas.types import from_arrow_schema

        from conquiet.spark.log.options import ReadOptions
        from conquiet.spark.log.source import LogStreamReader

        given = log._all({"startingOffsets": "earliest"} | options)
        schema = from_arrow_schema(ARROW_SCHEMA)
        self.reader = LogStreamReader(ReadOptions.of(given, streaming=True), schema)
        self.offset = self.reader.initialOffset() if offset is None else offset

    def batch(self):
        """The numbers of the events of the next micro-batch, which is then done."""
        start = self.offset
        self.offset = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
        return self.between(start, self.offset)

    def between(self, start, end):
        tasks = self.reader.partitions(start, end)
        batches = [batch for task in tasks for batch in self.reader.read(task)]
        return sorted(int(item) for batch in batches for item in batch["event_id"].to_pylist())


@pytest.fixture(autouse=True)
def no_clients_left():
    """The servers of a test end with it; clients in this process must not outlive them."""
    yield
    disconnect()


@pytest.fixture
def plain_log(redis_client, redis_url, tmp_path) -> Log:
    """A log for queries that need no Spark session."""
    return Log(None, redis_client, redis_url, tmp_path)


@pytest.fixture
def log(spark, redis_client, redis_url, tmp_path) -> Log:
    return Log(spark, redis_client, redis_url, tmp_path)
