"""Ten kills at random moments, of driver, Python workers and Redis: no table shows any of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import redis
from tests import needs
from tests.spark.conftest import INSTALL_JAVA, java_version
from tests.unit.lake.payments import entries, pipeline
from tests.unit.lake.test_engine import contents

VICTIMS = ("driver", "worker", "redis") * 3 + ("driver",)
PAYMENTS = 300
_BATCH = 15
_MOST_STEPS = 25
"""Fewer than a part of the log takes, so that a kill comes before its end."""


def publish(client: redis.Redis, log: list[dict[str, Any]]) -> None:
    adding = client.pipeline(transaction=False)
    for one in log:
        fields = {
            "specversion": "1.0",
            "id": one["event_id"],
            "type": one["type"],
            "source": one["source"],
            "subject": one["subject"],
            "time": one["time"].isoformat(),
            "datacontenttype": one["content_type"],
            **one["attributes"],
            "data": one["data"],
        }
        adding.xadd(f"payments:{crc32(one['subject'].encode()) % 2}", fields)
    adding.execute()


class Driver:
    """A driver in a session of its own, and the steps that it prints."""

    def __init__(self, url: str, lake: Path, place: Path, *more: object) -> None:
        place.mkdir(exist_ok=True)
        self.log = place / "driver.log"
        command = [sys.executable, "-m", "tests.spark.lake.payments_driver"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, url, *map(str, (lake, place, *more))],
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def follow(self, steps: int) -> bool:
        """Read so many steps; return False if the driver has ended before."""
        assert self.process.stdout is not None
        return all(self.process.stdout.readline() for _ in range(steps))

    def workers(self) -> list[int]:
        """Return the Python processes that run its tasks and plan its batches."""
        found = list(self._session())
        daemons = {pid for pid, _, command in found if "pyspark.daemon" in command}
        return [pid for pid, parent, _ in found if parent in daemons] or sorted(daemons)

    def _session(self) -> Iterator[tuple[int, int, str]]:
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                after_name = (place / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[3]) == self.process.pid:
                    command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    yield int(place.name), int(after_name[1]), command

    def kill(self) -> None:
        """Kill it with its JVM and its workers."""
        for pid, _, _ in list(self._session()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_of_driver_workers_and_redis_change_no_table(
    private_redis, tmp_path: Path
) -> None:
    if java_version() < 17:
        needs.missing("Java 17 or newer for Spark", INSTALL_JAVA)
    chance = random.Random(16)
    log = entries(PAYMENTS)
    chance.shuffle(log)
    parts = [log[start :: len(VICTIMS) + 1] for start in range(len(VICTIMS) + 1)]
    victims = list(VICTIMS)
    chance.shuffle(victims)
    lake, place = tmp_path / "lake", tmp_path / "driver"

    def start(lake: Path, most: int = _BATCH, *once: str) -> Driver:
        return Driver(private_redis.url, lake, place, most, *once)

    driver = start(lake)
    died = 0
    try:
        for victim, part in zip(victims, parts, strict=False):
            with redis.Redis.from_url(private_redis.url) as client:
                publish(client, part)
            while not driver.follow(chance.randint(1, _MOST_STEPS)):
                driver.kill()  # an earlier kill has ended it
                died += 1
                driver = start(lake)
            if victim == "driver":
                driver.kill()
                died += 1
                driver = start(lake)
            elif victim == "worker":
                os.kill(chance.choice(driver.workers()), signal.SIGKILL)
            else:
                private_redis.kill()
                private_redis.restart()
        driver.kill()
        with redis.Redis.from_url(private_redis.url) as client:
            publish(client, parts[-1])
        for folder, most in ((lake, _BATCH), (tmp_path / "undisturbed", 10_000)):
            driver = start(folder, most, "once")
            said, _ = driver.process.communicate()
            assert said.endswith("done\n"), driver.log.read_text()[-4000:]
    finally:
        driver.kill()
    assert died < 2 * len(VICTIMS)

    pipeline.lake = str(lake)
    disturbed = contents(pipeline)
    pipeline.lake = str(tmp_path / "undisturbed")
    undisturbed = contents(pipeline)
    assert len(undisturbed["raw_events"]) == len(log)
    assert len(undisturbed["payment"]) == PAYMENTS
    for name, rows in undisturbed.items():
        assert disturbed[name] == rows, name
