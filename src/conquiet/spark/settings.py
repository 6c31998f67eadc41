"""Build a Spark session with the settings that were measured to matter for events.

Settings from an argument, from spark-defaults.conf or from spark-submit are left as they are.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("conquiet.spark")

Settings = dict[str, str]
SETTINGS_ATTRIBUTE = "conquiet_settings"

_EXECUTION = "org.apache.spark.sql.execution.streaming"
_ROCKSDB = f"{_EXECUTION}.state.RocksDBStateStoreProvider"
_MAX_SOCKET_DIRECTORY_CHARS = 50
"""The path of a Unix socket has 107 bytes at most, and Spark adds a name of its own."""


def session(
    app: str = "conquiet",
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> SparkSession:
    """A session on `master` (`local[*]` unless Spark was told another), or of a Connect server.

    Its attribute `conquiet_settings` holds what was set here and by nobody else. A session that
    runs already is taken as it is. The sources and sinks of conquiet are registered in it.
    """
    if master is not None and remote is not None:
        raise ConfigError(f"master={master!r} and remote={remote!r}: give one of them")
    chosen = {name: _text(value) for name, value in (config or {}).items()}
    ours: Settings = {}
    if remote is not None:
        spark = _connected(app, remote, chosen)
    else:
        spark, ours = _started(app, master, chosen)
    from conquiet.spark.formats import register

    register(spark)
    if ours or not hasattr(spark, SETTINGS_ATTRIBUTE):  # what an earlier call has set stays told
        setattr(spark, SETTINGS_ATTRIBUTE, ours)
    return spark


def _connected(app: str, remote: str, chosen: Settings) -> SparkSession:
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
    logger.info("Spark Connect at %s: its settings are the server's, none was changed", remote)
    return spark


def _started(app: str, master: str | None, chosen: Settings) -> tuple[SparkSession, Settings]:
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    if running is not None and running.sparkContext._jsc is not None:
        logger.info("a Spark session runs already and is taken as it is")
        if chosen or master is not None:
            logger.warning("master and config are for a new session: call stop() on the old one")
        return running, {}
    if master is not None and is_local(master):
        _cores(master)  # refuses what it cannot read, before Java is started
    # Java starts a Python of its own to look for data sources: this one, not that on the PATH.
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    known = _known(master, chosen)
    where = known.get("spark.master", "local[*]")
    _choose_python(known, where)
    ours = {name: value for name, value in recommended(where).items() if name not in known}
    builder = SparkSession.builder.master(where).config(map={**ours, **chosen})
    if "spark.app.name" not in known:
        builder = builder.appName(app)
    spark = builder.getOrCreate()
    for name, value in sorted(ours.items()):
        logger.info("set %s=%s", name, value)
    return spark, ours


def _choose_python(known: Settings, where: str) -> None:
    """Executors of this machine run this Python, not the python3 on the PATH; or the one named."""
    named = known.get("spark.pyspark.python")
    if "PYSPARK_PYTHON" not in os.environ and (named is not None or is_local(where)):
        os.environ["PYSPARK_PYTHON"] = named or sys.executable
        logger.info("set PYSPARK_PYTHON=%s", os.environ["PYSPARK_PYTHON"])


def _known(master: str | None, chosen: Settings) -> Settings:
    """What is set by the caller, or else by files, by spark-submit or by the environment."""
    from pyspark import SparkConf, SparkContext

    asked = {**chosen, **({"spark.master": master} if master is not None else {})}
    start = SparkConf()
    for name, value in asked.items():
        start.set(name, value)
    # The JVM reads spark-defaults.conf and the arguments of spark-submit; it must be started
    # with what was asked, since the memory of a driver cannot be changed later.
    SparkContext._ensure_initialized(conf=start)
    return {**dict(SparkConf().getAll()), **asked}


def recommended(master: str) -> Settings:
    """The settings for a master: those that are safe anywhere, and those of one machine."""
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        # Of 100, which is Spark's, none is left when a job with more queries begins again.
        "spark.sql.codegen.cache.maxEntries": "1000",
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
            # `conquiet.spark.checkpoint.held` sees to that.
            "spark.sql.streaming.checkpointFileManagerClass": (
                f"{_EXECUTION}.checkpointing.FileSystemBasedCheckpointFileManager"
            ),
        }
    return settings


def is_local(master: str) -> bool:
    """Whether driver and executors share one process, and its disk."""
    return master == "local" or master.startswith("local[")


def _cores(master: str) -> int:
    count = master.removeprefix("local").strip("[]").partition(",")[0] or "1"
    if count != "*" and not count.isdecimal():
        raise ConfigError(f"master={master!r}: write local[2], local[*], or where a cluster is")
    return (os.cpu_count() or 1) if count == "*" else max(int(count), 1)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
