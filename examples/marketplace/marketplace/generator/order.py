"""Order: one order of the generated world, and how its parts are written."""

from __future__ import annotations

from typing import Any

from marketplace.generator.population import Product, Store, json_text


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
    """One token of telemetry: an impression or a click."""

    __slots__ = ("ad", "at", "buyer", "events", "impression", "kind", "note", "token")

    def __init__(self, token: str, kind: str, ad: Any, buyer: Store, at: int) -> None:
        self.token = token
        self.kind = kind
        self.ad = ad
        self.buyer = buyer
        self.at = at
        self.impression: Touch | None = None
        """Of a click: what was clicked on."""
        self.events = 1
        """How many events carry the token."""
        self.note: Any = None
        """For a witness."""


class Order:
    """What was ordered and what became of it; the two fragments stand in each of its events."""

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
        """What is to be paid as things stand."""
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
