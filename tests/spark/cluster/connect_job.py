"""A client of a Spark Connect server, in a process of its own; prints what came of it as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from conquiet import Message, Router
from conquiet.errors import ConfigError
from conquiet.spark import SparkWorker, session


def make_router() -> Router:
    router = Router()

    @router.raw()
    def see(message: Message[bytes]) -> None:
        assert message.type == "sold"

    return router


def run(url: str, lake: str) -> Any:
    spark = session(remote="local[2]")
    columns = ("concat('e-', id) AS event_id", "'sold' AS type", "'x' AS data")
    writing = spark.range(0, 500, 1, 2).selectExpr(*columns).write.format("conquiet")
    writing.mode("append").options(url=url, topic="orders", source="/shop").save()
    source = {"url": url, "streams": "orders", "startingOffsets": "earliest"}
    stream = spark.readStream.format("conquiet").options(**source)
    writing = stream.load().writeStream.format("parquet").trigger(availableNow=True)
    place = {"path": f"{lake}/raw_events", "checkpointLocation": f"{lake}/checkpoint-raw"}
    writing.options(**place).start().awaitTermination()
    carried = spark.read.parquet(f"{lake}/raw_events").count()
    counted = SparkWorker(make_router, spark.read.format("conquiet").options(**source).load()).run()
    handled = [list(row) for row in counted.collect()]
    try:
        SparkWorker(make_router, stream.load(), checkpoint=f"{lake}/checkpoint")
    except ConfigError as error:
        refused = str(error)
    return [carried, handled, refused]


if __name__ == "__main__":
    from tests.spark.cluster import connect_job  # as a module: a script's functions go by value

    print(json.dumps(connect_job.run(*sys.argv[1:])))
