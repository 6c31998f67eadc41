"""The expected tables of orders: facts, lines, attribution, and contradictions in money."""

from __future__ import annotations

from datetime import date
from typing import Any, NamedTuple

from marketplace.generator.orders import Line, Order, Touch
from marketplace.oracle.calendar import business_day
from marketplace.oracle.tables import Rows

LOST = frozenset(("canceled", "expired", "rejected"))
_DECISIONS = frozenset(("accepted", "partially_accepted", "rejected"))
_FURTHEST = ("closed", "delivered", "in_transit", "ready_for_dispatch")


class Note:
    """Collects what the readable events of an order say."""

    __slots__ = ("all_ids", "collections", "is_created", "lines", "money_ids", "payouts", "times")

    def __init__(self) -> None:
        self.is_created = False
        self.times: dict[str, int] = {}
        self.lines: dict[str, tuple[str, int]] = {}
        self.collections: list[tuple[int, str, int]] = []
        self.payouts: list[tuple[int, str, int]] = []
        self.money_ids: list[str] = []
        self.all_ids: list[str] = []

    def take(self, type_: str, at: int, detail: Any, event_id: str) -> None:
        self.all_ids.append(event_id)
        if type_ == "order_state_changed":
            self.times[detail] = at
        elif type_ == "line_item_state_changed":
            line, to = detail
            self.lines[line.id] = to, at
        elif type_ == "reservation_released":
            self.times["released"] = at
        elif type_ in ("order_canceled", "order_expired"):
            self.times[type_[6:]] = at
        else:
            self._take_money(type_, at, detail, event_id)

    def _take_money(self, type_: str, at: int, detail: Any, event_id: str) -> None:
        self.money_ids.append(event_id)
        if type_ == "order_created":
            self.is_created = True
        elif type_ == "vendor_payout_recorded":
            self.payouts.append((at, event_id, detail))
        else:
            self.collections.append((at, event_id, detail))

    @property
    def decision(self) -> str | None:
        return next((name for name in _DECISIONS if name in self.times), None)

    @property
    def state(self) -> str:
        for name in ("canceled", "expired", "rejected", *_FURTHEST):
            if name in self.times:
                return name
        return self.decision or "created_pending"


class KnownOrder(NamedTuple):
    """Holds an order as the tables have it."""

    order: Order
    note: Note
    state: str
    is_lost: bool
    created: int
    final: int
    collected_at: int | None
    collected: int
    paid_at: int | None
    paid: int
    day: date
    revenue_day: date | None

    @property
    def revenue(self) -> int:
        return 0 if self.is_lost else self.collected

    def status(self, line: Line) -> tuple[str, int | None]:
        return self.note.lines.get(line.id, ("pending", None))

    def is_live(self, line: Line) -> bool:
        return not self.is_lost and self.status(line)[0] != "rejected"


def known(order: Order) -> KnownOrder:
    note: Note = order.note
    state = note.state
    is_lost = state in LOST
    kept = [line.total for line in order.lines if note.lines.get(line.id, "p")[0] != "rejected"]
    final = 0 if is_lost or not kept else sum(kept) + order.tax + order.transport
    collected_at, _, collected = min(note.collections, default=(None, "", 0))
    paid_at, _, paid = min(note.payouts, default=(None, "", 0))
    is_revenue = collected_at is not None and not is_lost
    return KnownOrder(
        order,
        note,
        state,
        is_lost,
        order.subtotal - order.discounts + order.tax + order.transport,
        final,
        collected_at,
        collected,
        paid_at,
        paid,
        business_day(order.created),
        business_day(collected_at) if is_revenue and collected_at is not None else None,
    )


def order_row(found: KnownOrder) -> tuple[Any, ...]:
    order, times = found.order, found.note.times
    decision = found.note.decision
    decided = times[decision] if decision else None
    moments = [
        times.get(name)
        for name in ("ready_for_dispatch", "in_transit", "delivered", "closed", "canceled")
    ]
    moments += [times.get("expired"), times.get("released"), found.collected_at, found.paid_at]
    return (
        *(order.id, order.group_id, order.buyer.id, order.vendor.id, order.number),
        *("USD", order.method, order.buyer.postal_code, len(order.lines)),
        *(order.created * 1_000, _micros(decided), decision, *map(_micros, moments)),
        *(order.subtotal, order.discounts, order.tax, order.transport, found.created),
        *(found.final, found.collected, found.paid, found.state, found.revenue),
        *(found.day, found.revenue_day),
    )


def line_row(found: KnownOrder, line: Line) -> tuple[Any, ...]:
    order, product = found.order, line.product
    status, decided = found.status(line)
    final = line.total if found.is_live(line) else 0
    return (
        *(line.id, order.id, order.buyer.id, order.vendor.id, product.id),
        *(line.title.replace("\0", "\ufffd"), product.category, product.unit),
        *(line.qty, product.price, line.discount, line.total, status, _micros(decided)),
        *(found.state, order.created * 1_000, final, final if found.revenue_day else 0),
        *(found.day, found.revenue_day),
    )


def _micros(ms: int | None) -> int | None:
    return None if ms is None else ms * 1_000


# --- attribution ----------------------------------------------------------------------------


class Winner(NamedTuple):
    """Names the ad that an order or a line is attributed to."""

    ad: Any
    scope: str
    cents: int


def attribute(found: KnownOrder, rows: Rows) -> list[Winner]:
    """Write the rows of all candidates of an order; return the winners."""
    order = found.order
    touches = [t for t in order.touches if t.note is not None and t.note.at <= order.created]
    if not touches:
        return []
    winners = _scope(found, "store", None, order.vendor.id, touches, found.revenue, rows)
    for line in order.lines:
        live = found.is_live(line) and found.revenue_day is not None
        cents = line.total if live else 0
        won = _scope(found, "line", line.id, line.product.id, touches, cents, rows)
        winners += won if live else []
    return winners


def _scope(
    found: KnownOrder,
    scope: str,
    line_id: str | None,
    target: str,
    touches: list[Touch],
    cents: int,
    rows: Rows,
) -> list[Winner]:
    of_ads: dict[str, list[Touch]] = {}
    for touch in touches:
        if touch.ad.target_id == target:
            of_ads.setdefault(touch.ad.id, []).append(touch)
    if not of_ads:
        return []
    best = {ad: max(candidates, key=_rank) for ad, candidates in of_ads.items()}
    winner = max(best.values(), key=_rank)
    for ad, touch in best.items():
        won = touch is winner
        rows.add(
            (
                *(
                    scope,
                    found.order.id,
                    line_id,
                    ad,
                    touch.token,
                    touch.kind,
                    touch.note.at * 1_000,
                ),
                *(len(of_ads[ad]), won, found.order.vendor.id, found.order.buyer.id),
                *(found.day, found.revenue_day, cents if won else 0),
            )
        )
    return [Winner(winner.ad, scope, cents)]


def _rank(touch: Touch) -> tuple[bool, int, str]:
    return touch.kind == "click", touch.note.at, touch.token


# --- money ----------------------------------------------------------------------------------


def mismatches(found: KnownOrder) -> list[str]:
    """Return the problems of an order, by their names in the contract."""
    is_collected, is_paid = found.collected_at is not None, found.paid_at is not None
    is_closed = found.state == "closed"
    amounts = {amount for _, _, amount in found.note.collections}
    problems = {
        "final_over_created": found.final > found.created,
        "collected_not_final": is_collected and found.collected != found.final,
        "collections_differ": len(amounts) > 1,
        "paid_without_collection": is_paid and not is_collected,
        "paid_not_collected": is_paid and is_collected and found.paid != found.collected,
        "closed_without_collection": (
            is_closed and not is_collected and not is_paid and found.final > 0
        ),
        "closed_without_payout": is_closed and not is_paid and found.collected > 0,
    }
    return [name for name, is_so in problems.items() if is_so]
