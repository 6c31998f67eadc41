"""A log to read: streams of a real Redis, and queries over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


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

    def start(self, trigger=None, name="query", **options):
        """A query that writes the events, with their batch, to files."""
        frame = self.spark.readStream.format("conquiet").options(**self._all(options)).load()
        return (
            frame.select("stream", "entry_id", "event_id", "data", "_malformed")
            .writeStream.format("parquet")
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


@pytest.fixture
def log(spark, redis_client, redis_url, tmp_path) -> Log:
    return Log(spark, redis_client, redis_url, tmp_path)
