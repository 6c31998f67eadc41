"""Attribution: which ad an order, or a line of it, is owed to.

A click beats an impression, then the latest wins, then the largest token id. Touches of the store
compete for the order, touches of a product for its lines; the two never meet.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

_KEY = ("scope", "order_id", "line_item_id")


def fact_attribution(orders: DataFrame, lines: DataFrame, touches: DataFrame) -> DataFrame:
    """One row per (order, ad) and per (line, ad), with the best touch of that ad.

    `orders` have the tokens in `token_ids` that their first `order_created` presented.
    """
    seen = _candidates(orders, touches)
    by_store = seen.where(f.col("target_id") == f.col("vendor_store_id")).select(
        f.lit("store").alias("scope"),
        "*",
        f.lit(None).cast("string").alias("line_item_id"),
        f.col("order_cents").alias("cents"),
    )
    of_lines = lines.select(
        "order_id", "line_item_id", "product_id", f.col("revenue_cents").alias("cents")
    )
    by_line = seen.join(of_lines, "order_id").where(f.col("target_id") == f.col("product_id"))
    by_line = by_line.select(f.lit("line").alias("scope"), "*")
    return _ranked(by_store.unionByName(by_line.drop("product_id")))


def _candidates(orders: DataFrame, touches: DataFrame) -> DataFrame:
    presented = orders.select(
        *("order_id", "vendor_store_id", "buyer_store_id", "created_at"),
        *("business_day", "revenue_day"),
        f.col("revenue_cents").alias("order_cents"),
        f.explode(f.array_distinct("token_ids")).alias("token_id"),
    )
    of_touches = touches.select(
        "token_id", "kind", "ad_id", "target_id", f.col("occurred_at").alias("touched_at")
    )
    found = presented.join(of_touches, "token_id")
    return found.where(f.col("touched_at") <= f.col("created_at"))


def _ranked(candidates: DataFrame) -> DataFrame:
    rank = f.struct((f.col("kind") == "click").alias("is_click"), "touched_at", "token_id")
    of_order = ("vendor_store_id", "buyer_store_id", "business_day", "revenue_day", "cents")
    best = candidates.groupBy(*_KEY, "ad_id").agg(
        f.max(rank).alias("best"),
        f.count(f.lit(1)).alias("candidates"),
        *(f.first(name).alias(name) for name in of_order),
    )
    rivals = Window.partitionBy(*_KEY)
    won = f.col("best") == f.max("best").over(rivals)
    return best.withColumn("won", won).select(
        *(*_KEY, "ad_id"),
        f.col("best")["token_id"].alias("token_id"),
        f.when(f.col("best")["is_click"], "click").otherwise("impression").alias("kind"),
        f.col("best")["touched_at"].alias("touched_at"),
        *("candidates", "won", "vendor_store_id", "buyer_store_id"),
        *("business_day", "revenue_day"),
        f.when(f.col("won"), f.col("cents")).otherwise(0).alias("revenue_cents"),
    )
