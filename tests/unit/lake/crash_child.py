"""A run that kills itself after a given step: python -m tests.unit.lake.crash_child LAKE STEP."""

from __future__ import annotations

import os
import signal
import sys

from tests.unit.lake.payments import entries, pipeline

from conquiet.lake import pipeline as engine

BATCHES = 3
"""The third one is of redeliveries and late corrections alone."""


def batches() -> list[list[dict]]:
    log = entries(24)
    late = [one for one in log if one["type"] == "payment_corrected"]
    rest = [one for one in log if one["type"] != "payment_corrected"]
    return [rest[: len(rest) // 2], rest[len(rest) // 2 :], [*late, *rest[:5]]]


def run(lake: str, step: int = -1) -> list[str]:
    """Take the batches that the lake does not have; die after the step with that number."""
    steps: list[str] = []
    real = engine.Driver.step

    def count(driver: engine.Driver, name: str, batch: int) -> None:
        real(driver, name, batch)
        steps.append(name)
        if len(steps) - 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)

    engine.Driver.step = count  # type: ignore[method-assign]
    # The order of commits is the same in each run.
    engine._COMMITS_AT_ONCE = engine._MERGES_AT_ONCE = 1
    try:
        pipeline.lake = lake
        with pipeline.driver() as driver:
            for number, one in enumerate(batches()):
                driver.take(engine.as_table(one), "log", number)
                if number != 1:  # two batches at once
                    driver.refresh()
            if step == -2:
                pipeline.lake = lake
        return steps
    finally:
        engine.Driver.step = real  # type: ignore[method-assign]


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
