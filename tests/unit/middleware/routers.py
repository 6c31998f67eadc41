"""What the tests of middlewares share: routers of one handler, transactions, ordered batches."""

from __future__ import annotations

from typing import Any

import msgspec

from conquiet import Message, Router
from conquiet.memory import Inbox, Outbox, Store, Transaction
from conquiet.testing import message


class Order(msgspec.Struct):
    id: int = 0


class OrderPlaced(msgspec.Struct):
    order_id: int


def router_of(handle: Any, *middlewares: Any, **options: Any) -> Router:
    """A router whose one handler takes messages of type `order`, whole, and returns messages."""
    router = Router(**options)
    router.use(*middlewares)

    @router.raw(type="order", name="handle", source="/shop")
    def run(order: Message[Any]) -> Any:
        return handle(order)

    return router


def atomic(*inside: Any, outside: tuple[Any, ...] = ()) -> tuple[tuple[Any, ...], Store]:
    """A chain with transaction, inbox and outbox in memory, and the store that it writes to."""
    store = Store()
    return (*outside, Transaction(store), Inbox("shop"), Outbox("events"), *inside), store


def order(number: int = 1, *, key: str | None = None, **attributes: Any) -> Message[bytes]:
    made = message({"id": number}, type="order", **{"id": str(number), **attributes})
    made.order_key = key
    return made


def placed(number: int = 1, **attributes: Any) -> Message[Any]:
    return Message(OrderPlaced(number), {"type": "order.placed", **attributes})


def nothing(_: Message[Any]) -> None:
    """A handler that is content."""


def sum_of(registry, name, **labels):
    return sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
