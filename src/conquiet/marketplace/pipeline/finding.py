"""Finding: what has to be made again when days of silver have changed, and from which days.

Orders and tokens in those days are made again from all of their events. Where these are, and on
which business days an order or a touch stood until now, is read in `fact_order`, `ad_touches` and
`recon_money`: a few narrow columns of them, and never all of silver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from conquiet.marketplace.pipeline.ads import ad_touches, fact_ad_event
from conquiet.marketplace.pipeline.facts import fact_order, order_lives
from conquiet.marketplace.pipeline.lake import Lake
from conquiet.marketplace.pipeline.silver import events
from conquiet.marketplace.pipeline.tables import MARTS, SILVER

Days = set[date | None]
Pair = tuple[date | None, date | None]
Keep = Callable[[DataFrame], DataFrame]
_SPAN = ("first_day", "last_day")
_OF_ORDERS = ("fact_order", "fact_order_line", "fact_attribution")
_COUNTS_ON = ("business_day", "revenue_day", "paid_day")


@dataclass
class Before:
    """What the tables have of it: keys (None for all there are), the days of silver that hold the
    events, and the business days on which all that stands."""

    event_days: Days
    token_days: Days
    orders: DataFrame | None = None
    tokens: DataFrame | None = None
    stood: DataFrame | None = None
    order_days: Days = field(default_factory=set)
    touch_days: Days = field(default_factory=set)
    ad_event_days: Days = field(default_factory=set)
    mart_days: Days = field(default_factory=set)


@dataclass
class Found:
    """What has to be made again: keys, rows that were made of them, and the business days on which
    they stand or stood."""

    orders: DataFrame | None
    tokens: DataFrame | None
    buyers: DataFrame | None
    lives: DataFrame
    touches: DataFrame
    ad_events: DataFrame
    order_days: Days
    touch_days: Days
    ad_event_days: Days
    mart_days: set[date]


def find(lake: Lake, changed: Days, wanted: Collection[str], keep: Keep) -> Found:
    """What follows from changed days of silver for the tables that are wanted.

    `keep` is for frames that are used again.
    """
    there = lake.days(SILVER)
    if there <= changed or not _tells_days(lake, wanted):
        before = _everything(lake, there)
    else:
        before = _before(lake, changed, there, wanted, keep)
    told = events(lake.read(SILVER, before.event_days))
    seen = lake.read(SILVER, before.token_days)
    if before.orders is not None:
        told = told.join(before.orders, "order_id", "left_semi")
    if before.tokens is not None:
        seen = seen.join(before.tokens, "token_id", "left_semi")
    rows = events(lake.read(SILVER, there if before.orders is None else changed & there))
    lives, touches = keep(order_lives(told)), keep(ad_touches(seen))
    return _found(before, changed, wanted, lives, touches, keep(fact_ad_event(rows)))


def _found(
    before: Before,
    changed: Days,
    wanted: Collection[str],
    lives: DataFrame,
    touches: DataFrame,
    ad_events: DataFrame,
) -> Found:
    orders = fact_order(lives)
    frames = {
        "fact_order": _days_of_orders(orders),
        "order": orders.select("business_day"),
        "ad_touches": touches.select("business_day"),
        "fact_ad_event": ad_events.select("rollup_day"),
    }
    chosen = {*wanted, "order"} if "fact_order" in wanted else wanted
    now = surveyed({name: frame for name, frame in frames.items() if name in chosen})
    days = {name: _values(now.get(name, ())) for name in frames}
    order_days = before.order_days | days.pop("order")
    touch_days = before.touch_days | days["ad_touches"]
    mart_days = before.mart_days.union(*days.values())
    buyers = before.stood
    if buyers is not None:
        buyers = buyers.select("buyer_store_id").union(orders.select("buyer_store_id")).distinct()
    return Found(
        before.orders,
        before.tokens,
        buyers,
        lives,
        touches,
        ad_events,
        order_days,
        touch_days,
        before.ad_event_days | changed,
        {day for day in mart_days if day is not None},
    )


# --- as it was ----------------------------------------------------------------------------------


def _tells_days(lake: Lake, wanted: Collection[str]) -> bool:
    """Whether the tables that are kept up to silver tell in which of its days the events are."""
    names = [name for name in ("fact_order", "ad_touches", "recon_money") if name in wanted]
    return all(lake.has(name) and _SPAN[0] in lake.read(name).columns for name in names)


def _everything(lake: Lake, there: Days) -> Before:
    return Before(
        there,
        there,
        order_days=_days(lake, _OF_ORDERS),
        touch_days=lake.days("ad_touches"),
        ad_event_days=lake.days("fact_ad_event"),
        mart_days=_days(lake, MARTS),
    )


def _days(lake: Lake, names: Iterable[str]) -> Days:
    """Of several tables: one that was left out for a while may have days that others lack."""
    return set[date | None]().union(*(lake.days(name) for name in names))


def _before(lake: Lake, changed: Days, there: Days, wanted: Collection[str], keep: Keep) -> Before:
    rows = lake.read(SILVER, changed & there)
    tokens = keep(_present(rows, "token_id").distinct())
    own = _present(rows, "order_id")
    frames: dict[str, DataFrame] = {}
    stood = None
    if "fact_order" in wanted:
        old = lake.read("fact_order")
        presented = old.select("order_id", f.explode("token_ids").alias("token_id"))
        own = own.union(presented.join(tokens, "token_id", "left_semi").select("order_id"))
        orders = keep(own.distinct())
        narrow = old.select("order_id", "buyer_store_id", *_COUNTS_ON, *_SPAN)
        stood = keep(narrow.join(orders, "order_id", "left_semi"))
        frames["order"] = stood.select("business_day")
        frames["order_mart"] = _days_of_orders(stood)
        frames["order_span"] = stood.select(*_SPAN)
    else:
        orders = keep(own.distinct())
    if "recon_money" in wanted:  # orders without their order_created are nowhere else
        lost = lake.read("recon_money").where(f.col("problem") == "no_order_created")
        frames["lost_span"] = lost.join(orders, "order_id", "left_semi").select(*_SPAN)
    if "ad_touches" in wanted:
        touches = lake.read("ad_touches")
        touched = touches.join(tokens, "token_id", "left_semi")
        frames["touch"], frames["touch_span"] = (
            touched.select("business_day"),
            touched.select(*_SPAN),
        )
        impressions = tokens.withColumnRenamed("token_id", "impression_token_id")
        clicks = touches.join(impressions, "impression_token_id", "left_semi")
        frames["click"] = clicks.select("business_day")
    if "fact_ad_event" in wanted:
        frames["ad"] = lake.read("fact_ad_event", changed).select("rollup_day")
    found = surveyed(frames)
    knows_orders = {"fact_order", "recon_money"} <= set(wanted)
    spans = found["order_span"] | found["lost_span"] if knows_orders else {(None, None)}
    marts = (
        _values(found[name]) for name in ("order_mart", "touch", "click", "ad") if name in found
    )
    return Before(
        changed & there | within(spans, there),
        changed & there | within(found.get("touch_span", ()), there),
        orders,
        tokens,
        stood,
        _values(found.get("order", ())),
        _values(found.get("touch", ())),
        mart_days=set[date | None]().union(*marts),
    )


def _present(rows: DataFrame, name: str) -> DataFrame:
    return rows.select(name).where(f.col(name).isNotNull())


def _days_of_orders(orders: DataFrame) -> DataFrame:
    """The business days on which an order counts."""
    return orders.select(f.explode(f.array(*_COUNTS_ON)))


# --- days of several frames ---------------------------------------------------------------------


def surveyed(frames: Mapping[str, DataFrame]) -> dict[str, set[Pair]]:
    """The different rows of frames with one or two columns of days, by a single job."""
    nothing = f.lit(None).cast("date")
    parts = []
    for name, frame in frames.items():
        first, second = [*(f.col(one) for one in frame.columns), nothing][:2]
        parts.append(frame.select(f.lit(name).alias("name"), first.alias("a"), second.alias("b")))
    found: dict[str, set[Pair]] = {name: set() for name in frames}
    if parts:
        for row in reduce(DataFrame.union, parts).distinct().collect():
            found[row[0]].add((row[1], row[2]))
    return found


def _values(pairs: Iterable[Pair]) -> Days:
    return {first for first, _ in pairs}


def within(spans: Iterable[Pair], there: Days) -> Days:
    """The days that lie in one of the spans; all of them, if one is not known."""
    wanted: Days = {None}  # events without a time belong to no span
    for first, last in spans:
        if first is None or last is None:
            return set(there)
        wanted |= {first + timedelta(days=number) for number in range((last - first).days + 1)}
    return wanted & there
