"""One JVM, with the defaults of `conquiet.spark.session()`, does not fill up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression

import pytest
from tests import needs
from tests.spark.conftest import INSTALL_JAVA, java_version

RUNS, BATCHES, REFRESHES = 7, 60, 24
POOLS, MOST_IN_A_POOL = ("block-manager-ask-", "block-manager-storage-"), 100
"""Spark removes broadcast variables by these pools, which end idle threads after a minute."""
MONITOR = "Idle Worker Monitor"
"""Spark leaves one of these behind for every query over a source in Python; it sleeps."""
GROWTH = 0.02
"""The share of its limit by which a line through the second half may rise per 100 batches."""
LIMITS = {"metaspace": 512.0, "threads": 500.0}
"""For what has no limit of its own: megabytes, and a count."""


def count_threads(names: dict[str, int], *prefixes: str) -> int:
    return sum(count for name, count in names.items() if name.startswith(prefixes))


def growth(batches: Sequence[float], values: Sequence[float], limit: float) -> float:
    """Return by which share of the limit a line through the second half rises per 100 batches."""
    half = len(values) // 2
    return linear_regression(batches[half:], values[half:]).slope * 100 / limit


# Megabytes of compiled code after every ten batches, of two runs of `long_session.py`: with the
# option -XX:TieredStopAtLevel=1, whose limit is 48, and with the defaults, whose limit is 240.
WITHOUT_ROOM = [19.4, 22.3, 24.4, 26.1, 26.7, 27.7, 28.4, 29.3]
WITH_ROOM = [
    *(26.4, 32.3, 36.7, 38.6, 39.6, 41.8, 43.9, 45.7, 47.5, 49.6, 47.5),
    *(49.4, 50.9, 52.1, 52.9, 53.9, 55.1, 55.7, 56.2, 57.1, 58.1, 55.7),
    *(56.5, 57.1, 57.4, 58.7, 59.2, 59.7, 60.4, 61.1, 61.8, 62.4, 62.7),
]


def test_a_code_cache_that_fills_up_is_noticed_and_one_that_settles_is_not() -> None:
    batches = [10.0 * number for number in range(1, len(WITH_ROOM) + 1)]
    assert growth(batches[: len(WITHOUT_ROOM)], WITHOUT_ROOM, 48) > GROWTH
    assert growth(batches, WITH_ROOM, 240) < GROWTH


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_hundreds_of_batches_and_dozens_of_refreshes_leave_the_jvm_as_it_was(
    redis_url, tmp_path: Path, record_property
) -> None:
    if java_version() < 17:
        needs.missing("Java 17 or newer for Spark", INSTALL_JAVA)
    command = [sys.executable, "-m", "tests.spark.lake.long_session", redis_url]
    done = subprocess.run(
        [*command, str(tmp_path / "lake"), str(tmp_path), str(RUNS), str(BATCHES)],
        env={**os.environ, "SPARK_SUBMIT_OPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "CodeCache" not in done.stdout + done.stderr
    samples = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    batches = [sample["batches"] for sample in samples]
    last = samples[-1]
    assert last["batches"] >= RUNS * BATCHES - 10
    assert last["refreshes"] >= REFRESHES
    names = last["threads"]
    assert all(count <= MOST_IN_A_POOL for name, count in names.items() if name.startswith(POOLS))
    monitors = [count_threads(sample["threads"], MONITOR) for sample in samples]
    assert monitors[-1] - monitors[0] <= RUNS
    limits = {**LIMITS, "code cache": last["code cache limit"], "heap": last["heap limit"]}
    for sample in samples:
        known = count_threads(sample["threads"], *POOLS, MONITOR)
        sample["threads"] = sum(sample["threads"].values()) - known
    heading = "one Spark session for long"
    record_property(heading, f"{last['batches']} batches, {last['refreshes']} refreshes")
    for name, limit in limits.items():
        values = [sample[name] for sample in samples]
        every = max(1, len(values) // 6)
        some = ", ".join(f"{value:.0f}" for value in values[::every])
        grown = growth(batches, values, limit)
        record_property(heading, f"{name} (of {limit:.0f}): {some}; {grown:+.2%} per 100 batches")
        assert grown < GROWTH, (name, values, names)
        assert values[-1] < limit / 2, (name, values, names)
