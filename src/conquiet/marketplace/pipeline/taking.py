"""Taking: a micro-batch of the log into bronze and silver, each once, whatever is retried."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from conquiet.events.catalog import Catalog
from conquiet.marketplace.catalog import CATALOG
from conquiet.marketplace.pipeline.days import utc_day
from conquiet.marketplace.pipeline.lake import Lake, among, distinct, nullable
from conquiet.marketplace.pipeline.silver import (
    DAY,
    KINDS,
    PARTITION_BY,
    SORT_BY,
    deliveries,
    merged,
)
from conquiet.marketplace.pipeline.tables import RAW, SILVER
from conquiet.spark.bronze import INGEST_DATE
from conquiet.spark.tables.commits import commits_of
from conquiet.spark.tables.files import short_hash
from conquiet.spark.tables.writing import append_once, replace_partitions

ROWS = "rows"
"""The query under whose name rows of a table are taken."""


def take(lake: Lake, batch: DataFrame, query: str, number: int, catalog: Catalog = CATALOG) -> None:
    """Add a batch, with the columns of `raw_events`. The same number again changes nothing.

    Silver is made from the files that bronze has of the batch: the log is read once, and nothing
    has to be kept in memory.
    """
    append_once(
        batch, lake.path(RAW), query=query, batch=number, format=lake.format,
        partition_by=[INGEST_DATE],
    )  # fmt: skip
    written = f"/{short_hash(query.encode())}-{number:010d}-"  # as `named_by_batch` names them
    _merge(lake, lake.read_files(RAW, lambda file: written in file), query, number, catalog)


def take_rows(lake: Lake, rows: DataFrame, catalog: Catalog = CATALOG) -> int:
    """Add those rows of a table that is no log, whose ids are not in bronze yet; how many."""
    taken, known = _applied(lake, RAW, ROWS), _applied(lake, SILVER, ROWS)
    if taken > known:  # killed between the two: bronze knows what silver lacks
        left = lake.read(RAW)
        if lake.has(SILVER):
            left = left.join(lake.read(SILVER), "event_id", "left_anti")
        _merge(lake, left, ROWS, taken, catalog)
    before = 0
    if lake.has(RAW):
        there = lake.read(RAW)
        before = there.count()
        rows = rows.join(there, "event_id", "left_anti").select(*rows.columns)
    take(lake, rows, ROWS, taken + 1, catalog)
    return lake.read(RAW).count() - before


def _applied(lake: Lake, name: str, query: str) -> int:
    return commits_of(lake.path(name), lake.format).applied(query)


def retake(lake: Lake, days: list[object], catalog: Catalog = CATALOG) -> None:
    """Make days of silver again from bronze, by what the catalog says now."""
    rows = deliveries(lake.read(RAW), catalog).where(among(DAY, days))
    _replace(lake, merged(nullable(rows)), days)


def _merge(lake: Lake, raw: DataFrame, query: str, number: int, catalog: Catalog) -> None:
    days = distinct(raw.select(utc_day(f.col("time")).alias(DAY)), DAY)
    parts = [nullable(deliveries(raw, catalog))]
    if lake.has(SILVER):
        parts.append(lake.read(SILVER, days))
    _replace(lake, merged(*parts), days, query, number)


def _replace(
    lake: Lake, rows: DataFrame, days: list[object], query: str | None = None,
    number: int | None = None,
) -> None:  # fmt: skip
    """Write days; the rows of each are in one task, and come out of it in one file of a kind."""
    replace_partitions(
        rows.sortWithinPartitions(*PARTITION_BY, *SORT_BY),
        lake.path(SILVER),
        list(PARTITION_BY),
        partitions=[{"kind": kind, DAY: day} for kind in KINDS for day in days],
        format=lake.format,
        query=query,
        batch=number,
    )


def days_between(lake: Lake, since: object, until: object) -> list[object]:
    """The days of silver from one day on, up to and without another."""
    day = f.col("day")
    return distinct(lake.read(SILVER).where((day >= f.lit(since)) & (day < f.lit(until))), "day")
