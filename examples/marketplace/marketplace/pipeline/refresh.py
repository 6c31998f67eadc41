"""Refresh: facts, marts and reconciliation follow silver, for the orders, tokens and days in it
that changed since the last refresh.

Every table is a function of silver (and of bronze and the outbox, for reconciliation), and is
written by key or by day, the same rows however often. So a refresh that was killed is done
again from its beginning, and what it had written is written over by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from datetime import date, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from marketplace.pipeline import marts
from marketplace.pipeline.ad_marts import ad_daily
from marketplace.pipeline.attribution import fact_attribution
from marketplace.pipeline.counting import reconcile
from marketplace.pipeline.facts import fact_order, fact_order_line
from marketplace.pipeline.finding import Found, Pair, days_in, find, surveyed
from marketplace.pipeline.keeping import Kept
from marketplace.pipeline.lake import Lake, among
from marketplace.pipeline.recon import recon_money
from marketplace.pipeline.state import State
from marketplace.pipeline.tables import RAW, SILVER, STORED, with_sources
from marketplace.pipeline.weekly import admin_weekly

__all__ = ["reconcile", "refresh"]

BUCKETS = 16
"""Into how many files `recon_money` is grouped: some of its orders have no day."""
_AT_ONCE = 3
"""Tables that are written at the same time: while one is planned or committed, another is made."""

Write = Callable[[], None]


def refresh(
    lake: Lake, outbox: DataFrame | None = None, tables: Collection[str] = tuple(STORED)
) -> int:
    """Bring tables, and those that they are made of, up to silver; how many days had changed.

    Silver must have all that bronze has (`level`).
    """
    wanted = with_sources(tables)
    state = State.at(lake.root)
    state.choose(wanted)
    files, raw = set(lake.files(SILVER)), set(lake.files(RAW))
    changed = state.changed_days(files)
    if not wanted or not (changed or state.days):
        return 0
    lake.tell("looking for what changed")
    with Kept() as kept, ThreadPoolExecutor(_AT_ONCE) as pool:
        counted = pool.submit(reconcile, lake, outbox, changed, wanted)
        found = find(lake, changed, raw - state.raw, wanted, kept.keep)
        if state.days:
            # One was killed before: where and whose things were, the facts may not know any more.
            found.buyers = None
            found.order_days |= state.days
            found.touch_days |= state.days
        state.days |= found.mart_days
        state.write()
        _at_once(pool, _facts(lake, found), wanted)
        facts = Facts(lake, wanted)
        longest_first = {
            "buyer_first_purchase": lambda: _summarize(
                lake, facts, found.buyers, state.days, wanted
            ),
            **_attribution(lake, facts, found, state.days, wanted),
            **_marts(lake, facts, state.days),
        }
        _at_once(pool, longest_first, wanted)
        counted.result()
    state.files, state.raw, state.days = files, raw, set()
    state.write()
    return len(changed)


def _at_once(pool: Executor, writes: Mapping[str, Write], wanted: Collection[str]) -> None:
    """Make those that are wanted; what one fails with is raised when none is under way any more."""
    under_way = [pool.submit(write) for name, write in writes.items() if name in wanted]
    wait(under_way)
    for one in under_way:
        one.result()


# --- facts --------------------------------------------------------------------------------------


def _facts(lake: Lake, found: Found) -> dict[str, Write]:
    lives, orders, days = found.lives, found.orders, found.order_days

    def money() -> None:
        bucket = f.pmod(f.xxhash64("order_id"), f.lit(BUCKETS)).cast("int").alias("bucket")
        problems = recon_money(lives).select("*", bucket)
        lake.replace_keys(problems, "recon_money", orders, range(BUCKETS))

    return {
        "fact_order": lambda: lake.replace_keys(fact_order(lives), "fact_order", orders, days),
        "fact_order_line": lambda: lake.replace_keys(
            fact_order_line(lives), "fact_order_line", orders, days
        ),
        "ad_touches": lambda: lake.replace_keys(
            found.touches, "ad_touches", found.tokens, found.touch_days
        ),
        "fact_ad_event": lambda: lake.replace(
            found.ad_events, "fact_ad_event", list(found.ad_event_days)
        ),
        "recon_money": money,
    }


def _attribution(
    lake: Lake, facts: Facts, found: Found, days: set[date], wanted: Collection[str]
) -> dict[str, Write]:
    """And the mart that is made of it."""

    def write() -> None:
        touches, lives = lake.read("ad_touches"), found.lives
        owed = fact_attribution(fact_order(lives), fact_order_line(lives), touches)
        lake.replace_keys(owed, "fact_attribution", found.orders, found.order_days)
        if "ad_daily" in wanted:
            _make_ad_daily(lake, facts, days)

    return {"fact_attribution": write}


class Facts:
    """The facts of orders as they are now, by the days on which they count."""

    def __init__(self, lake: Lake, wanted: Collection[str]) -> None:
        self._lake = lake
        self._pairs: set[Pair] = set()
        if "fact_order" in wanted:
            pairs = [("business_day", day) for day in ("revenue_day", "paid_day")]
            found = surveyed(days_in(lake.read("fact_order"), {"order": pairs}))
            self._pairs = found["order"]

    def read(self, name: str, days: set[date]) -> DataFrame:
        """A table by the business day of orders: all that have an order which counts on one of
        the days."""
        on = {first for first, second in self._pairs if first in days or second in days}
        return self._lake.read(name, on)


# --- marts --------------------------------------------------------------------------------------


def _marts(lake: Lake, facts: Facts, days: set[date]) -> dict[str, Write]:
    ordered, earned = among("business_day", days), among("revenue_day", days)

    def orders() -> DataFrame:
        found = facts.read("fact_order", days)
        return found.where(ordered | earned | among("paid_day", days))

    def lines() -> DataFrame:
        return facts.read("fact_order_line", days).where(ordered | earned)

    makers: dict[str, Callable[[], DataFrame]] = {
        "store_daily": lambda: marts.store_daily(orders(), lines()),
        "product_daily": lambda: marts.product_daily(lines()),
        "category_daily": lambda: marts.category_daily(lines()),
        "zip_daily": lambda: marts.zip_daily(orders()),
    }

    def writing(name: str) -> Write:
        return lambda: lake.replace(makers[name]().where(ordered), name, list(days))

    return {name: writing(name) for name in makers}


def _make_ad_daily(lake: Lake, facts: Facts, days: set[date]) -> None:
    earned = among("revenue_day", days)
    rows = ad_daily(
        lake.read("ad_touches", days),
        lake.read("ad_touches"),
        lake.read("fact_ad_event").where(among("rollup_day", days)),
        facts.read("fact_attribution", days).where(earned),
        facts.read("fact_order_line", days).where(earned),
    )
    lake.replace(rows.where(among("business_day", days)), "ad_daily", list(days))


def _summarize(
    lake: Lake, facts: Facts, buyers: DataFrame | None, days: set[date], wanted: Collection[str]
) -> None:
    """Buyers of orders that changed (None: all), then weeks: those of the days, and those in which
    somebody became a new buyer, or is none any more."""
    orders = lake.read("fact_order")
    names = [name for name in ("buyer_first_purchase", "admin_weekly") if name in wanted]
    if buyers is None or not all(lake.has(name) for name in names):
        lake.replace_all(marts.buyer_first_purchase(orders), "buyer_first_purchase")
        weeks = None
    else:
        moved = _replace_buyers(lake, orders.join(buyers, "buyer_store_id", "left_semi"), buyers)
        weeks = {day - timedelta(days=day.weekday()) for day in {*days, *moved}}
    if "admin_weekly" not in wanted:
        return
    if weeks is None:
        lake.replace_all(admin_weekly(orders, lake.read("buyer_first_purchase")), "admin_weekly")
        return
    week_days = {
        week + timedelta(days=number)
        for week in weeks
        for number in range(min(7, (date.max - week).days + 1))
    }
    of_weeks = facts.read("fact_order", week_days)
    rows = admin_weekly(of_weeks, lake.read("buyer_first_purchase"))
    lake.replace(rows.where(among("week", weeks)), "admin_weekly", list(weeks))


def _replace_buyers(lake: Lake, orders: DataFrame, buyers: DataFrame) -> set[date]:
    """Make some buyers again, from all of their orders; the first days, before and after, of those
    whose first day is another one now."""
    old = lake.read("buyer_first_purchase").join(buyers, "buyer_store_id", "left_semi")
    before = old.select("buyer_store_id", f.col("first_day").alias("old"))
    with Kept() as kept:
        now = kept.keep(marts.buyer_first_purchase(orders))
        after = now.select("buyer_store_id", f.col("first_day").alias("now"))
        both = before.join(after, "buyer_store_id", "outer")
        pairs = surveyed(days_in(both, {"first_day": [("old", "now")]}))["first_day"]
        values = {day for pair in pairs for day in pair} - {None}
        lake.replace_keys(now, "buyer_first_purchase", buyers, values)
    return {day for old, new in pairs if old != new for day in (old, new) if day is not None}
