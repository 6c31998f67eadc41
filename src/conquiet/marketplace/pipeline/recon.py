"""Reconciliation: whether every event arrived, and whether the money agrees with itself.

A mismatch is a row that names the events.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from conquiet.marketplace.pipeline.days import hour
from conquiet.marketplace.pipeline.facts import COLLECTIONS
from conquiet.marketplace.pipeline.refusal import is_telemetry

MOST_NAMED = 100
MONEY = ("order_created", *COLLECTIONS, "vendor_payout_recorded")


def recon_completeness(raw: DataFrame, silver: DataFrame, outbox: DataFrame | None) -> DataFrame:
    """Per hour: the outbox, the log as it was taken in, and what silver and quarantine made of it.

    `raw` is bronze and `outbox` a batch of `conquiet-outbox`; the counts come from both ends, so a
    row that got lost between them shows. Entries without an id count one by one.
    """
    log = _log(raw)
    per_hour = log.groupBy("hour").agg(
        f.count(f.lit(1)).alias("log_count"), f.sum("entries").alias("entry_count")
    )
    kept = (
        silver.where(~is_telemetry(f.col("stream")))
        .groupBy(_hour_of_silver())
        .agg(
            f.sum((f.col("kind") == "event").cast("bigint")).alias("silver_count"),
            f.sum((f.col("kind") == "refused").cast("bigint")).alias("quarantine_count"),
        )
    )
    found = per_hour.join(kept, "hour", "outer").join(_strays(log, outbox), "hour", "outer")
    counts = ("log_count", "entry_count", "silver_count", "quarantine_count")
    filled = found.select(
        "hour",
        (f.lit(None).cast("bigint") if outbox is None else _or_zero("outbox_count")).alias(
            "outbox_count"
        ),
        *(_or_zero(name).alias(name) for name in counts),
        *(_or_none(name).alias(name) for name in ("missing_ids", "foreign_ids")),
    )
    is_complete = (
        (f.col("log_count") == f.col("silver_count") + f.col("quarantine_count"))
        & (f.size("missing_ids") == 0)
        & (f.size("foreign_ids") == 0)
    )
    return filled.withColumn("complete", is_complete)


def _log(raw: DataFrame) -> DataFrame:
    """The events of the domain's topic in bronze: one row each, with how often they came."""
    place = f.concat_ws("/", "stream", "entry_id")
    at = hour(f.coalesce(f.col("time"), f.col("entry_time")))
    entries = raw.where(~is_telemetry(f.col("stream"))).select(
        f.coalesce(f.nullif("event_id", f.lit("")), place).alias("id"),
        at.alias("hour"),
        f.struct("entry_time", "entry_id").alias("order"),
    )
    return entries.groupBy("id").agg(
        f.min_by("hour", "order").alias("hour"), f.count(f.lit(1)).alias("entries")
    )


def _hour_of_silver() -> Column:
    return hour(f.coalesce(f.col("created_at"), f.col("first_seen_at"))).alias("hour")


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


def recon_money(events: DataFrame, orders: DataFrame) -> DataFrame:
    """A row per order and problem: created ≥ final ≥ collected = paid."""
    amounts = f.get_json_object("payload", "$.data.amount_cents").try_cast("bigint")
    kind = f.col("event_type")
    told = events.where(f.col("order_id").isNotNull()).groupBy("order_id")
    sides = told.agg(
        f.sort_array(f.collect_list("event_id")).alias("all_ids"),
        f.sort_array(f.collect_list(f.when(kind.isin(*MONEY), f.col("event_id")))).alias("ids"),
        f.count_distinct(f.when(kind.isin(*COLLECTIONS), amounts)).alias("amounts"),
    )
    cents = ("created_cents", "final_cents", "collected_cents", "paid_cents")
    found = sides.join(
        orders.select("order_id", *cents, "collected_at", "paid_out_at"), "order_id", "left"
    )
    problems = [f.when(condition, name) for name, condition in _problems().items()]
    return found.select(
        "order_id",
        f.explode(f.array_compact(f.array(*problems))).alias("problem"),
        *cents,
        f.when(f.col("created_cents").isNull(), f.col("all_ids"))
        .otherwise(f.col("ids"))
        .alias("event_ids"),
    )


def _problems() -> dict[str, Column]:
    created, final = f.col("created_cents"), f.col("final_cents")
    collected, paid = f.col("collected_cents"), f.col("paid_cents")
    is_there = created.isNotNull()
    is_collected = is_there & f.col("collected_at").isNotNull()
    is_paid = is_there & f.col("paid_out_at").isNotNull()
    return {
        "no_order_created": ~is_there,
        "final_over_created": is_there & (final > created),
        "collected_not_final": is_collected & (collected != final),
        "collections_differ": is_there & (f.col("amounts") > 1),
        "paid_without_collection": is_paid & ~is_collected,
        "paid_not_collected": is_paid & is_collected & (paid != collected),
    }
