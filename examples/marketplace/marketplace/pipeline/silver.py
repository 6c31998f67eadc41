"""Silver: one row per event id, from its first delivery, with what it says and why it is refused.

    kind=event     the domain's events                ─▶ the table `events`
    kind=touch     impressions and clicks             ─▶ `ad_touches`, once per token
    kind=refused   what could not be taken            ─▶ `events_quarantine`

All of it is one table, grouped by kind and by the day of the outbox row (the attribute `time`), so
that one commit moves all three, and a duplicate meets its event in the same day however late it is.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from conquiet.events.catalog import Catalog
from marketplace.catalog import CATALOG
from marketplace.pipeline.days import plausible, utc_day
from marketplace.pipeline.payloads import declarations, envelope_schema, moment
from marketplace.pipeline.refusal import is_telemetry, reason

DAY = "day"
KINDS = ("event", "touch", "refused")
PARTITION_BY = ("kind", DAY)
SORT_BY = ("delivery_id",)
COLUMNS = (
    "delivery_id",
    "event_id",
    "stream",
    "entry_id",
    "first_seen_at",
    "type",
    "version",
    "aggregate_type",
    "aggregate_id",
    "created_at",
    "occurred_at",
    "moment",
    "actor_type",
    "actor_id",
    "actor_store_id",
    "order_id",
    "token_id",
    "token_ids",
    "reason",
    "data",
    "delivery_count",
    "kind",
    "day",
)
_MOMENTS = (
    "changed_at",
    "canceled_at",
    "expired_at",
    "released_at",
    "collected_at",
    "settled_at",
    "paid_out_at",
    "uploaded_at",
)
_STRICT = {"allowSingleQuotes": "false"}


def silver(raw: DataFrame, catalog: Catalog = CATALOG) -> DataFrame:
    """Entries of the log as rows of silver."""
    return merged(deliveries(raw, catalog))


def merged(*parts: DataFrame) -> DataFrame:
    """Rows of silver from several batches as one: the first delivery stays, deliveries add up.

    Which order or token it is about stays known, even if an earlier delivery turns up that cannot
    be read: what was made of the later one must be made again.

    Deliveries meet by their day, in which files are written too: so rows are moved and put into an
    order once. An aggregation would do it twice, since a row is no number.
    """
    everything = reduce(DataFrame.unionByName, parts).repartition(DAY)
    same = Window.partitionBy(DAY, "delivery_id")
    in_order = same.orderBy("first_seen_at", _sequence(), "entry_id", "stream")
    all_of_them = in_order.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    together = {
        "delivery_count": f.sum("delivery_count"),
        "order_id": f.max("order_id"),
        "token_id": f.max("token_id"),
    }
    counted = everything.select(
        *(name for name in COLUMNS if name not in together),
        *(column.over(all_of_them).alias(name) for name, column in together.items()),
        f.row_number().over(in_order).alias("number"),
    )
    return counted.where(f.col("number") == 1).select(*COLUMNS)


def deliveries(raw: DataFrame, catalog: Catalog = CATALOG) -> DataFrame:
    """Entries of the log with what they say: rows of silver, but an event may be there twice."""
    return _checked(_entries(raw), catalog).select(*COLUMNS)


def _sequence() -> Column:
    """The count of an entry's id: it is a number, and 10 comes after 9."""
    return f.split_part("entry_id", f.lit("-"), f.lit(2)).try_cast("bigint")


def day_of_entry() -> Column:
    """The day of silver that an entry of the log belongs to; null if it has no time."""
    return utc_day(plausible(f.col("time")))


def delivery_id() -> Column:
    """What deliveries of one event share: its id, or the entry's place if it has none."""
    return f.coalesce(f.nullif("event_id", f.lit("")), f.concat_ws("/", "stream", "entry_id"))


def _entries(raw: DataFrame) -> DataFrame:
    return raw.select(
        delivery_id().alias("delivery_id"),
        "event_id",
        "stream",
        "entry_id",
        f.col("entry_time").alias("first_seen_at"),
        "type",
        f.col("attributes")["aggregatetype"].alias("aggregate_type"),
        f.col("subject").alias("aggregate_id"),
        plausible(f.col("time")).alias("created_at"),
        "data",
        f.col("_malformed").alias("malformed"),
        f.lit(1).cast("bigint").alias("delivery_count"),
        day_of_entry().alias(DAY),
    )


def _checked(entries: DataFrame, catalog: Catalog) -> DataFrame:
    text = f.when(f.is_valid_utf8(f.col("data").cast("string")), f.col("data").cast("string"))
    parsed = entries.withColumn("text", text).withColumn(
        "envelope", f.from_json("text", envelope_schema(catalog), _STRICT)
    )
    judged = parsed.withColumn("reason", reason(catalog))
    envelope = f.col("envelope")
    data, actor = envelope["data"], envelope["actor"]
    taken = f.col("reason").isNull()
    # Of JSON that was cut off, Spark gives what came before the cut.
    is_readable = ~f.coalesce(f.col("reason"), f.lit("")).isin("malformed_entry", "broken_json")
    occurred = f.when(taken, moment(envelope["occurredAt"]))
    tokens = f.from_json(data["attribution"], "token_ids ARRAY<STRING>")["token_ids"]
    return judged.select(
        *entries.columns,
        "reason",
        f.when(is_readable, envelope["version"].try_cast("int")).alias("version"),
        occurred.alias("occurred_at"),
        f.when(taken, f.coalesce(_own_moment(catalog, data), occurred)).alias("moment"),
        f.when(taken, actor["type"]).alias("actor_type"),
        f.when(taken, actor["id"]).alias("actor_id"),
        f.when(taken, actor["storeId"]).alias("actor_store_id"),
        data["order_id"].alias("order_id"),
        data["token_id"].alias("token_id"),
        f.when(taken & (f.col("type") == "order_created"), tokens).alias("token_ids"),
        _kind().alias("kind"),
    )


def _kind() -> Column:
    found = f.when(f.col("reason").isNotNull(), "refused")
    return found.when(is_telemetry(f.col("stream")), "touch").otherwise("event")


def _own_moment(catalog: Catalog, data: Column) -> Column:
    """The time that an event's own data has, for the types that have one."""
    found = f.when(f.lit(False), f.lit(None).cast("timestamp"))
    for one in declarations(catalog):
        for name in _MOMENTS:
            if name in one.data.__struct_fields__:
                found = found.when(f.col("type") == str(one.event_type), moment(data[name]))
                break
    return found


# --- the tables of the contract ---------------------------------------------------------------


def events(rows: DataFrame) -> DataFrame:
    """The table `events`, with the day that it is grouped by."""
    return rows.where(f.col("kind") == "event").select(
        "event_id",
        f.col("type").alias("event_type"),
        "version",
        "aggregate_type",
        "aggregate_id",
        "occurred_at",
        "created_at",
        "actor_type",
        "actor_id",
        "actor_store_id",
        f.col("data").cast("string").alias("payload"),
        "first_seen_at",
        "delivery_count",
        "moment",
        "order_id",
        "token_ids",
        "day",
    )


def events_quarantine(rows: DataFrame) -> DataFrame:
    """The table `events_quarantine`."""
    return rows.where(f.col("kind") == "refused").select(
        f.nullif("event_id", f.lit("")).alias("event_id"),
        "stream",
        "entry_id",
        f.col("type").alias("event_type"),
        "version",
        "reason",
        "created_at",
        "data",
        "first_seen_at",
        "delivery_count",
        "day",
    )
