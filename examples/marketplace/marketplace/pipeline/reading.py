"""Reading: a folder of Parquet files with the columns of the log, as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from conquiet.errors import ConfigError
from conquiet.spark.checkpoint import local_directory

_PATTERN = frozenset("*?[{")


def read_files(spark: SparkSession, path: str, **options: str) -> DataFrame:
    """A folder of Parquet files with the columns of the log, as a stream.

    `options` are those of Spark's source of files, as `maxFilesPerTrigger`.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from conquiet.spark.columns import ARROW_SCHEMA

    reader = spark.readStream.schema(from_arrow_schema(ARROW_SCHEMA))
    return reader.options(**options).parquet(path)


def check_files(path: str) -> None:
    """Refuse files that are there and hold no log: Spark would read nulls where a column is not."""
    folder = local_directory(path)
    if folder is None or _PATTERN & set(path):
        return
    if not folder.exists():
        raise ConfigError(f"{path}: there is no such folder")
    for file in _files(folder):
        _check(file)


def _files(folder: Path) -> Iterator[Path]:
    """Those that Spark would read."""
    if folder.is_file():
        yield folder
        return
    for one in sorted(folder.iterdir()):
        if not one.name.startswith(("_", ".")):
            yield from _files(one)


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
            " those of raw_events and of the generator's write_parquet"
        )
