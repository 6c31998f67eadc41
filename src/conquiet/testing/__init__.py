"""For tests: messages in one line, a router without a worker, waiting without a guessed time.

`conquiet.testing.contracts` holds the conformance suite for storages of your own; it needs pytest,
this module does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from conquiet.acking import Acking, Error
from conquiet.codec import encode_data
from conquiet.event import complete
from conquiet.message import Message
from conquiet.router import Router

__all__ = ["Delivered", "deliver", "eventually", "message"]

Outcome = TypeVar("Outcome")


def message(data: Any = b"{}", **attributes: Any) -> Message[bytes]:
    """Build a raw message, as a source would deliver it.

    `data` is bytes, or an event whose class names the type, or anything that JSON can hold.
    `attributes` replace those that an event gets by default; None removes one.

    >>> import msgspec
    >>> class OrderPlaced(msgspec.Struct):
    ...     order: int
    >>> placed = message(OrderPlaced(7), subject="order-7")
    >>> placed.type, placed.data, placed.subject
    ('order.placed', b'{"order":7}', 'order-7')
    """
    typed = complete(Message(data), source="/test")
    if not typed.attributes["type"]:
        typed.attributes["type"] = "test"
    # None removes a default, to test a router without it.
    chosen = {**typed.attributes, **attributes}
    given = {name: value for name, value in chosen.items() if value is not None}
    return Message(encode_data(typed), given)


@dataclass(slots=True, eq=False)
class Delivered:
    """The settlements of one delivery; a message in neither list is not settled."""

    acked: list[Message[Any]] = field(default_factory=list)
    """Handled, in the order of their settlement."""
    nacked: list[Message[Any]] = field(default_factory=list)
    """Failed, to be delivered again by a source."""
    errors: list[Error] = field(default_factory=list)
    """The reasons, one per nacked message."""
    outputs: list[Message[Any]] = field(default_factory=list)
    """The outputs of the router; an outbox in its chain keeps them instead."""

    @property
    def events(self) -> list[Any]:
        """The data of the outputs."""
        return [output.data for output in self.outputs]

    def settle(
        self, acked: Sequence[Message[Any]], nacked: Sequence[tuple[Message[Any], Error]]
    ) -> None:
        """Record the settlements, as a source would."""
        self.acked.extend(acked)
        for item, error in nacked:
            self.nacked.append(item)
            self.errors.append(error)


def deliver(router: Router, *events: Any) -> Delivered:
    """Run one batch through a router and settle it; `events` that are no messages become such.

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


def eventually(
    condition: Callable[[], Outcome],
    *,
    timeout: float = 10.0,
    message: str = "",
    interval: float = 0.005,
) -> Outcome:
    """Call `condition` until it returns something true, and return that.

    A condition that raises AssertionError counts as not yet true; the last one explains a failure.

    It looks every `interval` seconds; after `timeout` seconds it fails, with `message`.
    """
    deadline = time.monotonic() + timeout
    last_error: AssertionError | None = None
    while True:
        try:
            outcome = condition()
            last_error = None
            if outcome:
                return outcome
        except AssertionError as error:
            last_error = error
        if time.monotonic() > deadline:
            what = message or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not within {timeout:g} s: {what}") from last_error
        time.sleep(interval)
