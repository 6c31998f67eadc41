"""Facts of orders: an accumulating snapshot per order, and one row per line."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from conquiet.marketplace import catalog
from conquiet.marketplace.pipeline.days import business_day
from conquiet.marketplace.pipeline.payloads import data_schema
from conquiet.marketplace.pipeline.texts import text

LOST = ("canceled", "expired", "rejected")
DECISIONS = ("accepted", "partially_accepted", "rejected")
COLLECTIONS = ("cash_collected", "payment_settled")
_STRUCTS = (
    catalog.OrderCreated,
    catalog.OrderStateChanged,
    catalog.LineItemStateChanged,
    catalog.OrderCanceled,
    catalog.OrderExpired,
    catalog.ReservationReleased,
    catalog.CashCollected,
    catalog.PaymentSettled,
    catalog.VendorPayoutRecorded,
)
_ORDER = (
    *("checkout_group_id", "buyer_store_id", "vendor_store_id", "order_number", "currency"),
    *("payment_method", "subtotal_cents", "discounts_cents", "tax_cents", "transport_fee_cents"),
    *("total_cents", "ship_to", "lines"),
)
_TIMES = {
    "ready_at": "ready_for_dispatch",
    "in_transit_at": "in_transit",
    "delivered_at": "delivered",
    "closed_at": "closed",
}
_FURTHEST = (
    ("closed_at", "closed"),
    ("delivered_at", "delivered"),
    ("in_transit_at", "in_transit"),
    ("ready_at", "ready_for_dispatch"),
)


def order_events(events: DataFrame) -> DataFrame:
    """The events that are about an order, with what they say in `said`."""
    return events.where(f.col("order_id").isNotNull()).select(
        "order_id",
        "event_id",
        "event_type",
        "moment",
        f.from_json("payload", data_schema(_STRUCTS))["data"].alias("said"),
    )


def fact_order(events: DataFrame) -> DataFrame:
    """One row per order that was created."""
    told = order_events(events)
    orders = _orders(told).join(_line_totals(_lines(told)), "order_id", "left")
    return _with_money(_with_state(orders)).select(
        *("order_id", "checkout_group_id", "buyer_store_id", "vendor_store_id", "order_number"),
        *("currency", "payment_method", "postal_code", "lines", "created_at", "decided_at"),
        *("decision", *_TIMES, "canceled_at", "expired_at", "released_at", "collected_at"),
        *("paid_out_at", "subtotal_cents", "discounts_cents", "tax_cents", "transport_fee_cents"),
        *("created_cents", "final_cents", "collected_cents", "paid_cents", "state"),
        *("revenue_cents", "business_day", "revenue_day"),
    )


def fact_order_line(events: DataFrame, orders: DataFrame) -> DataFrame:
    """One row per line of an order in `fact_order`."""
    of = orders.select(
        *("order_id", "buyer_store_id", "vendor_store_id", "created_at"),
        *("collected_at", "business_day", "revenue_day"),
        f.col("state").alias("order_state"),
    )
    lines = _lines(order_events(events)).join(of, "order_id")
    final = f.when(is_live(), f.col("line_total_cents")).otherwise(0)
    revenue = f.when(f.col("collected_at").isNotNull(), final).otherwise(0)
    return lines.select(
        *("line_item_id", "order_id", "buyer_store_id", "vendor_store_id", "product_id"),
        *("title", "category", "unit", "qty", "unit_price_cents", "discount_cents"),
        *("line_total_cents", "status", "decided_at", "order_state", "created_at"),
        final.alias("final_cents"),
        revenue.alias("revenue_cents"),
        *("business_day", "revenue_day"),
    )


def is_lost(state: str = "state") -> Column:
    return f.col(state).isin(*LOST)


def is_live(status: str = "status", state: str = "order_state") -> Column:
    """Of a line: not rejected, of an order that is not lost."""
    return (f.col(status) != "rejected") & ~is_lost(state)


# --- parts --------------------------------------------------------------------------------------


def _first(condition: Column, *values: Column) -> Column:
    """Of the events that meet a condition, the first by (moment, event id), with these values."""
    return f.min(f.when(condition, f.struct("moment", "event_id", *values)))


def _created(told: DataFrame) -> DataFrame:
    """What the first `order_created` of each order says."""
    order = f.struct("moment", *(f.col("said")[name].alias(name) for name in _ORDER))
    created = told.where(f.col("event_type") == "order_created").groupBy("order_id")
    found = created.agg(f.min_by(order, f.struct("moment", "event_id")).alias("order"))
    return found.select("order_id", "order.*")


def _orders(told: DataFrame) -> DataFrame:
    kind, to = f.col("event_type"), f.col("said")["to_status"]
    amount = f.col("said")["amount_cents"].alias("cents")
    is_change = kind == "order_state_changed"
    life = told.groupBy("order_id").agg(
        _first(is_change & to.isin(*DECISIONS), to.alias("to")).alias("decided"),
        *(
            f.min(f.when(is_change & (to == status), f.col("moment"))).alias(name)
            for name, status in _TIMES.items()
        ),
        f.min(f.when(kind == "order_canceled", f.col("moment"))).alias("canceled_at"),
        f.min(f.when(kind == "order_expired", f.col("moment"))).alias("expired_at"),
        f.max(f.when(kind == "reservation_released", f.col("moment"))).alias("released_at"),
        _first(kind.isin(*COLLECTIONS), amount).alias("collected"),
        _first(kind == "vendor_payout_recorded", amount).alias("paid"),
    )
    created = _created(told).select(
        "*",
        f.col("moment").alias("created_at"),
        text(f.col("ship_to")["postal_code"]).alias("postal_code"),
        f.col("total_cents").alias("created_cents"),
        f.size("lines").cast("bigint").alias("line_count"),
    )
    return created.join(life, "order_id").select(
        *(name for name in (*created.columns, *life.columns[1:]) if name != "lines"),
        f.col("line_count").alias("lines"),
        f.col("decided")["moment"].alias("decided_at"),
        f.col("decided")["to"].alias("decision"),
        f.col("collected")["moment"].alias("collected_at"),
        f.col("paid")["moment"].alias("paid_out_at"),
    )


def _lines(told: DataFrame) -> DataFrame:
    """The lines of created orders, with the latest status that each was given."""
    lines = _created(told).select("order_id", f.explode("lines").alias("line"))
    lines = lines.select("order_id", "line.*").withColumnRenamed("status", "first_status")
    is_change = f.col("event_type") == "line_item_state_changed"
    changes = told.where(is_change).groupBy(
        "order_id", f.col("said")["line_item_id"].alias("line_item_id")
    )
    latest = changes.agg(
        f.max(f.struct("moment", "event_id", f.col("said")["to_status"].alias("to"))).alias("last")
    )
    found = lines.join(latest, ["order_id", "line_item_id"], "left")
    return found.select(
        *("order_id", "line_item_id", "product_id", "qty", "unit_price_cents"),
        *("discount_cents", "line_total_cents"),
        *(text(f.col(name)).alias(name) for name in ("title", "category", "unit")),
        text(f.coalesce(f.col("last")["to"], f.col("first_status"))).alias("status"),
        f.col("last")["moment"].alias("decided_at"),
    )


def _line_totals(lines: DataFrame) -> DataFrame:
    left = lines.where(f.col("status") != "rejected").groupBy("order_id")
    return left.agg(f.sum("line_total_cents").alias("left_cents"))


def _with_state(orders: DataFrame) -> DataFrame:
    state = f.when(f.col("canceled_at").isNotNull(), "canceled")
    state = state.when(f.col("expired_at").isNotNull(), "expired")
    state = state.when(f.col("decision") == "rejected", "rejected")
    for name, status in _FURTHEST:
        state = state.when(f.col(name).isNotNull(), status)
    state = state.otherwise(f.coalesce(f.col("decision"), f.lit("created_pending")))
    return orders.withColumn("state", state)


def _with_money(orders: DataFrame) -> DataFrame:
    fees = f.col("tax_cents") + f.col("transport_fee_cents")
    final = f.when(~is_lost() & f.col("left_cents").isNotNull(), f.col("left_cents") + fees)
    collected = f.coalesce(f.col("collected")["cents"], f.lit(0))
    earned_at = f.when(~is_lost(), f.col("collected_at"))
    return orders.select(
        *orders.columns,
        f.coalesce(final, f.lit(0)).alias("final_cents"),
        collected.alias("collected_cents"),
        f.coalesce(f.col("paid")["cents"], f.lit(0)).alias("paid_cents"),
        f.when(is_lost(), 0).otherwise(collected).alias("revenue_cents"),
        business_day(f.col("created_at")).alias("business_day"),
        business_day(earned_at).alias("revenue_day"),
    )
