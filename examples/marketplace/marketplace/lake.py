"""The lake of the marketplace: its rules, its fact, and its tables in SQL.

    log ─▶ events, a typed table per event type, events_quarantine
             ├─▶ Order ─▶ fact_order, fact_order_line, recon_money ─▶ daily marts, buyers, weeks
             └─▶ ad_touches, fact_ad_event ─▶ fact_attribution ─▶ ad_daily

docs/marketplace.md has the contract of every table.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec

from conquiet.lake import Event, Pipeline
from marketplace.catalog import (
    CATALOG,
    CashCollected,
    Line,
    LineItemStateChanged,
    OrderCanceled,
    OrderCreated,
    OrderExpired,
    OrderStateChanged,
    PaymentSettled,
    ReservationReleased,
    VendorPayoutRecorded,
)

DOMAIN_TOPIC = "pf-domain-events"
TELEMETRY_TOPIC = "pf-ad-telemetry"
ZONE = "America/Chicago"
LOST = ("canceled", "expired", "rejected")
_DECISIONS = ("accepted", "partially_accepted", "rejected")
_FURTHEST = ("closed", "delivered", "in_transit", "ready_for_dispatch")

pipeline = Pipeline(
    CATALOG,
    lake="lake",
    name="marketplace",
    zone=ZONE,
    moments={
        "order_state_changed": "changed_at",
        "order_canceled": "canceled_at",
        "order_expired": "expired_at",
        "reservation_released": "released_at",
        "cash_collected": "collected_at",
        "payment_settled": "settled_at",
        "vendor_payout_recorded": "paid_out_at",
        "media_uploaded": "uploaded_at",
        "ad_paused": "changed_at",
        "ad_activated": "changed_at",
        "ad_expired": "changed_at",
    },
)


# --- telemetry: impressions and clicks, a topic of their own, in no outbox and no catalog ---------


class AdImpression(msgspec.Struct):
    token_id: UUID
    ad_id: UUID
    vendor_store_id: UUID
    buyer_store_id: UUID
    placement: str
    target_type: Literal["store", "product"]
    target_id: UUID


class AdClick(AdImpression):
    impression_token_id: UUID


pipeline.event("ad_impression", AdImpression, version=1, streams=f"{TELEMETRY_TOPIC}*")
pipeline.event("ad_click", AdClick, version=1, streams=f"{TELEMETRY_TOPIC}*")


@pipeline.expect("wrong_amounts", on_fail="quarantine")
def amounts_add_up(order: OrderCreated) -> bool:
    """Check the lines, the subtotal, the discounts and the total of an order."""
    subtotal = discounts = 0
    for line in order.lines:
        gross = line.qty * line.unit_price_cents
        if gross - line.discount_cents != line.line_total_cents:
            return False
        subtotal += gross
        discounts += line.discount_cents
    total = subtotal - discounts + order.tax_cents + order.transport_fee_cents
    return (subtotal, discounts, total) == (
        order.subtotal_cents,
        order.discounts_cents,
        order.total_cents,
    )


# --- orders ---------------------------------------------------------------------------------------


@pipeline.table(key="order_id", partition_by="business_day")
class FactOrder(msgspec.Struct):
    order_id: str
    checkout_group_id: UUID
    buyer_store_id: UUID
    vendor_store_id: UUID
    order_number: int
    currency: str
    payment_method: str
    postal_code: str
    lines: int
    created_at: datetime
    decided_at: datetime | None
    decision: str | None
    ready_at: datetime | None
    in_transit_at: datetime | None
    delivered_at: datetime | None
    closed_at: datetime | None
    canceled_at: datetime | None
    expired_at: datetime | None
    released_at: datetime | None
    collected_at: datetime | None
    paid_out_at: datetime | None
    subtotal_cents: int
    discounts_cents: int
    tax_cents: int
    transport_fee_cents: int
    created_cents: int
    final_cents: int
    collected_cents: int
    paid_cents: int
    state: str
    revenue_cents: int
    business_day: date
    revenue_day: date | None
    paid_day: date | None
    token_ids: list[str]


@pipeline.table(key="line_item_id", partition_by="business_day")
class FactOrderLine(msgspec.Struct):
    line_item_id: UUID
    order_id: str
    buyer_store_id: UUID
    vendor_store_id: UUID
    product_id: UUID
    title: str
    category: str
    unit: str
    qty: int
    unit_price_cents: int
    discount_cents: int
    line_total_cents: int
    status: str
    decided_at: datetime | None
    order_state: str
    created_at: datetime
    final_cents: int
    revenue_cents: int
    business_day: date
    revenue_day: date | None
    is_live: bool


@pipeline.table(key=("order_id", "problem"))
class ReconMoney(msgspec.Struct):
    order_id: str
    problem: str
    created_cents: int | None
    final_cents: int | None
    collected_cents: int | None
    paid_cents: int | None
    event_ids: list[str]


Step = tuple[datetime, str, str]
"""A moment, an event id, and a status."""
Payment = tuple[datetime, str, int]
"""A moment, an event id, and cents."""
First = TypeVar("First", bound=tuple[datetime, str, Any])


@pipeline.fact(key="order_id")
class Order(msgspec.Struct, array_like=True):
    """Collect what the events of one order say; the first of several is by (moment, event id)."""

    key: str = ""
    created: tuple[datetime, str, OrderCreated] | None = None
    decided: Step | None = None
    reached: dict[str, datetime] = {}
    canceled_at: datetime | None = None
    expired_at: datetime | None = None
    released_at: datetime | None = None
    lines: dict[UUID, Step] = {}
    collected: Payment | None = None
    paid: Payment | None = None
    collections: set[int] = set()
    currencies: set[str] = set()
    money_ids: set[str] = set()
    other_ids: set[str] = set()
    """Events other than those of money, until the order's `order_created` arrives."""

    def apply(self, event: Event) -> None:
        data, at, id_ = event.data, event.moment, event.event_id
        match data:
            case OrderCreated():
                if self.created is None or (at, id_) < self.created[:2]:
                    self.created = (at, id_, data)
                self.other_ids.clear()
            case CashCollected() | PaymentSettled():
                self.collected = _earlier(self.collected, (at, id_, data.amount_cents))
                self.collections.add(data.amount_cents)
            case VendorPayoutRecorded():
                self.paid = _earlier(self.paid, (at, id_, data.amount_cents))
            case OrderStateChanged():
                self._move(data.to_status, at, id_)
            case LineItemStateChanged():
                line, step = data.line_item_id, (at, id_, data.to_status)
                self.lines[line] = max(self.lines.get(line, step), step)
            case OrderCanceled():
                self.canceled_at = min(self.canceled_at or at, at)
            case OrderExpired():
                self.expired_at = min(self.expired_at or at, at)
            case ReservationReleased():
                self.released_at = max(self.released_at or at, at)
        if currency := getattr(data, "currency", None):
            self.currencies.add(currency)
            self.money_ids.add(id_)
        elif self.created is None:
            self.other_ids.add(id_)

    def _move(self, status: str, at: datetime, id_: str) -> None:
        if status in _DECISIONS:
            self.decided = _earlier(self.decided, (at, id_, status))
        elif status in _FURTHEST:
            self.reached[status] = min(self.reached.get(status, at), at)

    def rows(self) -> Iterator[msgspec.Struct]:
        if self.created is None:
            ids = sorted(self.money_ids | self.other_ids)
            yield ReconMoney(self.key, "no_order_created", None, None, None, None, ids)
            return
        order = self._order_row(*self.created)
        yield order
        for line in self.created[2].lines:
            yield self._line_row(order, line)
        cents = (order.created_cents, order.final_cents, order.collected_cents, order.paid_cents)
        for problem in self._problems(order):
            yield ReconMoney(self.key, problem, *cents, sorted(self.money_ids))

    def _state(self) -> str:
        if self.canceled_at is not None:
            return "canceled"
        if self.expired_at is not None:
            return "expired"
        decision = self.decided[2] if self.decided else "created_pending"
        if decision == "rejected":
            return decision
        return next((status for status in _FURTHEST if status in self.reached), decision)

    def _final_cents(self, data: OrderCreated, state: str) -> int:
        kept = [line for line in data.lines if self._line_status(line)[1] != "rejected"]
        if state in LOST or not kept:
            return 0
        return (
            sum(line.line_total_cents for line in kept) + data.tax_cents + data.transport_fee_cents
        )

    def _line_status(self, line: Line) -> tuple[datetime | None, str]:
        step = self.lines.get(line.line_item_id)
        return (None, line.status) if step is None else (step[0], step[2])

    def _order_row(self, created_at: datetime, _: str, data: OrderCreated) -> FactOrder:
        state, reached = self._state(), self.reached
        collected_at, _, collected = self.collected or (None, "", 0)
        paid_at, _, paid = self.paid or (None, "", 0)
        decided_at, _, decision = self.decided or (None, "", None)
        is_lost = state in LOST
        return FactOrder(
            order_id=self.key,
            checkout_group_id=data.checkout_group_id,
            buyer_store_id=data.buyer_store_id,
            vendor_store_id=data.vendor_store_id,
            order_number=data.order_number,
            currency=data.currency,
            payment_method=data.payment_method,
            postal_code=data.ship_to.postal_code,
            lines=len(data.lines),
            created_at=created_at,
            decided_at=decided_at,
            decision=decision,
            ready_at=reached.get("ready_for_dispatch"),
            in_transit_at=reached.get("in_transit"),
            delivered_at=reached.get("delivered"),
            closed_at=reached.get("closed"),
            canceled_at=self.canceled_at,
            expired_at=self.expired_at,
            released_at=self.released_at,
            collected_at=collected_at,
            paid_out_at=paid_at,
            subtotal_cents=data.subtotal_cents,
            discounts_cents=data.discounts_cents,
            tax_cents=data.tax_cents,
            transport_fee_cents=data.transport_fee_cents,
            created_cents=data.total_cents,
            final_cents=self._final_cents(data, state),
            collected_cents=collected,
            paid_cents=paid,
            state=state,
            revenue_cents=0 if is_lost else collected,
            business_day=pipeline.day(created_at),
            revenue_day=None if is_lost or collected_at is None else pipeline.day(collected_at),
            paid_day=None if paid_at is None else pipeline.day(paid_at),
            token_ids=_tokens(data),
        )

    def _line_row(self, order: FactOrder, line: Line) -> FactOrderLine:
        decided_at, status = self._line_status(line)
        is_live = status != "rejected" and order.state not in LOST
        final = line.line_total_cents if is_live else 0
        return FactOrderLine(
            line_item_id=line.line_item_id,
            order_id=order.order_id,
            buyer_store_id=order.buyer_store_id,
            vendor_store_id=order.vendor_store_id,
            product_id=line.product_id,
            title=line.title,
            category=line.category,
            unit=line.unit,
            qty=line.qty,
            unit_price_cents=line.unit_price_cents,
            discount_cents=line.discount_cents,
            line_total_cents=line.line_total_cents,
            status=status,
            decided_at=decided_at,
            order_state=order.state,
            created_at=order.created_at,
            final_cents=final,
            revenue_cents=0 if order.collected_at is None else final,
            business_day=order.business_day,
            revenue_day=order.revenue_day,
            is_live=is_live,
        )

    def _problems(self, order: FactOrder) -> Iterator[str]:
        """Compare created ≥ final ≥ collected = paid, by the names of the contract."""
        is_collected, is_paid = self.collected is not None, self.paid is not None
        if order.final_cents > order.created_cents:
            yield "final_over_created"
        if is_collected and order.collected_cents != order.final_cents:
            yield "collected_not_final"
        if len(self.collections) > 1:
            yield "collections_differ"
        if is_paid and not is_collected:
            yield "paid_without_collection"
        if is_paid and is_collected and order.paid_cents != order.collected_cents:
            yield "paid_not_collected"
        if order.state == "closed" and not is_paid:
            if not is_collected and order.final_cents > 0:
                yield "closed_without_collection"
            if order.collected_cents > 0:
                yield "closed_without_payout"
        if len(self.currencies) > 1:
            yield "currencies_differ"


def _earlier(known: First | None, new: First) -> First:
    return new if known is None else min(known, new)


def _tokens(data: OrderCreated) -> list[str]:
    """Read the tokens that the checkout presented, each once."""
    found = (data.attribution or {}).get("token_ids")
    if not isinstance(found, list):
        return []
    return list(dict.fromkeys(one for one in found if isinstance(one, str)))


# --- marts: sums by business day ------------------------------------------------------------------

_IS_LOST = f"state IN {LOST}"

pipeline.mart(
    "store_daily",
    by=("business_day", "vendor_store_id"),
    sums=(
        *("orders", "lost_orders", "created_cents", "live_orders", "units", "discounts_cents"),
        *("final_cents", "revenue_orders", "revenue_cents", "payouts", "paid_cents"),
    ),
    of=f"""
    SELECT business_day, vendor_store_id, 1 AS orders, ({_IS_LOST})::INT AS lost_orders,
           created_cents, (NOT {_IS_LOST})::INT AS live_orders, final_cents
    FROM fact_order
    UNION ALL BY NAME
    SELECT business_day, vendor_store_id, qty AS units, discount_cents AS discounts_cents
    FROM fact_order_line WHERE is_live
    UNION ALL BY NAME
    SELECT revenue_day AS business_day, vendor_store_id, 1 AS revenue_orders, revenue_cents
    FROM fact_order WHERE revenue_day IS NOT NULL
    UNION ALL BY NAME
    SELECT paid_day AS business_day, vendor_store_id, 1 AS payouts, paid_cents
    FROM fact_order WHERE paid_day IS NOT NULL
    """,
)
pipeline.mart(
    "zip_daily",
    by=("business_day", "postal_code"),
    sums=(
        *("orders", "lost_orders", "created_cents", "final_cents"),
        *("revenue_orders", "revenue_cents"),
    ),
    of=f"""
    SELECT business_day, postal_code, 1 AS orders, ({_IS_LOST})::INT AS lost_orders,
           created_cents, final_cents
    FROM fact_order
    UNION ALL BY NAME
    SELECT revenue_day AS business_day, postal_code, 1 AS revenue_orders, revenue_cents
    FROM fact_order WHERE revenue_day IS NOT NULL
    """,
)
for _name, _by in {
    "product_daily": ("business_day", "product_id", "vendor_store_id"),
    "category_daily": ("business_day", "category"),
}.items():
    _others = ", ".join(_by[1:])
    pipeline.mart(
        _name,
        by=_by,
        sums=("lines", "units", "discounts_cents", "final_cents", "revenue_lines", "revenue_cents"),
        of=f"""
        SELECT business_day, {_others}, 1 AS lines, qty AS units,
               discount_cents AS discounts_cents, final_cents
        FROM fact_order_line WHERE is_live
        UNION ALL BY NAME
        SELECT revenue_day AS business_day, {_others}, 1 AS revenue_lines, revenue_cents
        FROM fact_order_line WHERE is_live AND revenue_day IS NOT NULL
        """,
    )

pipeline.query(
    "buyer_first_purchase",
    key=("buyer_store_id",),
    group="buyer_store_id",
    touched="SELECT buyer_store_id FROM changed_fact_order",
    sql=f"""
    SELECT buyer_store_id, first.order_id AS first_order_id,
           first.vendor_store_id AS first_vendor_store_id, first.created_at AS first_purchase_at,
           first.business_day AS first_day, purchases, last_purchase_at
    FROM (
        SELECT buyer_store_id, count(*) AS purchases, max(created_at) AS last_purchase_at,
               min({{'created_at': created_at, 'order_id': order_id,
                     'vendor_store_id': vendor_store_id, 'business_day': business_day}}) AS first
        FROM fact_order
        WHERE NOT {_IS_LOST} AND buyer_store_id IN (FROM touched)
        GROUP BY buyer_store_id
    )
    """,
)

_STAGES = {
    "decide": ("created_at", "decided_at"),
    "dispatch": ("decided_at", "in_transit_at"),
    "deliver": ("in_transit_at", "delivered_at"),
    "collect": ("delivered_at", "collected_at"),
    "payout": ("collected_at", "paid_out_at"),
}
_PERCENTILES = ", ".join(
    f"quantile_disc((epoch_us({end}) - epoch_us({start})) // 1000, 0.{part}) AS {stage}_p{part}_ms"
    for stage, (start, end) in _STAGES.items()
    for part in (50, 95)
)

pipeline.query(
    "admin_weekly",
    key=("week",),
    group="week",
    touched="""
    SELECT unnest([date_trunc('week', business_day), date_trunc('week', revenue_day)])::DATE AS week
    FROM changed_fact_order
    UNION SELECT date_trunc('week', first_day)::DATE FROM changed_buyer_first_purchase
    """,
    sql=f"""
    WITH created AS (
        SELECT date_trunc('week', business_day)::DATE AS week, count(*) AS orders,
               count(*) FILTER ({_IS_LOST}) AS lost_orders, sum(final_cents)::BIGINT AS gmv_cents,
               count(DISTINCT buyer_store_id) FILTER (NOT {_IS_LOST}) AS buyers, {_PERCENTILES}
        FROM fact_order WHERE week IN (FROM touched) GROUP BY 1
    ), earned AS (
        SELECT date_trunc('week', revenue_day)::DATE AS week,
               sum(revenue_cents)::BIGINT AS revenue_cents
        FROM fact_order WHERE week IN (FROM touched) GROUP BY 1
    ), new AS (
        SELECT date_trunc('week', first_day)::DATE AS week, count(*) AS new_buyers
        FROM buyer_first_purchase WHERE week IN (FROM touched) GROUP BY 1
    )
    SELECT week, coalesce(orders, 0) AS orders, coalesce(lost_orders, 0) AS lost_orders,
           coalesce(gmv_cents, 0) AS gmv_cents, coalesce(buyers, 0) AS buyers,
           coalesce(new_buyers, 0) AS new_buyers,
           coalesce(buyers, 0) - coalesce(new_buyers, 0) AS returning_buyers,
           coalesce(revenue_cents, 0) AS revenue_cents, COLUMNS('_p[59][05]_ms$')
    FROM created FULL JOIN earned USING (week) LEFT JOIN new USING (week)
    """,
)


# --- ads ------------------------------------------------------------------------------------------

pipeline.query(
    "ad_touches",
    key=("token_id",),
    group="token_id",
    order_by="business_day",
    touched="""
    SELECT token_id FROM changed_ad_impression UNION SELECT token_id FROM changed_ad_click
    UNION SELECT token_id FROM ad_impression
    WHERE event_id IN (SELECT event_id FROM changed_redeliveries)
    UNION SELECT token_id FROM ad_click
    WHERE event_id IN (SELECT event_id FROM changed_redeliveries)
    """,
    sql="""
    WITH told AS (
        SELECT 'impression' AS kind, * FROM ad_impression WHERE token_id IN (FROM touched)
        UNION ALL BY NAME
        SELECT 'click' AS kind, * FROM ad_click WHERE token_id IN (FROM touched)
    ), again AS (
        SELECT event_id, sum(entries) AS entries, min(first_seen_at) AS seen_at
        FROM redeliveries WHERE event_id IN (SELECT event_id FROM told) GROUP BY event_id
    ), ranked AS (
        SELECT *, row_number() OVER (PARTITION BY token_id ORDER BY occurred_at, event_id) AS place,
               min(least(first_seen_at, seen_at)) OVER (PARTITION BY token_id) AS token_seen_at,
               sum(delivery_count + coalesce(entries, 0)) OVER (PARTITION BY token_id)
               AS deliveries
        FROM told LEFT JOIN again USING (event_id)
    )
    SELECT token_id, kind, ad_id, vendor_store_id, buyer_store_id, placement, target_type,
           target_id, impression_token_id, occurred_at, local_day(occurred_at) AS business_day,
           event_id, token_seen_at AS first_seen_at, deliveries::BIGINT AS delivery_count
    FROM ranked WHERE place = 1
    """,
)

_AD_TYPES = {
    "ad_created": "status, placement, target_type, target_id, bid_cents_cpm, daily_budget_cents",
    "ad_updated": "placement, target_type, target_id, bid_cents_cpm, daily_budget_cents",
    "ad_paused": "'paused' AS status, from_status, cause",
    "ad_activated": "'active' AS status, from_status, cause",
    "ad_expired": "'expired' AS status, from_status, cause",
    "ad_daily_rollup_ready": (
        "day AS rollup_day, impressions, clicks, spend_micros, rollup_revision"
    ),
}

pipeline.query(
    "fact_ad_event",
    key=("event_id",),
    group="event_id",
    order_by="business_day",
    touched=" UNION ".join(f"SELECT event_id FROM changed_{type_}" for type_ in _AD_TYPES),
    sql=f"""
    SELECT event_id, event_type, ad_id, vendor_store_id, happened_at,
           local_day(happened_at) AS business_day, status, from_status, cause, placement,
           target_type, target_id, bid_cents_cpm, daily_budget_cents, rollup_day, impressions,
           clicks, spend_micros, rollup_revision
    FROM ({
        " UNION ALL BY NAME ".join(
            f"SELECT event_id, '{type_}' AS event_type, ad_id, vendor_store_id,"
            f" moment AS happened_at, {fields} FROM {type_} WHERE event_id IN (FROM touched)"
            for type_, fields in _AD_TYPES.items()
        )
    })
    """,
)

pipeline.query(
    "fact_attribution",
    key=("scope", "order_id", "line_item_id", "ad_id"),
    group="order_id",
    order_by="business_day",
    touched="""
    SELECT order_id FROM changed_fact_order WHERE len(token_ids) > 0
    UNION SELECT order_id FROM (
        SELECT order_id, unnest(token_ids) AS token_id FROM fact_order WHERE len(token_ids) > 0
    ) WHERE token_id IN (SELECT token_id FROM changed_ad_touches)
    """,
    sql="""
    WITH presented AS (
        SELECT order_id, vendor_store_id, buyer_store_id, created_at, business_day, revenue_day,
               revenue_cents, unnest(token_ids) AS token_id
        FROM fact_order WHERE len(token_ids) > 0 AND order_id IN (FROM touched)
    ), seen AS (
        SELECT presented.*, kind, ad_id, target_id, occurred_at AS touched_at
        FROM presented JOIN ad_touches USING (token_id) WHERE occurred_at <= created_at
    ), candidates AS (
        SELECT 'store' AS scope, NULL AS line_item_id, true AS is_live, * FROM seen
        WHERE target_id = vendor_store_id
        UNION ALL BY NAME
        SELECT 'line' AS scope, line.line_item_id, line.is_live,
               seen.* REPLACE (line.revenue_cents AS revenue_cents)
        FROM seen JOIN fact_order_line line ON line.order_id = seen.order_id
             AND line.product_id = seen.target_id
    ), best AS (
        SELECT scope, order_id, line_item_id, ad_id, count(*) AS candidates,
               max({'is_click': kind = 'click', 'touched_at': touched_at, 'token_id': token_id})
               AS best, any_value(COLUMNS(['vendor_store_id', 'buyer_store_id', 'business_day',
               'revenue_day', 'revenue_cents', 'is_live']))
        FROM candidates GROUP BY ALL
    ), ranked AS (
        SELECT *, best = max(best) OVER (PARTITION BY scope, order_id, line_item_id) AS won
        FROM best
    )
    SELECT scope, order_id, line_item_id, ad_id, best.token_id AS token_id,
           CASE WHEN best.is_click THEN 'click' ELSE 'impression' END AS kind,
           best.touched_at AS touched_at, candidates, won, vendor_store_id, buyer_store_id,
           business_day, revenue_day, CASE WHEN won THEN revenue_cents ELSE 0 END AS revenue_cents,
           is_live
    FROM ranked
    """,
)

_AD_MEASURES = (
    *("impressions", "clicks", "orphan_clicks", "rollup_impressions", "rollup_clicks"),
    *("spend_micros", "rollup_revision", "attributed_orders", "attributed_order_cents"),
    *("attributed_lines", "attributed_line_cents"),
)

pipeline.query(
    "ad_daily",
    key=("business_day", "ad_id"),
    group=("business_day", "ad_id"),
    touched="""
    SELECT business_day, ad_id FROM changed_ad_touches
    UNION SELECT business_day, ad_id FROM ad_touches
    WHERE kind = 'click' AND impression_token_id IN (SELECT token_id FROM changed_ad_touches)
    UNION SELECT rollup_day, ad_id FROM changed_fact_ad_event WHERE rollup_day IS NOT NULL
    UNION SELECT revenue_day, ad_id FROM changed_fact_attribution WHERE revenue_day IS NOT NULL
    """,
    sql=f"""
    WITH seen AS (
        SELECT business_day, ad_id, vendor_store_id, kind, impression_token_id FROM ad_touches
        WHERE (business_day, ad_id) IN (FROM touched)
    ), known AS (
        SELECT token_id FROM ad_touches
        WHERE token_id IN (SELECT impression_token_id FROM seen WHERE kind = 'click')
    ), rollups AS (
        SELECT rollup_day, ad_id, max({{'rollup_revision': rollup_revision,
               'happened_at': happened_at, 'event_id': event_id, 'impressions': impressions,
               'clicks': clicks, 'spend_micros': spend_micros,
               'vendor_store_id': vendor_store_id}}) AS last
        FROM fact_ad_event
        WHERE rollup_day IS NOT NULL AND (rollup_day, ad_id) IN (FROM touched) GROUP BY ALL
    ), sold AS (
        SELECT revenue_day AS business_day, ad_id, vendor_store_id, scope, revenue_cents
        FROM fact_attribution WHERE won AND is_live AND (revenue_day, ad_id) IN (FROM touched)
    ), parts AS (
        SELECT business_day, ad_id, vendor_store_id, (kind = 'impression')::INT AS impressions,
               (kind = 'click')::INT AS clicks,
               (kind = 'click' AND impression_token_id NOT IN (FROM known))::INT AS orphan_clicks
        FROM seen
        UNION ALL BY NAME
        SELECT rollup_day AS business_day, ad_id, last.vendor_store_id AS vendor_store_id,
               last.impressions AS rollup_impressions, last.clicks AS rollup_clicks,
               last.spend_micros AS spend_micros, last.rollup_revision AS rollup_revision
        FROM rollups
        UNION ALL BY NAME
        SELECT business_day, ad_id, vendor_store_id, 1 AS attributed_orders,
               revenue_cents AS attributed_order_cents FROM sold WHERE scope = 'store'
        UNION ALL BY NAME
        SELECT business_day, ad_id, vendor_store_id, 1 AS attributed_lines,
               revenue_cents AS attributed_line_cents FROM sold WHERE scope = 'line'
    )
    SELECT business_day, ad_id, max(vendor_store_id) AS vendor_store_id,
           {", ".join(f"coalesce(sum({name}), 0)::BIGINT AS {name}" for name in _AD_MEASURES)}
    FROM parts GROUP BY business_day, ad_id
    """,
)


# --- the report -----------------------------------------------------------------------------------

for _title, _sql in {
    "Orders per day": "SELECT business_day, sum(orders) FROM store_daily GROUP BY 1",
    "Revenue per day, in dollars": (
        "SELECT business_day, sum(revenue_cents) / 100 FROM store_daily GROUP BY 1"
    ),
    "Lost orders per day, in percent": (
        "SELECT business_day, 100 * sum(lost_orders) / nullif(sum(orders), 0)"
        " FROM store_daily GROUP BY 1"
    ),
    "Revenue by category, in dollars": (
        "SELECT category, sum(revenue_cents) / 100 FROM category_daily GROUP BY 1"
    ),
    "Revenue by postal code, in dollars": (
        "SELECT postal_code, sum(revenue_cents) / 100 FROM zip_daily GROUP BY 1"
    ),
    "Clicks of 100 impressions": (
        "SELECT business_day, 100 * sum(clicks) / nullif(sum(impressions), 0)"
        " FROM ad_daily GROUP BY 1"
    ),
    "Buyers per week": "SELECT week, buyers FROM admin_weekly",
}.items():
    pipeline.chart(_title, _sql)
