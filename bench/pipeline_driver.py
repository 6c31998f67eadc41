"""A driver of the pipeline over files, in a process of its own: `python -m bench.pipeline_driver`.

It takes all files but the last and makes all tables; then the last, and makes them again.
What that took goes to the standard output, as JSON.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

SETTINGS = {
    "spark.driver.memory": "4g",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
}


class Order(msgspec.Struct):
    """What a driver is asked to do."""

    files: list[str]
    last: int
    """How many of the files are taken after the others."""
    lake: str
    files_per_batch: int


class Taken(msgspec.Struct):
    """How long it took, in seconds."""

    session: float
    take: float
    refresh: float
    more_take: float
    more_refresh: float


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    from marketplace.pipeline import Job, Lake, read_files

    clock = _Clock()
    root = Path(order.lake)
    source = root / "source"
    source.mkdir(parents=True)
    spark = started(root)
    first = clock.lap()
    lake = Lake(spark, root / "lake")
    job = Job(lake, once=True)
    laps = []
    for files in (order.files[: -order.last], order.files[-order.last :]):
        for file in files:
            (source / Path(file).name).symlink_to(file)
        clock.lap()
        events = read_files(spark, str(source), maxFilesPerTrigger=str(order.files_per_batch))
        job.start(events).awaitTermination()
        laps.append(clock.lap())
        print(f"  taken: {laps[-1]:,.1f} s", file=sys.stderr, flush=True)
        job.finish()
        laps.append(clock.lap())
        print(f"  refreshed: {laps[-1]:,.1f} s", file=sys.stderr, flush=True)
    spark.stop()
    sys.stdout.buffer.write(msgspec.json.encode(Taken(first, *laps)))


def started(root: Path) -> Any:
    """A session that keeps its files below a folder."""
    from conquiet.spark import session

    places = {"spark.local.dir": root / "tmp", "spark.sql.warehouse.dir": root / "warehouse"}
    return session("bench", master="local[2]", config={**SETTINGS, **places})


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        taken, self._last = now - self._last, now
        return taken


if __name__ == "__main__":
    main()
