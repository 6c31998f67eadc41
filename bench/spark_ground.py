"""Ground: what the parts of bench/spark.py stand on, and how they take turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from bench.harness import Case, Seconds
from conquiet import embedded

FAIR_EVENTS = 1_000_000
"""Of fewer, the fixed cost of a job is most of what it costs."""


@dataclass(frozen=True)
class Ground:
    """One Spark, one Redis, one PostgreSQL, and two plain processes."""

    spark: SparkSession
    plain: ProcessPoolExecutor
    redis_url: str
    postgres: embedded.PostgresServer
    directory: Path
    events: int
    rounds: int
    latency_seconds: float

    def in_two_processes(
        self, work: Callable[..., int], *arguments: tuple[Any, ...]
    ) -> Callable[[], int]:
        """The work, once for each of the arguments, at the same time; the sum of what it did."""

        def run() -> int:
            under_way = [self.plain.submit(work, *one) for one in arguments]
            return sum(one.result() for one in under_way)

        return run


@dataclass(frozen=True)
class Run:
    """Work to be timed. What comes before and the counting of its result are not."""

    work: Callable[[], Any]
    count: Callable[[], int] | None = None
    """How many events have arrived; without it, the work itself says."""
    prepare: Callable[[], object] | None = None


def in_turn(runs: Mapping[str, Run], wanted: int, rounds: int) -> dict[str, Seconds]:
    """As harness.measure, with a check of each result: a wrong answer cannot be fast."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # the first round is for caches and plans
        for name, run in runs.items():
            seconds = _timed(name, run, wanted)
            if number:
                taken[name].append(seconds)
    return {name: Seconds(min(all_), statistics.median(all_)) for name, all_ in taken.items()}


def _timed(name: str, run: Run, wanted: int) -> float:
    if run.prepare is not None:
        run.prepare()
    gc.collect()
    start = time.perf_counter()
    found = run.work()
    seconds = time.perf_counter() - start
    if run.count is not None:
        found = run.count()
    if found != wanted:
        raise AssertionError(f"{name}: {found} events instead of {wanted}")
    return seconds


def judged(case: Case, bar: float, events: int) -> Case:
    """The case with the ratio that was wanted, and whether it was reached."""
    assert case.ratio is not None
    verdict = "met" if case.ratio >= bar else "missed"
    if verdict == "missed" and events < FAIR_EVENTS:
        verdict = "missed (few events)"
    case.settings["bar"] = f"{bar} {verdict}"
    return case
