"""Reading: a table as a frame, and its files for other programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from conquiet.errors import ConfigError
from conquiet.spark.tables.commits import Commits, commits_of, format_of
from conquiet.spark.tables.files import table_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_table(spark: SparkSession, path: str | os.PathLike[str]) -> DataFrame:
    """The table as it is now: the files of its last commit, whatever else lies in the folder.

    Spark needs no jar for Delta: `deltalake` tells which files the table has.
    """
    table, commits = _table(path)
    schema = commits.schema()
    assert schema is not None
    files = [str(table / name) for name in commits.files()]
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).option("basePath", str(table)).parquet(*files)


def table_files(path: str | os.PathLike[str]) -> list[str]:
    """The paths of the files of a table, for DuckDB, Polars and the like."""
    table, commits = _table(path)
    return [str(table / name) for name in commits.files()]


def _table(path: str | os.PathLike[str]) -> tuple[Path, Commits]:
    table = table_path(path)
    found = format_of(table)
    if found is None:
        raise ConfigError(f"{table} is no table of conquiet.spark: there is none, or plain files")
    return table, commits_of(table, found)
