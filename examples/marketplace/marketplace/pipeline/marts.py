"""Marts: sums by business day; what can be added up and nothing else, ratios are for readers.

Each takes facts, whole or those of some days, and gives all rows that follow from them. A measure
that stands on another day than its order is counted on that day.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from marketplace.pipeline.days import business_day
from marketplace.pipeline.facts import is_live, is_lost

_ORDERS = ("orders", "lost_orders", "created_cents", "final_cents")
_LINES = ("lines", "units", "discounts_cents", "final_cents", "revenue_lines", "revenue_cents")


def store_daily(orders: DataFrame, lines: DataFrame) -> DataFrame:
    store = f.col("vendor_store_id")
    created = _facts(
        orders,
        (f.col("business_day"), store),
        orders=f.lit(1),
        lost_orders=is_lost().cast("bigint"),
        live_orders=(~is_lost()).cast("bigint"),
        created_cents=f.col("created_cents"),
        final_cents=f.col("final_cents"),
    )
    sold = _facts(
        lines.where(is_live()),
        (f.col("business_day"), store),
        units=f.col("qty"),
        discounts_cents=f.col("discount_cents"),
    )
    paid = _facts(
        orders.where(f.col("paid_out_at").isNotNull()),
        (business_day(f.col("paid_out_at")), store),
        payouts=f.lit(1),
        paid_cents=f.col("paid_cents"),
    )
    measures = (
        *("orders", "lost_orders", "created_cents", "live_orders", "units", "discounts_cents"),
        *("final_cents", "revenue_orders", "revenue_cents", "payouts", "paid_cents"),
    )
    parts = (created, sold, _revenue(orders, store), paid)
    return summed(parts, ("business_day", "vendor_store_id"), measures)


def zip_daily(orders: DataFrame) -> DataFrame:
    place = f.col("postal_code")
    created = _facts(
        orders,
        (f.col("business_day"), place),
        orders=f.lit(1),
        lost_orders=is_lost().cast("bigint"),
        created_cents=f.col("created_cents"),
        final_cents=f.col("final_cents"),
    )
    measures = (*_ORDERS, "revenue_orders", "revenue_cents")
    parts = (created, _revenue(orders, place))
    return summed(parts, ("business_day", "postal_code"), measures)


def product_daily(lines: DataFrame) -> DataFrame:
    parts = _sold(lines, f.col("product_id"), f.col("vendor_store_id"))
    return summed(parts, ("business_day", "product_id"), _LINES, "vendor_store_id")


def category_daily(lines: DataFrame) -> DataFrame:
    return summed(_sold(lines, f.col("category")), ("business_day", "category"), _LINES)


def buyer_first_purchase(orders: DataFrame) -> DataFrame:
    """The first order of each buyer that was not lost, and how many there are."""
    first = f.min(f.struct("created_at", "order_id", "vendor_store_id", "business_day"))
    found = orders.where(~is_lost()).groupBy("buyer_store_id")
    return found.agg(
        first.alias("first"),
        f.count(f.lit(1)).alias("purchases"),
        f.max("created_at").alias("last_purchase_at"),
    ).select(
        "buyer_store_id",
        f.col("first")["order_id"].alias("first_order_id"),
        f.col("first")["vendor_store_id"].alias("first_vendor_store_id"),
        f.col("first")["created_at"].alias("first_purchase_at"),
        f.col("first")["business_day"].alias("first_day"),
        "purchases",
        "last_purchase_at",
    )


# --- parts --------------------------------------------------------------------------------------


def _facts(rows: DataFrame, key: tuple[Column, Column], **measures: Column) -> DataFrame:
    """Rows with the key of a mart, in columns of their own names, and some of its measures."""
    day, other = key
    return rows.select(
        day.alias("business_day"),
        other,
        *(value.cast("bigint").alias(name) for name, value in measures.items()),
    )


def _revenue(orders: DataFrame, other: Column) -> DataFrame:
    return _facts(
        orders.where(f.col("revenue_day").isNotNull()),
        (f.col("revenue_day"), other),
        revenue_orders=f.lit(1),
        revenue_cents=f.col("revenue_cents"),
    )


def _sold(lines: DataFrame, *other: Column) -> tuple[DataFrame, ...]:
    """Live lines on the day of their order, and those that were paid for on that day."""
    live = lines.where(is_live())
    sold = live.select(
        "business_day",
        *other,
        f.lit(1).cast("bigint").alias("lines"),
        f.col("qty").alias("units"),
        f.col("discount_cents").alias("discounts_cents"),
        "final_cents",
    )
    paid = live.where(f.col("revenue_day").isNotNull()).select(
        f.col("revenue_day").alias("business_day"),
        *other,
        f.lit(1).cast("bigint").alias("revenue_lines"),
        "revenue_cents",
    )
    return sold, paid


def summed(
    parts: Sequence[DataFrame],
    key: tuple[str, ...],
    measures: tuple[str, ...],
    attribute: str | None = None,
) -> DataFrame:
    """The parts by their key; a measure that a part lacks counts as nothing.

    An attribute is what follows from the key, as the vendor of a product.
    """
    rows = reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), parts)
    others = [] if attribute is None else [f.max(attribute).alias(attribute)]
    sums = [f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in measures]
    return rows.groupBy(*key).agg(*others, *sums)
