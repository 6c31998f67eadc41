"""The business tables, on PostgreSQL and SQLite; each state machine is also a CHECK."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    URL,
    BigInteger,
    CheckConstraint,
    Column,
    Date,
    DateTime,
    Engine,
    ForeignKey,
    MetaData,
    String,
    Table,
    Text,
)

from conquiet.events import schema as events_schema
from conquiet.events.table import UuidText
from conquiet.sql import dialect
from conquiet.sql import schema as sql_schema
from marketplace.catalog import CATALOG
from marketplace.service.lifecycle import AD, LICENSE, LINE, ORDER, Lifecycle

METADATA = MetaData()


def _id(name: str = "id") -> Column[Any]:
    return Column(name, UuidText(), primary_key=True)


def _uuid(name: str) -> Column[Any]:
    return Column(name, UuidText(), nullable=False)


def _text(name: str) -> Column[Any]:
    return Column(name, Text, nullable=False)


def _cents(name: str) -> Column[Any]:
    return Column(name, BigInteger, CheckConstraint(f"{name} >= 0"), nullable=False, default=0)


def _status(lifecycle: Lifecycle) -> Column[Any]:
    names = ", ".join(f"'{state}'" for state in lifecycle.states)
    return Column("status", String(32), CheckConstraint(f"status IN ({names})"), nullable=False)


ORDERS = Table(
    "market_orders",
    METADATA,
    _id(),
    _uuid("checkout_group_id"),
    _uuid("buyer_store_id"),
    _uuid("vendor_store_id"),
    Column("order_number", BigInteger, nullable=False),
    Column("currency", String(3), nullable=False),
    Column("payment_method", String(8), nullable=False),
    _status(ORDER),
    _cents("tax_cents"),
    _cents("transport_fee_cents"),
    _cents("total_cents"),
    _cents("collected_cents"),
    _cents("paid_cents"),
    Column("created_at", DateTime(timezone=True), nullable=False),
)

LINES = Table(
    "market_order_lines",
    METADATA,
    _id(),
    Column("order_id", UuidText(), ForeignKey(ORDERS.c.id), nullable=False, index=True),
    Column("position", BigInteger, nullable=False),
    _uuid("product_id"),
    Column("qty", BigInteger, CheckConstraint("qty > 0"), nullable=False),
    _cents("line_total_cents"),
    _status(LINE),
)

LEDGER = Table(
    "market_ledger",
    METADATA,
    _id(),
    Column("order_id", UuidText(), ForeignKey(ORDERS.c.id), nullable=False, index=True),
    _text("kind"),
    _cents("amount_cents"),
    Column("recorded_at", DateTime(timezone=True), nullable=False),
)

LICENSES = Table(
    "market_licenses",
    METADATA,
    _id(),
    _uuid("store_id"),
    _text("license_type"),
    _status(LICENSE),
    Column("expires_on", Date),
)

ADS = Table(
    "market_ads",
    METADATA,
    _id(),
    _uuid("vendor_store_id"),
    _text("placement"),
    _text("target_type"),
    _uuid("target_id"),
    _cents("bid_cents_cpm"),
    _cents("daily_budget_cents"),
    _status(AD),
)

AD_DAYS = Table(
    "market_ad_days",
    METADATA,
    Column("ad_id", UuidText(), ForeignKey(ADS.c.id), primary_key=True),
    Column("day", Date, primary_key=True),
    Column("revision", BigInteger, CheckConstraint("revision > 0"), nullable=False),
)

MEDIA = Table(
    "market_media",
    METADATA,
    _id(),
    _uuid("store_id"),
    _text("kind"),
    _text("mime_type"),
    Column("size_bytes", BigInteger, nullable=False),
)


def init(engine: Engine | str | URL) -> None:
    """Create what is missing: business tables, `outbox_events` and the inbox; safe to repeat."""
    database = dialect.as_engine(engine)
    try:
        sql_schema.init(database, outbox=None)
        events_schema.init(database, CATALOG)
        METADATA.create_all(database)
    finally:
        if database is not engine:
            database.dispose()
