"""A driver of the payments lake, to be killed: python -m tests.spark.lake.payments_driver URL LAKE
PLACE EVENTS [once].

EVENTS is the size of a micro-batch at most. It prints a line per step of the protocol. Tasks judge
and fold, however small a batch is.
"""

from __future__ import annotations

import sys

from tests.unit.lake.payments import pipeline

from conquiet.lake import pipeline as engine
from conquiet.spark import session


def say(progress: engine.Progress) -> None:
    print(progress.step, flush=True)


def main(url: str, lake: str, place: str, most: str, once: str = "") -> None:
    engine._FEW_ROWS = 0
    pipeline.lake = lake
    spark = session(
        "payments",
        master="local[2,4]",  # a task whose Python dies is tried again
        config={
            "spark.driver.memory": "512m",
            "spark.local.dir": place,
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
        },
    )
    log = spark.readStream.format("conquiet").options(
        url=url, streams="payments:*", startingOffsets="earliest", maxOffsetsPerTrigger=most
    )
    pipeline.run(log.load(), once=bool(once), refresh_seconds=1.0, on_progress=say)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
