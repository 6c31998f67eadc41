"""Deliver messages to a router and see what becomes of them, without a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conquiet.acking import Acking, Error
from conquiet.message import Message
from conquiet.router import Router
from conquiet.testing.messages import message


@dataclass(slots=True, eq=False)
class Delivered:
    """What became of the messages of one delivery; what is in neither list is not settled."""

    acked: list[Message[Any]] = field(default_factory=list)
    nacked: list[Message[Any]] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)
    """Why, one per nacked message."""
    outputs: list[Message[Any]] = field(default_factory=list)
    """What the router let through; an outbox in its chain keeps it instead."""

    @property
    def events(self) -> list[Any]:
        """The data of the outputs."""
        return [output.data for output in self.outputs]

    def settle(
        self, acked: Sequence[Message[Any]], nacked: Sequence[tuple[Message[Any], Error]]
    ) -> None:
        """Takes the settlements, as a source would."""
        self.acked.extend(acked)
        for item, error in nacked:
            self.nacked.append(item)
            self.errors.append(error)


def deliver(router: Router, *events: Any) -> Delivered:
    """Run one batch through a router and settle it; events become messages.

    >>> from conquiet import Router
    >>> router = Router()
    >>> @router.event(type="ping")
    ... def ping(data: bytes) -> None: ...
    >>> delivered = deliver(router, message(b"", type="ping"), message(b"", type="pong"))
    >>> [item.type for item in delivered.acked], [item.type for item in delivered.nacked]
    (['ping'], ['pong'])
    """
    delivered = Delivered()
    batch = [item if isinstance(item, Message) else message(item) for item in events]
    for item in batch:
        item.acking = Acking(delivered, item)
    handled = router.run(batch)
    router.settle(handled)
    delivered.outputs = handled.outputs
    return delivered
