"""Source: a folder of Parquet files in the columns of the log, as a stream of Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PATTERN = frozenset("*?[{")


def read_files(spark: SparkSession, path: str, **options: str) -> DataFrame:
    """Read a folder of Parquet files as a stream, as `pipeline.run` takes it.

    `options` are those of Spark's source of files, as `maxFilesPerTrigger`.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from conquiet.spark.columns import ARROW_SCHEMA

    reader = spark.readStream.schema(from_arrow_schema(ARROW_SCHEMA))
    return reader.options(**options).parquet(path)


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
        raise ConfigError(f"{file} is no whole Parquet file; take it out of the folder") from error
    missing = [name for name in ARROW_SCHEMA.names if name not in there]
    if missing:
        raise ConfigError(
            f"{file} has no column {', '.join(missing)}: files have the columns of the log, as"
            " those of raw_events"
        )
