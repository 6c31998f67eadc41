"""Tables whose statements are queued, and a router that handles by a plain function."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, select
from sqlalchemy.dialects.postgresql import JSONB, insert

from conquiet import Router
from conquiet.message import Message
from conquiet.sql import Inbox, Outbox, Transaction, connection
from conquiet.testing import deliver, message

METADATA = MetaData()
ORDERS = Table(
    "orders", METADATA, Column("id", Text, primary_key=True), Column("amount", Integer, default=0)
)
DOCUMENTS = Table("documents", METADATA, Column("id", Text), Column("body", JSONB))
SAVE = insert(ORDERS)
UPSERT = SAVE.on_conflict_do_update(index_elements=["id"], set_={"amount": ORDERS.c.amount + 1})
SKIP = SAVE.on_conflict_do_nothing()


def amounts(engine: Engine) -> dict[str, int]:
    with engine.connect() as looking:
        return {row.id: row.amount for row in looking.execute(select(ORDERS))}


def run(engine: Engine, *handle: Any) -> Any:
    router = Router()
    router.use(Transaction(engine), Inbox("test"), Outbox("orders"))
    calls = iter(handle)

    @router.raw(name="handler", source="/test")
    def handler(item: Message[Any]) -> list[Message[Any]]:
        with connection(engine) as found:
            (handle[0] if len(handle) == 1 else next(calls))(found)
        return [Message(b"", {"type": "done"})]

    return deliver(router, *(message(id=str(number)) for number in range(len(handle))))
