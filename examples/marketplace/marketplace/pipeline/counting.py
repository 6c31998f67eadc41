"""Counting: whether the outbox, the log, silver and quarantine have the same events, by hour."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from marketplace.pipeline.days import may_be_of, plausible, utc_day
from marketplace.pipeline.keeping import Kept
from marketplace.pipeline.lake import Lake, among, distinct
from marketplace.pipeline.ops import outbox_delivery
from marketplace.pipeline.recon import hourly_counts, lost_ids, recon_completeness
from marketplace.pipeline.tables import RAW, SILVER

COUNTED = ("recon_completeness", "outbox_delivery")


def reconcile(
    lake: Lake,
    outbox: DataFrame | None,
    days: set[date | None] | None = None,
    wanted: Collection[str] = COUNTED,
) -> None:
    """Count the hours of some days of silver, or of all, from both ends."""
    names = [name for name in COUNTED if name in wanted]
    if not names:
        return
    raw = lake.read(RAW)
    if days is None:
        _count(lake, raw, lake.read(SILVER), outbox, None, names)
        return
    known = {day for day in days if day is not None}
    if None in days:  # rows without a time stand in the hour of their entry
        timeless = lake.read(SILVER, [None])
        seen = distinct(timeless.select(utc_day(f.col("first_seen_at")).alias("d")), "d")
        known |= {day for day in seen if day is not None}
    silver = lake.read(SILVER, {*known, None})
    near = raw.where(may_be_of(f.col("time"), known))
    _count(lake, near, silver, outbox, known, names)


def _count(
    lake: Lake,
    raw: DataFrame,
    silver: DataFrame,
    outbox: DataFrame | None,
    days: set[date] | None,
    names: Collection[str],
) -> None:
    if days is not None:
        at = utc_day(f.coalesce(plausible(f.col("time")), f.col("entry_time")))
        raw = raw.withColumn("at_day", at).where(among("at_day", days))
        if outbox is not None:
            outbox = outbox.withColumn("at_day", utc_day(f.col("time")))
            outbox = outbox.where(among("at_day", days))
    with Kept() as kept:
        outbox = None if outbox is None else kept.keep(outbox)
        made = {}
        if "recon_completeness" in names:
            counts = hourly_counts(raw, silver, outbox)
            made["recon_completeness"] = _completeness(raw, silver, counts, days, kept)
        if "outbox_delivery" in names:
            made["outbox_delivery"] = outbox_delivery(silver, outbox)
        for name, rows in made.items():
            rows = rows.withColumn("day", utc_day(f.col("hour")))
            if days is None:
                lake.replace_all(rows, name)
            else:
                lake.replace(rows.where(among("day", days)), name, list(days))


def _completeness(
    raw: DataFrame, silver: DataFrame, counts: DataFrame, days: set[date] | None, kept: Kept
) -> DataFrame:
    """Names the lost events of hours that do not agree: these are few, and finding them costs."""
    if days is not None:  # others were not counted from both ends
        counts = counts.withColumn("day", utc_day(f.col("hour"))).where(among("day", days))
    counts = kept.keep(counts)
    wrong = counts.where(~f.col("agrees")).select(f.unix_seconds("hour").alias("at"))
    hours = distinct(wrong, "at")
    return recon_completeness(counts, lost_ids(raw, silver, hours) if hours else None)
