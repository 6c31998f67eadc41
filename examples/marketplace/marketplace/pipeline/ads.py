"""Ads: touches, once per token; and the events of their life, with their rollups."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from marketplace import catalog
from marketplace.pipeline.days import business_day
from marketplace.pipeline.payloads import data_schema
from marketplace.pipeline.telemetry import KINDS
from marketplace.pipeline.texts import text

_LIFE = (
    catalog.AdCreated,
    catalog.AdUpdated,
    catalog.AdPaused,
    catalog.AdActivated,
    catalog.AdExpired,
    catalog.AdDailyRollupReady,
)
AD_TYPES = (
    "ad_created",
    "ad_updated",
    "ad_paused",
    "ad_activated",
    "ad_expired",
    "ad_daily_rollup_ready",
)
_STATUS = {"ad_paused": "paused", "ad_activated": "active", "ad_expired": "expired"}


def ad_touches(silver: DataFrame) -> DataFrame:
    """One row per token: what the first event said, and the deliveries of all of them; beside
    the contract, the days of silver where its events are."""
    parsed = silver.where(f.col("kind") == "touch").withColumn(
        "said", f.from_json(f.col("data").cast("string"), data_schema(KINDS.values()))["data"]
    )
    touch = f.struct(
        f.when(f.col("type") == "ad_click", "click").otherwise("impression").alias("kind"),
        *(f.col("said")[name].alias(name) for name in ("ad_id", "vendor_store_id")),
        f.col("said")["buyer_store_id"].alias("buyer_store_id"),
        *(text(f.col("said")[name]).alias(name) for name in ("placement", "target_type")),
        f.col("said")["target_id"].alias("target_id"),
        f.when(f.col("type") == "ad_click", f.col("said")["impression_token_id"]).alias(
            "impression_token_id"
        ),
        "occurred_at",
        business_day(f.col("occurred_at")).alias("business_day"),
        "event_id",
    )
    found = parsed.groupBy("token_id").agg(
        f.min_by(touch, f.struct("occurred_at", "event_id")).alias("touch"),
        f.min("first_seen_at").alias("first_seen_at"),
        f.sum("delivery_count").alias("delivery_count"),
        *(f.min("day").alias("first_day"), f.max("day").alias("last_day")),
    )
    return found.select(
        *("token_id", "touch.*", "first_seen_at", "delivery_count", "first_day", "last_day")
    )


def fact_ad_event(events: DataFrame) -> DataFrame:
    """One row per event of an ad."""
    kind = f.col("event_type")
    parsed = events.where(kind.isin(*AD_TYPES)).withColumn(
        "said", f.from_json("payload", data_schema(_LIFE))["data"]
    )
    is_rollup = kind == "ad_daily_rollup_ready"

    def said(name: str, as_: str | None = None) -> Column:
        return f.col("said")[name].alias(as_ or name)

    def rolled(name: str) -> Column:
        return f.when(is_rollup, f.col("said")[name]).alias(name)

    status = f.when(kind == "ad_created", text(f.col("said")["status"]))
    for event_type, after in _STATUS.items():
        status = status.when(kind == event_type, after)
    return parsed.select(
        "event_id",
        "event_type",
        said("ad_id"),
        said("vendor_store_id"),
        f.col("moment").alias("happened_at"),
        business_day(f.col("moment")).alias("business_day"),
        status.alias("status"),
        *(text(f.col("said")[name]).alias(name) for name in ("from_status", "cause")),
        *(text(f.col("said")[name]).alias(name) for name in ("placement", "target_type")),
        said("target_id"),
        said("bid_cents_cpm"),
        said("daily_budget_cents"),
        f.when(is_rollup, f.col("said")["day"].cast("date")).alias("rollup_day"),
        *(rolled(name) for name in ("impressions", "clicks", "spend_micros", "rollup_revision")),
        "day",
    )
