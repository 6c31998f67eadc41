"""Lake: the folder of all tables, and the three ways in which a table is written.

DIR/raw_events  DIR/silver  DIR/fact_order …     tables of conquiet.spark, Parquet or Delta
DIR/_pipeline/state.json                         which silver the other tables were made from
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from conquiet.errors import ConfigError
from conquiet.marketplace.pipeline.silver import events, events_quarantine
from conquiet.marketplace.pipeline.tables import SILVER, STORED, VIEWS, checked
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
                f"{self.root} has no table {name}: make it by conquiet pipeline run --once"
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

    # --- writing --------------------------------------------------------------------------------

    def replace(self, frame: DataFrame, name: str, values: Sequence[Any]) -> None:
        """Rows in place of all that stand under some values of the partition's column."""
        table = STORED[name]
        replace_partitions(
            frame,
            self.path(name),
            [table.partition_by],
            partitions=[{table.partition_by: value} for value in values],
            sort_by=table.key,
            format=self.format,
        )

    def replace_all(self, frame: DataFrame, name: str) -> None:
        """Rows in place of the whole table."""
        column = STORED[name].partition_by
        frame = frame.persist()
        try:
            there = distinct(self.read(name), column) if self.has(name) else []
            self.replace(frame, name, list({*there, *distinct(frame, column)}))
        finally:
            frame.unpersist()

    def replace_keys(self, frame: DataFrame, name: str, keys: DataFrame) -> None:
        """Rows in place of those that have one of the keys; partitions without any stay alone."""
        column = STORED[name].partition_by
        values = set(distinct(frame, column))
        if self.has(name):
            there = self.read(name)
            key = keys.columns
            values |= set(distinct(there.join(keys, key, "left_semi"), column))
            stay = there.where(among(column, values)).join(keys, key, "left_anti")
            frame = frame.unionByName(stay, allowMissingColumns=True)
        self.replace(frame, name, list(values))


def distinct(frame: DataFrame, *columns: str) -> list[Any]:
    """The values of a column, or rows of several."""
    rows = frame.select(*columns).distinct().collect()
    return [row[0] if len(columns) == 1 else tuple(row) for row in rows]


def among(column: str, values: Any) -> Any:
    """Whether a column has one of the values, of which one may be null."""
    given = [value for value in values if value is not None]
    found = f.col(column).isin(given) if given else f.lit(False)
    return found | f.col(column).isNull() if None in values else found
