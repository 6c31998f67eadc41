"""Finding: what has to be made again when days of silver have changed, and from which days.

Orders and tokens in those days of which bronze has new entries are made again from all of their
events. Where these are, and on which business days an order or a touch stood until now, is read in
`fact_order`, `ad_touches` and `recon_money`: a few narrow columns of them, and never all of silver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from marketplace.pipeline.ads import ad_touches, fact_ad_event
from marketplace.pipeline.facts import fact_order, order_lives
from marketplace.pipeline.lake import Lake
from marketplace.pipeline.silver import delivery_id, events
from marketplace.pipeline.tables import MARTS, RAW, SILVER

Days = set[date | None]
Pair = tuple[date | None, date | None]
Keep = Callable[[DataFrame], DataFrame]
_SPAN = ("first_day", "last_day")
_OF_ORDERS = ("fact_order", "fact_order_line", "fact_attribution")
_BUSINESS_DAY: list[tuple[str, ...]] = [("business_day",)]
_COUNTS_ON = ("business_day", "revenue_day", "paid_day")
_COUNT_DAYS: list[tuple[str, ...]] = [(name,) for name in _COUNTS_ON]


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


def find(
    lake: Lake, changed: Days, raw: Collection[str], wanted: Collection[str], keep: Keep
) -> Found:
    """What follows from changed days of silver for the tables that are wanted.

    `raw` are the files of bronze that came with the changes, `keep` is for frames that are used
    again.
    """
    there = lake.days(SILVER)
    if there <= changed or not _tells_days(lake, wanted):
        before = _everything(lake, there)
    else:
        rows = lake.read(SILVER, changed & there).join(_new(lake, raw), "delivery_id", "left_semi")
        before = _before(lake, rows, changed, there, wanted, keep)
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
        "fact_order": days_in(orders, {"order": _BUSINESS_DAY, "fact_order": _COUNT_DAYS}),
        "ad_touches": days_in(touches, {"ad_touches": _BUSINESS_DAY}),
        "fact_ad_event": days_in(ad_events, {"fact_ad_event": [("rollup_day",)]}),
    }
    now = surveyed(*(frame for name, frame in frames.items() if name in wanted))
    days = {name: _values(now.get(name, ())) for name in (*frames, "order")}
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


def _new(lake: Lake, raw: Collection[str]) -> DataFrame:
    """What silver calls the events that have an entry in some files of bronze."""
    files = set(raw)
    return lake.read_files(RAW, files.__contains__).select(delivery_id().alias("delivery_id"))


def _before(
    lake: Lake,
    rows: DataFrame,
    changed: Days,
    there: Days,
    wanted: Collection[str],
    keep: Keep,
) -> Before:
    """`rows` are those of silver that changed, or may have."""
    tokens = keep(_present(rows, "token_id").distinct())
    own = _present(rows, "order_id")
    frames: list[DataFrame] = []
    stood = None
    if "fact_order" in wanted:
        old = lake.read("fact_order")
        presented = old.select("order_id", f.explode("token_ids").alias("token_id"))
        own = own.union(presented.join(tokens, "token_id", "left_semi").select("order_id"))
        orders = keep(own.distinct())
        narrow = old.select("order_id", "buyer_store_id", *_COUNTS_ON, *_SPAN)
        stood = keep(narrow.join(orders, "order_id", "left_semi"))
        counts = {"order": _BUSINESS_DAY, "order_mart": _COUNT_DAYS}
        frames.append(days_in(stood, {**counts, "order_span": [_SPAN]}))
    else:
        orders = keep(own.distinct())
    if "recon_money" in wanted:  # orders without their order_created are nowhere else
        lost = lake.read("recon_money").where(f.col("problem") == "no_order_created")
        lost = lost.join(orders, "order_id", "left_semi")
        frames.append(days_in(lost, {"lost_span": [_SPAN]}))
    if "ad_touches" in wanted:
        touches = lake.read("ad_touches")
        touched = touches.join(tokens, "token_id", "left_semi")
        frames.append(days_in(touched, {"touch": _BUSINESS_DAY, "touch_span": [_SPAN]}))
        impressions = tokens.withColumnRenamed("token_id", "impression_token_id")
        clicks = touches.join(impressions, "impression_token_id", "left_semi")
        frames.append(days_in(clicks, {"click": _BUSINESS_DAY}))
    if "fact_ad_event" in wanted:
        rollups = lake.read("fact_ad_event", changed)
        frames.append(days_in(rollups, {"ad": [("rollup_day",)]}))
    found = surveyed(*frames)
    knows_orders = {"fact_order", "recon_money"} <= set(wanted)
    spans = found["order_span"] | found["lost_span"] if knows_orders else {(None, None)}
    marts = (_values(found[name]) for name in ("order_mart", "touch", "click", "ad"))
    return Before(
        changed & there | within(spans, there),
        changed & there | within(found["touch_span"], there),
        orders,
        tokens,
        stood,
        _values(found["order"]),
        _values(found["touch"]),
        mart_days=set[date | None]().union(*marts),
    )


def _present(rows: DataFrame, name: str) -> DataFrame:
    return rows.select(name).where(f.col(name).isNotNull())


# --- days of several frames ---------------------------------------------------------------------


def days_in(frame: DataFrame, named: Mapping[str, Iterable[tuple[str, ...]]]) -> DataFrame:
    """Pairs of days in each row, by name, each from one or two columns: all in one pass."""
    nothing = f.lit(None).cast("date")
    pairs = []
    for name, places in named.items():
        for columns in places:
            first, second = [*(f.col(column) for column in columns), nothing][:2]
            pair = f.lit(name).alias("name"), first.alias("a"), second.alias("b")
            pairs.append(f.struct(*pair))
    return frame.select(f.inline(f.array(*pairs)))


def surveyed(*frames: DataFrame) -> dict[str, set[Pair]]:
    """The different pairs of days in frames of `days_in`, by name and by a single job."""
    found: dict[str, set[Pair]] = defaultdict(set)
    if frames:
        for name, first, second in reduce(DataFrame.union, frames).distinct().collect():
            found[name].add((first, second))
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
