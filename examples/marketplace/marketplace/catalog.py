"""The events of the marketplace. The lists are locked: a new value is a migration.

Ids are UUIDs, money is in whole cents with the currency beside a total, times have an offset and
are written in UTC. No names, no phone numbers, no signed tokens: an event is read by many.
"""

from __future__ import annotations

from datetime import date, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec

from conquiet.events import Catalog

MOST = 10**15
"""The limit of cents and counts: sums of thousands of them fit into 64 bits."""
Cents = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Quantity = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Currency = Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]
PaymentMethod = Literal["cash", "ach"]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time with an offset."""


class AggregateType(StrEnum):
    """The kinds of things that events are about."""

    VENDOR_ORDER = "vendor_order"
    CHECKOUT_GROUP = "checkout_group"
    LICENSE = "license"
    STORE = "store"
    MEDIA = "media"
    LEDGER_EVENT = "ledger_event"
    NOTIFICATION = "notification"
    AD = "ad"


class EventType(StrEnum):
    """The types of events."""

    ORDER_CREATED = "order_created"
    ORDER_STATE_CHANGED = "order_state_changed"
    LINE_ITEM_STATE_CHANGED = "line_item_state_changed"
    LICENSE_STATUS_CHANGED = "license_status_changed"
    MEDIA_UPLOADED = "media_uploaded"
    PAYMENT_SETTLED = "payment_settled"
    CASH_COLLECTED = "cash_collected"
    VENDOR_PAYOUT_RECORDED = "vendor_payout_recorded"
    NOTIFICATION_REQUESTED = "notification_requested"
    ORDER_EXPIRED = "order_expired"
    ORDER_CANCELED = "order_canceled"
    RESERVATION_RELEASED = "reservation_released"
    AD_CREATED = "ad_created"
    AD_UPDATED = "ad_updated"
    AD_PAUSED = "ad_paused"
    AD_ACTIVATED = "ad_activated"
    AD_EXPIRED = "ad_expired"
    AD_DAILY_ROLLUP_READY = "ad_daily_rollup_ready"


CATALOG = Catalog(EventType, AggregateType)


class Data(msgspec.Struct, omit_defaults=True):
    """A payload: names in snake case, empty optional fields left out."""


# --- orders ---------------------------------------------------------------------------------


class OrderKeys(Data):
    """The keys of an order, in each of its events."""

    order_id: UUID
    checkout_group_id: UUID
    buyer_store_id: UUID
    vendor_store_id: UUID


class ShipTo(Data):
    postal_code: str


class Line(Data):
    line_item_id: UUID
    product_id: UUID
    title: str
    category: str
    unit: str
    qty: Quantity
    unit_price_cents: Cents
    discount_cents: Cents
    line_total_cents: Cents
    status: str


class ReleasedLine(Data):
    line_item_id: UUID
    product_id: UUID
    qty: Quantity


@CATALOG.declare(EventType.ORDER_CREATED, AggregateType.VENDOR_ORDER)
class OrderCreated(OrderKeys):
    order_number: int
    currency: Currency
    payment_method: PaymentMethod
    subtotal_cents: Cents
    discounts_cents: Cents
    tax_cents: Cents
    transport_fee_cents: Cents
    total_cents: Cents
    ship_to: ShipTo
    lines: list[Line]
    attribution: dict[str, Any] | None = None


@CATALOG.declare(EventType.ORDER_STATE_CHANGED, AggregateType.VENDOR_ORDER)
class OrderStateChanged(OrderKeys):
    from_status: str
    to_status: str
    changed_at: Moment
    total_cents: Cents
    balance_due_cents: Cents
    reason: str | None = None


@CATALOG.declare(EventType.LINE_ITEM_STATE_CHANGED, AggregateType.VENDOR_ORDER)
class LineItemStateChanged(OrderKeys):
    line_item_id: UUID
    product_id: UUID
    from_status: str
    to_status: str
    qty: Quantity
    line_total_cents: Cents
    order_total_cents_after: Cents


@CATALOG.declare(EventType.ORDER_CANCELED, AggregateType.VENDOR_ORDER)
class OrderCanceled(OrderKeys):
    canceled_at: Moment
    canceled_by: str
    total_cents: Cents
    reason_code: str | None = None


@CATALOG.declare(EventType.ORDER_EXPIRED, AggregateType.VENDOR_ORDER)
class OrderExpired(OrderKeys):
    expired_at: Moment
    ttl_days: Quantity
    total_cents: Cents


@CATALOG.declare(EventType.RESERVATION_RELEASED, AggregateType.VENDOR_ORDER)
class ReservationReleased(OrderKeys):
    cause: str
    released_at: Moment
    lines: list[ReleasedLine]


# --- money ----------------------------------------------------------------------------------


@CATALOG.declare(EventType.CASH_COLLECTED, AggregateType.VENDOR_ORDER)
class CashCollected(OrderKeys):
    payment_intent_id: UUID
    ledger_event_id: UUID
    amount_cents: Cents
    currency: Currency
    collected_at: Moment


@CATALOG.declare(EventType.PAYMENT_SETTLED, AggregateType.LEDGER_EVENT)
class PaymentSettled(OrderKeys):
    ledger_event_id: UUID
    payment_intent_id: UUID
    method: PaymentMethod
    amount_cents: Cents
    currency: Currency
    settled_at: Moment


@CATALOG.declare(EventType.VENDOR_PAYOUT_RECORDED, AggregateType.LEDGER_EVENT)
class VendorPayoutRecorded(OrderKeys):
    ledger_event_id: UUID
    amount_cents: Cents
    currency: Currency
    paid_out_at: Moment


# --- stores ---------------------------------------------------------------------------------


@CATALOG.declare(EventType.LICENSE_STATUS_CHANGED, AggregateType.LICENSE)
class LicenseStatusChanged(Data):
    license_id: UUID
    store_id: UUID
    license_type: str
    status: str
    from_status: str | None = None
    reason: str | None = None
    expires_on: date | None = None


@CATALOG.declare(EventType.MEDIA_UPLOADED, AggregateType.MEDIA)
class MediaUploaded(Data):
    media_id: UUID
    store_id: UUID
    kind: str
    mime_type: str
    size_bytes: Count
    uploaded_at: Moment


@CATALOG.declare(EventType.NOTIFICATION_REQUESTED, AggregateType.NOTIFICATION)
class NotificationRequested(Data):
    notification_id: UUID
    recipient_store_id: UUID
    channel: str
    kind: str
    source_event_id: UUID | None = None


# --- ads: their life, never their impressions and clicks, which are telemetry ----------------


class AdKeys(Data):
    ad_id: UUID
    vendor_store_id: UUID


class AdTerms(AdKeys):
    placement: str
    target_type: str
    target_id: UUID
    bid_cents_cpm: Cents
    daily_budget_cents: Cents


class Change(Data):
    field: str
    old: Any
    new: Any


class AdMoved(AdKeys):
    from_status: str
    changed_at: Moment
    cause: str


@CATALOG.declare(EventType.AD_CREATED, AggregateType.AD)
class AdCreated(AdTerms):
    status: str


@CATALOG.declare(EventType.AD_UPDATED, AggregateType.AD)
class AdUpdated(AdTerms):
    changes: list[Change]


@CATALOG.declare(EventType.AD_PAUSED, AggregateType.AD)
class AdPaused(AdMoved):
    pass


@CATALOG.declare(EventType.AD_ACTIVATED, AggregateType.AD)
class AdActivated(AdMoved):
    pass


@CATALOG.declare(EventType.AD_EXPIRED, AggregateType.AD)
class AdExpired(AdMoved):
    pass


@CATALOG.declare(EventType.AD_DAILY_ROLLUP_READY, AggregateType.AD)
class AdDailyRollupReady(AdKeys):
    day: date
    timezone: str
    impressions: Count
    clicks: Count
    spend_micros: Count
    rollup_revision: Count


# --- who takes what -------------------------------------------------------------------------

ANALYTICS = CATALOG.consumer("analytics", EventType)
NOTIFICATIONS = CATALOG.consumer(
    "notifications",
    (
        EventType.NOTIFICATION_REQUESTED,
        EventType.ORDER_CREATED,
        EventType.ORDER_STATE_CHANGED,
        EventType.ORDER_CANCELED,
        EventType.ORDER_EXPIRED,
        EventType.LICENSE_STATUS_CHANGED,
    ),
)
