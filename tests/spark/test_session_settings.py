"""conquiet.spark.session: the settings that matter, and never against the user."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import needs
from tests.spark.conftest import INSTALL_JAVA, java_version

from conquiet.errors import ConfigError
from conquiet.spark.checkpoint import local_directory, lock_checkpoint
from conquiet.spark.class_archive import OPTIONS, ClassArchive, archive_place
from conquiet.spark.columns import CORES_VARIABLE
from conquiet.spark.formats import executor_cores
from conquiet.spark.log import tasks
from conquiet.spark.settings import DriverPython, _choose_python, is_local, recommend, session

_TRY = """
import json, logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="said: %(message)s")
from conquiet.spark.settings import session
spark = session("tried", formats=False, quick_start=True, config={"spark.ui.enabled": False,
    "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": 7})
told = spark.conquiet_settings
found = {name: spark.sparkContext.getConf().get(name) for name in told}
names = ("spark.sql.shuffle.partitions", "spark.sql.session.timeZone",
    "spark.sql.streaming.stateStore.providerClass")
shown = [spark.conf.get(name) for name in names]
rows = spark.range(3).mapInArrow(lambda batches: batches, "id long").count()
assert "conquiet.spark.log.source" not in sys.modules
java = list(
    spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments())
assert "SPARK_SUBMIT_OPTS" not in os.environ
master = spark.sparkContext.master
print(json.dumps([told, found, shown, rows, session() is spark, master, java]))
"""
_OTHER_STORE = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["python", "spark-submit", "PYSPARK_SUBMIT_ARGS"])
def test_a_session_sets_what_nobody_else_has_set_and_says_so(way, spark, tmp_path: Path) -> None:
    """Asked for by `config`, in a file, and on the command line or in the environment."""
    (tmp_path / "spark-defaults.conf").write_text("spark.sql.session.timeZone Europe/Zurich\n")
    (tmp_path / "job.py").write_text(_TRY)
    environment = {"SPARK_CONF_DIR": str(tmp_path), **_plain_environment()}
    environment.pop(OPTIONS, None)
    asked = ["--master", "local[1]"]
    asked += ["--conf", f"spark.sql.streaming.stateStore.providerClass={_OTHER_STORE}"]
    command = [sys.executable]
    if way == "spark-submit":
        command = [str(Path(sys.executable).with_name("spark-submit")), *asked]
        environment["PYSPARK_PYTHON"] = sys.executable
    elif way == "PYSPARK_SUBMIT_ARGS":
        environment["PYSPARK_SUBMIT_ARGS"] = f"{shlex.join(asked)} pyspark-shell"
    done = subprocess.run(
        [*command, str(tmp_path / "job.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [answer] = [line for line in done.stdout.splitlines() if not line.startswith("said: ")]
    told, found, shown, rows, is_same, master, java = json.loads(answer)
    assert told == found
    quick = {"-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m"}
    assert (quick <= set(java)) == (way != "spark-submit")  # which has started Java before
    assert set(told) >= {
        "spark.sql.streaming.checkpointFileManagerClass",
        "spark.sql.python.filterPushdown.enabled",
    }
    assert "spark.sql.shuffle.partitions" not in told
    assert "spark.sql.session.timeZone" not in told
    assert (shown[:2], rows, is_same) == (["7", "Europe/Zurich"], 3, True)
    if way != "python":
        assert (shown[2], master) == (_OTHER_STORE, "local[1]")
    said = [line.removeprefix("said: ") for line in done.stdout.splitlines()]
    assert {f"set {name}={value}" for name, value in told.items()} <= set(said)


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK")}


def test_a_running_session_is_taken_as_it_is(spark, caplog: pytest.LogCaptureFixture) -> None:
    before = spark.conf.get("spark.sql.shuffle.partitions")
    with caplog.at_level("WARNING", "conquiet.spark"):
        assert session(config={"spark.sql.shuffle.partitions": 9}) is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == before
    assert "are for a new session" in caplog.text


def test_a_running_session_is_taken_as_it_is_in_another_thread_too(spark) -> None:
    """There it is not the active one."""
    before = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(session()))
    thread.start()
    thread.join()
    assert found == [spark]
    assert spark.conf.get("spark.sql.streaming.stateStore.providerClass") == before
    assert spark.conquiet_settings == {}


def test_the_python_of_executors_is_the_one_that_was_named(monkeypatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "")  # so that it is put back afterwards
    monkeypatch.delenv("PYSPARK_PYTHON")
    named, python = {"spark.pyspark.python": "/opt/bin/python3.11"}, DriverPython()
    _choose_python(named, "spark://host:7077", python)  # Java was started by spark-submit
    assert os.environ["PYSPARK_PYTHON"] == "/opt/bin/python3.11"
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3")
    _choose_python(named, "local[2]", python)
    assert os.environ["PYSPARK_PYTHON"] == "/usr/bin/python3"
    monkeypatch.delenv("PYSPARK_PYTHON")
    _choose_python({}, "spark://host:7077", python)  # where it may lie elsewhere
    assert "PYSPARK_PYTHON" not in os.environ
    _choose_python({}, "local[2]", python)
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_the_python_of_executors_is_not_that_of_the_planner(monkeypatch) -> None:
    """Spark runs one command on all hosts: a bare name, which each of them finds on its PATH."""
    monkeypatch.setenv("PYSPARK_PYTHON", "")
    monkeypatch.delenv("PYSPARK_PYTHON")
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    before = os.environ["PATH"]
    with DriverPython() as python:
        path = os.environ["PATH"]
    assert os.environ["PATH"] == before
    named = {"spark.pyspark.python": "/opt/bin/python3.11"}
    settings = _choose_python(named, "spark://host:7077", python)
    assert settings["spark.executorEnv.PATH"].startswith("/opt/bin:/usr/")
    assert os.environ["PYSPARK_PYTHON"] == "python3.11"
    for name in ("python3", "python3.11"):
        command = [shutil.which(name, path=path), "-c", "import sys; print(sys.prefix)"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == sys.prefix


def test_workers_import_the_files_of_pyspark_and_not_its_archives(monkeypatch, tmp_path) -> None:
    """Python keeps no bytecode of an archive, and would compile PySpark in every process."""
    import pyspark

    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    archives = sorted((Path(pyspark.__file__).resolve().parent / "python" / "lib").glob("*.zip"))
    assert len(archives) == 2
    others = [tmp_path / "other.zip", tmp_path / "*"]
    with DriverPython() as python:
        pass
    found = subprocess.run(
        [python.command, "-c", "import os; print(os.environ['PYTHONPATH'])"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*archives, *others]))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == os.pathsep.join(map(str, others))


@dataclass
class Context:
    """What a SparkContext says about its cluster."""

    master: str
    conf: dict[str, str]
    defaultParallelism: int = 2

    def getConf(self):
        return self

    def getAll(self):
        return self.conf.items()


@pytest.mark.parametrize(
    ("master", "conf", "cores"),
    [
        ("local[3]", {"spark.cores.max": "9"}, 2),
        ("spark://host:7077", {"spark.cores.max": "12", "spark.executor.cores": "4"}, 12),
        ("yarn", {"spark.executor.instances": "5", "spark.executor.cores": "4"}, 20),
        (
            "k8s://host",
            {"spark.dynamicAllocation.maxExecutors": "3", "spark.executor.cores": "2"},
            6,
        ),
    ],
)
def test_the_cores_of_executors_are_those_of_the_cluster(master, conf, cores) -> None:
    assert executor_cores(Context(master, conf)) == cores


def test_tasks_follow_the_cores_of_the_executors(monkeypatch) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "7")
    assert tasks._cores() == 7
    monkeypatch.delenv(CORES_VARIABLE)
    assert tasks._cores() == os.cpu_count()


def test_planners_get_the_cores_of_the_session(spark) -> None:
    assert spark.sparkContext.environment[CORES_VARIABLE] == str(
        spark.sparkContext.defaultParallelism
    )


def test_a_cluster_gets_nothing_that_is_right_for_one_machine_only() -> None:
    there = recommend("spark://host:7077")
    here = recommend("local[3]")
    assert set(there) < set(here)
    assert "spark.sql.streaming.checkpointFileManagerClass" not in there
    assert here["spark.sql.shuffle.partitions"] == "3"
    assert not is_local("local-cluster[2,1,1024]")


def test_a_master_and_a_server_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        session(master="local[1]", remote="sc://localhost")


def test_a_number_of_cores_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write local\[2\]"):
        recommend("local[two]")


def test_a_checkpoint_is_held_by_one_query_at_a_time(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/checkpoint"
    with (
        lock_checkpoint(place),
        pytest.raises(ConfigError, match="is in use by process"),
        lock_checkpoint(place),
    ):
        pass
    with lock_checkpoint(place):
        pass


def test_only_a_local_checkpoint_has_a_lock() -> None:
    assert local_directory("hdfs://host/checkpoint") is None
    assert local_directory("relative/path") == Path("relative/path")
    assert local_directory("file:///a/b") == Path("/a/b")
    with lock_checkpoint("s3a://bucket/checkpoint"):
        pass


def test_java_gets_the_class_archive_beside_the_options_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given() -> str | None:
        with ClassArchive():
            return os.environ.get(OPTIONS)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(OPTIONS, raising=False)
    place = archive_place()
    assert given() is None  # there is none yet
    place.parent.mkdir()
    place.touch()
    assert given() == f"-XX:SharedArchiveFile={place} -Xlog:cds*=off"
    assert OPTIONS not in os.environ
    monkeypatch.setenv(OPTIONS, "-Dx=1")
    assert given() == f"-Dx=1 -XX:SharedArchiveFile={place} -Xlog:cds*=off"
    assert os.environ[OPTIONS] == "-Dx=1"
    monkeypatch.setenv(OPTIONS, "-XX:SharedArchiveFile=/own.jsa")
    assert given() == "-XX:SharedArchiveFile=/own.jsa"


_MAPPED = """
from conquiet.spark.settings import session
spark = session("mapped", formats=False, config={"spark.ui.enabled": False})
print("jsa" in open(f"/proc/{spark.sparkContext._gateway.proc.pid}/maps").read())
spark.stop()
"""


@pytest.mark.slow
def test_a_session_maps_the_classes_that_prepare_has_kept(tmp_path: Path) -> None:
    if java_version() < 17:
        needs.missing("Java 17 or newer for Spark", INSTALL_JAVA)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), OPTIONS: ""}
    prepare = [sys.executable, "-m", "conquiet", "pipeline", "prepare", "--json"]
    for command in (prepare, [sys.executable, "-c", _MAPPED]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        if command is prepare:
            made = json.loads(done.stdout)  # and no line of Java's
            assert Path(made["path"]).stat().st_size == made["bytes"] > 10_000_000
    assert done.stdout.splitlines() == ["True"]
