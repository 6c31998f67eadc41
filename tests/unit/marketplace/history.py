"""Orders by hand: what happened to each, as entries of the log."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from tests.unit.marketplace.entries import START, entry, envelope, line, order, rfc, uuid

from marketplace.lake import pipeline


class History:
    """Events in the order in which they are told, each with an id of its own."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        return pipeline.local(self.entries)

    def tell(self, type: str, data: dict[str, Any], at: datetime = START) -> str:
        number = len(self.entries) + 1
        self.entries.append(entry(number, type, envelope(number, data, at=at)))
        return uuid(number)


class Order:
    """One order with two lines (1,000 and 500 cents) and 100 of fees; days count from START."""

    def __init__(self, history: History, number: int, day: float = 0, **changes: Any) -> None:
        self._history, self.number = history, number
        self.keys = {
            "order_id": uuid(1000 + number),
            "checkout_group_id": uuid(2000 + number),
            "buyer_store_id": changes.pop("buyer_store_id", uuid(3000 + number)),
            "vendor_store_id": uuid(4000),
        }
        self.lines = [line(10_000 + 10 * number), line(10_001 + 10 * number, qty=1)]
        data = order(*self.lines, order_number=number, **self.keys, **changes)
        self.created = self._tell("order_created", data, day)

    def _tell(self, type: str, data: dict[str, Any], day: float) -> str:
        return self._history.tell(type, data, START + timedelta(days=day))

    def _at(self, day: float) -> str:
        return rfc(START + timedelta(days=day))

    def moves(self, to: str, day: float) -> str:
        about = {"from_status": "before", "to_status": to, "changed_at": self._at(day)}
        money = {"total_cents": 1600, "balance_due_cents": 0}
        return self._tell("order_state_changed", {**self.keys, **about, **money}, day)

    def line_becomes(self, place: int, to: str, day: float) -> str:
        it = self.lines[place]
        about = {name: it[name] for name in ("line_item_id", "product_id", "qty")}
        about |= {"from_status": "pending", "to_status": to, "order_total_cents_after": 0}
        about["line_total_cents"] = it["line_total_cents"]
        return self._tell("line_item_state_changed", {**self.keys, **about}, day)

    def collects(self, cents: int, day: float, currency: str = "USD") -> str:
        money = {"amount_cents": cents, "currency": currency, "collected_at": self._at(day)}
        ids = {"payment_intent_id": uuid(7), "ledger_event_id": uuid(8)}
        return self._tell("cash_collected", {**self.keys, **ids, **money}, day)

    def settles(self, cents: int, day: float) -> str:
        money = {"amount_cents": cents, "currency": "USD", "settled_at": self._at(day)}
        ids = {"payment_intent_id": uuid(7), "ledger_event_id": uuid(9), "method": "cash"}
        return self._tell("payment_settled", {**self.keys, **ids, **money}, day)

    def pays_out(self, cents: int, day: float) -> str:
        money = {"amount_cents": cents, "currency": "USD", "paid_out_at": self._at(day)}
        about = {**self.keys, "ledger_event_id": uuid(10), **money}
        return self._tell("vendor_payout_recorded", about, day)

    def is_canceled(self, day: float) -> str:
        about = {"canceled_at": self._at(day), "canceled_by": "buyer", "total_cents": 1600}
        return self._tell("order_canceled", {**self.keys, **about}, day)
