"""What the tests of the core share: messages with a ledger, routers, a transaction of lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from conquiet import Acking, Message, Router
from conquiet.acking import Error
from conquiet.errors import StoreError
from conquiet.inbox import Entry, Inbox
from conquiet.outbox import Outbox
from conquiet.transaction import Transaction


class PlaceOrder(msgspec.Struct):
    id: int


class OrderPlaced(msgspec.Struct):
    id: int


class Ledger:
    """Settles messages by writing down their ids."""

    def __init__(self) -> None:
        self.acked: list[str] = []
        self.nacked: dict[str, Error] = {}
        self.calls = 0
        self.trace: list[Any] = []

    def settle(self, acked: Sequence[str], nacked: Sequence[tuple[str, Error]]) -> None:
        self.calls += 1
        self.acked += acked
        self.nacked.update(nacked)
        self.trace += [("ack", token) for token in acked]
        self.trace += [("nack", token) for token, _ in nacked]

    def message(self, number: int | str, data: bytes | None = None, **attributes: Any) -> Message:
        body = b'{"id": %d}' % number if data is None and isinstance(number, int) else data
        values = {"id": str(number), "type": "place.order", "source": "/test", **attributes}
        known = {name: value for name, value in values.items() if value is not None}
        return Message(body, known, acking=Acking(self, str(number)))

    def batch(self, count: int, **attributes: Any) -> list[Message]:
        return [self.message(number, **attributes) for number in range(count)]


class ListTransaction(Transaction):
    """Begins, commits and rolls back in a list; effects count only once committed."""

    def __init__(self, trace: list[Any] | None = None) -> None:
        self.trace: list[Any] = [] if trace is None else trace
        self.pending: list[Any] = []
        self.effects: list[Any] = []
        self.pending_marks: set[Any] = set()
        self.marks: set[Any] = set()
        """What an inbox noted; it commits and rolls back with the effects."""
        self.failures = 0
        """How many of the next commits fail as if the store had."""
        self.is_away = False
        """Whether no transaction can begin."""

    @contextmanager
    def scope(self, batch: Sequence[Message[Any]]) -> Iterator[None]:
        self.trace.append(("begin", len(batch)))
        if self.is_away:
            raise StoreError("the store is away")
        self.pending = []
        self.pending_marks = set()
        try:
            yield
            if self.failures:
                self.failures -= 1
                raise StoreError("the store refused the commit")
        except BaseException:
            self.trace.append("rollback")
            raise
        self.trace.append("commit")
        self.effects += self.pending
        self.marks |= self.pending_marks


class ListInbox(Inbox):
    """An inbox inside a ListTransaction."""

    def __init__(self, transaction: ListTransaction, subscriber: str = "test") -> None:
        super().__init__(subscriber)
        self.transaction = transaction

    def remember(self, entries: Sequence[Entry]) -> list[Entry]:
        new = [entry for entry in entries if entry not in self.transaction.marks]
        self.transaction.pending_marks.update(new)
        return new


class ListOutbox(Outbox):
    """An outbox inside a ListTransaction."""

    def __init__(self, transaction: ListTransaction, topic: str = "orders") -> None:
        super().__init__(topic)
        self.transaction = transaction

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        self.transaction.pending += outputs


def router_with(function: Any, *middlewares: Any, **options: Any) -> Router:
    """A router with one handler of commands, and a chain around it."""
    router = Router(**options)
    router.use(*middlewares)
    router.command(source="/orders")(function)
    return router


def succeed(order: PlaceOrder) -> None: ...


def place_two(order: PlaceOrder) -> list[OrderPlaced]:
    return [OrderPlaced(1), OrderPlaced(2)]
