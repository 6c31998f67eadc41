"""Drivers killed at random moments leave tables that are those of a run that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.spark.marketplace.driver import start
from tests.spark.marketplace.tables import contents, differences, digests, taken

from marketplace.generator import Generator, write_parquet
from marketplace.oracle import Oracle
from marketplace.pipeline import Lake

KILLS, PARTS = 10, 4


def kill_after(driver: subprocess.Popen[str], seconds: float) -> bool:
    """Whether it died by us; the JVM and the Python of its session die with it."""
    assert driver.stdout is not None
    assert driver.stdout.readline() == "started\n"
    try:
        out, _ = driver.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate()
        return True
    assert out == "done\n"
    return False


def finish(driver: subprocess.Popen[str]) -> float:
    """Let a driver come to its end; how long it took, from where its work begins."""
    assert driver.stdout is not None
    assert driver.stdout.readline() == "started\n"
    begin = time.monotonic()
    out, _ = driver.communicate()
    assert out == "done\n"
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_driver_that_is_killed_ten_times_makes_the_same_tables(spark, tmp_path: Path) -> None:
    oracle = Oracle(outbox=False)
    entries = list(Generator(seed=21, orders=40, days=4, cut=True, faults="all").entries(oracle))
    whole, log = tmp_path / "whole", tmp_path / "log"
    write_parquet(entries, whole, rows_per_file=len(entries) // PARTS + 1)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "lake"
    seconds = finish(start(whole, undisturbed))

    log.mkdir()
    parts = sorted(whole.glob("*.parquet"))
    chance = random.Random(4)
    # Kills are spread over what a driver does here and now, so that all kinds of work get done,
    # and none of it for the last time.
    longest, died, is_done = seconds / 4, 0, True
    for attempt in range(4 * KILLS):
        if parts and (is_done or attempt % 2 == 0):
            os.link(parts[0], log / parts.pop(0).name)
        is_done = not kill_after(start(log, disturbed), chance.uniform(0.1, longest))
        died += not is_done
        longest *= 0.7 if is_done else 1
        if died == KILLS:
            break
    assert died == KILLS
    for part in parts:
        os.link(part, log / part.name)
    finish(start(log, disturbed))

    lake, other = Lake(spark, disturbed), Lake(spark, undisturbed)
    assert differences(lake, oracle) == []
    assert taken(lake) == taken(other)
    assert contents(lake) == contents(other)
    assert digests(disturbed) == digests(undisturbed)
