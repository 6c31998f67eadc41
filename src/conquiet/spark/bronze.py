"""Bronze: the log or an outbox, as it is, in the table `raw_events`; what comes after reads there.

A row is an event with the place it stood at, whatever its type and whether or not it could be
read, plus when it was taken in. Nothing is parsed here, so that nothing can be lost here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from conquiet.errors import ConfigError
from conquiet.spark.checkpoint import local_directory
from conquiet.spark.query import start_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

TABLE = "raw_events"
INGEST_TIME = "ingest_time"
INGEST_DATE = "ingest_date"

Origin = Literal["log", "outbox"]
TableFormat = Literal["parquet", "delta"]
FORMATS: dict[str, str] = {"log": "conquiet", "outbox": "conquiet-outbox"}
"""Where events come from → the format that reads them."""


@dataclass(frozen=True, slots=True)
class Bronze:
    """Where the table is, how it is written, and how often."""

    to: str
    format: TableFormat = "parquet"
    checkpoint: str | None = None
    once: bool = False
    trigger_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.format not in get_args(TableFormat):
            raise ConfigError(
                f"format={self.format!r}: choose {' or '.join(get_args(TableFormat))}"
            )
        if self.once and self.trigger_seconds is not None:
            raise ConfigError("once and trigger_seconds exclude each other: once ends by itself")

    def check(self) -> None:
        """Refuse to write one format to a table of the other."""
        if local_directory(self.to) is not None:
            from conquiet.spark.tables.commits import commits_of
            from conquiet.spark.tables.files import table_path

            commits_of(table_path(self.path), self.format)

    @property
    def path(self) -> str:
        return f"{self.to.rstrip('/')}/{TABLE}"

    @property
    def checkpoint_path(self) -> str:
        return self.checkpoint or f"{self.to.rstrip('/')}/_checkpoints/{TABLE}"

    @property
    def trigger(self) -> dict[str, Any]:
        if self.once:
            return {"availableNow": True}
        return {"processingTime": f"{self.trigger_seconds or 0:g} seconds"}


def read_events(spark: SparkSession, origin: Origin, options: Mapping[str, str]) -> DataFrame:
    """The events of the log or of an outbox, as a stream."""
    return spark.readStream.format(FORMATS[origin]).options(**options).load()


def raw_events(events: DataFrame) -> DataFrame:
    """The rows of the table: as they were read, and when; the date is what files are grouped by.

    The time is that of the micro-batch, so a replayed one writes the same rows.
    """
    from pyspark.sql import functions as f

    now = f.current_timestamp()
    return events.select("*", now.alias(INGEST_TIME), f.to_date(now).alias(INGEST_DATE))


def start_bronze(events: DataFrame, table: Bronze) -> StreamingQuery:
    """Start to write the table; the query holds the lock of its checkpoint until it ends.

    Where the driver cannot commit, because it is a Connect server or the files are in an object
    store, Spark's own sink writes Parquet; Spark then reads the table exactly, by its log.
    """
    rows = raw_events(events)
    if table.format == "parquet" and (_is_remote() or local_directory(table.to) is None):
        writing = rows.writeStream.queryName(TABLE).trigger(**table.trigger).format("parquet")
        writing = writing.option("path", table.path).partitionBy(INGEST_DATE)
        return start_query(writing, table.checkpoint_path)
    from conquiet.spark.tables.writing import write_table

    query = write_table(
        rows,
        table.path,
        format=table.format,
        partition_by=[INGEST_DATE],
        checkpoint=table.checkpoint_path,
        trigger=table.trigger,
        name=TABLE,
    )
    assert query is not None, "events are a stream"
    return query


def is_whole_table(origin: str, options: Mapping[str, str]) -> bool:
    """Whether the events lie in a table that is no log, and can only be read as a whole."""
    if origin != "outbox":
        return False
    from conquiet.events.table import EVENTS_TABLE

    given = {name.lower(): value for name, value in options.items()}
    return given.get("table", "").rpartition(".")[2] == EVENTS_TABLE


def take_whole(spark: SparkSession, options: Mapping[str, str], table: Bronze) -> int:
    """Add those rows of `outbox_events` that the table does not have yet, in one commit; how many.

    They are told by their ids: to repeat a run, or what it was killed in, adds no row twice.
    """
    from conquiet.events.table import EVENTS_TABLE
    from conquiet.spark.tables.commits import commits_of
    from conquiet.spark.tables.files import table_path
    from conquiet.spark.tables.reading import read_table
    from conquiet.spark.tables.writing import append_once

    rows = raw_events(spark.read.format(FORMATS["outbox"]).options(**options).load())
    commits = commits_of(table_path(table.path), table.format)
    before = 0
    if commits.schema() is not None:
        there = read_table(spark, table.path)
        before = there.count()
        rows = rows.join(there.select("event_id"), "event_id", "left_anti").select(*rows.columns)
    batch = commits.applied(EVENTS_TABLE) + 1
    append_once(
        rows,
        table.path,
        query=EVENTS_TABLE,
        batch=batch,
        format=table.format,
        partition_by=[INGEST_DATE],
    )
    return read_table(spark, table.path).count() - before


def _is_remote() -> bool:
    from pyspark.sql.utils import is_remote

    return bool(is_remote())
