"""Orders: from the buyer's click to the vendor's money; one handler per command."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

import msgspec
from sqlalchemy import Engine, Row, bindparam, select, update

from conquiet import sql
from conquiet.events import Event
from marketplace.catalog import (
    CATALOG,
    Line,
    LineItemStateChanged,
    NotificationRequested,
    OrderCanceled,
    OrderCreated,
    OrderExpired,
    OrderStateChanged,
    ReleasedLine,
    ReservationReleased,
    ShipTo,
)
from marketplace.service import commands
from marketplace.service.lifecycle import (
    ORDER,
    IllegalTransition,
    Refused,
    WrongAmount,
)
from marketplace.service.tables import LINES, Book, order_keys

TTL_DAYS = 10
_LINES_OF = select(LINES).where(LINES.c.order_id == bindparam("order")).order_by(LINES.c.position)


class Orders:
    """Stores orders and their lines; the events it returns are stored in the same transaction."""

    def __init__(self, engine: Engine, orders: Book) -> None:
        self._engine = engine
        self._orders = orders
        self._lines = Book(engine, LINES, "line")

    def place_order(self, command: commands.PlaceOrder) -> list[Event]:
        at = command.decided_at
        data = _priced(command)
        self._orders.add(
            id=command.order_id,
            checkout_group_id=command.checkout_group_id,
            buyer_store_id=command.buyer_store_id,
            vendor_store_id=command.vendor_store_id,
            order_number=command.order_number,
            currency=command.currency,
            payment_method=command.payment_method,
            status="created_pending",
            tax_cents=command.tax_cents,
            transport_fee_cents=command.transport_fee_cents,
            total_cents=command.total_cents,
            collected_cents=0,
            paid_cents=0,
            created_at=at,
        )
        self._lines.add_all(
            [
                {
                    "id": line.line_item_id,
                    "order_id": command.order_id,
                    "position": position,
                    "product_id": line.product_id,
                    "qty": line.qty,
                    "line_total_cents": line.line_total_cents,
                    "status": line.status,
                }
                for position, line in enumerate(data.lines)
            ]
        )
        created = CATALOG.event(
            data, aggregate_id=command.order_id, actor=command.actor, occurred_at=at
        )
        to = command.vendor_store_id
        return [created, _notification(command.order_id, to, "order_received", created)]

    def accept_lines(self, command: commands.AcceptLines) -> list[Event]:
        """Accept all lines, some or none; a line is decided once."""
        at, order = command.decided_at, self._orders.get(command.order_id)
        lines = self._lines_of(order.id)
        rejected = set(command.rejected)
        unknown = rejected.difference(line.id for line in lines)
        if unknown:
            raise Refused(f"order {order.id} has no line {', '.join(map(str, sorted(unknown)))}")
        kept = [line for line in lines if line.id not in rejected]
        status = "rejected" if not kept else "partially_accepted" if rejected else "accepted"
        ORDER.check(order.id, order.status, status)
        events: list[Event] = []
        total, left = order.total_cents, len(lines)
        for line in lines:
            to = "rejected" if line.id in rejected else "accepted"
            if to == "rejected":
                left -= 1
                total = total - line.line_total_cents if left else 0
            data = LineItemStateChanged(
                **order_keys(order),
                line_item_id=line.id,
                product_id=line.product_id,
                from_status=line.status,
                to_status=to,
                qty=line.qty,
                line_total_cents=line.line_total_cents,
                order_total_cents_after=total,
            )
            events.append(CATALOG.event(data, aggregate_id=order.id, occurred_at=at))
        self._decide_lines(order.id, kept, rejected)
        events.append(self._move(order, command, status, at, total, command.reason))
        if rejected:
            cause = "line_rejected" if kept else "order_rejected"
            dropped = [line for line in lines if line.id in rejected]
            events.append(_released(order, cause, dropped, at))
        return events

    def mark_ready(self, command: commands.MarkReady) -> list[Event]:
        return [self._step(command, "ready_for_dispatch")]

    def dispatch_order(self, command: commands.DispatchOrder) -> list[Event]:
        return [self._step(command, "in_transit")]

    def deliver_order(self, command: commands.DeliverOrder) -> list[Event]:
        order = self._orders.get(command.order_id)
        delivered = self._step(command, "delivered", order)
        to = order.buyer_store_id
        return [delivered, _notification(order.id, to, "order_delivered", delivered)]

    def close_order(self, command: commands.CloseOrder) -> list[Event]:
        order = self._orders.get(command.order_id)
        ORDER.check(order.id, order.status, "closed")
        if not order.total_cents == order.collected_cents == order.paid_cents:
            raise IllegalTransition(
                f"order {order.id}: {order.total_cents} cents are due,"
                f" {order.collected_cents} collected and {order.paid_cents} paid out;"
                " it can be closed when the three are the same"
            )
        return [self._step(command, "closed", order)]

    def cancel_order(self, command: commands.CancelOrder) -> list[Event]:
        at, order = command.decided_at, self._orders.get(command.order_id)
        ORDER.check(order.id, order.status, "canceled")
        data = OrderCanceled(
            **order_keys(order),
            canceled_at=at,
            canceled_by=command.canceled_by,
            total_cents=order.total_cents,
            reason_code=command.reason_code,
        )
        return self._end(order, "canceled", data, command, at)

    def expire_order(self, command: commands.ExpireOrder) -> list[Event]:
        at, order = command.decided_at, self._orders.get(command.order_id)
        ORDER.check(order.id, order.status, "expired")
        due = _aware(order.created_at) + timedelta(days=TTL_DAYS)
        if at < due:
            raise IllegalTransition(f"order {order.id} expires at {due.isoformat()}, not before")
        data = OrderExpired(
            **order_keys(order), expired_at=at, ttl_days=TTL_DAYS, total_cents=order.total_cents
        )
        return self._end(order, "expired", data, command, at)

    # --- inside -----------------------------------------------------------------------------

    def _step(self, command: commands.OrderCommand, to: str, order: Any = None) -> Event:
        order = order or self._orders.get(command.order_id)
        ORDER.check(order.id, order.status, to)
        return self._move(order, command, to, command.decided_at, order.total_cents)

    def _move(
        self,
        order: Any,
        command: commands.OrderCommand,
        to: str,
        at: datetime,
        total: int,
        reason: str | None = None,
    ) -> Event:
        self._orders.change(order.id, status=to, total_cents=total)
        data = OrderStateChanged(
            **order_keys(order),
            from_status=order.status,
            to_status=to,
            changed_at=at,
            total_cents=total,
            balance_due_cents=total - order.collected_cents,
            reason=reason,
        )
        return CATALOG.event(data, aggregate_id=order.id, actor=command.actor, occurred_at=at)

    def _end(
        self,
        order: Any,
        status: str,
        data: msgspec.Struct,
        command: commands.OrderCommand,
        at: datetime,
    ) -> list[Event]:
        self._orders.change(order.id, status=status)
        kept = [line for line in self._lines_of(order.id) if line.status != "rejected"]
        ended = CATALOG.event(data, aggregate_id=order.id, actor=command.actor, occurred_at=at)
        return [ended, _released(order, f"order_{status}", kept, at)]

    def _lines_of(self, order_id: UUID) -> list[Row[Any]]:
        with sql.connection(self._engine) as connection:
            return list(connection.execute(_LINES_OF, {"order": order_id}))

    def _decide_lines(self, order_id: UUID, kept: list[Row[Any]], rejected: set[UUID]) -> None:
        of_order = update(LINES).where(LINES.c.order_id == order_id)
        with sql.connection(self._engine) as connection:
            if kept:
                connection.execute(
                    of_order.where(LINES.c.id.not_in(rejected)) if rejected else of_order,
                    {"status": "accepted"},
                )
            if rejected:
                connection.execute(of_order.where(LINES.c.id.in_(rejected)), {"status": "rejected"})


def _priced(command: commands.PlaceOrder) -> OrderCreated:
    """Add up the order; refused if the total is not the one that the buyer was shown."""
    lines = []
    for line in command.lines:
        gross = line.qty * line.unit_price_cents
        if line.discount_cents > gross:
            raise WrongAmount(
                f"order {command.order_id}: line {line.line_item_id} costs {gross} cents and"
                f" cannot have a discount of {line.discount_cents}"
            )
        fields = msgspec.structs.asdict(line)
        total = gross - line.discount_cents
        lines.append(Line(**fields, line_total_cents=total, status="pending"))
    subtotal = sum(line.qty * line.unit_price_cents for line in lines)
    discounts = sum(line.discount_cents for line in lines)
    total = subtotal - discounts + command.tax_cents + command.transport_fee_cents
    if total != command.total_cents:
        raise WrongAmount(
            f"order {command.order_id}: subtotal {subtotal} - discounts {discounts} + tax"
            f" {command.tax_cents} + transport {command.transport_fee_cents} = {total} cents,"
            f" and the command says {command.total_cents}"
        )
    tokens = [str(token) for token in command.token_ids]
    return OrderCreated(
        order_id=command.order_id,
        checkout_group_id=command.checkout_group_id,
        buyer_store_id=command.buyer_store_id,
        vendor_store_id=command.vendor_store_id,
        order_number=command.order_number,
        currency=command.currency,
        payment_method=command.payment_method,
        subtotal_cents=subtotal,
        discounts_cents=discounts,
        tax_cents=command.tax_cents,
        transport_fee_cents=command.transport_fee_cents,
        total_cents=total,
        ship_to=ShipTo(command.postal_code),
        lines=lines,
        attribution={"token_ids": tokens} if tokens else None,
    )


def _released(order: Any, cause: str, lines: list[Row[Any]], at: datetime) -> Event:
    released = [ReleasedLine(line.id, line.product_id, line.qty) for line in lines]
    data = ReservationReleased(**order_keys(order), cause=cause, released_at=at, lines=released)
    return CATALOG.event(data, aggregate_id=order.id, occurred_at=at)


def _notification(order_id: UUID, to: UUID, kind: str, cause: Event) -> Event:
    """Request a notification, once per order and kind: its id follows from them."""
    id_ = uuid5(order_id, kind)
    data = NotificationRequested(id_, to, "email", kind, source_event_id=cause.id)
    return CATALOG.event(data, aggregate_id=id_, occurred_at=cause.occurred_at)


def _aware(moment: datetime) -> datetime:
    """Add the offset that SQLite drops: stored times are in UTC."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
