"""Book: how handlers find and change rows, in the transaction that they run in."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Engine, Row, Table, bindparam, insert, select, update

from conquiet import sql
from marketplace.service.lifecycle import NotFound, Refused


class Book:
    """One table of things with an id; a row that is looked at is locked until the commit."""

    def __init__(self, engine: Engine, table: Table, kind: str) -> None:
        self._engine = engine
        self._kind = kind
        # Made once: to put a statement together takes as long as to execute it.
        is_it = table.c.id == bindparam("key")
        self._select = select(table).where(is_it).with_for_update()
        self._insert = insert(table)
        self._update = update(table).where(is_it)

    def find(self, id_: UUID) -> Row[Any] | None:
        with sql.connection(self._engine) as connection:
            return connection.execute(self._select, {"key": id_}).one_or_none()

    def get(self, id_: UUID) -> Row[Any]:
        found = self.find(id_)
        if found is None:
            raise NotFound(f"{self._kind} {id_} is not known here; send what creates it first")
        return found

    def add(self, **values: Any) -> None:
        """A new row; refused if its id is taken."""
        if self.find(values["id"]) is not None:
            raise Refused(f"{self._kind} {values['id']} exists already; nothing was changed")
        with sql.connection(self._engine) as connection:
            connection.execute(self._insert, values)

    def add_all(self, rows: list[dict[str, Any]]) -> None:
        with sql.connection(self._engine) as connection:
            connection.execute(self._insert, rows)

    def change(self, id_: UUID, **values: Any) -> None:
        with sql.connection(self._engine) as connection:
            connection.execute(self._update, {"key": id_, **values})


def order_keys(order: Row[Any]) -> dict[str, UUID]:
    """What every event of an order carries."""
    return {
        "order_id": order.id,
        "checkout_group_id": order.checkout_group_id,
        "buyer_store_id": order.buyer_store_id,
        "vendor_store_id": order.vendor_store_id,
    }
