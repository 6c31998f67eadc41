"""The expected marts: sums by business day, buyers, weeks."""

from __future__ import annotations

from array import array
from datetime import date
from typing import Any

from marketplace.generator.orders import Line
from marketplace.oracle.calendar import business_day, nearest_rank, week
from marketplace.oracle.orders import KnownOrder
from marketplace.oracle.tables import Rows

_STAGES = (
    ("created", "decided"),
    ("decided", "in_transit"),
    ("in_transit", "delivered"),
    ("delivered", "collected"),
    ("collected", "paid"),
)


class Sums:
    """Sums numbers by key; a row exists once a number was added to it."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.rows: dict[tuple[Any, ...], list[int]] = {}

    def add(self, key: tuple[Any, ...], first: int, *values: int) -> None:
        """Add to the measures from the given one on."""
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = [0] * self._width
        for place, value in enumerate(values, first):
            row[place] += value

    def write(self, rows: Rows) -> None:
        for key, row in sorted(self.rows.items()):
            rows.add((*key, *row))


class _Buyer:
    __slots__ = ("first", "last", "purchases")

    def __init__(self, first: tuple[int, str, str]) -> None:
        self.first = first
        self.last = first[0]
        self.purchases = 0


class _Week:
    __slots__ = ("buyers", "durations", "gmv", "lost", "orders", "revenue")

    def __init__(self) -> None:
        self.orders = self.lost = self.gmv = self.revenue = 0
        self.buyers: set[str] = set()
        self.durations = [array("q") for _ in _STAGES]


class Marts:
    """Takes every order once, when nothing more can happen to it."""

    def __init__(self) -> None:
        self.stores = Sums(11)
        self.products = Sums(6)
        self.categories = Sums(6)
        self.zips = Sums(6)
        self._buyers: dict[str, _Buyer] = {}
        self._weeks: dict[date, _Week] = {}

    def take(self, found: KnownOrder) -> None:
        order = found.order
        live = [line for line in order.lines if found.is_live(line)]
        units = sum(line.qty for line in live)
        discounts = sum(line.discount for line in live)
        lost = int(found.is_lost)
        store, zip_ = order.vendor.id, order.buyer.postal_code
        counted = (1, lost, found.created, 1 - lost, units, discounts, found.final)
        self.stores.add((found.day, store), 0, *counted)
        self.zips.add((found.day, zip_), 0, 1, lost, found.created, found.final)
        if found.revenue_day is not None:
            self.stores.add((found.revenue_day, store), 7, 1, found.revenue)
            self.zips.add((found.revenue_day, zip_), 4, 1, found.revenue)
        if found.paid_at is not None:
            self.stores.add((business_day(found.paid_at), store), 9, 1, found.paid)
        for line in live:
            self._take_line(found, line)
        if not found.is_lost:
            self._take_buyer(found)
        self._take_week(found)

    def _take_line(self, found: KnownOrder, line: Line) -> None:
        product = line.product
        counted = (1, line.qty, line.discount, line.total)
        of_product = (product.id, found.order.vendor.id)
        self.products.add((found.day, *of_product), 0, *counted)
        self.categories.add((found.day, product.category), 0, *counted)
        if found.revenue_day is not None:
            self.products.add((found.revenue_day, *of_product), 4, 1, line.total)
            self.categories.add((found.revenue_day, product.category), 4, 1, line.total)

    def _take_buyer(self, found: KnownOrder) -> None:
        order = found.order
        this = (order.created, order.id, order.vendor.id)
        buyer = self._buyers.get(order.buyer.id)
        if buyer is None:
            buyer = self._buyers[order.buyer.id] = _Buyer(this)
        buyer.first = min(buyer.first, this)
        buyer.last = max(buyer.last, order.created)
        buyer.purchases += 1

    def _take_week(self, found: KnownOrder) -> None:
        order, times = found.order, found.note.times
        row = self._week(found.day)
        row.orders += 1
        row.lost += found.is_lost
        row.gmv += found.final
        if not found.is_lost:
            row.buyers.add(order.buyer.id)
        decision = found.note.decision
        moments = {
            "created": order.created,
            "decided": times.get(decision) if decision else None,
            "in_transit": times.get("in_transit"),
            "delivered": times.get("delivered"),
            "collected": found.collected_at,
            "paid": found.paid_at,
        }
        for durations, (begin, end) in zip(row.durations, _STAGES, strict=True):
            start, stop = moments[begin], moments[end]
            if start is not None and stop is not None:
                durations.append(stop - start)
        if found.revenue_day is not None:
            self._week(found.revenue_day).revenue += found.revenue

    def _week(self, day: date) -> _Week:
        row = self._weeks.get(week(day))
        if row is None:
            row = self._weeks[week(day)] = _Week()
        return row

    def write_buyers(self, rows: Rows) -> None:
        for id_, buyer in sorted(self._buyers.items()):
            at, order_id, vendor_id = buyer.first
            rows.add(
                (
                    *(id_, order_id, vendor_id, at * 1_000, business_day(at)),
                    *(buyer.purchases, buyer.last * 1_000),
                )
            )

    def write_weeks(self, rows: Rows) -> None:
        first = {id_: week(business_day(one.first[0])) for id_, one in self._buyers.items()}
        for monday, row in sorted(self._weeks.items()):
            new = sum(first[buyer] == monday for buyer in row.buyers)
            durations: list[int | None] = []
            for values in row.durations:
                ordered: Any = sorted(values)
                durations += (nearest_rank(ordered, 50), nearest_rank(ordered, 95))
            rows.add(
                (
                    *(monday, row.orders, row.lost, row.gmv, len(row.buyers), new),
                    *(len(row.buyers) - new, row.revenue, *durations),
                )
            )
