"""The log as a source: batches, AvailableNow, the latency of micro-batches, and cost by size."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import redis
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from bench import spark_floors as floors
from bench.harness import Case, compare
from bench.spark_ground import Ground, Run, in_turn, judged
from conquiet.lake import Pipeline

STREAMS = [f"events:{number}" for number in range(4)]
TICKS = [f"ticks:{number}" for number in range(4)]
PER_TRIGGER = 200_000
FLOOR, OTHER_FLOOR = "two redis-py + hiredis readers", "the same by COUNT 1000"
NO_OP, TO_PARQUET = "AvailableNow, no-op", "AvailableNow to Parquet"
TO_LAKE = "AvailableNow to raw_events of a lake"
LEAST_CPU_COUNT, OTHER_COUNT = 200, 1_000
"""Replies that stay in the caches of a CPU are parsed fastest; 1,000 is what many would write."""
_WAIT_SECONDS = 60.0


class Log:
    """Four streams that grow from one size to the next, so that no event is made twice."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.size = 0
        self._numbers = itertools.count()
        self._smallest: Case | None = None
        self._queries: dict[str, StreamingQuery] = {}
        """The last one of each case."""

    def grow(self, size: int) -> None:
        url, half = self.ground.redis_url, (size - self.size) // 2
        shares = [
            (url, STREAMS[:2], self.size, half),
            (url, STREAMS[2:], self.size + half, size - self.size - half),
        ]
        self.ground.in_two_processes(floors.add, *shares)()
        self.size = size

    def remove(self) -> None:
        with redis.Redis.from_url(self.ground.redis_url) as client:
            client.delete(*STREAMS)

    # --- batches ----------------------------------------------------------------------------

    def batch(self) -> DataFrame:
        reader = self.ground.spark.read.format("conquiet").options(url=self.ground.redis_url)
        return reader.option("streams", "events:*").load()

    def cost(self) -> Case:
        """What an event costs at this size, compared with the first size of all."""
        seconds = in_turn({"count": Run(lambda: self.batch().count())}, self.size, 3)
        case = compare("read, count, by size", self.size, seconds, "count", events=self.size)
        if self._smallest is None:
            self._smallest = case
        else:
            case.floor = f"{self._smallest.settings['events']:,} events"
            case.floor_rate = self._smallest.rate
            case.ratio = case.rate / self._smallest.rate
        return case

    def reading(self) -> Iterator[Case]:
        ground = self.ground
        few = ground.spark.read.format("conquiet").schema("entry_id STRING, data BINARY")
        few = few.options(url=ground.redis_url, streams="events:*")
        runs = {
            FLOOR: self._by_hand(LEAST_CPU_COUNT),
            OTHER_FLOOR: self._by_hand(OTHER_COUNT),
            "read, count": Run(lambda: self.batch().count()),
            "read, count, two columns": Run(lambda: few.load().count()),
            "read to Parquet": self._to_files(
                "batch", lambda path: self.batch().write.mode("overwrite").parquet(path)
            ),
            NO_OP: Run(self._to_nothing),
            TO_PARQUET: self._to_files("sink", self._to_parquet),
            TO_LAKE: self._to_lake(),
        }
        bars = {
            "read, count": 1.0,
            "read to Parquet": 0.6,
            TO_LAKE: 0.35,
        }
        seconds = in_turn(runs, self.size, ground.rounds)
        for name in runs:
            if name in (FLOOR, OTHER_FLOOR):
                continue
            settings: dict[str, Any] = {"events": self.size}
            if name in self._queries:
                settings |= {"per_trigger": self._limit} | _durations(self._queries[name])
            case = compare(name, self.size, seconds, name, FLOOR, **settings)
            yield judged(case, bars[name], ground.events) if name in bars else case

        yield compare(
            "read, count", self.size, seconds, "read, count", OTHER_FLOOR, events=self.size
        )

    def _by_hand(self, count: int) -> Run:
        url = self.ground.redis_url
        shares = ((url, STREAMS[:2], count), (url, STREAMS[2:], count))
        return Run(self.ground.in_two_processes(floors.read, *shares))

    def _to_files(self, name: str, write: Callable[[str], object]) -> Run:
        path = str(self.ground.directory / name)
        spark = self.ground.spark
        return Run(
            lambda: write(path),
            lambda: spark.read.parquet(path).count(),
            lambda: shutil.rmtree(path, ignore_errors=True),
        )

    # --- AvailableNow -----------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return min(PER_TRIGGER, max(1, self.size // 2))

    def _stream(self) -> DataFrame:
        reader = self.ground.spark.readStream.format("conquiet")
        reader = reader.options(url=self.ground.redis_url, streams="events:*")
        return reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=self._limit).load()

    def _checkpoint(self) -> str:
        return str(self.ground.directory / f"checkpoint-{next(self._numbers)}")

    def _finish(self, name: str, query: StreamingQuery | None) -> None:
        assert query is not None
        query.awaitTermination()
        self._queries[name] = query

    def _to_nothing(self) -> int:
        writer = self._stream().writeStream.format("noop").trigger(availableNow=True)
        self._finish(NO_OP, writer.option("checkpointLocation", self._checkpoint()).start())
        return _rows(self._queries[NO_OP])

    def _to_parquet(self, path: str) -> None:
        writer = self._stream().writeStream.format("parquet").trigger(availableNow=True)
        writer = writer.options(path=path, checkpointLocation=self._checkpoint())
        self._finish(TO_PARQUET, writer.start())

    def _to_lake(self) -> Run:
        pipeline = Pipeline(lake=str(self.ground.directory / "lake"))

        def write() -> None:
            pipeline.run(
                self._stream(),
                once=True,
                checkpoint=self._checkpoint(),
                on_query=lambda query: self._queries.update({TO_LAKE: query}),
            )

        return Run(
            write,
            lambda: pipeline.read("raw_events").num_rows,
            lambda: shutil.rmtree(pipeline.lake, ignore_errors=True),
        )


# --- latency --------------------------------------------------------------------------------


def latency(ground: Ground) -> Iterator[Case]:
    for rate, bar_ms in ((1_000, None), (10_000, 120.0)):
        yield _latency(ground, rate, bar_ms)


def _latency(ground: Ground, rate: int, bar_ms: float | None) -> Case:
    """How long the triggers took while another process added events."""
    with redis.Redis.from_url(ground.redis_url) as client:
        client.delete(*TICKS)
    query = _watched(ground, str(ground.directory / f"latency-{rate}"))
    try:
        add = partial(floors.produce, ground.redis_url, TICKS, rate)
        warm, _ = ground.plain.submit(add, ground.latency_seconds / 4).result()
        _wait(query, warm)
        first = len(query.recentProgress)
        added, seconds = ground.plain.submit(add, ground.latency_seconds).result()
        _wait(query, warm + added)
        progress = [one for one in query.recentProgress[first:] if one["numInputRows"]]
    finally:
        query.stop()
    took = sorted(float(one["durationMs"]["triggerExecution"]) for one in progress)
    p50, p95 = (took[int(len(took) * share)] for share in (0.5, 0.95))
    settings: dict[str, Any] = {"p50_ms": p50, "p95_ms": p95, "triggers": len(took)}
    if bar_ms is not None:
        settings["bar"] = f"p95 {bar_ms:g} ms {'met' if p95 <= bar_ms else 'missed'}"
    return Case(name=f"micro-batches at {rate:,}/s", rate=added / seconds, settings=settings)


def _watched(ground: Ground, checkpoint: str) -> StreamingQuery:
    reader = ground.spark.readStream.format("conquiet").options(url=ground.redis_url)
    ticks = reader.options(streams=",".join(TICKS), startingOffsets="earliest").load()
    return ticks.writeStream.format("noop").option("checkpointLocation", checkpoint).start()


def _wait(query: StreamingQuery, rows: int) -> None:
    until = time.monotonic() + _WAIT_SECONDS
    while (found := _rows(query)) != rows:
        if found > rows or time.monotonic() > until or not query.isActive:
            raise AssertionError(f"micro-batches had {found} events instead of {rows}")
        time.sleep(0.1)


def _rows(query: StreamingQuery) -> int:
    return sum(one["numInputRows"] for one in query.recentProgress)


def _durations(query: StreamingQuery) -> dict[str, int]:
    """Where the time of a trigger goes, on average."""
    took = [one["durationMs"] for one in query.recentProgress if one["numInputRows"]]
    phases = ("triggerExecution", "latestOffset", "addBatch")
    return {f"{name}_ms": sum(one.get(name, 0) for one in took) // len(took) for name in phases}
