"""What the contracts of transaction, inbox and outbox share: how to write, and to look."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context
from typing import Any, TypeVar

import pytest

from conquiet.message import Message
from conquiet.router import Router
from conquiet.stage import Middleware
from conquiet.testing.contracts.contract import Contract
from conquiet.transaction import Transaction

T = TypeVar("T")


class HandlerFailed(Exception):
    """What a handler of these tests raises."""


class Storing(Contract):
    """Binds a storage. Must be given: `transaction`, `note`, `noted`. As needed: `outage`."""

    bindings = frozenset(("transaction", "note", "noted", "outage"))

    @abstractmethod
    def transaction(self) -> Transaction:
        """The middleware, over the same storage at every call."""

    @abstractmethod
    def note(self, key: str) -> None:
        """Add 1 to a counter of this name, through the ambient transaction, as an adapter does."""

    @abstractmethod
    def noted(self, key: str) -> int:
        """The committed value of a counter, 0 if it does not exist; called from any thread."""

    def outage(self) -> AbstractContextManager[object]:
        """Makes every BEGIN or every COMMIT fail while it is open, as a lost connection does."""
        pytest.skip("this binding cannot make its store fail")

    # --- for the tests ----------------------------------------------------------------------

    def chain(self) -> list[Middleware]:
        """The middlewares under test."""
        return [self.transaction()]

    def router(
        self, *middlewares: Middleware, run: Callable[[Message[Any]], Any] | None = None
    ) -> Router:
        """A router with one handler, which notes the id and then fails if that says "bad"."""
        router = Router()
        router.use(*(middlewares or self.chain()))

        @router.raw(name="handler", source="/contract")
        def handle(message: Message[Any]) -> None:  # says None, for chains without an outbox
            self.note(message.id)
            outputs = run(message) if run is not None else None
            if message.id.startswith("bad"):
                raise HandlerFailed(message.id)
            return outputs  # type: ignore[return-value]

        return router

    def effects(self, *keys: str) -> list[int]:
        return [self.noted(key) for key in keys]


def elsewhere(look: Callable[[], T]) -> T:
    """Call a function where no transaction is ambient: in another thread, with a new context."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(Context().run(look)))
    thread.start()
    thread.join(30)
    assert found, "looking from another thread failed or hung"
    return found[0]
