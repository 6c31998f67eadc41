"""The business tables, on PostgreSQL and SQLite; each state machine is also a CHECK."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID

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
    Uuid,
    bindparam,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from conquiet import events, sql
from marketplace.catalog import CATALOG
from marketplace.service.lifecycle import AD, LICENSE, LINE, ORDER, Lifecycle, NotFound, Refused

METADATA = MetaData()


def _id(name: str = "id") -> Column[Any]:
    return Column(name, Uuid(), primary_key=True)


def _uuid(name: str) -> Column[Any]:
    return Column(name, Uuid(), nullable=False)


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
    Column("order_id", Uuid(), ForeignKey(ORDERS.c.id), nullable=False, index=True),
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
    Column("order_id", Uuid(), ForeignKey(ORDERS.c.id), nullable=False, index=True),
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
    Column("ad_id", Uuid(), ForeignKey(ADS.c.id), primary_key=True),
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


def as_engine(database: Engine | str | URL) -> Engine:
    """Return the engine itself, or create one for a URL."""
    return database if isinstance(database, Engine) else sql.engine(database)


def init(engine: Engine | str | URL) -> None:
    """Create the business tables, `outbox_events` and the inbox, where they are missing."""
    database = as_engine(engine)
    try:
        sql.schema.init(database, outbox=None)
        events.schema.init(database, CATALOG)
        METADATA.create_all(database)
    finally:
        if database is not engine:
            database.dispose()


class Book:
    """Reads and changes the rows of one table, in the ambient transaction.

    A row that is read is locked until the commit. Rows of a `batch` are read by one statement when
    it begins, and written together when it ends.
    """

    def __init__(self, engine: Engine, table: Table, kind: str) -> None:
        self._engine = engine
        self._kind = kind
        # Built once: building a statement takes as long as executing it.
        is_it = table.c.id == bindparam("key")
        self._select = select(table).where(is_it).with_for_update()
        are_they = table.c.id.in_(bindparam("keys", expanding=True))
        # In one order in every process, so that two of them cannot wait for each other.
        self._select_all = select(table).where(are_they).order_by(table.c.id).with_for_update()
        self._insert = insert(table)
        dialect: Any = postgresql if engine.dialect.name == "postgresql" else sqlite
        new = dialect.insert(table)
        self._insert_new = new.on_conflict_do_nothing().returning(table.c.id)
        self._update = update(table).where(is_it)
        self._batch: ContextVar[_Batch | None] = ContextVar(table.name, default=None)

    @contextmanager
    def batch(self, ids: Iterable[UUID]) -> Iterator[None]:
        """Read and lock the rows with these ids; write those that have changed at the end."""
        keys = list(set(ids))
        if not keys:
            yield
            return
        with sql.connection(self._engine) as connection:
            found = connection.execute(self._select_all, {"keys": keys})
            batch = _Batch({row.id: dict(row._mapping) for row in found})
        token = self._batch.set(batch)
        try:
            yield
        finally:
            self._batch.reset(token)
        self._write(batch)

    def _write(self, batch: _Batch) -> None:
        """Execute one statement per set of columns, with the rows that have changed in these."""
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for id_, columns in batch.changed.items():
            row = batch.rows[id_]
            names = tuple(sorted(columns))
            alike.setdefault(names, []).append({"key": id_, **{name: row[name] for name in names}})
        for rows in alike.values():
            with sql.connection(self._engine) as connection:
                connection.execute(self._update, rows)

    def find(self, id_: UUID) -> Any:
        """Return a row, or None if there is none with this id."""
        batch = self._batch.get()
        if batch is not None and id_ in batch.rows:
            return SimpleNamespace(**batch.rows[id_])
        with sql.connection(self._engine) as connection:
            return connection.execute(self._select, {"key": id_}).one_or_none()

    def get(self, id_: UUID) -> Any:
        found = self.find(id_)
        if found is None:
            raise NotFound(f"{self._kind} {id_} is not known here; send what creates it first")
        return found

    def add(self, **values: Any) -> None:
        """Insert a row; refused if its id is taken."""
        with sql.connection(self._engine) as connection:
            added = connection.execute(self._insert_new, values).one_or_none()
        if added is None:
            raise Refused(f"{self._kind} {values['id']} exists already; nothing was changed")
        batch = self._batch.get()
        if batch is not None:
            batch.rows[values["id"]] = values

    def add_all(self, rows: list[dict[str, Any]]) -> None:
        with sql.connection(self._engine) as connection:
            connection.execute(self._insert, rows)

    def change(self, id_: UUID, **values: Any) -> None:
        batch = self._batch.get()
        if batch is not None and id_ in batch.rows:
            batch.rows[id_].update(values)
            batch.changed.setdefault(id_, set()).update(values)
            return
        with sql.connection(self._engine) as connection:
            connection.execute(self._update, {"key": id_, **values})


@dataclass
class _Batch:
    """Holds the rows of a batch, and which of their columns have changed."""

    rows: dict[UUID, dict[str, Any]]
    changed: dict[UUID, set[str]] = field(default_factory=dict)


def order_keys(order: Any) -> dict[str, UUID]:
    """Return the keys that every event of an order carries."""
    return {
        "order_id": order.id,
        "checkout_group_id": order.checkout_group_id,
        "buyer_store_id": order.buyer_store_id,
        "vendor_store_id": order.vendor_store_id,
    }
