"""Lake: the folder of all tables, and the three ways in which a table is written.

DIR/raw_events  DIR/silver  DIR/fact_order …     tables of conquiet.spark, Parquet or Delta
DIR/_pipeline/state.json                         which silver the other tables were made from
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from conquiet.errors import ConfigError
from conquiet.spark.tables.commits import commits_of
from conquiet.spark.tables.files import partition_at
from conquiet.spark.tables.reading import table_files
from conquiet.spark.tables.writing import replace_partitions
from marketplace.pipeline.silver import DAY as SILVER_DAY
from marketplace.pipeline.silver import events, events_quarantine
from marketplace.pipeline.tables import SILVER, STORED, VIEWS, checked
from marketplace.pipeline.typed import typed, typed_names

if TYPE_CHECKING:
    from conquiet.spark.tables.commits import Format

_VIEWS = dict(zip(VIEWS, (events, events_quarantine), strict=True))
TYPED = typed_names()
"""Views of `events` by type and version."""
_SETTINGS: dict[str, str | int | bool] = {
    # Else a table of many days is listed by a job with a task for each of its files.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": 100_000,
    # What Spark puts into a folder that no reader sees needs no second rename.
    "mapreduce.fileoutputcommitter.algorithm.version": 2,
    # As every table is written; a thread that sets it for a moment must not disturb another.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Small pieces of a shuffle, put together where there is little: a task needs little memory.
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": 32,
    # Of what is kept, too: else each of its readers has as many tasks, most of them for nothing.
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": True,
}


def tell_nobody(what: str) -> None:
    """For whoever does not ask what is being made."""


class Lake:
    """The tables below a folder, of one format; `tell` hears what is being made, in any thread."""

    def __init__(
        self,
        spark: SparkSession,
        root: str | os.PathLike[str],
        format: Format = "parquet",
        tell: Callable[[str], None] = tell_nobody,
    ) -> None:
        self.spark = spark
        self.root = Path(root).absolute()
        self.format = format
        self.tell = tell
        for setting, value in _SETTINGS.items():
            spark.conf.set(setting, value)

    def path(self, name: str) -> Path:
        return self.root / name

    def has(self, name: str) -> bool:
        folder = self.path(SILVER if name in VIEWS or name in TYPED else name)
        return (folder / "_conquiet" / "state.json").is_file() or (folder / "_delta_log").is_dir()

    def read(self, name: str, values: Collection[Any] | None = None) -> DataFrame:
        """A table of the contract, silver itself, or the events of a type and version
        (`order_created_v1`); or what stands under some values of the column by which files are
        grouped: no other file is opened."""
        if name != SILVER and name not in TYPED:
            checked(name)
        if not self.has(name):
            table = "events" if name in TYPED else name
            raise ConfigError(
                f"{self.root} has no table {name}: make it by"
                f" conquiet pipeline run --tables {table} --once"
            )
        if name in TYPED:
            return typed(self.read("events", values), TYPED[name])
        if name in _VIEWS:
            return _VIEWS[name](self.read(SILVER, values))
        if values is None:
            return self.read_files(name, lambda file: True)
        column = self._column(name)
        wanted = {None if value is None else str(value) for value in values}
        return self.read_files(name, lambda file: dict(partition_at(file))[column] in wanted)

    def read_files(self, name: str, is_wanted: Callable[[str], bool]) -> DataFrame:
        """The rows in some files of a stored table, by their names below its folder."""
        folder, commits = self.path(name), commits_of(self.path(name), self.format)
        schema = commits.schema()
        assert schema is not None, f"{name} is there"
        files = [str(folder / file) for file in commits.files() if is_wanted(file)]
        if not files:
            return self.spark.createDataFrame([], schema)
        return self.spark.read.schema(schema).option("basePath", str(folder)).parquet(*files)

    def files(self, name: str) -> list[str]:
        """The files of a stored table, below its folder."""
        folder = self.path(name)
        if not self.has(name):
            return []
        return [os.path.relpath(path, folder) for path in table_files(folder)]

    def days(self, name: str) -> set[date | None]:
        """The days under which a table has files."""
        column = self._column(name)
        found = {dict(partition_at(file))[column] for file in self.files(name)}
        return {None if day is None else date.fromisoformat(day) for day in found}

    def _column(self, name: str) -> str:
        return SILVER_DAY if name == SILVER else STORED[name].partition_by

    # --- writing --------------------------------------------------------------------------------

    def replace(self, frame: DataFrame, name: str, values: Sequence[Any] | None) -> None:
        """Rows in place of all that stand under some values of the partition's column; None for
        the values that the rows have."""
        table = STORED[name]
        self.tell(f"making {name}")
        replace_partitions(
            nullable(frame),
            self.path(name),
            [table.partition_by],
            partitions=None
            if values is None
            else [{table.partition_by: value} for value in values],
            sort_by=table.key,
            format=self.format,
        )

    def replace_all(self, frame: DataFrame, name: str) -> None:
        """Rows in place of the whole table."""
        if not self.has(name):
            self.replace(frame, name, None)
            return
        is_kept = frame.is_cached
        frame = frame.persist()
        values = set(distinct(frame, self._column(name)))
        self.replace(frame, name, list(values | self.days(name)))
        if not is_kept:
            frame.unpersist()

    def replace_keys(
        self, frame: DataFrame, name: str, keys: DataFrame | None, values: Collection[Any]
    ) -> None:
        """Rows in place of those that have one of the keys, or of all (None), where both stand
        under some values of the partition's column."""
        if keys is not None:
            stay = self.read(name, values).join(keys, keys.columns, "left_anti")
            frame = frame.unionByName(stay, allowMissingColumns=True)
        self.replace(frame, name, list(values))


def nullable(frame: DataFrame) -> DataFrame:
    """The frame with columns that may all be null, and whatever is in them.

    Whether one may be is written into files. It differs with the way that rows came here, and the
    same rows must be the same bytes.
    """
    empty = frame.sparkSession.range(0)
    nothing = [f.lit(None).cast(_nullable(one.dataType)).alias(one.name) for one in frame.schema]
    return frame.unionByName(empty.select(*nothing))


def _nullable(kind: DataType) -> DataType:
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType), containsNull=True)
    if isinstance(kind, MapType):
        return MapType(kind.keyType, _nullable(kind.valueType), valueContainsNull=True)
    if isinstance(kind, StructType):
        return StructType([StructField(one.name, _nullable(one.dataType)) for one in kind])
    return kind


def distinct(frame: DataFrame, column: str) -> list[Any]:
    """The values of a column."""
    return [row[0] for row in frame.select(column).distinct().collect()]


def among(column: str, values: Any) -> Any:
    """Whether a column has one of the values, of which one may be null."""
    given = [value for value in values if value is not None]
    found = f.col(column).isin(given) if given else f.lit(False)
    return found | f.col(column).isNull() if None in values else found
