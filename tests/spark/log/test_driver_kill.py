"""A driver that is killed loses nothing and repeats nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

from conquiet.redis import Readers, trim_stream

DRIVER = Path(__file__).with_name("driver.py")
EVENTS = 12_000


@contextlib.contextmanager
def driver(url, directory):
    """A driver in a session of its own, so that its JVM and its workers die with it."""
    directory.mkdir(exist_ok=True)
    with (directory / "driver.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, DRIVER, url, directory],
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def commits(directory):
    return len(list((directory / "checkpoint" / "commits").glob("[0-9]*")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_driver_loses_nothing_and_repeats_nothing(log) -> None:
    for number in range(4):
        log.add(f"orders:{number}", *range(number, EVENTS, 4))
    directory = log.directory / "driver"
    for wanted in (3, 9):
        with driver(log.url, directory) as process:
            eventually(
                lambda wanted=wanted, process=process: (
                    commits(directory) >= wanted or process.poll() is not None
                ),
                timeout=180,
            )
            assert process.poll() is None, (directory / "driver.log").read_text()[-3000:]
        # What a dead query has not committed is kept for it.
        for stream, positions in (
            (f"orders:{n}", Readers(log.client, f"orders:{n}").positions()) for n in range(4)
        ):
            trim_stream(log.client, stream, exact=True)
            assert positions.keys() == {"killed"}
    with driver(log.url, directory):
        eventually(lambda: commits(directory) >= EVENTS // 500, timeout=180)
    rows = log.spark.read.parquet(str(directory / "out")).select("event_id").collect()
    assert sorted(int(row.event_id) for row in rows) == list(range(EVENTS))
