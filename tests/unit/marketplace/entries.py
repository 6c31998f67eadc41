"""Entries of the log by hand, as bronze has them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 3, 7, 12, tzinfo=UTC)
DOMAIN, TELEMETRY = "pf-domain-events", "pf-ad-telemetry"


def uuid(number: int) -> str:
    return f"00000000-0000-7000-8000-{number:012d}"


def rfc(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def envelope(number: int, data: Any, at: datetime = START, **changes: Any) -> dict[str, Any]:
    whole = {"version": 1, "eventId": uuid(number), "occurredAt": rfc(at), "data": data, **changes}
    return {name: value for name, value in whole.items() if value is not ...}


def entry(number: int, type: str, body: Any, **columns: Any) -> dict[str, Any]:
    """An entry whose event has a number; `body` is its envelope, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = {
        "stream": DOMAIN,
        "entry_id": f"{1_000 + number}-0",
        "entry_time": START + timedelta(seconds=number),
        "event_id": uuid(number),
        "type": type,
        "source": "/outbox_events",
        "subject": uuid(1),
        "time": START,
        "attributes": {"specversion": "1.0", "aggregatetype": "vendor_order"},
        "data": data,
    }
    return found | columns


KEYS = {
    "order_id": uuid(101),
    "checkout_group_id": uuid(102),
    "buyer_store_id": uuid(103),
    "vendor_store_id": uuid(104),
}


def line(number: int = 201, qty: int = 2, price: int = 500, discount: int = 0) -> dict[str, Any]:
    return {
        "line_item_id": uuid(number),
        "product_id": uuid(number + 100),
        "title": "Tomatoes",
        "category": "vegetables",
        "unit": "kg",
        "qty": qty,
        "unit_price_cents": price,
        "discount_cents": discount,
        "line_total_cents": qty * price - discount,
        "status": "pending",
    }


def order(*lines: dict[str, Any], tax: int = 70, transport: int = 30, **changes: Any) -> Any:
    lines = lines or (line(),)
    subtotal = sum(one["qty"] * one["unit_price_cents"] for one in lines)
    discounts = sum(one["discount_cents"] for one in lines)
    whole = {
        **KEYS,
        "order_number": 1,
        "currency": "USD",
        "payment_method": "cash",
        "subtotal_cents": subtotal,
        "discounts_cents": discounts,
        "tax_cents": tax,
        "transport_fee_cents": transport,
        "total_cents": subtotal - discounts + tax + transport,
        "ship_to": {"postal_code": "60601"},
        "lines": list(lines),
        **changes,
    }
    return {name: value for name, value in whole.items() if value is not ...}
