"""Drivers of the cluster tests: each function runs in a process of its own, given JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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
    counted = SparkWorker(router, orders(spark, 0, rows, 4), slice_rows=20).run()
    return {row["outcome"]: row["count"] for row in counted.collect()}


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


def _session(settings: dict[str, Any]) -> Any:
    from conquiet.spark import session

    return session("conquiet cluster tests", config=settings)


if __name__ == "__main__":
    name, given = sys.argv[1:]
    print(json.dumps(globals()[name](**json.loads(given))))
