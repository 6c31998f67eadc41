"""Taking: a micro-batch of the log into bronze and silver, each once, whatever is retried."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import date

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from conquiet.events.catalog import Catalog
from conquiet.spark.bronze import INGEST_DATE
from conquiet.spark.tables.commits import commits_of
from conquiet.spark.tables.files import short_hash
from conquiet.spark.tables.writing import append_once, replace_partitions
from marketplace.catalog import CATALOG
from marketplace.pipeline.days import may_be_of, utc_day
from marketplace.pipeline.lake import Lake, among, distinct, nullable
from marketplace.pipeline.silver import (
    DAY,
    KINDS,
    PARTITION_BY,
    SORT_BY,
    day_of_entry,
    deliveries,
    merged,
)
from marketplace.pipeline.tables import RAW, SILVER

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
    _merge(lake, query, number, catalog)


def take_rows(lake: Lake, rows: DataFrame, catalog: Catalog = CATALOG) -> int:
    """Add those rows of a table that is no log, whose ids are not in bronze yet; how many."""
    before = 0
    if lake.has(RAW):
        there = lake.read(RAW)
        before = there.count()
        rows = rows.join(there, "event_id", "left_anti").select(*rows.columns)
    take(lake, rows, ROWS, applied(lake, RAW, ROWS) + 1, catalog)
    return lake.read(RAW).count() - before


def level(lake: Lake, queries: Iterable[str], catalog: Catalog = CATALOG) -> None:
    """Bring silver up to bronze, where a kill came between the two commits of a batch."""
    for query in queries:
        taken = applied(lake, RAW, query)
        if taken > applied(lake, SILVER, query):
            _merge(lake, query, taken, catalog)


def applied(lake: Lake, name: str, query: str) -> int:
    """The last batch of a query that is in a table; -1 for none."""
    return commits_of(lake.path(name), lake.format).applied(query)


def retake(lake: Lake, days: Collection[date | None], catalog: Catalog = CATALOG) -> None:
    """Make days of silver again from bronze, by what the catalog says now."""
    near = may_be_of(f.col("time"), {day for day in days if day is not None})
    rows = deliveries(lake.read(RAW).where(near), catalog).where(among(DAY, days))
    _replace(lake, merged(nullable(rows)), days)


def _merge(lake: Lake, query: str, number: int, catalog: Catalog) -> None:
    """Add what bronze has of a batch to its days of silver."""
    written = f"/{short_hash(query.encode())}-{number:010d}-"  # as `named_by_batch` names them
    raw = lake.read_files(RAW, lambda file: written in file)
    days = distinct(raw.select(day_of_entry().alias(DAY)), DAY)
    parts = [nullable(deliveries(raw, catalog))]
    if lake.has(SILVER):
        parts.append(lake.read(SILVER, days))
    _replace(lake, merged(*parts), days, query, number)


def _replace(
    lake: Lake, rows: DataFrame, days: Collection[date | None], query: str | None = None,
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


def days_between(lake: Lake, since: date, until: date) -> set[date | None]:
    """The days of silver from one day on, up to and without another; None if rows without a time
    were first seen then."""
    there = lake.days(SILVER)
    found: set[date | None] = {day for day in there if day is not None and since <= day < until}
    if None in there:
        seen = utc_day(f.col("first_seen_at")).alias(DAY)
        days = distinct(lake.read(SILVER, [None]).select(seen), DAY)
        found |= {None for day in days if day is None or since <= day < until}
    return found
