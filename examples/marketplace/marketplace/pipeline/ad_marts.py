"""ad_daily: what was seen of an ad, what its rollup says, and what was sold by it."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from marketplace.pipeline.facts import is_live
from marketplace.pipeline.marts import summed

_MEASURES = (
    *("impressions", "clicks", "orphan_clicks"),
    *("rollup_impressions", "rollup_clicks", "spend_micros", "rollup_revision"),
    *("attributed_orders", "attributed_order_cents", "attributed_lines", "attributed_line_cents"),
)


def ad_daily(
    touches: DataFrame,
    impressions: DataFrame,
    ad_events: DataFrame,
    attribution: DataFrame,
    lines: DataFrame,
) -> DataFrame:
    """Per business day and ad; `impressions` are the touches in which a click finds its own."""
    parts = (
        _seen(touches, impressions),
        _rolled_up(ad_events),
        *_sold(attribution, lines),
    )
    return summed(parts, ("business_day", "ad_id"), _MEASURES, "vendor_store_id")


def _seen(touches: DataFrame, impressions: DataFrame) -> DataFrame:
    known = impressions.select(
        f.col("token_id").alias("impression_token_id"), f.lit(True).alias("has_impression")
    )
    is_click = f.col("kind") == "click"
    is_orphan = is_click & f.col("has_impression").isNull()
    return touches.join(known, "impression_token_id", "left").select(
        *("business_day", "ad_id", "vendor_store_id"),
        _counted(~is_click, "impressions"),
        _counted(is_click, "clicks"),
        _counted(is_orphan, "orphan_clicks"),
    )


def _rolled_up(ad_events: DataFrame) -> DataFrame:
    """Of several rollups of a day the highest revision counts, then the last."""
    counted = f.struct(
        *("rollup_revision", "happened_at", "event_id"),
        *("vendor_store_id", "impressions", "clicks", "spend_micros"),
    )
    rollups = ad_events.where(f.col("rollup_day").isNotNull())
    last = rollups.groupBy("rollup_day", "ad_id").agg(f.max(counted).alias("last"))
    return last.select(
        f.col("rollup_day").alias("business_day"),
        "ad_id",
        f.col("last")["vendor_store_id"].alias("vendor_store_id"),
        f.col("last")["impressions"].alias("rollup_impressions"),
        f.col("last")["clicks"].alias("rollup_clicks"),
        f.col("last")["spend_micros"].alias("spend_micros"),
        f.col("last")["rollup_revision"].alias("rollup_revision"),
    )


def _sold(attribution: DataFrame, lines: DataFrame) -> tuple[DataFrame, DataFrame]:
    won = attribution.where(f.col("won") & f.col("revenue_day").isNotNull())
    key = (f.col("revenue_day").alias("business_day"), "ad_id", "vendor_store_id")
    orders = won.where(f.col("scope") == "store").select(
        *key,
        f.lit(1).cast("bigint").alias("attributed_orders"),
        f.col("revenue_cents").alias("attributed_order_cents"),
    )
    live = lines.where(is_live()).select("line_item_id")
    of_lines = won.where(f.col("scope") == "line").join(live, "line_item_id", "left_semi")
    sold = of_lines.select(
        *key,
        f.lit(1).cast("bigint").alias("attributed_lines"),
        f.col("revenue_cents").alias("attributed_line_cents"),
    )
    return orders, sold


def _counted(condition: Column, name: str) -> Column:
    return condition.cast("bigint").alias(name)
