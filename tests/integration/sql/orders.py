"""A table of orders, and handlers that write to it inside a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Engine, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from conquiet import Router
from conquiet.message import Message
from conquiet.sql import Inbox, Outbox, Transaction, connection
from conquiet.stage import Middleware
from conquiet.testing import Delivered, deliver, message

SAVE = text("INSERT INTO orders (id) VALUES (:id)")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(String, primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


def save(engine: Engine, id_: str) -> None:
    """Insert an order, in the ambient transaction where there is one."""
    with connection(engine) as found:
        found.execute(SAVE, {"id": id_})


def saved(engine: Engine) -> list[str]:
    """The orders that are committed."""
    with engine.connect() as looking:
        return list(looking.execute(text("SELECT id FROM orders ORDER BY id")).scalars())


def run(
    engine: Engine,
    handle: Callable[[], object],
    *,
    outside: Sequence[Middleware] = (),
    **options: Any,
) -> Delivered:
    """One message through a handler that does what the test says."""
    router = Router()
    router.use(*outside, Transaction(engine, **options), Inbox("test"), Outbox("orders"))
    router.raw(name="handler")(_raw(handle))
    try:
        return deliver(router, message())
    finally:
        router.close()


def _raw(handle: Callable[[], object]) -> Callable[..., Any]:
    if asyncio.iscoroutinefunction(handle):

        async def handle_async(item: Message[Any]) -> None:
            await handle()

        return handle_async

    def handle_sync(item: Message[Any]) -> None:
        handle()

    return handle_sync


def remembered(engine: Engine) -> int:
    """How many messages the inbox has."""
    with engine.connect() as looking:
        count = looking.execute(text("SELECT count(*) FROM processed_messages")).scalar()
        assert count is not None
        return count
