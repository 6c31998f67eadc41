"""Facts of orders: an accumulating snapshot per order, and one row per line."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from marketplace import catalog
from marketplace.pipeline.days import business_day
from marketplace.pipeline.payloads import data_schema
from marketplace.pipeline.texts import text

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
MONEY = ("order_created", *COLLECTIONS, "vendor_payout_recorded")
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


def order_lives(events: DataFrame) -> DataFrame:
    """One row per order that any event is about, with all that its events say.

    Everything about orders is taken from these rows: events meet by their order once.
    """
    told = events.where(f.col("order_id").isNotNull()).select(
        *("order_id", "event_id", "event_type", "moment", "token_ids", "day"),
        f.from_json("payload", data_schema(_STRUCTS))["data"].alias("said"),
    )
    return _with_money(_with_state(_with_lines(_gathered(told))))


def fact_order(lives: DataFrame) -> DataFrame:
    """One row per order that was created; beside the contract, how to find its events again."""
    return lives.where(f.col("created_at").isNotNull()).select(
        *("order_id", "checkout_group_id", "buyer_store_id", "vendor_store_id", "order_number"),
        *("currency", "payment_method", "postal_code"),
        f.size("lines").cast("bigint").alias("lines"),
        *("created_at", "decided_at"),
        *("decision", *_TIMES, "canceled_at", "expired_at", "released_at", "collected_at"),
        *("paid_out_at", "subtotal_cents", "discounts_cents", "tax_cents", "transport_fee_cents"),
        *("created_cents", "final_cents", "collected_cents", "paid_cents", "state"),
        *("revenue_cents", "business_day", "revenue_day"),
        business_day(f.col("paid_out_at")).alias("paid_day"),
        *("token_ids", "first_day", "last_day"),
    )


def fact_order_line(lives: DataFrame) -> DataFrame:
    """One row per line of an order in `fact_order`."""
    of_order = ("order_id", "buyer_store_id", "vendor_store_id", "created_at", "collected_at")
    lines = lives.where(f.col("created_at").isNotNull()).select(
        *(*of_order, "business_day", "revenue_day"),
        f.col("state").alias("order_state"),
        f.inline("lines"),
    )
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


def _first(condition: Column, *values: Column | str) -> Column:
    """Of the events that meet a condition, the first by (moment, event id), with these values."""
    return f.min(f.when(condition, f.struct("moment", "event_id", *values)))


def _gathered(told: DataFrame) -> DataFrame:
    """The events of each order, by what they are about."""
    kind, said = f.col("event_type"), f.col("said")
    to, cents = said["to_status"], said["amount_cents"]
    is_change, is_line = kind == "order_state_changed", kind == "line_item_state_changed"
    line = f.struct(said["line_item_id"].alias("id"), "moment", "event_id", to.alias("to"))
    return told.groupBy("order_id").agg(
        _first(
            kind == "order_created",
            *(said[name].alias(name) for name in _ORDER),
            "token_ids",
        ).alias("created"),
        f.collect_list(f.when(is_line, line)).alias("line_changes"),
        _first(is_change & to.isin(*DECISIONS), to.alias("to")).alias("decided"),
        *(
            f.min(f.when(is_change & (to == status), f.col("moment"))).alias(name)
            for name, status in _TIMES.items()
        ),
        f.min(f.when(kind == "order_canceled", f.col("moment"))).alias("canceled_at"),
        f.min(f.when(kind == "order_expired", f.col("moment"))).alias("expired_at"),
        f.max(f.when(kind == "reservation_released", f.col("moment"))).alias("released_at"),
        _first(kind.isin(*COLLECTIONS), cents.alias("cents")).alias("collected"),
        _first(kind == "vendor_payout_recorded", cents.alias("cents")).alias("paid"),
        f.collect_set(f.when(kind.isin(*COLLECTIONS), cents)).alias("amounts"),
        f.collect_set(f.when(kind.isin(*MONEY), said["currency"])).alias("currencies"),
        f.collect_list("event_id").alias("event_ids"),
        f.collect_list(f.when(kind.isin(*MONEY), f.col("event_id"))).alias("money_ids"),
        f.min("day").alias("first_day"),
        f.max("day").alias("last_day"),
    )


def _with_lines(orders: DataFrame) -> DataFrame:
    """The lines of created orders, with the latest status that each was given."""
    created = f.col("created")

    def decided(line: Column) -> Column:
        last = f.array_max(
            f.filter("line_changes", lambda change: change["id"] == line["line_item_id"])
        )
        names = ("line_item_id", "product_id", "qty", "unit_price_cents", "discount_cents")
        return f.struct(
            *(line[name].alias(name) for name in (*names, "line_total_cents")),
            *(text(line[name]).alias(name) for name in ("title", "category", "unit")),
            text(f.coalesce(last["to"], line["status"])).alias("status"),
            last["moment"].alias("decided_at"),
        )

    return orders.select(
        *(name for name in orders.columns if name not in ("created", "line_changes")),
        *(created[name].alias(name) for name in _ORDER if name not in ("ship_to", "lines")),
        created["moment"].alias("created_at"),
        created["token_ids"].alias("token_ids"),
        text(created["ship_to"]["postal_code"]).alias("postal_code"),
        created["total_cents"].alias("created_cents"),
        f.transform(created["lines"], decided).alias("lines"),
        f.col("decided")["moment"].alias("decided_at"),
        f.col("decided")["to"].alias("decision"),
        f.col("collected")["moment"].alias("collected_at"),
        f.col("paid")["moment"].alias("paid_out_at"),
    )


def _with_state(orders: DataFrame) -> DataFrame:
    state = f.when(f.col("canceled_at").isNotNull(), "canceled")
    state = state.when(f.col("expired_at").isNotNull(), "expired")
    state = state.when(f.col("decision") == "rejected", "rejected")
    for name, status in _FURTHEST:
        state = state.when(f.col(name).isNotNull(), status)
    state = state.otherwise(f.coalesce(f.col("decision"), f.lit("created_pending")))
    return orders.withColumn("state", state)


def _with_money(orders: DataFrame) -> DataFrame:
    left = f.filter("lines", lambda line: line["status"] != "rejected")
    lines = f.aggregate(
        left, f.lit(0).cast("bigint"), lambda sum_, line: sum_ + line["line_total_cents"]
    )
    fees = f.col("tax_cents") + f.col("transport_fee_cents")
    final = f.when(~is_lost() & (f.size(left) > 0), lines + fees)
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
