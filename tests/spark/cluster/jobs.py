"""Drivers of the cluster tests: each function runs in a process of its own, given JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.spark.router.redis_shop import redis_shop
from tests.spark.router.shop import orders, shop


def write_batch(settings: dict[str, Any], url: str, rows: int) -> int:
    """A large batch to a stream, in eight tasks, with small slices."""
    spark = _session(settings)
    frame = spark.range(0, rows, 1, 8).selectExpr(
        "concat('e-', id) AS event_id", "'sold' AS type", "repeat('x', 200) AS data"
    )
    writing = frame.write.format("conquiet").mode("append")
    writing.options(url=url, topic="orders", source="/shop", sliceRows=100).save()
    return rows


def route(settings: dict[str, Any], url: str, notes: str, rows: int, **behaviour: Any) -> Any:
    """Orders through the shop's router, whose process dies once on the way."""
    from conquiet.spark import SparkWorker

    spark = _session(settings)
    router = shop(url, notes=Path(notes), **behaviour)
    return _counts(SparkWorker(router, orders(spark, 0, rows, 4), batch_size=20).run())


def route_in_redis(settings: dict[str, Any], url: str, notes: str, rows: int, dies_at: int) -> Any:
    """The same with effects, inbox and outbox in Redis; the process dies after a commit."""
    from conquiet.spark import SparkWorker

    spark = _session(settings)
    router = redis_shop(url, notes=Path(notes), dies_at=dies_at, lease=2.0)
    return _counts(SparkWorker(router, orders(spark, 0, rows, 4), batch_size=20).run())


def route_log(settings: dict[str, Any], url: str, log: str, notes: str, **behaviour: Any) -> Any:
    """Orders of the log through the shop's router, as a stream, in small micro-batches."""
    from conquiet.spark import SparkWorker

    spark = _session(settings)
    options = {"url": log, "streams": "orders", "startingOffsets": "earliest"}
    options |= {"maxOffsetsPerTrigger": "100", "minPartitions": "2"}
    frame = spark.readStream.format("conquiet").options(**options).load()
    router = shop(url, notes=Path(notes), **behaviour)
    place, trigger = f"{notes}/checkpoint", {"availableNow": True}
    worker = SparkWorker(router, frame, batch_size=20, checkpoint=place, trigger=trigger)
    return _counts(worker.run())


def route_twice(settings: dict[str, Any], url: str, notes: str, rows: int) -> Any:
    """One task of four waits until Spark has started a second attempt of it."""
    from conquiet.spark import SparkWorker

    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.minTaskRuntime": "500ms",
    }
    spark = _session(settings | speculation)
    router = shop(url, notes=Path(notes), straggles_at=rows - 1)
    return _counts(SparkWorker(router, orders(spark, 0, rows, 4), batch_size=20).run())


def through(settings: dict[str, Any], url: str, log: str, notes: str) -> Any:
    """Source, router and sink, one after the other: the log, its handlers, and a copy of it."""
    from conquiet.spark import SparkWorker

    spark = _session(settings)
    options = {"url": log, "streams": "orders", "startingOffsets": "earliest"}
    frame = spark.readStream.format("conquiet").options(**options, minPartitions="2").load()
    place, trigger = f"{notes}/checkpoint", {"availableNow": True}
    counted = SparkWorker(shop(url), frame, checkpoint=place, trigger=trigger).run()
    copying = frame.drop("stream").writeStream.format("conquiet").trigger(availableNow=True)
    copying.options(url=log, topic="copy", checkpointLocation=f"{notes}/copy")
    copying.start().awaitTermination()
    return _counts(counted)


def _counts(frame: Any) -> dict[str, int]:
    return {row["outcome"]: row["count"] for row in frame.collect()}


def where(settings: dict[str, Any], more: dict[str, str]) -> Any:
    """From where executors have conquiet, and which Python they are."""
    spark = _session({**settings, **more})

    def look(batches):
        import sys

        import pyarrow as pa

        import conquiet

        for _ in batches:
            yield pa.record_batch({"at": [conquiet.__file__], "python": [sys.executable]})

    return [
        list(row) for row in spark.range(1).mapInArrow(look, "at string, python string").collect()
    ]


def read_log(settings: dict[str, Any], more: dict[str, str], url: str) -> Any:
    """Read the log: rows, tasks, and the cores that planners are given."""
    from conquiet.spark.columns import CORES_VARIABLE

    spark = _session({**settings, **more})
    frame = spark.read.format("conquiet").options(url=url, streams="orders").load()
    cores = spark.sparkContext.environment[CORES_VARIABLE]
    return [frame.count(), frame.rdd.getNumPartitions(), int(cores)]


def _session(settings: dict[str, Any]) -> Any:
    from conquiet.spark import session

    return session("conquiet cluster tests", config=settings)


if __name__ == "__main__":
    name, given = sys.argv[1:]
    print(json.dumps(globals()[name](**json.loads(given))))
