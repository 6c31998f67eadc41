"""Class archive: classes of Spark, as Java has read and verified them once, in a file.

A large part of what a session costs before its first job is the loading of classes. Java maps
them from the file instead (Class Data Sharing). `make_archive` writes it, once per machine and
user; sessions of `conquiet.spark` on that machine use it if it is there. Java ignores it if Spark's
jars or Java itself have changed since.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from conquiet.errors import ConfigError, ConquietError

OPTIONS = "SPARK_SUBMIT_OPTS"
"""The variable whose options Spark gives to the Java process of a driver."""
_SECONDS = 600.0
_QUIET = "-Xlog:cds*=off"


def archive_place() -> Path:
    """Return where the archive for this Spark and this Java is kept."""
    import pyspark
    from pyspark.find_spark_home import _find_spark_home

    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java") or ""
    parts = (_find_spark_home(), pyspark.__version__, os.path.realpath(java))
    name = sha256("\n".join(parts).encode()).hexdigest()[:12]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "conquiet" / f"spark-{name}.jsa"


class ClassArchive:
    """Lets the Java process that is started meanwhile use the archive, if there is one.

    Options of the caller that name an archive are left as they are.
    """

    def __init__(self) -> None:
        self._before: str | None = None
        self._is_set = False

    def __enter__(self) -> ClassArchive:
        self._before = os.environ.get(OPTIONS)
        given = self._before or ""
        if "SharedArchiveFile" not in given and "ArchiveClassesAtExit" not in given:
            place = archive_place()
            if _is_ours(place):
                os.environ[OPTIONS] = f"{given} -XX:SharedArchiveFile={place} {_QUIET}".strip()
                self._is_set = True
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._is_set:
            return
        if self._before is None:
            del os.environ[OPTIONS]
        else:
            os.environ[OPTIONS] = self._before


def _is_ours(place: Path) -> bool:
    """Return whether there is an archive that this user has written: it holds code."""
    try:
        return place.stat().st_uid == os.getuid() and " " not in str(place)
    except OSError:
        return False


def make_archive() -> Path:
    """Run a small pipeline in a process of its own, and keep the classes that its Java has loaded;
    return the place of the archive."""
    place = archive_place()
    if " " in str(place):
        raise ConfigError(
            f"{place}: Java's options cannot hold a path with a space; set XDG_CACHE_HOME"
        )
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="class-archive-", dir=place.parent) as folder:
        made = Path(folder) / place.name
        environment = {**os.environ, OPTIONS: f"-XX:ArchiveClassesAtExit={made} {_QUIET}"}
        done = subprocess.run(
            [sys.executable, "-m", __name__, folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode or not made.exists():
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise ConquietError(f"no class archive was made: {' '.join(said) or 'Java wrote none'}")
        made.replace(place)
    return place


def _load_classes(folder: str) -> None:
    """Do what sessions of conquiet do: a stream of files, tasks in Python, SQL, Parquet."""
    from conquiet.spark import session

    config = {"spark.local.dir": folder, "spark.sql.warehouse.dir": f"{folder}/warehouse"}
    spark = session("classes", master="local[2]", config={**config, "spark.ui.enabled": False})
    columns = (
        "CAST(id % 3 AS STRING) AS type",
        "current_timestamp() AS time",
        "map('a', 'b') AS m",
    )
    rows = spark.range(0, 100, 1, 2).selectExpr(*columns)
    rows.write.parquet(f"{folder}/rows")

    def take(frame: Any, number: int) -> None:
        frame._jdf.queryExecution().toRdd().getNumPartitions()
        spark.sparkContext.parallelize([b"1", b"2"], 2).map(len).collect()

    stream = spark.readStream.schema(rows.schema).parquet(f"{folder}/rows")
    writing = stream.writeStream.foreachBatch(take).trigger(availableNow=True)
    writing.option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()
    counts = spark.read.parquet(f"{folder}/rows").groupBy("type").count()
    counts.mapInArrow(lambda batches: batches, counts.schema).collect()
    java = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    java.stdin.close()
    java.wait(_SECONDS)


if __name__ == "__main__":
    _load_classes(sys.argv[1])
