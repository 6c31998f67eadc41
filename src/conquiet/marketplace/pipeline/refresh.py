"""Refresh: facts, marts and reconciliation follow silver, for the orders, tokens and days in it
that changed since the last refresh.

Every table is a function of silver (and of bronze and the outbox, for reconciliation), and is
written by key or by day, the same rows however often. So a refresh that was killed is done
again from its beginning, and what it had written is written over by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from conquiet.marketplace.pipeline import marts
from conquiet.marketplace.pipeline.ad_marts import ad_daily
from conquiet.marketplace.pipeline.ads import ad_touches, fact_ad_event
from conquiet.marketplace.pipeline.attribution import fact_attribution
from conquiet.marketplace.pipeline.days import business_day, utc_day
from conquiet.marketplace.pipeline.facts import fact_order, fact_order_line
from conquiet.marketplace.pipeline.lake import Lake, among, distinct
from conquiet.marketplace.pipeline.ops import outbox_delivery
from conquiet.marketplace.pipeline.recon import recon_completeness, recon_money
from conquiet.marketplace.pipeline.silver import events
from conquiet.marketplace.pipeline.state import State
from conquiet.marketplace.pipeline.tables import RAW, SILVER
from conquiet.marketplace.pipeline.weekly import admin_weekly

BUCKETS = 16
"""Into how many files `recon_money` is grouped: some of its orders have no day."""


def refresh(lake: Lake, outbox: DataFrame | None = None) -> int:
    """Bring all tables up to silver; how many of its days had changed."""
    state = State.at(lake.root)
    files = set(lake.files(SILVER))
    changed = state.changed_days(files)
    if not changed and not state.days:
        return 0
    with _Kept() as kept:
        found = _find(lake, changed, kept.keep)
        state.days |= found.mart_days
        state.write()
        _write_facts(lake, found)
        _write_marts(lake, state.days)
        _write_summaries(lake)
        reconcile(lake, outbox, changed)
    state.files, state.days = files, set()
    state.write()
    return len(changed)


class _Kept:
    """Frames that are kept while they are used more than once."""

    def __init__(self) -> None:
        self._frames: list[DataFrame] = []

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *_: object) -> None:
        for frame in self._frames:
            frame.unpersist()

    def keep(self, frame: DataFrame) -> DataFrame:
        self._frames.append(frame.persist())
        return frame


@dataclass
class _Changed:
    """What must be made again: keys, and rows that were made of them."""

    orders: DataFrame
    tokens: DataFrame
    silver_days: set[date | None]
    events: DataFrame
    fact_orders: DataFrame
    fact_lines: DataFrame
    touches: DataFrame
    ad_events: DataFrame
    mart_days: set[date]


def _find(lake: Lake, days: set[date | None], keep: Callable[[DataFrame], DataFrame]) -> _Changed:
    silver = lake.read(SILVER)
    changed = silver.where(among("day", days))
    tokens = keep(changed.select("token_id").where(f.col("token_id").isNotNull()).distinct())
    orders = keep(_orders(silver, changed, tokens))
    told = keep(events(silver).join(orders, "order_id", "left_semi"))
    fact_orders = keep(fact_order(told))
    fact_lines = keep(fact_order_line(told, fact_orders))
    touches = keep(ad_touches(silver.join(tokens, "token_id", "left_semi")))
    ad_events = keep(fact_ad_event(events(changed)))
    mart_days = [
        _days_of_orders(fact_orders),
        touches.select("business_day"),
        ad_events.select("rollup_day"),
    ]
    if lake.has("fact_order"):  # where they stood until now
        old_touches = lake.read("ad_touches")
        impressions = tokens.withColumnRenamed("token_id", "impression_token_id")
        mart_days += [
            _days_of_orders(lake.read("fact_order").join(orders, "order_id", "left_semi")),
            old_touches.join(tokens, "token_id", "left_semi").select("business_day"),
            old_touches.join(impressions, "impression_token_id", "left_semi").select(
                "business_day"
            ),
            lake.read("fact_ad_event").where(among("day", days)).select("rollup_day"),
        ]
    every_day = set(distinct(reduce(DataFrame.union, mart_days).toDF("day"), "day")) - {None}
    return _Changed(
        orders, tokens, days, told, fact_orders, fact_lines, touches, ad_events, every_day
    )


def _orders(silver: DataFrame, changed: DataFrame, tokens: DataFrame) -> DataFrame:
    """Orders with a changed event, and those that presented a changed token."""
    own = changed.select("order_id")
    presented = silver.where(f.col("token_ids").isNotNull()).select(
        "order_id", f.explode("token_ids").alias("token_id")
    )
    by_token = presented.join(tokens, "token_id", "left_semi").select("order_id")
    return own.union(by_token).where(f.col("order_id").isNotNull()).distinct()


def _days_of_orders(orders: DataFrame) -> DataFrame:
    days = f.array("business_day", "revenue_day", business_day(f.col("paid_out_at")))
    return orders.select(f.explode(days))


# --- writing --------------------------------------------------------------------------------


def _write_facts(lake: Lake, found: _Changed) -> None:
    lake.replace_keys(found.touches, "ad_touches", found.tokens)
    lake.replace(found.ad_events, "fact_ad_event", list(found.silver_days))
    lake.replace_keys(found.fact_orders, "fact_order", found.orders)
    lake.replace_keys(found.fact_lines, "fact_order_line", found.orders)
    owed = fact_attribution(
        found.events, found.fact_orders, found.fact_lines, lake.read("ad_touches")
    ).persist()
    lake.replace_keys(owed, "fact_attribution", found.orders)
    owed.unpersist()
    problems = recon_money(found.events, found.fact_orders)
    bucket = f.pmod(f.xxhash64("order_id"), f.lit(BUCKETS)).cast("int").alias("bucket")
    problems = problems.select("*", bucket).persist()
    lake.replace_keys(problems, "recon_money", found.orders)
    problems.unpersist()


def _write_marts(lake: Lake, days: set[date]) -> None:
    all_orders, all_lines = lake.read("fact_order"), lake.read("fact_order_line")
    ordered, earned = among("business_day", days), among("revenue_day", days)
    orders = all_orders.withColumn("paid_day", business_day(f.col("paid_out_at")))
    orders = orders.where(ordered | earned | among("paid_day", days)).drop("paid_day")
    lines = all_lines.where(ordered | earned)
    touches = lake.read("ad_touches")
    made = {
        "store_daily": marts.store_daily(orders, lines),
        "product_daily": marts.product_daily(lines),
        "category_daily": marts.category_daily(lines),
        "zip_daily": marts.zip_daily(orders),
        "ad_daily": ad_daily(
            touches.where(ordered),
            touches,
            lake.read("fact_ad_event").where(among("rollup_day", days)),
            lake.read("fact_attribution").where(earned),
            all_lines.where(earned),
        ),
    }
    for name, rows in made.items():
        lake.replace(rows.where(ordered), name, list(days))


def _write_summaries(lake: Lake) -> None:
    """What any order can change: the first purchase of a buyer makes other weeks' buyers new."""
    orders = lake.read("fact_order")
    lake.replace_all(marts.buyer_first_purchase(orders), "buyer_first_purchase")
    lake.replace_all(admin_weekly(orders, lake.read("buyer_first_purchase")), "admin_weekly")


def reconcile(lake: Lake, outbox: DataFrame | None, days: set[date | None] | None = None) -> None:
    """Count the hours of some days of silver, or of all, from both ends."""
    silver, raw = lake.read(SILVER), lake.read(RAW)
    if days is None:
        _count(lake, raw, silver, outbox, None)
        return
    known = {day for day in days if day is not None}
    if None in days:  # rows without a time stand in the hour of their entry
        timeless = silver.where(f.col("day").isNull())
        known |= set(distinct(timeless.select(utc_day(f.col("first_seen_at")).alias("d")), "d"))
    _count(lake, raw, silver, outbox, known)


def _count(
    lake: Lake, raw: DataFrame, silver: DataFrame, outbox: DataFrame | None, days: set[date] | None
) -> None:
    if days is not None:
        at = utc_day(f.coalesce(f.col("time"), f.col("entry_time")))
        raw = raw.withColumn("at_day", at).where(among("at_day", days))
        silver = silver.where(among("day", {*days, None}))
        if outbox is not None:
            outbox = outbox.withColumn("at_day", utc_day(f.col("time")))
            outbox = outbox.where(among("at_day", days))
    outbox = None if outbox is None else outbox.persist()
    made = {
        "recon_completeness": recon_completeness(raw, silver, outbox),
        "outbox_delivery": outbox_delivery(silver, outbox),
    }
    for name, rows in made.items():
        rows = rows.withColumn("day", utc_day(f.col("hour")))
        if days is None:
            lake.replace_all(rows, name)
        else:
            lake.replace(rows.where(among("day", days)), name, list(days))
    if outbox is not None:
        outbox.unpersist()
