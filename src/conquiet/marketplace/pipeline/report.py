"""Report: a page of HTML with what the marts say; ratios are computed here, where they are read."""

from __future__ import annotations

from html import escape
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from conquiet.marketplace.pipeline.charts import Point, bars, lines
from conquiet.marketplace.pipeline.lake import Lake

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto; color: #222 }
svg { width: 100%; font-size: 11px } figure { margin: 1.5rem 0 } figcaption { font-weight: 600 }
circle { fill: #2563eb } table { border-collapse: collapse; width: 100% }
td, th { text-align: right; padding: .2rem .5rem; border-bottom: 1px solid #ddd }
.bad { color: #b91c1c }"""
_TOP = 8


def report(lake: Lake) -> str:
    """The page, for what the tables hold now."""
    stores, ads = lake.read("store_daily"), lake.read("ad_daily")
    categories = lake.read("category_daily")
    parts = [
        _agreement(lake),
        lines("Orders per day", _by_day(stores, f.sum("orders"))),
        lines("Revenue per day, in dollars", _by_day(stores, f.sum("revenue_cents") / 100)),
        lines(
            "Lost orders per day, in percent", _by_day(stores, _percent("lost_orders", "orders"))
        ),
        bars("Revenue by category, in dollars", _top(categories, "category")),
        bars("Revenue by postal code, in dollars", _top(lake.read("zip_daily"), "postal_code")),
        lines("Clicks per day", _by_day(ads, f.sum("clicks"))),
        lines("Clicks of 100 impressions", _by_day(ads, _percent("clicks", "impressions"))),
        _weeks(lake.read("admin_weekly")),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Marketplace</title>'
        f"<style>{_STYLE}</style></head><body><h1>Marketplace</h1>\n{body}\n</body></html>\n"
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
    kind = ' class="bad"' if hours or orders else ""
    return (
        f"<p{kind}>{hours:,} hours are not complete, the money of {orders:,} orders contradicts"
        f" itself, {refused:,} events are in quarantine.</p>"
    )


def _weeks(rows: DataFrame) -> str:
    names = ("week", "orders", "lost_orders", "buyers", "new_buyers", "gmv_cents", "revenue_cents")
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row[name])}</td>" for name in names) + "</tr>"
        for row in rows.orderBy("week").select(*names).collect()
    )
    return f"<h2>Weeks</h2><table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
