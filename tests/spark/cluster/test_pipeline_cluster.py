"""`conquiet pipeline run` on a real cluster: a worker dies in the middle, the table is exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import needs
from tests.spark.cluster.standalone import Cluster, Job, settings
from tests.spark.conftest import INSTALL_JAVA, java_version
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EVENTS = 30_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if java_version() < 17:
        needs.missing("Java 17 or newer for Spark", INSTALL_JAVA)
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()


def publish(client: Any, first: int, last: int) -> None:
    pipeline = client.pipeline(transaction=False)
    for number in range(first, last):
        fields = {"id": f"e-{number}", "type": "sold", "source": "/shop", "specversion": "1.0"}
        pipeline.xadd(f"events:{{{number % 2}}}", {**fields, "data": "{}"})
    pipeline.execute()


class Pipeline:
    """The command in a process, and what it says batch by batch."""

    def __init__(self, cluster: Cluster, directory: Path, lake: Path, *arguments: str) -> None:
        self.out = directory / "pipeline.out"
        self.err = directory / "pipeline.err"
        confs = [
            word
            for name, value in settings(cluster, directory).items()
            if name != "spark.master"
            for word in ("--conf", f"{name}={value}")
        ]
        command = [sys.executable, "-m", "conquiet", "pipeline", "run", "--json", "--to", str(lake)]
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                [*command, "--master", cluster.url, *confs, *arguments],
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def events(self) -> int:
        """How many it has told of; fails if it has ended with an error."""
        assert self.process.poll() in (None, 0), self.err.read_text()[-4000:]
        return sum(json.loads(line)["events"] for line in self.out.read_text().splitlines())

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


def ids_in(lake: Path) -> list[str]:
    import duckdb

    rows = duckdb.sql(f"SELECT event_id FROM '{lake}/raw_events/*/*.parquet'").fetchall()
    return sorted(row[0] for row in rows)


def test_a_stream_is_carried_once_though_a_worker_and_the_driver_are_killed(
    cluster, tmp_path, redis_client, redis_url
) -> None:
    lake = tmp_path / "lake"
    arguments = ("--url", redis_url, "--streams", "events:*", "--max-events", "2000")
    publish(redis_client, 0, EVENTS // 2)
    running = Pipeline(cluster, tmp_path, lake, *arguments)
    try:
        eventually(lambda: running.events() >= 4_000, timeout=180)
        cluster.workers[0].kill()
        publish(redis_client, EVENTS // 2, EVENTS)
        before = running.events()
        eventually(lambda: running.events() > before + 2_000, timeout=180)
        running.stop(signal.SIGKILL)
        cluster.add_worker()
        running = Pipeline(cluster, tmp_path, lake, *arguments)
        eventually(lambda: len(ids_in(lake)) >= EVENTS, timeout=240)
        assert running.stop() == 0, running.err.read_text()[-4000:]
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
    assert ids_in(lake) == sorted(f"e-{number}" for number in range(EVENTS))


def test_executors_without_conquiet_take_it_from_the_archive(cluster, tmp_path: Path) -> None:
    archive = tmp_path / "packages.zip"
    packing = [sys.executable, "-m", "conquiet", "pipeline", "package", "--output", str(archive)]
    heavy = ("pandas", "deltalake", "sqlalchemy", "psycopg-binary", "adbc-driver-postgresql")
    without = [word for name in heavy for word in ("--without", name)]
    subprocess.run([*packing, *without], check=True, timeout=120, stdout=subprocess.DEVNULL)
    bare = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    tried = subprocess.run([bare, "-c", "import conquiet"], capture_output=True, cwd=tmp_path)
    assert tried.returncode != 0, "the bare Python has conquiet: this test would show nothing"
    [[place, python]] = Job(
        cluster, tmp_path, "where",
        more={
            "spark.archives": f"{archive}#conquiet",
            "spark.executorEnv.PYTHONPATH": "./conquiet",
            "spark.pyspark.python": bare,
        },
    ).result()  # fmt: skip
    assert "work" in Path(place).parts  # of a worker of the cluster, not of the driver
    assert place.endswith("/conquiet/conquiet/__init__.py")
    assert Path(python).resolve() == Path(bare).resolve()
