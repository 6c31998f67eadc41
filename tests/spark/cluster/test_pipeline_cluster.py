"""`conquiet pipeline run` on a real cluster, of which a worker dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests import needs
from tests.spark.cluster.standalone import JOB_SECONDS, Cluster, Job, settings
from tests.spark.conftest import INSTALL_JAVA, java_version
from tests.waiting import eventually

from conquiet.spark.archive import MANIFEST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EVENTS = 30_000
DEBIAN = "/usr/bin/python3"
PYTHON = {"PYSPARK_PYTHON": sys.executable}


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

    def __init__(
        self, directory: Path, lake: Path, *arguments: str, environment: Mapping[str, str] = PYTHON
    ) -> None:
        self.out = directory / "pipeline.out"
        self.err = directory / "pipeline.err"
        command = [sys.executable, "-m", "conquiet", "pipeline", "run", "--json", "--to", str(lake)]
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def events(self) -> int:
        """How many it has told of; fails if it has ended with an error."""
        assert self.process.poll() in (None, 0), self.err.read_text()[-4000:]
        return sum(json.loads(line)["events"] for line in self.out.read_text().splitlines())

    def end(self) -> int:
        """Wait for its end; how many events it has told of."""
        try:
            self.process.wait(JOB_SECONDS)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        return self.events()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(JOB_SECONDS)


def on(cluster: Cluster, directory: Path, *left_out: str) -> list[str]:
    """The arguments that run a driver on this machine."""
    confs = settings(cluster, directory)
    names = [name for name in confs if name not in ("spark.master", *left_out)]
    words = [word for name in names for word in ("--conf", f"{name}={confs[name]}")]
    return ["--master", cluster.url, *words]


def ids_in(lake: Path) -> list[str]:
    import duckdb
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(str(lake / "raw_events")):
        return []
    rows = duckdb.read_parquet(DeltaTable(str(lake / "raw_events")).file_uris())
    return sorted(id_ for (id_,) in rows.project("event_id").fetchall())


def test_a_stream_is_carried_once_though_a_worker_and_the_driver_are_killed(
    cluster, tmp_path, redis_client, redis_url
) -> None:
    lake = tmp_path / "lake"
    arguments = [*on(cluster, tmp_path), "--broker", redis_url, "--streams", "events:*"]
    arguments += ["--max-events", "2000"]
    publish(redis_client, 0, EVENTS // 2)
    running = Pipeline(tmp_path, lake, *arguments)
    try:
        eventually(lambda: running.events() >= 4_000, timeout=JOB_SECONDS)
        cluster.workers[0].kill()
        publish(redis_client, EVENTS // 2, EVENTS)
        before = running.events()
        eventually(lambda: running.events() > before + 2_000, timeout=JOB_SECONDS)
        running.stop(signal.SIGKILL)
        cluster.add_worker()
        running = Pipeline(tmp_path, lake, *arguments)
        eventually(lambda: len(ids_in(lake)) >= EVENTS, timeout=JOB_SECONDS)
        assert running.stop() == 0, running.err.read_text()[-4000:]
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
    assert ids_in(lake) == sorted(f"e-{number}" for number in range(EVENTS))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_archive(tmp_path_factory.mktemp("archive") / "packages.zip")


def pack_archive(target: Path, *more: str) -> Path:
    """Run `conquiet pipeline package`, without what these tests have no use for."""
    packing = [sys.executable, "-m", "conquiet", "pipeline", "package", "--output", str(target)]
    heavy = ("sqlalchemy", "psycopg-binary", "adbc-driver-postgresql")
    without = [word for name in heavy for word in ("--without", name)]
    command = [*packing, *without, *more]
    subprocess.run(command, check=True, timeout=JOB_SECONDS, stdout=subprocess.DEVNULL)
    return target


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has nothing installed."""
    python = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    tried = subprocess.run(
        [python, "-c", "import conquiet"], capture_output=True, cwd=tmp_path_factory.mktemp("bare")
    )
    assert tried.returncode != 0, "the bare Python has conquiet: these tests would show nothing"
    return python


def test_executors_without_conquiet_take_it_from_the_archive(
    cluster, tmp_path: Path, archive: Path, bare: str
) -> None:
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


def test_the_planner_runs_the_python_of_the_driver_and_executors_run_theirs(
    cluster, tmp_path: Path, archive: Path, bare: str, redis_client, redis_url
) -> None:
    """The Python of the executors exists on the driver's machine too, without conquiet."""
    entry = {"specversion": "1.0", "id": "1", "type": "sold", "source": "/shop", "data": "{}"}
    for _ in range(300):
        redis_client.xadd("orders", entry)
    rows, tasks, cores = Job(
        cluster, tmp_path, "read_log",
        url=redis_url,
        more={
            "spark.archives": f"{archive}#conquiet",
            "spark.executorEnv.PYTHONPATH": "./conquiet",
            "spark.pyspark.python": bare,
        },
    ).result()  # fmt: skip
    assert (rows, tasks) == (300, 1)
    assert cores == 2  # of two workers with one each


def test_the_command_brings_the_archive_to_executors_without_conquiet(
    cluster, tmp_path: Path, archive: Path, bare: str, redis_client, redis_url
) -> None:
    publish(redis_client, 0, 500)
    lake = tmp_path / "lake"
    arguments = [*on(cluster, tmp_path, "spark.executorEnv.PYTHONPATH"), "--once"]
    arguments += ["--broker", redis_url, "--streams", "events:*", "--archive", str(archive)]
    # The driver's Python has conquiet; on this machine the same path is that of the executors.
    driver = os.pathsep.join(path for path in sys.path if path)
    environment = {"PYSPARK_PYTHON": bare, "PYTHONPATH": driver}
    running = Pipeline(tmp_path, lake, *arguments, environment=environment)
    assert running.end() == 500
    assert ids_in(lake) == sorted(f"e-{number}" for number in range(500))


@pytest.fixture
def debian() -> str:
    """The Python of Debian, if it is an earlier patch release of this one: 12 has 3.11.2, where
    redis needs a package that later releases do not."""
    said = subprocess.run([DEBIAN, "-V"], capture_output=True, text=True).stdout.split()
    here = said[-1] if said else "none"
    minor, _, patch = here.rpartition(".")
    if minor != f"3.{sys.version_info.minor}" or int(patch) >= 3:
        pytest.skip(f"{DEBIAN} is {here}")
    return here


def run_by_debian(cluster: Cluster, directory: Path, archive: Path, redis_url: str) -> Pipeline:
    arguments = [*on(cluster, directory, "spark.executorEnv.PYTHONPATH"), "--once"]
    arguments += ["--broker", redis_url, "--streams", "events:*", "--archive", str(archive)]
    arguments += ["--conf", f"spark.pyspark.python={DEBIAN}"]
    return Pipeline(directory, directory / "lake", *arguments, environment={})


def test_executors_whose_python_is_too_early_for_the_archive_are_refused(
    cluster, tmp_path: Path, archive: Path, debian: str, redis_client, redis_url
) -> None:
    first = json.loads(zipfile.ZipFile(archive).read(MANIFEST))["python"]
    assert first.endswith(".3")
    publish(redis_client, 0, 5)
    running = run_by_debian(cluster, tmp_path, archive, redis_url)
    assert running.process.wait(JOB_SECONDS) == 1
    [line] = [line for line in running.err.read_text().splitlines() if "error:" in line]
    assert f"was packed for Python {first} and later patch releases" in line
    assert f"pack it again with --python {debian}" in line


def test_an_archive_for_an_earlier_python_serves_executors_that_have_it(
    cluster, tmp_path: Path, debian: str, redis_client, redis_url
) -> None:
    if find_spec("async_timeout") is None:
        needs.missing("async-timeout", "pip install async-timeout")
    publish(redis_client, 0, 500)
    packed = pack_archive(tmp_path / "early.zip", "--python", debian)
    running = run_by_debian(cluster, tmp_path, packed, redis_url)
    assert running.end() == 500
    assert ids_in(tmp_path / "lake") == sorted(f"e-{number}" for number in range(500))
