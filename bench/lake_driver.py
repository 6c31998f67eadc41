"""A driver of the marketplace's lake: `python -m bench.lake_driver LOG LAKE`.

It takes the folder `first` of a log in one session, then `late`, then `newest`, each with a refresh
of all tables, and prints the seconds as JSON.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import msgspec

SETTINGS = {
    "spark.driver.memory": "2g",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
}
FILES_PER_BATCH = "20"


def main(log: str, lake: str) -> None:
    from conquiet.lake import read_files
    from conquiet.spark import session
    from marketplace.lake import pipeline

    began = time.perf_counter()
    places = {"spark.local.dir": f"{lake}.tmp", "spark.sql.warehouse.dir": f"{lake}.warehouse"}
    spark = session("bench", master="local[2]", config={**SETTINGS, **places})
    started = time.perf_counter() - began
    pipeline.lake = lake
    seconds: dict[str, float] = {}
    steps: Counter[str] = Counter()
    for part in ("first", "late", "newest"):
        last = began = time.perf_counter()

        def count(progress: Any, part: str = part) -> None:
            nonlocal last
            now = time.perf_counter()
            steps[f"{part}: {progress.step}"] += now - last  # type: ignore[assignment]
            last = now

        pipeline.run(
            read_files(spark, f"{log}/{part}", maxFilesPerTrigger=FILES_PER_BATCH),
            once=True,
            checkpoint=f"{lake}.checkpoints/{part}",
            on_progress=count,
        )
        seconds[part] = time.perf_counter() - began
        print(f"  {part}: {seconds[part]:,.1f} s", file=sys.stderr, flush=True)
    spark.stop()
    print(msgspec.json.encode({"session": started, **seconds, "tables": steps}).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
