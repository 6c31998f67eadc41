"""A pipeline of one's own: three types, two versions, a rule, a late correction; and its events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec

from conquiet.events import Catalog
from conquiet.lake import Event, Pipeline


class EventType(StrEnum):
    PAYMENT_AUTHORIZED = "payment_authorized"
    PAYMENT_CAPTURED = "payment_captured"
    PAYMENT_CORRECTED = "payment_corrected"


class AggregateType(StrEnum):
    PAYMENT = "payment"


CATALOG = Catalog(EventType, AggregateType)


@CATALOG.declare("payment_authorized", "payment")
class Authorized(msgspec.Struct):
    payment_id: str
    shop: str
    cents: int


@CATALOG.declare("payment_authorized", "payment", version=2)
class AuthorizedInCurrency(Authorized):
    currency: str


@CATALOG.declare("payment_captured", "payment")
class Captured(msgspec.Struct):
    payment_id: str
    captured_at: datetime
    cents: int


@CATALOG.declare("payment_corrected", "payment")
class Corrected(msgspec.Struct):
    payment_id: str
    cents: int


pipeline = Pipeline(CATALOG, name="payments", zone="America/Chicago")
pipeline.moments = {"payment_captured": "captured_at"}


@pipeline.expect("captures_something")
def captures_something(data: Captured) -> bool:
    return data.cents > 0


@pipeline.table(key="payment_id", partition_by="day")
class Payment(msgspec.Struct):
    payment_id: str
    day: date
    shop: str
    cents: int
    captured_at: datetime | None


@pipeline.expect("not_free", on_fail="count")
def not_free(row: Payment) -> bool:
    return row.cents != 0


@pipeline.fact(key="payment_id")
class PaymentState(msgspec.Struct, array_like=True):
    key: str = ""
    shop: str | None = None
    authorized_at: datetime | None = None
    captured: tuple[datetime, int] | None = None
    corrected: tuple[datetime, str, int] | None = None

    def apply(self, event: Event) -> None:
        data = event.data
        if isinstance(data, Authorized):
            self.shop, self.authorized_at = data.shop, event.moment
        elif isinstance(data, Captured):
            first = (event.moment, data.cents)
            self.captured = min(self.captured or first, first)
        else:  # the latest correction holds, however late it comes
            last = (event.moment, event.event_id, data.cents)
            self.corrected = max(self.corrected or last, last)

    def rows(self) -> Iterator[Payment]:
        if self.shop is None or self.authorized_at is None:
            return
        cents = self.captured[1] if self.captured else 0
        cents = self.corrected[2] if self.corrected else cents
        captured_at = self.captured[0] if self.captured else None
        day = pipeline.day(self.authorized_at)
        yield Payment(self.key, day, self.shop, cents, captured_at)


pipeline.mart(
    "shop_daily", of=Payment, by=("day", "shop"), sums=("cents",), counts={"payments": None}
)

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def entry(
    type: str,
    data: dict[str, Any] | None,
    *,
    hour: float,
    number: int,
    version: int = 1,
    delivered: float = 0,
    raw: bytes | None = None,
) -> dict[str, Any]:
    """Return one entry of the log; its id follows from its number."""
    event_id = str(uuid.UUID(int=number))
    at = START + timedelta(hours=hour)
    seen = at + timedelta(seconds=1, hours=delivered)
    envelope = {
        "version": version,
        "eventId": event_id,
        "occurredAt": at.isoformat(),
        "actor": {"type": "system", "id": "till"},
        "data": data,
    }
    return {
        "stream": "payments",
        "entry_id": f"{int(seen.timestamp() * 1000)}-{number}",
        "entry_time": seen,
        "key": (data or {}).get("payment_id"),
        "event_id": event_id,
        "type": type,
        "source": "/till",
        "subject": (data or {}).get("payment_id"),
        "time": at,
        "content_type": "application/json",
        "attributes": {"aggregatetype": "payment"},
        "data": json.dumps(envelope).encode() if raw is None else raw,
        "_malformed": None,
    }


def entries(payments: int = 40) -> list[dict[str, Any]]:
    """Return a log with redeliveries, late corrections, and entries that are refused."""
    log = []
    for n in range(payments):
        base, hour = n * 10, n * 3
        given = {"payment_id": f"p{n}", "shop": f"shop-{n % 3}", "cents": 1000 + n}
        newer = {**given, "currency": "USD"}
        first = entry(
            "payment_authorized",
            newer if n % 2 else given,
            hour=hour,
            number=base,
            version=1 + n % 2,
        )
        log.append(first)
        captured_at = (START + timedelta(hours=hour + 1)).isoformat()
        captured = {"payment_id": f"p{n}", "captured_at": captured_at, "cents": 1000 + n}
        log.append(entry("payment_captured", captured, hour=hour + 1, number=base + 1))
        if n % 4 == 0:  # a correction that comes days late
            corrected = {"payment_id": f"p{n}", "cents": 900 + n}
            log.append(
                entry("payment_corrected", corrected, hour=hour + 2, number=base + 2, delivered=60)
            )
        if n % 5 == 0:
            log.append({**first, "entry_id": f"9{first['entry_id']}"})  # delivered twice
        if n % 8 == 0:
            captured = {**captured, "cents": 0}
            log.append(entry("payment_captured", captured, hour=hour + 1, number=base + 3))
    return log
