"""Latency of a lake at a steady rate: from XADD to a row of silver, and to a row of a mart.

python bench/lake_latency.py [--quick] [--rate N] [--seconds S] [--refresh-seconds S]

A process adds payments to one stream of a private Redis; a driver on `local[2]` follows it with a
trigger of 0 s. An event's time is that of its entry, by the clock of Redis. It has arrived when all
Delta tables of silver have its batch; in the mart, when `shop_daily` has. Events of the first ten
seconds are left out: Spark and Delta are warmed up by them. Run once without refreshes, once with.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import argparse
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import redis

from conquiet import embedded
from conquiet.lake.pipeline import Progress

_WARM_SECONDS = 10.0
_MOST_BEHIND_SECONDS = 60.0
"""How long a run may take for the events that wait when the last one was added."""
_TICKS = 100
"""Pipelines per second of the process that adds events."""


def produce(url: str, rate: int, seconds: float) -> None:
    """Add `rate` events a second to a stream."""
    from datetime import UTC, datetime
    from uuid import uuid4

    with redis.Redis.from_url(url) as client:
        start = time.monotonic()
        for tick in range(int(seconds * _TICKS)):
            time.sleep(max(0.0, start + tick / _TICKS - time.monotonic()))
            adding = client.pipeline(transaction=False)
            now = datetime.now(UTC).isoformat()
            for number in range(rate // _TICKS):
                id_ = str(uuid4())
                payment = f"p{tick * rate + number}"
                data = {"payment_id": payment, "shop": f"shop-{number % 5}", "cents": 100}
                envelope = {"version": 1, "eventId": id_, "occurredAt": now, "data": data}
                envelope["actor"] = {"type": "system", "id": "till"}
                fields = {"specversion": "1.0", "id": id_, "type": "payment_authorized"}
                fields |= {"source": "/till", "subject": payment, "time": now}
                fields |= {"aggregatetype": "payment", "data": json.dumps(envelope)}
                adding.xadd("payments", fields)
            adding.execute()


class Clock:
    """When the commits of each batch came."""

    def __init__(self) -> None:
        self.silver: dict[int, float] = {}
        self.mart: dict[int, float] = {}
        self.steps: dict[str, list[float]] = defaultdict(list)
        self.events = 0
        self._last = time.time()
        self._has_silver: set[int] = set()

    def see(self, progress: Progress) -> None:
        now = time.time()
        self.events = progress.events
        self.steps[progress.step].append(now - self._last)
        self._last = now
        if progress.step == "shop_daily committed":
            self.mart[progress.batch] = now
        elif progress.step == "states and changes written":
            self._has_silver.update(range(progress.batch + 1))
        elif progress.step.endswith("committed") and progress.batch not in self._has_silver:
            self.silver[progress.batch] = now


def latencies(lake: Path, clock: Clock) -> tuple[np.ndarray, np.ndarray]:
    """Return the milliseconds of all events that came after the warm-up: to silver, to the mart."""
    times: dict[int, np.ndarray] = {}
    for log in sorted((lake / "events" / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        versions = [one["txn"]["version"] for one in actions if "txn" in one]
        files = [one["add"]["path"] for one in actions if "add" in one]
        if versions and files:
            rows = [pq.read_table(lake / "events" / one)["first_seen_at"] for one in files]
            times[versions[0]] = np.concatenate(
                [one.cast("int64").to_numpy() / 1e6 for one in rows]
            )
    start = min(one.min() for one in times.values()) + _WARM_SECONDS
    silver, mart = [], []
    for number, seen in times.items():
        seen = seen[seen >= start]
        if number in clock.silver:
            silver.append(clock.silver[number] - seen)
        after = [at for through, at in clock.mart.items() if through >= number]
        if after:
            mart.append(min(after) - seen)
    nothing = np.empty(0)
    return np.concatenate([nothing, *silver]) * 1e3, np.concatenate([nothing, *mart]) * 1e3


def measure(url: str, place: Path, rate: int, seconds: float, refresh_seconds: float) -> None:
    from tests.unit.lake.payments import pipeline

    from conquiet.spark import session

    spark = session(
        "latency",
        master="local[2]",
        config={
            "spark.log.level": "ERROR",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        },
    )
    pipeline.lake = str(place)
    reader = spark.readStream.format("conquiet")
    log = reader.options(url=url, streams="payments", startingOffsets="earliest").load()
    clock = Clock()
    command = [sys.executable, __file__, "--produce", url, "--rate", str(rate)]
    producers: list[threading.Thread] = []

    def add_events() -> None:
        subprocess.run([*command, "--seconds", str(seconds)], check=True)
        produced = int(seconds * _TICKS) * (rate // _TICKS)
        end = time.monotonic() + _MOST_BEHIND_SECONDS
        while clock.events < produced and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(2 * refresh_seconds if refresh_seconds < seconds else 2.0)
        os.kill(os.getpid(), signal.SIGTERM)  # ends the run

    def begin(query: object) -> None:
        if not producers:  # the query has started, and the run has its handlers of signals
            producers.append(threading.Thread(target=add_events, daemon=True))
            producers[0].start()

    pipeline.run(log, refresh_seconds=refresh_seconds, on_progress=clock.see, on_query=begin)
    spark.stop()
    for name, found in zip(("silver", "mart"), latencies(place, clock), strict=True):
        if not len(found) and (name == "silver" or clock.mart):
            print(f"refresh every {refresh_seconds:g} s: no event came after the warm-up")
        elif len(found):
            p50, p95, p99 = np.percentile(found, [50, 95, 99])
            print(
                f"refresh every {refresh_seconds:g} s: XADD to {name}: p50 {p50:.0f} ms,"
                f" p95 {p95:.0f} ms, p99 {p99:.0f} ms ({len(found):,} events,"
                f" {len(clock.silver)} batches)",
                flush=True,
            )
    for step, taken in sorted(clock.steps.items(), key=lambda one: -sum(one[1])):
        middle, sum_ = np.median(taken) * 1e3, sum(taken)
        print(f"    {step}: {middle:.0f} ms after the step before, {sum_:.1f} s in all")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 seconds instead of 60")
    parser.add_argument("--rate", type=int, default=1000, help="events a second (1000)")
    parser.add_argument("--seconds", type=float, help="of events (60)")
    parser.add_argument("--refresh-seconds", type=float, default=1.0, help="(1)")
    parser.add_argument("--produce", help=argparse.SUPPRESS)
    given = parser.parse_args()
    seconds = given.seconds or (20.0 if given.quick else 60.0)
    if given.produce:
        produce(given.produce, given.rate, seconds)
        return
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as directory:
        for name, refresh in (("silver", float("inf")), ("mart", given.refresh_seconds)):
            with embedded.redis(private=True) as server:
                measure(server.url, Path(directory, name), given.rate, seconds, refresh)


if __name__ == "__main__":
    main()
