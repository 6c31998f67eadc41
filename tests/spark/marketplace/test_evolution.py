"""Events change: an optional field, a second version, a new value of the enum; from emit to mart.

Each is emitted into PostgreSQL, relayed to the log, and read by a pipeline of yesterday. What that
does not know waits in quarantine, until the catalog of today comes and `replay` takes it in.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from enum import StrEnum
from pathlib import Path
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy.exc import DBAPIError
from tests.integration.marketplace.services import relay_all
from tests.spark.marketplace.entries import order
from tests.spark.marketplace.tables import rows_of

from conquiet.events import Catalog, Event, emit, schema
from conquiet.spark.bronze import read_events
from conquiet.sql import engine
from marketplace.catalog import CATALOG, AggregateType, EventType, OrderCreated
from marketplace.pipeline import Job, Lake, replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DAY, AT = date(2026, 3, 7), datetime(2026, 3, 7, 18, tzinfo=UTC)
NewType = StrEnum(
    "NewType", {**{one.name: one.value for one in EventType}, "CONVERTED": "checkout_converted"}
)
TODAY = Catalog(NewType, AggregateType)


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
    TODAY.declare(one.event_type, one.aggregate_type, one.version)(struct)
TODAY.declare("order_created", "vendor_order", version=2)(OrderCreated2)
TODAY.declare("checkout_converted", "checkout_group")(CheckoutConverted)


def ordered(struct: type[OrderCreated], catalog: Catalog, **more: str) -> Event:
    order_id = uuid4()
    data = msgspec.convert({**order(order_id=str(order_id)), **more}, struct)
    return catalog.event(data, aggregate_id=order_id, occurred_at=AT)


class Market:
    """A database of yesterday, its relay and its log; and the tables, by any catalog."""

    def __init__(self, spark, folder: Path, database_url: str, client, redis_url: str) -> None:
        self.engine, self._client = engine(database_url), client
        schema.init(self.engine, CATALOG)
        self._spark, self._url = spark, redis_url
        self.lake = Lake(spark, folder / "lake")

    def emit(self, *events: Event) -> None:
        for event in events:  # of services of yesterday and of today
            with self.engine.begin() as connection:
                emit(connection, event)
        relay_all(self.engine, self._client)

    def job(self, catalog: Catalog) -> Job:
        tables = ["store_daily", "recon_completeness"]
        return Job(self.lake, once=True, tables=tables, catalog=catalog)

    def take(self, catalog: Catalog) -> None:
        log = {"url": self._url, "streams": "pf-*", "startingOffsets": "earliest"}
        job = self.job(catalog)
        job.start(read_events(self._spark, "log", log)).awaitTermination()
        job.finish()

    def replay(self, catalog: Catalog) -> None:
        """What `conquiet pipeline replay` does after the release that brings a catalog."""
        assert replay(self.job(catalog), date(2020, 1, 1), date(2100, 1, 1)) == 1

    def rows(self, table: str) -> list[dict]:
        return rows_of(self.lake.read(table))

    def reasons(self) -> list[str]:
        return [row["reason"] for row in self.rows("events_quarantine")]

    def on_the_day(self) -> tuple[int, int]:
        """Orders and cents of the mart."""
        rows = [row for row in self.rows("store_daily") if row["business_day"] == DAY]
        return sum(row["orders"] for row in rows), sum(row["created_cents"] for row in rows)

    def counted(self) -> tuple[int, int]:
        """What silver and the quarantine hold, by reconciliation, which must agree."""
        rows = self.rows("recon_completeness")
        assert all(row["complete"] for row in rows)
        return sum(row["silver_count"] for row in rows), sum(
            row["quarantine_count"] for row in rows
        )


@pytest.fixture
def market(
    spark, tmp_path: Path, database_url: str, redis_client, redis_url: str
) -> Iterator[Market]:
    made = Market(spark, tmp_path, database_url, redis_client, redis_url)
    yield made
    made.engine.dispose()


def test_an_optional_field_is_taken_by_readers_that_do_not_know_it(market: Market) -> None:
    market.emit(ordered(OrderCreated, CATALOG), ordered(WithGift, TODAY, gift="ribbon"))
    market.take(CATALOG)
    assert market.reasons() == []
    assert market.on_the_day() == (2, 2200)
    payloads = [msgspec.json.decode(row["payload"]) for row in market.rows("events")]
    assert {one["version"] for one in payloads} == {1}
    assert {one["data"].get("gift") for one in payloads} == {None, "ribbon"}  # nothing is dropped

    market.replay(TODAY)  # to which the old events are as good as the new ones
    assert market.reasons() == []
    assert market.on_the_day() == (2, 2200)


def test_a_new_version_waits_in_quarantine_until_the_catalog_knows_it(market: Market) -> None:
    market.emit(ordered(OrderCreated, CATALOG), ordered(OrderCreated2, TODAY, channel="phone"))
    market.take(CATALOG)
    assert market.reasons() == ["unknown_version"]
    assert market.on_the_day() == (1, 1100)
    assert market.counted() == (1, 1)

    market.replay(TODAY)
    assert market.reasons() == []
    assert market.on_the_day() == (2, 2200)
    assert market.counted() == (2, 0)
    assert {row["version"] for row in market.rows("events")} == {1, 2}
    assert {row["delivery_count"] for row in market.rows("events")} == {1}


def test_a_new_value_of_the_enum_is_a_migration_and_then_an_event_as_any(market: Market) -> None:
    group = uuid4()
    converted = TODAY.event(CheckoutConverted(group), aggregate_id=group, occurred_at=AT)
    with pytest.raises(DBAPIError, match="checkout_converted"):
        market.emit(converted)  # before the migration
    [lacking] = schema.verify(market.engine, TODAY)
    assert "checkout_converted" in str(lacking)
    schema.migrate(market.engine, TODAY)
    assert schema.verify(market.engine, TODAY) == []

    market.emit(converted, ordered(OrderCreated, CATALOG))
    market.take(CATALOG)
    assert market.reasons() == ["unknown_type"]
    assert market.counted() == (1, 1)

    market.replay(TODAY)
    assert market.reasons() == []
    assert market.on_the_day() == (1, 1100)
    assert market.counted() == (2, 0)
    assert {row["event_type"] for row in market.rows("events")} == {
        "order_created",
        "checkout_converted",
    }
