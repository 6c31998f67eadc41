"""One JVM, with the defaults of `conquiet.spark.session()`, does not fill up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from tests import needs
from tests.spark.conftest import INSTALL_JAVA, java_version

RUNS, BATCHES, REFRESHES = 5, 60, 50
POOLS, MOST_IN_A_POOL = ("block-manager-ask-", "block-manager-storage-"), 100
"""Spark removes broadcast variables by these pools, which end idle threads after a minute."""
MONITOR = "Idle Worker Monitor"
"""Spark leaves one of these behind for every query over a source in Python; it sleeps."""
ALLOWED = {"code cache": 8.0, "metaspace": 2.0, "heap": 10.0, "threads": 4.0}
"""By how much the mean of the last third of the samples may be above that of the middle third."""


def other_threads(names: dict[str, int]) -> int:
    known = (*POOLS, MONITOR)
    return sum(count for name, count in names.items() if not name.startswith(known))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_batches_and_dozens_of_refreshes_leave_the_jvm_as_it_was(
    redis_url, tmp_path: Path, record_property
) -> None:
    if java_version() < 17:
        needs.missing("Java 17 or newer for Spark", INSTALL_JAVA)
    command = [sys.executable, "-m", "tests.spark.lake.long_session", redis_url]
    done = subprocess.run(
        [*command, str(tmp_path / "lake"), str(tmp_path), str(RUNS), str(BATCHES)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "CodeCache" not in done.stdout + done.stderr
    samples = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert samples[-1]["batches"] >= RUNS * BATCHES - 10
    assert samples[-1]["refreshes"] >= REFRESHES
    names = samples[-1]["threads"]
    assert all(count <= MOST_IN_A_POOL for name, count in names.items() if name.startswith(POOLS))
    monitors = [
        sum(count for name, count in sample["threads"].items() if name.startswith(MONITOR))
        for sample in samples
    ]
    assert monitors[-1] - monitors[0] <= RUNS
    third = len(samples) // 3
    for name, most in ALLOWED.items():
        values = [sample[name] for sample in samples]
        if name == "threads":
            values = list(map(other_threads, values))
        record_property(name, ", ".join(f"{value:.0f}" for value in values[:: third // 2]))
        grown = mean(values[-third:]) - mean(values[third : 2 * third])
        assert grown <= most, (name, values, names)
    assert samples[-1]["code cache"] < samples[-1]["code cache limit"] / 2
