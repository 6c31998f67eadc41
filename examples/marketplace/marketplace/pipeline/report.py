"""Report: a page of HTML with what the marts say; ratios are computed here, where they are read."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from marketplace.charts import Point, bars, columns, lines, table
from marketplace.page import page, section, sentence
from marketplace.pipeline.lake import Lake

_TOP = 8


def report(lake: Lake) -> str:
    """The page, for what the tables hold now."""
    stores, ads = lake.read("store_daily"), lake.read("ad_daily")
    categories = lake.read("category_daily")
    return page(
        "Marketplace",
        _agreement(lake),
        section(
            "Orders",
            columns("Orders per day", _by_day(stores, f.sum("orders"))),
            columns("Revenue per day, in dollars", _by_day(stores, f.sum("revenue_cents") / 100)),
            lines(
                "Lost orders per day, in percent",
                _by_day(stores, _percent("lost_orders", "orders")),
            ),
            bars("Revenue by category, in dollars", _top(categories, "category")),
            bars("Revenue by postal code, in dollars", _top(lake.read("zip_daily"), "postal_code")),
        ),
        section(
            "Ads",
            lines("Clicks per day", _by_day(ads, f.sum("clicks"))),
            lines("Clicks of 100 impressions", _by_day(ads, _percent("clicks", "impressions"))),
        ),
        _weeks(lake.read("admin_weekly")),
    )


def _by_day(rows: DataFrame, measure: Any) -> list[Point]:
    found = rows.groupBy("business_day").agg(measure.cast("double").alias("value"))
    return [
        (str(row.business_day), row.value or 0.0) for row in found.orderBy("business_day").collect()
    ]


def _percent(part: str, whole: str) -> Any:
    return f.sum(part) * 100 / f.nullif(f.sum(whole), f.lit(0))


def _top(rows: DataFrame, name: str) -> list[Point]:
    found = rows.groupBy(name).agg((f.sum("revenue_cents") / 100).alias("value"))
    best = found.orderBy(f.desc("value"), name).limit(_TOP).collect()
    return [(str(row[name]), float(row.value)) for row in best]


def _agreement(lake: Lake) -> str:
    hours = lake.read("recon_completeness").where("NOT complete").count()
    orders = lake.read("recon_money").select("order_id").distinct().count()
    refused = lake.read("events_quarantine").count()
    text = (
        f"{hours:,} hours are not complete, the money of {orders:,} orders contradicts itself,"
        f" {refused:,} events are in quarantine."
    )
    return sentence(text, "bad" if hours or orders else "")


def _weeks(rows: DataFrame) -> str:
    names = ("week", "orders", "lost_orders", "buyers", "new_buyers", "gmv_cents", "revenue_cents")
    weeks = [
        [_cell(row[name]) for name in names]
        for row in rows.orderBy("week").select(*names).collect()
    ]
    head = [name.replace("_", " ") for name in names]
    return f'<h2>Weeks</h2><div class="card">{table(head, weeks, "Weeks")}</div>'


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
