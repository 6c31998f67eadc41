"""Lake: the folder of all tables, and the three ways in which a table is written.

DIR/raw_events  DIR/silver  DIR/fact_order …     tables of conquiet.spark, Parquet or Delta
DIR/_pipeline/state.json                         which silver the other tables were made from
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from conquiet.errors import ConfigError
from conquiet.marketplace.pipeline.silver import events, events_quarantine
from conquiet.marketplace.pipeline.tables import SILVER, STORED, VIEWS, checked
from conquiet.spark.tables.files import partition_at
from conquiet.spark.tables.reading import read_table, table_files
from conquiet.spark.tables.writing import replace_partitions

if TYPE_CHECKING:
    from conquiet.spark.tables.commits import Format

_VIEWS = dict(zip(VIEWS, (events, events_quarantine), strict=True))


class Lake:
    """The tables below a folder, of one format."""

    def __init__(
        self, spark: SparkSession, root: str | os.PathLike[str], format: Format = "parquet"
    ) -> None:
        self.spark = spark
        self.root = Path(root).absolute()
        self.format = format

    def path(self, name: str) -> Path:
        return self.root / name

    def has(self, name: str) -> bool:
        folder = self.path(SILVER if name in VIEWS else name)
        return (folder / "_conquiet" / "state.json").is_file() or (folder / "_delta_log").is_dir()

    def read(self, name: str) -> DataFrame:
        """A table of the contract, or silver itself."""
        if name != SILVER:
            checked(name)
        if not self.has(name):
            raise ConfigError(
                f"{self.root} has no table {name}: make it by"
                f" conquiet pipeline run --tables {name} --once"
            )
        if name in _VIEWS:
            return _VIEWS[name](self.read(SILVER))
        return read_table(self.spark, self.path(name))

    def files(self, name: str) -> list[str]:
        """The files of a stored table, below its folder."""
        folder = self.path(name)
        if not self.has(name):
            return []
        return [os.path.relpath(path, folder) for path in table_files(folder)]

    def days(self, name: str) -> set[date]:
        """The days that the files of a table are grouped by."""
        values = [partition_at(file)[0][1] for file in self.files(name)]
        return {date.fromisoformat(value) for value in values if value is not None}

    # --- writing --------------------------------------------------------------------------------

    def replace(self, frame: DataFrame, name: str, values: Sequence[Any]) -> None:
        """Rows in place of all that stand under some values of the partition's column."""
        table = STORED[name]
        replace_partitions(
            nullable(frame),
            self.path(name),
            [table.partition_by],
            partitions=[{table.partition_by: value} for value in values],
            sort_by=table.key,
            format=self.format,
        )

    def replace_all(self, frame: DataFrame, name: str) -> None:
        """Rows in place of the whole table."""
        column = STORED[name].partition_by
        is_kept = frame.is_cached
        frame = frame.persist()
        values = frame.select(column)
        if self.has(name):
            values = values.union(self.read(name).select(column))
        self.replace(frame, name, distinct(values, column))
        if not is_kept:
            frame.unpersist()

    def replace_keys(self, frame: DataFrame, name: str, keys: DataFrame | None) -> None:
        """Rows in place of those that have one of the keys; partitions without any stay alone.

        Without keys, in place of all.
        """
        if keys is None:
            self.replace_all(frame, name)
            return
        column = STORED[name].partition_by
        if not self.has(name):
            self.replace(frame, name, distinct(frame, column))
            return
        there, key = self.read(name), keys.columns
        old = there.join(keys, key, "left_semi")
        values = distinct(frame.select(column).union(old.select(column)), column)
        stay = there.where(among(column, values)).join(keys, key, "left_anti")
        self.replace(frame.unionByName(stay, allowMissingColumns=True), name, values)


def nullable(frame: DataFrame) -> DataFrame:
    """The frame with columns that may all be null.

    Whether one may be is written into files. It differs with the way that rows came here, and the
    same rows must be the same bytes.
    """
    empty = frame.sparkSession.range(0)
    nothing = [f.lit(None).cast(one.dataType).alias(one.name) for one in frame.schema]
    return frame.unionByName(empty.select(*nothing))


def distinct(frame: DataFrame, column: str) -> list[Any]:
    """The values of a column."""
    return [row[0] for row in frame.select(column).distinct().collect()]


def among(column: str, values: Any) -> Any:
    """Whether a column has one of the values, of which one may be null."""
    given = [value for value in values if value is not None]
    found = f.col(column).isin(given) if given else f.lit(False)
    return found | f.col(column).isNull() if None in values else found
