"""Refresh: facts, marts and reconciliation follow silver, for the orders, tokens and days in it
that changed since the last refresh.

Every table is a function of silver (and of bronze and the outbox, for reconciliation), and is
written by key or by day, the same rows however often. So a refresh that was killed is done
again from its beginning, and what it had written is written over by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from conquiet.marketplace.pipeline.recon import (
    hourly_counts,
    lost_ids,
    recon_completeness,
    recon_money,
)
from conquiet.marketplace.pipeline.silver import events
from conquiet.marketplace.pipeline.state import State
from conquiet.marketplace.pipeline.tables import MARTS, RAW, SILVER, STORED, with_sources
from conquiet.marketplace.pipeline.weekly import admin_weekly

BUCKETS = 16
"""Into how many files `recon_money` is grouped: some of its orders have no day."""


def refresh(
    lake: Lake, outbox: DataFrame | None = None, tables: Collection[str] = tuple(STORED)
) -> int:
    """Bring tables, and those that they are made of, up to silver; how many days had changed."""
    wanted = with_sources(tables)
    state = State.at(lake.root)
    state.choose(wanted)
    files = set(lake.files(SILVER))
    changed = state.changed_days(files)
    if not wanted or not (changed or state.days):
        return 0
    with _Kept() as kept:
        found = _find(lake, changed, kept.keep, is_anew=not state.files)
        state.days |= _mart_days(lake, found, wanted)
        state.write()
        _write_facts(lake, found, wanted)
        _write_marts(lake, state.days, wanted)
        _write_summaries(lake, wanted)
        reconcile(lake, outbox, changed, wanted)
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
    is_anew: bool
    """Whether that is everything, and nothing of what is there may stay."""

    def keys(self, of: DataFrame) -> DataFrame | None:
        return None if self.is_anew else of


def _find(
    lake: Lake,
    days: set[date | None],
    keep: Callable[[DataFrame], DataFrame],
    *,
    is_anew: bool,
) -> _Changed:
    silver = lake.read(SILVER)
    changed = silver.where(among("day", days))
    tokens = keep(changed.select("token_id").where(f.col("token_id").isNotNull()).distinct())
    orders = keep(_orders(silver, changed, tokens))
    told = keep(events(silver).join(orders, "order_id", "left_semi"))
    fact_orders = keep(fact_order(told))
    fact_lines = keep(fact_order_line(told, fact_orders))
    touches = keep(ad_touches(silver.join(tokens, "token_id", "left_semi")))
    ad_events = keep(fact_ad_event(events(changed)))
    return _Changed(
        orders, tokens, days, told, fact_orders, fact_lines, touches, ad_events, is_anew
    )


def _mart_days(lake: Lake, found: _Changed, wanted: Collection[str]) -> set[date]:
    """The days of the marts on which stands what changed, or stood until now."""
    chosen = [name for name in MARTS if name in wanted]
    if not chosen:
        return set()
    days = [_days_of_orders(found.fact_orders)]
    if "ad_daily" in chosen:
        days += [found.touches.select("business_day"), found.ad_events.select("rollup_day")]
    standing: set[date] = set()
    if found.is_anew:
        standing = standing.union(*(lake.days(name) for name in chosen))
    else:
        old_orders = lake.read("fact_order").join(found.orders, "order_id", "left_semi")
        days += [_days_of_orders(old_orders), *_old_ad_days(lake, found, chosen)]
    return standing | set(distinct(reduce(DataFrame.union, days).toDF("day"), "day")) - {None}


def _old_ad_days(lake: Lake, found: _Changed, chosen: Collection[str]) -> list[DataFrame]:
    if "ad_daily" not in chosen:
        return []
    touches, tokens = lake.read("ad_touches"), found.tokens
    impressions = tokens.withColumnRenamed("token_id", "impression_token_id")
    rollups = lake.read("fact_ad_event").where(among("day", found.silver_days))
    return [
        touches.join(tokens, "token_id", "left_semi").select("business_day"),
        touches.join(impressions, "impression_token_id", "left_semi").select("business_day"),
        rollups.select("rollup_day"),
    ]


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


def _write_facts(lake: Lake, found: _Changed, wanted: Collection[str]) -> None:
    orders, tokens = found.keys(found.orders), found.keys(found.tokens)
    if "ad_touches" in wanted:
        lake.replace_keys(found.touches, "ad_touches", tokens)
    if "fact_ad_event" in wanted:
        if found.is_anew:
            lake.replace_all(found.ad_events, "fact_ad_event")
        else:
            lake.replace(found.ad_events, "fact_ad_event", list(found.silver_days))
    if "fact_order" in wanted:
        lake.replace_keys(found.fact_orders, "fact_order", orders)
    if "fact_order_line" in wanted:
        lake.replace_keys(found.fact_lines, "fact_order_line", orders)
    if "fact_attribution" in wanted:
        touches = lake.read("ad_touches")
        owed = fact_attribution(found.events, found.fact_orders, found.fact_lines, touches)
        with _Kept() as kept:
            lake.replace_keys(kept.keep(owed), "fact_attribution", orders)
    if "recon_money" in wanted:
        problems = recon_money(found.events, found.fact_orders)
        bucket = f.pmod(f.xxhash64("order_id"), f.lit(BUCKETS)).cast("int").alias("bucket")
        with _Kept() as kept:
            lake.replace_keys(kept.keep(problems.select("*", bucket)), "recon_money", orders)


def _write_marts(lake: Lake, days: set[date], wanted: Collection[str]) -> None:
    makers = {name: make for name, make in _makers(lake, days).items() if name in wanted}
    for name, make in makers.items():
        lake.replace(make().where(among("business_day", days)), name, list(days))


def _makers(lake: Lake, days: set[date]) -> dict[str, Callable[[], DataFrame]]:
    """How each mart is made, from the rows of the facts that stand on some days."""
    ordered, earned = among("business_day", days), among("revenue_day", days)

    def orders() -> DataFrame:
        found = lake.read("fact_order").withColumn("paid_day", business_day(f.col("paid_out_at")))
        return found.where(ordered | earned | among("paid_day", days)).drop("paid_day")

    def lines() -> DataFrame:
        return lake.read("fact_order_line").where(ordered | earned)

    def ads() -> DataFrame:
        touches = lake.read("ad_touches")
        return ad_daily(
            touches.where(ordered),
            touches,
            lake.read("fact_ad_event").where(among("rollup_day", days)),
            lake.read("fact_attribution").where(earned),
            lake.read("fact_order_line").where(earned),
        )

    return {
        "store_daily": lambda: marts.store_daily(orders(), lines()),
        "product_daily": lambda: marts.product_daily(lines()),
        "category_daily": lambda: marts.category_daily(lines()),
        "zip_daily": lambda: marts.zip_daily(orders()),
        "ad_daily": ads,
    }


def _write_summaries(lake: Lake, wanted: Collection[str]) -> None:
    """What any order can change: the first purchase of a buyer makes other weeks' buyers new."""
    if "buyer_first_purchase" in wanted:
        purchases = marts.buyer_first_purchase(lake.read("fact_order"))
        lake.replace_all(purchases, "buyer_first_purchase")
    if "admin_weekly" in wanted:
        weeks = admin_weekly(lake.read("fact_order"), lake.read("buyer_first_purchase"))
        lake.replace_all(weeks, "admin_weekly")


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
    silver, raw = lake.read(SILVER), lake.read(RAW)
    if days is None:
        _count(lake, raw, silver, outbox, None, names)
        return
    known = {day for day in days if day is not None}
    if None in days:  # rows without a time stand in the hour of their entry
        timeless = silver.where(f.col("day").isNull())
        known |= set(distinct(timeless.select(utc_day(f.col("first_seen_at")).alias("d")), "d"))
    _count(lake, raw, silver, outbox, known, names)


def _count(
    lake: Lake,
    raw: DataFrame,
    silver: DataFrame,
    outbox: DataFrame | None,
    days: set[date] | None,
    names: Collection[str],
) -> None:
    if days is not None:
        at = utc_day(f.coalesce(f.col("time"), f.col("entry_time")))
        raw = raw.withColumn("at_day", at).where(among("at_day", days))
        silver = silver.where(among("day", {*days, None}))
        if outbox is not None:
            outbox = outbox.withColumn("at_day", utc_day(f.col("time")))
            outbox = outbox.where(among("at_day", days))
    with _Kept() as kept:
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
    raw: DataFrame, silver: DataFrame, counts: DataFrame, days: set[date] | None, kept: _Kept
) -> DataFrame:
    """Names the lost events of hours that do not agree: these are few, and finding them costs."""
    if days is not None:  # others were not counted from both ends
        counts = counts.withColumn("day", utc_day(f.col("hour"))).where(among("day", days))
    counts = kept.keep(counts)
    wrong = counts.where(~f.col("agrees")).select(f.unix_seconds("hour").alias("at"))
    hours = distinct(wrong, "at")
    return recon_completeness(counts, lost_ids(raw, silver, hours) if hours else None)
