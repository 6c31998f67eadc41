"""Payments: collected once, settled once, paid out once, and always the amount that is due."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, bindparam, select

from conquiet import sql
from conquiet.events import Event
from marketplace.catalog import (
    CATALOG,
    CashCollected,
    PaymentSettled,
    VendorPayoutRecorded,
)
from marketplace.service import commands
from marketplace.service.lifecycle import IllegalTransition, Refused, WrongAmount
from marketplace.service.tables import LEDGER, Book, order_keys

_KINDS = select(LEDGER.c.kind).where(LEDGER.c.order_id == bindparam("order"))
_Payment = commands.CollectCash | commands.SettlePayment | commands.PayOut


class Payments:
    """Stores what was collected and paid out for each order in a ledger."""

    def __init__(self, engine: Engine, orders: Book) -> None:
        self._engine = engine
        self._orders = orders
        self._ledger = Book(engine, LEDGER, "ledger event")

    def collect_cash(self, command: commands.CollectCash) -> list[Event]:
        at, order = command.decided_at, self._delivered(command)
        if order.payment_method != "cash":
            raise Refused(f"order {order.id} is paid by {order.payment_method}, not in cash")
        self._is_due(order, command.amount_cents, order.total_cents, "collected")
        self._record(self._kinds(order.id), order.id, command, "cash_collected", at)
        self._orders.change(order.id, collected_cents=command.amount_cents)
        data = CashCollected(
            **order_keys(order),
            payment_intent_id=command.payment_intent_id,
            ledger_event_id=command.ledger_event_id,
            amount_cents=command.amount_cents,
            currency=order.currency,
            collected_at=at,
        )
        return [CATALOG.event(data, aggregate_id=order.id, occurred_at=at)]

    def settle_payment(self, command: commands.SettlePayment) -> list[Event]:
        """Record that the bank has the money. Cash must have been collected before."""
        at, order = command.decided_at, self._delivered(command)
        kinds = self._kinds(order.id)
        if order.payment_method == "cash" and "cash_collected" not in kinds:
            raise IllegalTransition(f"order {order.id}: its cash has not been collected yet")
        self._is_due(order, command.amount_cents, order.total_cents, "settled")
        self._record(kinds, order.id, command, "payment_settled", at)
        self._orders.change(order.id, collected_cents=command.amount_cents)
        data = PaymentSettled(
            **order_keys(order),
            ledger_event_id=command.ledger_event_id,
            payment_intent_id=command.payment_intent_id,
            method=order.payment_method,
            amount_cents=command.amount_cents,
            currency=order.currency,
            settled_at=at,
        )
        return [CATALOG.event(data, aggregate_id=command.ledger_event_id, occurred_at=at)]

    def pay_out(self, command: commands.PayOut) -> list[Event]:
        at, order = command.decided_at, self._delivered(command)
        kinds = self._kinds(order.id)
        if "payment_settled" not in kinds:
            raise IllegalTransition(f"order {order.id}: its payment has not been settled yet")
        self._is_due(order, command.amount_cents, order.collected_cents, "paid out")
        self._record(kinds, order.id, command, "vendor_payout_recorded", at)
        self._orders.change(order.id, paid_cents=command.amount_cents)
        data = VendorPayoutRecorded(
            **order_keys(order),
            ledger_event_id=command.ledger_event_id,
            amount_cents=command.amount_cents,
            currency=order.currency,
            paid_out_at=at,
        )
        return [CATALOG.event(data, aggregate_id=command.ledger_event_id, occurred_at=at)]

    # --- inside -----------------------------------------------------------------------------

    def _delivered(self, command: commands.OrderCommand) -> Any:
        order = self._orders.get(command.order_id)
        if order.status != "delivered":
            raise IllegalTransition(
                f"order {order.id} is {order.status}; money moves while it is delivered"
            )
        return order

    def _is_due(self, order: Any, amount: int, due: int, what: str) -> None:
        if amount != due:
            raise WrongAmount(f"order {order.id}: {due} cents are to be {what}, not {amount}")

    def _kinds(self, order_id: UUID) -> set[str]:
        """Return the kinds of entries that the ledger has for an order."""
        with sql.connection(self._engine) as connection:
            return set(connection.scalars(_KINDS, {"order": order_id}))

    def _record(
        self, kinds: set[str], order_id: UUID, command: _Payment, kind: str, at: datetime
    ) -> None:
        """Add an entry to the ledger, once per order and kind."""
        if kind in kinds:
            raise IllegalTransition(f"order {order_id}: {kind} is in the ledger already")
        self._ledger.add(
            id=command.ledger_event_id,
            order_id=order_id,
            kind=kind,
            amount_cents=command.amount_cents,
            recorded_at=at,
        )
