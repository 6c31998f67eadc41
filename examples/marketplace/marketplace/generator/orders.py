"""Orders: one order with its lines and touches, and the life of all of them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from marketplace.generator.clock import DAY, HOUR, MINUTE, SECOND
from marketplace.generator.faults import FAULTS
from marketplace.generator.population import ODD_WORDS, Product, Store, json_text, uuid_stem

if TYPE_CHECKING:
    from marketplace.generator.generator import World


class Line:
    __slots__ = ("discount", "id", "is_rejected", "product", "qty", "title", "total")

    def __init__(self, id: str, product: Product, qty: int, discount: int, title: str) -> None:
        self.id = id
        self.product = product
        self.qty = qty
        self.discount = discount
        self.title = title
        self.total = qty * product.price - discount
        self.is_rejected = False

    def json(self) -> str:
        product = self.product
        return (
            f'{product.head}{self.discount},"line_item_id":"{self.id}","line_total_cents":{self.total},'
            f'"product_id":"{product.id}","qty":{self.qty},"status":"pending",'
            f'"title":{json_text(self.title)},"unit":"{product.unit}",'
            f'"unit_price_cents":{product.price}}}'
        )

    def released(self) -> str:
        return f'{{"line_item_id":"{self.id}","product_id":"{self.product.id}","qty":{self.qty}}}'


class Touch:
    """Holds one token of telemetry: an impression or a click."""

    __slots__ = ("ad", "at", "buyer", "events", "impression", "kind", "note", "token")

    def __init__(self, token: str, kind: str, ad: Any, buyer: Store, at: int) -> None:
        self.token = token
        self.kind = kind
        self.ad = ad
        self.buyer = buyer
        self.at = at
        self.impression: Touch | None = None
        """The target of a click."""
        self.events = 1
        """How many events carry the token."""
        self.note: Any = None
        """For a witness."""


class Order:
    """Holds an order and its state; the two fragments are in each of its events."""

    __slots__ = (
        *("buyer", "created", "discounts", "group_id", "id", "lines", "method", "number"),
        *("collected", "keys", "note", "odd", "stem", "state", "subtotal", "tax", "touches"),
        *("total", "transport", "vendor", "vendor_key"),
    )

    def __init__(self, number: int, stem: str, buyer: Store, vendor: Store, method: str) -> None:
        self.number = number
        self.stem = stem
        self.id = f"{stem}000000"
        self.group_id = f"{stem}000001"
        self.buyer = buyer
        self.vendor = vendor
        self.method = method
        self.lines: list[Line] = []
        self.touches: list[Touch] = []
        self.subtotal = self.discounts = self.tax = self.transport = 0
        self.total = 0
        """The amount due now."""
        self.collected = 0
        self.created = 0
        self.state = "created_pending"
        self.odd = False
        """Whether a title holds a NUL."""
        self.keys = f'"checkout_group_id":"{self.group_id}",'
        self.vendor_key = f'"vendor_store_id":"{vendor.id}"}}'
        self.note: Any = None
        """For a witness."""

    def created_json(self) -> str:
        tokens = ",".join([f'"{touch.token}"' for touch in self.touches])
        attribution = f'"attribution":{{"token_ids":[{tokens}]}},' if tokens else ""
        return (
            f'{{{attribution}"buyer_store_id":"{self.buyer.id}",{self.keys}"currency":"USD",'
            f'"discounts_cents":{self.discounts},'
            f'"lines":[{",".join([line.json() for line in self.lines])}],'
            f'"order_id":"{self.id}","order_number":{self.number},"payment_method":"{self.method}",'
            f'"ship_to":{{"postal_code":"{self.buyer.postal_code}"}},'
            f'"subtotal_cents":{self.subtotal},"tax_cents":{self.tax},"total_cents":{self.total},'
            f'"transport_fee_cents":{self.transport},{self.vendor_key}'
        )


TTL_DAYS = 10
_REASONS = ("changed_mind", "found_cheaper", "ordered_twice", None)
_QUANTITIES = (1, 1, 2, 2, 3, 4, 6, 10, 12, 24)


class Orders:
    """Runs the steps of an order's life; the world calls each at its time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._record = world.recorder.record
        self._text = world.recorder.text
        self._plan = world.plan
        self._random = Random(f"{world.seed}/orders")
        self._chance = self._random.random
        self._population = world.population
        faults = world.faults
        self._partial = FAULTS["partial_acceptance"] if "partial_acceptance" in faults else 0.0
        self._wrong = FAULTS["wrong_amounts"] if "wrong_amounts" in faults else 0.0
        self._odd = FAULTS["text"] if "text" in faults else 0.0

    # --- placing ----------------------------------------------------------------------------

    def draw(self, number: int) -> Order:
        """Draw the order of a buyer."""
        chance, population = self._chance, self._population
        buyers, vendors = population.buyers, population.vendors
        buyer = buyers[int(chance() * chance() * len(buyers))]
        vendor = vendors[int(chance() * len(vendors))]
        method = "cash" if chance() < 0.6 else "ach"
        order = Order(1_000 + number, uuid_stem(self._random), buyer, vendor, method)
        for place in range(1 + int(chance() * chance() * 6)):
            order.lines.append(self._line(order, vendor, place))
        order.subtotal = sum([line.qty * line.product.price for line in order.lines])
        order.discounts = sum([line.discount for line in order.lines])
        order.tax = (order.subtotal - order.discounts) * 8 // 100
        order.transport = int(chance() * 4) * 500
        order.total = order.subtotal - order.discounts + order.tax + order.transport
        return order

    def _line(self, order: Order, vendor: Store, place: int) -> Line:
        chance = self._chance
        product = vendor.products[int(chance() * len(vendor.products))]
        qty = _QUANTITIES[int(chance() * len(_QUANTITIES))]
        gross = qty * product.price
        rebate = chance()
        discount = gross * int(rebate * 40) // 100 if rebate < 0.5 else 0
        title, odd = product.title, chance()
        if odd < self._odd:
            word = ODD_WORDS[int(odd / self._odd * len(ODD_WORDS))]
            title = f"{title} {word}"
            order.odd = order.odd or "\0" in word
        return Line(f"{order.stem}0001{place:02x}", product, qty, discount, title)

    def create(self, at: int, order: Order) -> None:
        order.created = at
        event_id = self._record(
            *(at, "order_created", "vendor_order", order.id, order.created_json(), order),
            actor=("user", order.buyer.user, order.buyer.id),
            foreign=order.odd,
        )
        self._notify(at, order, order.vendor, "order_received", event_id, "01")
        chance = self._chance
        fate, early = chance(), chance()
        if fate < 0.03:
            self._plan(at + TTL_DAYS * DAY, self.expire, order)
        elif fate < 0.06:
            self._plan(at + MINUTE + int(early * 5 * HOUR), self.cancel, order)
        else:
            self._plan(at + 5 * MINUTE + int(early * chance() * 40 * HOUR), self.decide, order)

    # --- carrying out -----------------------------------------------------------------------

    def decide(self, at: int, order: Order) -> None:
        """Let the vendor accept all lines, some or none."""
        chance = self._chance
        lines, rejects, some = order.lines, chance() < 0.04, chance()
        if rejects:
            rejected = lines
        elif some < self._partial and len(lines) > 1:
            rejected = lines[: 1 + int(some / self._partial * (len(lines) - 1))]
        else:
            rejected = []
        left = len(lines)
        for line in lines:
            to = "accepted"
            if line in rejected:
                to = "rejected"
                left -= 1
                line.is_rejected = True
                order.total = order.total - line.total if left else 0
            data = (
                f'{{"buyer_store_id":"{order.buyer.id}",{order.keys}"from_status":"pending",'
                f'"line_item_id":"{line.id}","line_total_cents":{line.total},"order_id":"{order.id}",'
                f'"order_total_cents_after":{order.total},"product_id":"{line.product.id}",'
                f'"qty":{line.qty},"to_status":"{to}",{order.vendor_key}'
            )
            detail = (line, to)
            self._record(
                *(at, "line_item_state_changed", "vendor_order", order.id, data, order, detail)
            )
        state = "rejected" if rejects else "partially_accepted" if rejected else "accepted"
        self._move(at, order, state, "out_of_stock" if rejected else None)
        if rejected:
            cause = "order_rejected" if rejects else "line_rejected"
            self._release(at, order, cause, rejected)
        if rejects:
            self._world.finished(order)
        elif chance() < 0.02:
            self._plan(at + MINUTE + int(chance() * 3 * HOUR), self.cancel, order)
        else:
            self._plan(at + HOUR + int(chance() * DAY), self.ready, order)

    def ready(self, at: int, order: Order) -> None:
        self._move(at, order, "ready_for_dispatch")
        step = self.cancel if self._chance() < 0.01 else self.send
        self._plan(at + 30 * MINUTE + int(self._chance() * DAY), step, order)

    def send(self, at: int, order: Order) -> None:
        self._move(at, order, "in_transit")
        self._plan(at + 2 * HOUR + int(self._chance() * 2 * DAY), self.deliver, order)

    def deliver(self, at: int, order: Order) -> None:
        event_id = self._move(at, order, "delivered")
        self._notify(at, order, order.buyer, "order_delivered", event_id, "02")
        if order.method == "cash":
            self._plan(at + SECOND + int(self._chance() * 10 * MINUTE), self.collect, order)
        else:
            self._plan(at + DAY + int(self._chance() * 2 * DAY), self.settle, order)

    def cancel(self, at: int, order: Order) -> None:
        chance = self._chance()
        reason = _REASONS[int(chance * len(_REASONS))]
        by = "buyer" if chance < 0.7 else "vendor"
        order.state = "canceled"
        because = f'"reason_code":"{reason}",' if reason else ""
        data = (
            f'{{"buyer_store_id":"{order.buyer.id}","canceled_at":"{self._text(at)}",'
            f'"canceled_by":"{by}",{order.keys}"order_id":"{order.id}",{because}'
            f'"total_cents":{order.total},{order.vendor_key}'
        )
        self._record(at, "order_canceled", "vendor_order", order.id, data, order)
        kept = [line for line in order.lines if not line.is_rejected]
        self._release(at, order, "order_canceled", kept)
        self._world.finished(order)

    def expire(self, at: int, order: Order) -> None:
        order.state = "expired"
        data = (
            f'{{"buyer_store_id":"{order.buyer.id}",{order.keys}"expired_at":"{self._text(at)}",'
            f'"order_id":"{order.id}","total_cents":{order.total},"ttl_days":{TTL_DAYS},'
            f"{order.vendor_key}"
        )
        self._record(at, "order_expired", "vendor_order", order.id, data, order)
        self._release(at, order, "order_expired", order.lines)
        self._world.finished(order)

    # --- paying -----------------------------------------------------------------------------

    def collect(self, at: int, order: Order) -> None:
        amount = order.collected = self._amount(order.total)
        data = (
            f'{{"amount_cents":{amount},"buyer_store_id":"{order.buyer.id}",{order.keys}'
            f'"collected_at":"{self._text(at)}","currency":"USD",'
            f'"ledger_event_id":"{order.stem}000301","order_id":"{order.id}",'
            f'"payment_intent_id":"{order.stem}000201",{order.vendor_key}'
        )
        self._record(at, "cash_collected", "vendor_order", order.id, data, order, amount)
        self._plan(at + DAY + int(self._chance() * DAY), self.settle, order)

    def settle(self, at: int, order: Order) -> None:
        """Settle the payment: for ach this is the collection, for cash it follows it."""
        if order.method == "ach":
            amount = order.collected = self._amount(order.total)
        else:
            amount = order.total
        ledger = f"{order.stem}000302"
        data = (
            f'{{"amount_cents":{amount},"buyer_store_id":"{order.buyer.id}",{order.keys}'
            f'"currency":"USD","ledger_event_id":"{ledger}","method":"{order.method}",'
            f'"order_id":"{order.id}","payment_intent_id":"{order.stem}000201",'
            f'"settled_at":"{self._text(at)}",{order.vendor_key}'
        )
        self._record(at, "payment_settled", "ledger_event", ledger, data, order, amount)
        self._plan(at + HOUR + int(self._chance() * 3 * DAY), self.pay_out, order)

    def pay_out(self, at: int, order: Order) -> None:
        amount = self._amount(order.collected)
        ledger = f"{order.stem}000303"
        data = (
            f'{{"amount_cents":{amount},"buyer_store_id":"{order.buyer.id}",{order.keys}'
            f'"currency":"USD","ledger_event_id":"{ledger}","order_id":"{order.id}",'
            f'"paid_out_at":"{self._text(at)}",{order.vendor_key}'
        )
        self._record(at, "vendor_payout_recorded", "ledger_event", ledger, data, order, amount)
        self._plan(at + SECOND + int(self._chance() * MINUTE), self.close, order)

    def close(self, at: int, order: Order) -> None:
        self._move(at, order, "closed")
        self._world.finished(order)

    def _amount(self, right: int) -> int:
        """Return the amount that is recorded: the right one, unless the fault changes it."""
        draw = self._chance()
        if draw >= self._wrong:
            return right
        return max(0, right - 1 - int(draw / self._wrong * 90))

    # --- shared by several steps ------------------------------------------------------------

    def _move(self, at: int, order: Order, to: str, reason: str | None = None) -> str:
        total = order.total
        balance = 0 if to == "closed" else total
        because = f'"reason":"{reason}",' if reason else ""
        data = (
            f'{{"balance_due_cents":{balance},"buyer_store_id":"{order.buyer.id}",'
            f'"changed_at":"{self._text(at)}",{order.keys}"from_status":"{order.state}",'
            f'"order_id":"{order.id}",{because}"to_status":"{to}","total_cents":{total},'
            f"{order.vendor_key}"
        )
        order.state = to
        vendor = order.vendor
        actor = None if to == "closed" else ("store", vendor.user, vendor.id)
        kind = "order_state_changed"
        return self._record(at, kind, "vendor_order", order.id, data, order, to, actor)

    def _release(self, at: int, order: Order, cause: str, lines: list[Line]) -> None:
        released = ",".join([line.released() for line in lines])
        data = (
            f'{{"buyer_store_id":"{order.buyer.id}","cause":"{cause}",{order.keys}'
            f'"lines":[{released}],"order_id":"{order.id}","released_at":"{self._text(at)}",'
            f"{order.vendor_key}"
        )
        self._record(at, "reservation_released", "vendor_order", order.id, data, order)

    def _notify(self, at: int, order: Order, to: Store, kind: str, cause: str, number: str) -> None:
        id_ = f"{order.stem}0004{number}"
        data = (
            f'{{"channel":"email","kind":"{kind}","notification_id":"{id_}",'
            f'"recipient_store_id":"{to.id}","source_event_id":"{cause}"}}'
        )
        self._record(at, "notification_requested", "notification", id_, data)
