"""One session for many micro-batches and refreshes of the payments lake:
python -m tests.spark.lake.long_session URL LAKE PLACE RUNS BATCHES [JAVA_OPTIONS].

It prints a line of JSON every ten batches: what the JVM holds after a garbage collection. Tasks
judge and fold, however small a batch is.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import redis
from tests.spark.lake.test_kills import publish
from tests.unit.lake.payments import entries, pipeline

from conquiet.lake import pipeline as engine
from conquiet.spark import session

_MEGABYTE = 1 << 20
_PAYMENTS_PER_BATCH = 3
_BATCHES_PER_SAMPLE = 10
_REFRESH_SECONDS = 8.0


def main(url: str, lake: str, place: str, runs: int, batches: int, java: str = "") -> None:
    """Take a log in by `runs` queries of about `batches` micro-batches each."""
    engine._FEW_ROWS = 0
    pipeline.lake = lake
    config = {"spark.local.dir": place, "spark.log.level": "ERROR"}
    if java:
        config["spark.driver.extraJavaOptions"] = java
    spark = session("long session", config=config)
    steps: Counter[str] = Counter()

    def follow(progress: engine.Progress) -> None:
        steps[progress.step] += 1
        if progress.step == "taken" and steps["taken"] % _BATCHES_PER_SAMPLE == 0:
            done = {"batches": steps["taken"], "refreshes": steps["applied"]}
            print(json.dumps({**done, **measure(spark)}), flush=True)

    log = entries(runs * batches * _PAYMENTS_PER_BATCH)
    size = -(-len(log) // runs)
    for run in range(runs):
        with redis.Redis.from_url(url) as client:
            publish(client, log[run * size : (run + 1) * size])
        reader = spark.readStream.format("conquiet").options(url=url, streams="payments:*")
        reader = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=size // batches)
        pipeline.run(reader.load(), once=True, refresh_seconds=_REFRESH_SECONDS, on_progress=follow)
    spark.stop()


def measure(spark: Any) -> dict[str, Any]:
    """Read the beans of the JVM; sizes are in megabytes."""
    java = spark._jvm.java.lang
    java.System.gc()
    beans = java.management.ManagementFactory
    pools = {pool.getName(): pool.getUsage() for pool in beans.getMemoryPoolMXBeans()}
    code = [usage for name, usage in pools.items() if name.startswith("Code")]
    heap = beans.getMemoryMXBean().getHeapMemoryUsage()
    found = java.Thread.getAllStackTraces().keySet().toArray()
    names = Counter(re.sub(r"[0-9a-f-]{36}|\d+", "N", thread.getName()) for thread in found)
    return {
        "code cache": sum(usage.getUsed() for usage in code) / _MEGABYTE,
        "code cache limit": sum(usage.getMax() for usage in code) / _MEGABYTE,
        "metaspace": pools["Metaspace"].getUsed() / _MEGABYTE,
        "heap": heap.getUsed() / _MEGABYTE,
        "heap limit": heap.getMax() / _MEGABYTE,
        "threads": names,
    }


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:6]), *sys.argv[6:])
