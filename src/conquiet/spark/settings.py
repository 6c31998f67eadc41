"""Build a Spark session with the settings that were measured to matter for events.

Settings from an argument, from spark-defaults.conf or from spark-submit are left as they are.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conquiet.errors import ConfigError
from conquiet.spark.class_archive import OPTIONS, ClassArchive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("conquiet.spark")

Settings = dict[str, str]
SETTINGS_ATTRIBUTE = "conquiet_settings"

_EXECUTION = "org.apache.spark.sql.execution.streaming"
_ROCKSDB = f"{_EXECUTION}.state.RocksDBStateStoreProvider"
_EXECUTOR_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""One compiler, and as much room for compiled code as Java has by default with two."""
_JAVA_OPTIONS = (OPTIONS, "SPARK_LAUNCHER_OPTS")
_MAX_SOCKET_DIRECTORY_CHARS = 50
"""The path of a Unix socket has 107 bytes at most, and Spark adds a name of its own."""


def session(
    app: str = "conquiet",
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, Any] | None = None,
    formats: bool = True,
    quick_start: bool = False,
) -> SparkSession:
    """Return a session on `master` (by default Spark's own, or `local[*]`), or of a Connect server.

    `app` names it in Spark's pages; `remote` is the URL of a Connect server, in place of `master`;
    `config` holds Spark's settings, which win over ours.

    Its attribute `conquiet_settings` holds the settings that were made here. A session that is
    already running is returned unchanged. The formats of conquiet are registered in it, unless
    `formats` is false: files need none.

    `quick_start` lets Java compile by its first compiler alone: for a session of minutes whose rows
    are in Python, as that of a pipeline that runs once.
    """
    if master is not None and remote is not None:
        raise ConfigError(f"master={master!r} and remote={remote!r}: give one of them")
    chosen = {name: _text(value) for name, value in (config or {}).items()}
    ours: Settings = {}
    if remote is not None:
        spark = _connect(app, remote, chosen)
    else:
        with _quick_java() if quick_start else nullcontext():
            spark, ours = _start(app, master, chosen)
    if formats:
        from conquiet.spark.formats import register

        register(spark)
    if ours or not hasattr(spark, SETTINGS_ATTRIBUTE):  # keep those of an earlier call
        setattr(spark, SETTINGS_ATTRIBUTE, ours)
    return spark


@contextmanager
def _quick_java() -> Iterator[None]:
    """Let a Java that is started meanwhile, and Spark's launcher of it, compile by C1 alone.

    Options of the user come after these, and prevail.
    """
    before = {name: os.environ.get(name) for name in _JAVA_OPTIONS}
    for name, value in before.items():
        os.environ[name] = f"{_QUICK_JAVA} {value or ''}".strip()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _connect(app: str, remote: str, chosen: Settings) -> SparkSession:
    from pyspark.sql import SparkSession

    try:
        spark = (
            SparkSession.builder.appName(app).remote(remote).config(map={**chosen}).getOrCreate()
        )
    except ImportError as error:
        raise ConfigError(
            f"remote={remote!r}: Spark Connect needs packages that are missing ({error}):"
            " pip install 'pyspark[connect]'"
        ) from error
    logger.info("Spark Connect at %s: the settings are those of the server", remote)
    return spark


def _start(app: str, master: str | None, chosen: Settings) -> tuple[SparkSession, Settings]:
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    if running is not None and running.sparkContext._jsc is not None:
        logger.info("a Spark session is running already, and is used unchanged")
        if chosen or master is not None:
            logger.warning("master and config are for a new session: call stop() on the old one")
        return running, {}
    if master is not None and is_local(master):
        _cores(master)  # refuses an invalid master before Java is started
    with DriverPython() as python, ClassArchive():
        # Java starts a Python of its own to look for data sources: this one, not that on the PATH.
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", python.command)
        known = _read_known(master, chosen)
    where = known.get("spark.master", "local[*]")
    ours = recommend(where) | _choose_python(known, where, python)
    ours = {name: value for name, value in ours.items() if name not in known}
    builder = SparkSession.builder.master(where).config(map={**ours, **chosen})
    if "spark.app.name" not in known:
        builder = builder.appName(app)
    spark = builder.getOrCreate()
    for name, value in sorted(ours.items()):
        logger.info("set %s=%s", name, value)
    return spark, ours


class DriverPython:
    """Puts this Python first on the PATH of the Java process that is started meanwhile.

    Spark plans reads with a Python process on the driver, and starts it by the command that
    executors run too. If that command is a bare name, each host finds its own Python.
    """

    def __init__(self) -> None:
        self.command = sys.executable
        """The command by which Java starts this Python."""
        self._directory: Path | None = None
        self._path = ""

    def __enter__(self) -> DriverPython:
        if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else spark-submit has started Java already
            made = tempfile.TemporaryDirectory(prefix="conquiet-python-")
            atexit.register(made.cleanup)
            self._directory = Path(made.name)
            self.add("python3")
            if os.access(self._directory / "python3", os.X_OK):  # not on a disk without programs
                self.command = f"{made.name}/python3"
            self._path = os.environ.get("PATH", os.defpath)
            os.environ["PATH"] = f"{made.name}{os.pathsep}{self._path}"
        return self

    def __exit__(self, *error: object) -> None:
        if self._directory is not None:
            os.environ["PATH"] = self._path

    def add(self, name: str) -> bool:
        """Make this Python known under a name; return whether Java finds it."""
        if self._directory is None:
            return False
        script = self._directory / name
        # Not a link: a virtual environment is found by the path that its Python is started by.
        script.write_text(_SCRIPT.format(shlex.quote(_archives()), shlex.quote(sys.executable)))
        script.chmod(0o755)
        return True


# Spark puts the archives of PySpark before the same modules as files. Python keeps no bytecode of
# archives: each process, such as the planner of every query, would compile them for a second.
_SCRIPT = """#!/bin/sh
archives={}
kept=
set -f
IFS=:
for one in $PYTHONPATH; do
    [ -n "$archives" ] && case $one in "$archives"*.zip) continue ;; esac
    kept=$kept${{kept:+:}}$one
done
PYTHONPATH=$kept exec {} "$@"
"""


def _archives() -> str:
    """Return where the archives of the PySpark are that this Python has installed, if it has."""
    import pyspark

    package = Path(pyspark.__file__).parent
    if str(package.parent) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return ""
    return f"{package.resolve()}/python/lib/"


def _choose_python(known: Settings, where: str, python: DriverPython) -> Settings:
    """Choose the Python of the executors; return the settings by which they find it.

    On one machine it is this one, not the python3 on the PATH. On a cluster it is
    `spark.pyspark.python`, which must not become the Python of the driver's planner.
    """
    named = known.get("spark.pyspark.python")
    if "PYSPARK_PYTHON" in os.environ or (named is None and not is_local(where)):
        return {}
    settings: Settings = {}
    command = named or python.command
    if named is not None and not is_local(where) and "spark.executorEnv.PATH" not in known:
        directory, name = os.path.split(named)
        if os.path.isabs(directory) and python.add(name):
            command = name
            settings["spark.executorEnv.PATH"] = f"{directory}:{_EXECUTOR_PATH}"
    os.environ["PYSPARK_PYTHON"] = command
    logger.info("set PYSPARK_PYTHON=%s", command)
    return settings


def _read_known(master: str | None, chosen: Settings) -> Settings:
    """Return the settings of the caller, of files, of spark-submit and of the environment."""
    from pyspark import SparkConf, SparkContext

    asked = {**chosen, **({"spark.master": master} if master is not None else {})}
    start = SparkConf()
    for name, value in asked.items():
        start.set(name, value)
    # Java reads spark-defaults.conf and the arguments of spark-submit. It must be started with the
    # settings of the caller, since the memory of a driver cannot be changed later.
    SparkContext._ensure_initialized(conf=start)
    return {**dict(SparkConf().getAll()), **asked}


def recommend(master: str) -> Settings:
    """Return the settings for a master: those that are safe anywhere, and those of one machine."""
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    if len(tempfile.gettempdir()) <= _MAX_SOCKET_DIRECTORY_CHARS:
        settings["spark.python.unix.domain.socket.enabled"] = "true"
    if is_local(master):
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(_cores(master)),
            # Its rename is not atomic, as it need not be where one process writes a checkpoint:
            # `conquiet.spark.checkpoint.lock_checkpoint` sees to that.
            "spark.sql.streaming.checkpointFileManagerClass": (
                f"{_EXECUTION}.checkpointing.FileSystemBasedCheckpointFileManager"
            ),
        }
    return settings


def is_local(master: str) -> bool:
    """Return whether driver and executors share one process, and its disk."""
    return master == "local" or master.startswith("local[")


def _cores(master: str) -> int:
    count = master.removeprefix("local").strip("[]").partition(",")[0] or "1"
    if count != "*" and not count.isdecimal():
        raise ConfigError(f"master={master!r}: write local[2], local[*], or where a cluster is")
    return (os.cpu_count() or 1) if count == "*" else max(int(count), 1)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
