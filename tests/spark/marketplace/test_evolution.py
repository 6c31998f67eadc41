"""Events change: an optional field, a second version, a new type; from emit to the marts.

A pipeline of yesterday keeps what it does not know yet in quarantine; `replay` takes it in.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from enum import StrEnum
from pathlib import Path
from uuid import UUID, uuid4

import msgspec
import pytest
from tests.spark.marketplace.entries import order
from tests.spark.marketplace.tables import rows_of

from conquiet.events import Catalog, emit, schema
from conquiet.marketplace.catalog import CATALOG, AggregateType, EventType, OrderCreated
from conquiet.marketplace.pipeline import Job, Lake, replay
from conquiet.sql import engine

AT = datetime(2026, 3, 7, 18, tzinfo=UTC)
# What a migration adds to the enum of the database:
NewType = StrEnum(
    "NewType", {**{one.name: one.value for one in EventType}, "CONVERTED": "checkout_converted"}
)
TOMORROW = Catalog(NewType, AggregateType)


class WithGift(OrderCreated):
    """Version 1, with a field that may be left out."""

    gift: str | None = None


class OrderCreated2(OrderCreated, kw_only=True):
    """Version 2: a field that must be there."""

    channel: str


class CheckoutConverted(msgspec.Struct):
    checkout_group_id: UUID


for one in CATALOG.declarations:
    struct = WithGift if one.data is OrderCreated else one.data
    TOMORROW.declare(one.event_type, one.aggregate_type, one.version)(struct)
TOMORROW.declare("order_created", "vendor_order", version=2)(OrderCreated2)
TOMORROW.declare("checkout_converted", "checkout_group")(CheckoutConverted)


def emitted(url: str) -> None:
    """One event of each kind, in the outbox."""
    shop = engine(url)
    schema.init(shop, TOMORROW)
    orders = [
        (OrderCreated2, {"channel": "phone"}),
        (WithGift, {"gift": "ribbon"}),
        (WithGift, {}),
    ]
    events = []
    for struct, more in orders:
        order_id = uuid4()
        data = msgspec.convert({**order(order_id=str(order_id)), **more}, struct)
        events.append(TOMORROW.event(data, aggregate_id=order_id, occurred_at=AT))
    group = uuid4()
    events.append(TOMORROW.event(CheckoutConverted(group), aggregate_id=group, occurred_at=AT))
    with shop.begin() as connection:
        emit(connection, *events)
    shop.dispose()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_new_waits_in_quarantine_and_is_taken_in_by_a_replay(spark, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.sqlite"
    emitted(url)

    def outbox():
        options = {"url": url, "table": "outbox_events", "delivery": "true"}
        return spark.read.format("conquiet-outbox").options(**options).load()

    lake = Lake(spark, tmp_path / "lake")
    yesterday = Job(lake, once=True, outbox=outbox)
    for _ in range(2):  # rows that are there are not taken twice
        yesterday.take_outbox(outbox())
        yesterday.finish()
    reasons = {row["reason"] for row in rows_of(lake.read("events_quarantine"))}
    assert reasons == {"unknown_version", "unknown_type"}
    [day] = rows_of(lake.read("store_daily"))
    assert (day["business_day"], day["orders"], day["created_cents"]) == (date(2026, 3, 7), 2, 2200)

    today = Job(lake, once=True, outbox=outbox, catalog=TOMORROW)
    assert replay(today, date(2020, 1, 1), date(2100, 1, 1)) == 1
    assert rows_of(lake.read("events_quarantine")) == []
    types = {row["event_type"] for row in rows_of(lake.read("events"))}
    assert types == {"order_created", "checkout_converted"}
    [day] = rows_of(lake.read("store_daily"))
    assert (day["orders"], day["created_cents"], day["units"]) == (3, 3300, 6)
    assert all(row["complete"] for row in rows_of(lake.read("recon_completeness")))
    assert {row["delivery_count"] for row in rows_of(lake.read("events"))} == {1}
