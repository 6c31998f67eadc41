"""Reconciliation: whether every event arrived, and whether the money agrees with itself.

A mismatch is a row that names the events.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from marketplace.pipeline.days import hour, plausible
from marketplace.pipeline.refusal import is_telemetry
from marketplace.pipeline.silver import delivery_id

MOST_NAMED = 100
COUNTS = ("log_count", "entry_count", "silver_count", "quarantine_count")


def hourly_counts(raw: DataFrame, silver: DataFrame, outbox: DataFrame | None) -> DataFrame:
    """Per hour: the outbox, the log as it was taken in, and what silver and quarantine made of it.

    `raw` is bronze and `outbox` a batch of `conquiet-outbox`; the counts come from both ends, so a
    row that got lost between them shows: in `agrees`, which also compares a digest of the ids.
    Entries without an id count one by one.
    """
    log = _log(raw)
    per_hour = log.groupBy("hour").agg(
        f.count(f.lit(1)).alias("log_count"),
        f.sum("entries").alias("entry_count"),
        f.bit_xor(f.xxhash64("id")).alias("log_digest"),
    )
    kept = (
        _kept(silver)
        .groupBy("hour")
        .agg(
            f.sum((f.col("kind") == "event").cast("bigint")).alias("silver_count"),
            f.sum((f.col("kind") == "refused").cast("bigint")).alias("quarantine_count"),
            f.bit_xor(f.xxhash64("id")).alias("kept_digest"),
        )
    )
    found = per_hour.join(kept, "hour", "outer").join(_strays(log, outbox), "hour", "outer")
    return found.select(
        "hour",
        (f.lit(None).cast("bigint") if outbox is None else _or_zero("outbox_count")).alias(
            "outbox_count"
        ),
        *(_or_zero(name).alias(name) for name in COUNTS),
        *(_or_none(name).alias(name) for name in ("missing_ids", "foreign_ids")),
        (
            f.col("log_digest").eqNullSafe(f.col("kept_digest"))
            & (_or_zero("log_count") == _or_zero("silver_count") + _or_zero("quarantine_count"))
        ).alias("agrees"),
    )


def lost_ids(raw: DataFrame, silver: DataFrame, hours: Sequence[int]) -> DataFrame:
    """What is in the log and in neither silver nor quarantine, or the reverse, of some hours.

    An hour is given by the seconds of its begin.
    """
    of_hours = f.unix_seconds("hour").isin(list(hours))
    log, kept = _log(raw).where(of_hours), _kept(silver).where(of_hours)
    lost = log.join(kept, "id", "left_anti").select("hour", "id")
    strange = kept.join(log, "id", "left_anti").select("hour", "id")
    return lost.union(strange).groupBy("hour").agg(_named(f.col("id")).alias("lost_ids"))


def recon_completeness(counts: DataFrame, lost: DataFrame | None = None) -> DataFrame:
    """The counts of `hourly_counts`, with the events that are lost where they do not agree."""
    if lost is None:
        lost = counts.select("hour", f.array().cast("array<string>").alias("lost_ids")).limit(0)
    rows = counts.join(lost, "hour", "left")
    strays = ("missing_ids", "foreign_ids")
    is_complete = f.col("agrees")
    for name in strays:
        is_complete = is_complete & (f.size(name) == 0)
    return rows.select(
        *("hour", "outbox_count", *COUNTS, *strays),
        _or_none("lost_ids").alias("lost_ids"),
        is_complete.alias("complete"),
    )


def _log(raw: DataFrame) -> DataFrame:
    """The events of the domain's topic in bronze: one row each, with how often they came."""
    at = hour(f.coalesce(plausible(f.col("time")), f.col("entry_time")))
    entries = raw.where(~is_telemetry(f.col("stream"))).select(
        delivery_id().alias("id"),
        at.alias("hour"),
        f.struct("entry_time", "entry_id").alias("order"),
    )
    return entries.groupBy("id").agg(
        f.min_by("hour", "order").alias("hour"), f.count(f.lit(1)).alias("entries")
    )


def _kept(silver: DataFrame) -> DataFrame:
    """The events of the domain's topic in silver and quarantine."""
    at = hour(f.coalesce(f.col("created_at"), f.col("first_seen_at")))
    rows = silver.where(~is_telemetry(f.col("stream")))
    return rows.select(f.col("delivery_id").alias("id"), at.alias("hour"), "kind")


def _strays(log: DataFrame, outbox: DataFrame | None) -> DataFrame:
    """Per hour what is in the outbox and not in the log, and the reverse."""
    if outbox is None:
        nothing = f.lit(None).cast("array<string>")
        named = log.select("hour").distinct()
        return named.select("hour", nothing.alias("missing_ids"), nothing.alias("foreign_ids"))
    rows = outbox.select(f.col("event_id").alias("id"), hour(f.col("time")).alias("row_hour"))
    both = log.select("id", "hour").join(rows, "id", "outer")
    missing = f.when(f.col("hour").isNull(), f.col("id"))
    foreign = f.when(f.col("row_hour").isNull(), f.col("id"))
    return both.groupBy(f.coalesce("row_hour", "hour").alias("hour")).agg(
        f.count("row_hour").alias("outbox_count"),
        _named(missing).alias("missing_ids"),
        _named(foreign).alias("foreign_ids"),
    )


def _named(ids: Column) -> Column:
    return f.slice(f.sort_array(f.collect_list(ids)), 1, MOST_NAMED)


def _or_zero(name: str) -> Column:
    return f.coalesce(f.col(name), f.lit(0).cast("bigint"))


def _or_none(name: str) -> Column:
    return f.coalesce(f.col(name), f.array().cast("array<string>"))


def recon_money(lives: DataFrame) -> DataFrame:
    """A row per order and problem, from `order_lives`: created ≥ final ≥ collected = paid.

    Beside the contract, the days of silver where the order's events are.
    """
    problems = [f.when(condition, name) for name, condition in _problems().items()]
    is_there = f.col("created_at").isNotNull()
    cents = ("created_cents", "final_cents", "collected_cents", "paid_cents")
    named = f.when(is_there, f.col("money_ids")).otherwise(f.col("event_ids"))
    return lives.select(
        "order_id",
        f.explode(f.array_compact(f.array(*problems))).alias("problem"),
        *(f.when(is_there, f.col(name)).alias(name) for name in cents),
        f.sort_array(named).alias("event_ids"),
        *("first_day", "last_day"),
    )


def _problems() -> dict[str, Column]:
    created, final = f.col("created_cents"), f.col("final_cents")
    collected, paid = f.col("collected_cents"), f.col("paid_cents")
    is_there = f.col("created_at").isNotNull()
    is_collected = is_there & f.col("collected_at").isNotNull()
    is_paid = is_there & f.col("paid_out_at").isNotNull()
    is_closed = is_there & (f.col("state") == "closed")
    return {
        "no_order_created": ~is_there,
        "final_over_created": is_there & (final > created),
        "collected_not_final": is_collected & (collected != final),
        "collections_differ": is_there & (f.size("amounts") > 1),
        "paid_without_collection": is_paid & ~is_collected,
        "paid_not_collected": is_paid & is_collected & (paid != collected),
        "closed_without_collection": is_closed & ~is_collected & ~is_paid & (final > 0),
        "closed_without_payout": is_closed & ~is_paid & (collected > 0),
        "currencies_differ": is_there & (f.size("currencies") > 1),
    }
