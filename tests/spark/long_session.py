"""A driver that keeps one Spark session for many micro-batches and refreshes of a lake.

It prints a line of JSON per cycle: the memory of the JVM after a garbage collection, and its
threads.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import redis
from marketplace.lake import pipeline

from conquiet.spark import session
from marketplace.generator import DOMAIN_TOPIC, TELEMETRY_TOPIC, Generator, write_log

_MEGABYTE = 1 << 20


def main(broker: str, lake: str, cycles: int, batches: int, orders: int) -> None:
    """Fill the log, take it in by `batches` micro-batches, refresh the tables: `cycles` times."""
    spark = session("long session")  # with its defaults: they are what is tested
    entries = list(Generator(seed=5, orders=orders).entries())
    size = -(-len(entries) // cycles)
    client: Any = redis.Redis.from_url(broker)
    pipeline.lake = lake
    for cycle in range(cycles):
        write_log(client, entries[cycle * size : (cycle + 1) * size])
        frame = (
            spark.readStream.format("conquiet-log")
            .option("url", broker)
            .option("streams", f"{DOMAIN_TOPIC},{TELEMETRY_TOPIC}")
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(-(-size // batches)))
            .load()
        )
        pipeline.run(frame, once=True)
        print(json.dumps(measure(spark)), flush=True)
    spark.stop()


def measure(spark: Any) -> dict[str, float]:
    """Read the JVM's own beans; megabytes and a count of threads."""
    java = spark._jvm.java.lang
    java.System.gc()
    beans = java.management.ManagementFactory
    pools = {pool.getName(): pool.getUsage() for pool in beans.getMemoryPoolMXBeans()}
    code = [usage for name, usage in pools.items() if name.startswith(("CodeHeap", "CodeCache"))]
    return {
        "code cache": sum(usage.getUsed() for usage in code) / _MEGABYTE,
        "code cache reserved": sum(usage.getMax() for usage in code) / _MEGABYTE,
        "metaspace": pools["Metaspace"].getUsed() / _MEGABYTE,
        "heap": beans.getMemoryMXBean().getHeapMemoryUsage().getUsed() / _MEGABYTE,
        "threads": beans.getThreadMXBean().getThreadCount(),
        "classes": beans.getClassLoadingMXBean().getLoadedClassCount(),
    }


if __name__ == "__main__":
    broker, lake, *numbers = sys.argv[1:]
    main(broker, lake, *map(int, numbers))
