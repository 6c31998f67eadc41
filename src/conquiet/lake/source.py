"""Source: a folder of Parquet files in the columns of the log, as a stream of Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MARK = "conquiet_files"
_PATTERN = frozenset("*?[{")


def read_files(spark: SparkSession, path: str, **options: str) -> DataFrame:
    """Read a folder of Parquet files as a stream, as `pipeline.run` takes it.

    `options` are those of Spark's source of files, as `maxFilesPerTrigger`.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from conquiet.spark.columns import ARROW_SCHEMA

    reader = spark.readStream.schema(from_arrow_schema(ARROW_SCHEMA))
    frame = reader.options(**options).parquet(path)
    setattr(frame, _MARK, True)
    return frame


def are_files(frame: DataFrame) -> bool:
    """Return whether a frame is what `read_files` gave: files in the columns of the log."""
    return bool(getattr(frame, _MARK, False))


def local_paths(frame: DataFrame) -> list[str]:
    """Return the files of a micro-batch, if all are on a local disk; else none."""
    found = [urlsplit(one) for one in frame.inputFiles()]
    if any(one.scheme not in ("", "file") for one in found):
        return []
    return [unquote(one.path) for one in found]


def check_files(path: str) -> None:
    """Refuse local files without the columns of the log: Spark would read nulls instead."""
    if "://" in path or _PATTERN & set(path):
        return
    folder = Path(path)
    if not folder.exists():
        raise ConfigError(f"{path}: there is no such folder")
    for file in parquet_files(folder):
        _check(file)


def parquet_files(folder: Path) -> Iterator[Path]:
    """Find the files that Spark would read, in order."""
    if folder.is_file():
        yield folder
        return
    for one in sorted(folder.iterdir()):
        if not one.name.startswith(("_", ".")):
            yield from parquet_files(one)


def _check(file: Path) -> None:
    import pyarrow
    import pyarrow.parquet as pq

    from conquiet.spark.columns import ARROW_SCHEMA

    try:
        there = set(pq.read_schema(file).names)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(
            f"{file} is not a whole Parquet file; take it out of the folder"
        ) from error
    missing = [name for name in ARROW_SCHEMA.names if name not in there]
    if missing:
        raise ConfigError(
            f"{file} has no column {', '.join(missing)}: files have the columns of the log, as"
            " those of raw_events"
        )
