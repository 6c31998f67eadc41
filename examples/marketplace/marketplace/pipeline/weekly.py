"""admin_weekly: orders, buyers and money of a week, and how long the stages took."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from marketplace.pipeline.days import milliseconds, week
from marketplace.pipeline.facts import is_lost
from marketplace.pipeline.percentiles import nearest_rank

STAGES = {
    "decide": ("created_at", "decided_at"),
    "dispatch": ("decided_at", "in_transit_at"),
    "deliver": ("in_transit_at", "delivered_at"),
    "collect": ("delivered_at", "collected_at"),
    "payout": ("collected_at", "paid_out_at"),
}
PERCENTS = (50, 95)
_COUNTS = (
    *("orders", "lost_orders", "gmv_cents", "buyers", "new_buyers", "returning_buyers"),
    "revenue_cents",
)


def admin_weekly(orders: DataFrame, buyers: DataFrame) -> DataFrame:
    """Per week, from `fact_order` and `buyer_first_purchase`."""
    created = _created(orders.withColumn("week", week(f.col("business_day"))), buyers)
    earned = orders.where(f.col("revenue_day").isNotNull()).groupBy(
        week(f.col("revenue_day")).alias("week")
    )
    revenue = earned.agg(f.sum("revenue_cents").alias("revenue_cents"))
    found = created.join(revenue, "week", "outer")
    counts = [f.coalesce(f.col(name), f.lit(0)).alias(name) for name in _COUNTS]
    durations = [
        nearest_rank(f.col(stage), percent).alias(f"{stage}_p{percent}_ms")
        for stage in STAGES
        for percent in PERCENTS
    ]
    return found.select("week", *counts, *durations)


def _created(orders: DataFrame, buyers: DataFrame) -> DataFrame:
    first = buyers.select("buyer_store_id", week(f.col("first_day")).alias("first_week"))
    rows = orders.join(first, "buyer_store_id", "left")
    buyer = f.when(~is_lost(), f.col("buyer_store_id"))
    is_new = f.col("first_week") == f.col("week")
    found = rows.groupBy("week").agg(
        f.count(f.lit(1)).alias("orders"),
        f.sum(is_lost().cast("bigint")).alias("lost_orders"),
        f.sum("final_cents").alias("gmv_cents"),
        f.count_distinct(buyer).alias("buyers"),
        f.count_distinct(f.when(is_new, buyer)).alias("new_buyers"),
        *(_durations(*stage).alias(name) for name, stage in STAGES.items()),
    )
    return found.withColumn("returning_buyers", f.col("buyers") - f.col("new_buyers"))


def _durations(start: str, end: str) -> Column:
    taken = milliseconds(f.col(start), f.col(end))
    return f.sort_array(f.collect_list(taken))  # which leaves nulls out
