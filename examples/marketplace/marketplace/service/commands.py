"""The commands of the marketplace. The caller chooses the ids, so that a repeated command is
recognized."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec

from conquiet.events import ActorRef
from marketplace.catalog import Cents, Count, Currency, Moment, PaymentMethod, Quantity


class Command(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Carries when it was decided, now unless given, and by whom."""

    at: Moment | None = None
    actor: ActorRef | None = None

    @property
    def decided_at(self) -> datetime:
        return self.at or datetime.now(UTC)


# --- orders ---------------------------------------------------------------------------------


class OrderedLine(msgspec.Struct, kw_only=True):
    line_item_id: UUID
    product_id: UUID
    title: str
    category: str
    unit: str
    qty: Quantity
    unit_price_cents: Cents
    discount_cents: Cents = 0


class PlaceOrder(Command):
    """Places an order; refused unless it adds up to `total_cents`, which the buyer was shown."""

    order_id: UUID
    checkout_group_id: UUID
    buyer_store_id: UUID
    vendor_store_id: UUID
    order_number: int
    currency: Currency
    payment_method: PaymentMethod
    tax_cents: Cents
    transport_fee_cents: Cents
    total_cents: Cents
    postal_code: str
    lines: Annotated[list[OrderedLine], msgspec.Meta(min_length=1)]
    token_ids: list[UUID] = []
    """Tokens of ads that the checkout presented."""


class OrderCommand(Command):
    order_id: UUID


class AcceptLines(OrderCommand):
    """Accepts every line but those in `rejected`."""

    rejected: list[UUID] = []
    reason: str | None = None


class MarkReady(OrderCommand):
    pass


class DispatchOrder(OrderCommand):
    pass


class DeliverOrder(OrderCommand):
    pass


class CancelOrder(OrderCommand):
    canceled_by: str
    reason_code: str | None = None


class ExpireOrder(OrderCommand):
    pass


class CloseOrder(OrderCommand):
    pass


# --- money ----------------------------------------------------------------------------------


class CollectCash(OrderCommand):
    payment_intent_id: UUID
    ledger_event_id: UUID
    amount_cents: Cents


class SettlePayment(OrderCommand):
    payment_intent_id: UUID
    ledger_event_id: UUID
    amount_cents: Cents


class PayOut(OrderCommand):
    ledger_event_id: UUID
    amount_cents: Cents


# --- licenses -------------------------------------------------------------------------------


class SubmitLicense(Command):
    license_id: UUID
    store_id: UUID
    license_type: str


class ReviewLicense(Command):
    license_id: UUID
    status: Literal["verified", "rejected"]
    reason: str | None = None
    expires_on: date | None = None


class ExpireLicense(Command):
    license_id: UUID
    reason: str | None = None


# --- media ----------------------------------------------------------------------------------


class RecordUpload(Command):
    media_id: UUID
    store_id: UUID
    kind: str
    mime_type: str
    size_bytes: Count


# --- ads ------------------------------------------------------------------------------------


class CreateAd(Command):
    ad_id: UUID
    vendor_store_id: UUID
    placement: str
    target_type: Literal["store", "product"]
    target_id: UUID
    bid_cents_cpm: Cents
    daily_budget_cents: Cents


class UpdateAd(Command):
    """Changes the terms that are given, and no others."""

    ad_id: UUID
    placement: str | None = None
    bid_cents_cpm: Cents | None = None
    daily_budget_cents: Cents | None = None


class MoveAd(Command):
    ad_id: UUID
    cause: str


class ActivateAd(MoveAd):
    pass


class PauseAd(MoveAd):
    pass


class ExpireAd(MoveAd):
    pass


class RollUpAd(Command):
    """Reports the counts of a business day; a later count has a higher revision."""

    ad_id: UUID
    day: date
    timezone: str
    impressions: Count
    clicks: Count
    spend_micros: Count
    rollup_revision: Quantity
