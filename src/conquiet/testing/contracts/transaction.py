"""The contract of a transaction, and the binding that it shares with inbox and outbox."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from contextvars import Context
from typing import Any, TypeVar

import pytest

from conquiet.acking import Acking
from conquiet.errors import Blameless, GivenBack, StoreError
from conquiet.memory import Log
from conquiet.message import Message
from conquiet.router import Router
from conquiet.stage import Middleware
from conquiet.testing import deliver, eventually, message
from conquiet.testing.contracts.contract import Contract
from conquiet.testing.contracts.samples import ids, make_messages
from conquiet.transaction import Transaction

T = TypeVar("T")


class HandlerFailed(Exception):
    """Raised by the handlers of these tests."""


class StorageContract(Contract):
    """Binds a storage; the base of the contracts of transaction, inbox and outbox.

    Must be given: `transaction`, `note`, `read_note`. As needed: `outage`.
    """

    bindings = frozenset(("transaction", "note", "read_note", "outage"))

    @abstractmethod
    def transaction(self) -> Transaction:
        """Return the middleware, over the same storage at every call."""

    @abstractmethod
    def note(self, key: str) -> None:
        """Add 1 to a counter of this name, through the ambient transaction, as an adapter does."""

    @abstractmethod
    def read_note(self, key: str) -> int:
        """Return the committed value of a counter, else 0; called from any thread."""

    def outage(self) -> AbstractContextManager[object]:
        """Return a context in which every BEGIN or every COMMIT fails, as on a lost connection."""
        pytest.skip("this binding cannot make its store fail")

    # --- for the tests ----------------------------------------------------------------------

    def chain(self) -> list[Middleware]:
        """Return the middlewares under test."""
        return [self.transaction()]

    def router(
        self, *middlewares: Middleware, run: Callable[[Message[Any]], Any] | None = None
    ) -> Router:
        """Return a router with one handler, which notes the id and fails if that says "bad"."""
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
        return [self.read_note(key) for key in keys]


def elsewhere(look: Callable[[], T]) -> T:
    """Call a function where no transaction is ambient: in another thread, with a new context."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(Context().run(look)))
    thread.start()
    thread.join(30)
    assert found, "looking from another thread failed or hung"
    return found[0]


class TransactionContract(StorageContract):
    """A transaction commits all effects of a batch or none, and before the ack.

    Binding: see `StorageContract`. Also, as needed: `handle`, `savepoints`.
    """

    bindings = StorageContract.bindings | {"handle", "savepoints"}

    savepoints: bool = True
    """False if the store cannot undo a part of a transaction."""

    def handle(self) -> Callable[[], object]:
        """Take the ambient transaction's handle now; calling the result writes through it."""
        pytest.skip("this binding has no handle to keep")

    def test_effects_are_committed_together_with_the_batch(self) -> None:
        delivered = deliver(self.router(), *make_messages(3))
        assert ids(delivered.acked) == ["m-0", "m-1", "m-2"]
        assert self.effects("m-0", "m-1", "m-2") == [1, 1, 1]

    def test_effects_are_invisible_before_the_commit(self) -> None:
        seen: list[int] = []
        router = self.router(
            run=lambda item: seen.append(elsewhere(lambda: self.read_note(item.id)))
        )
        deliver(router, *make_messages(1))
        assert seen == [0]
        assert self.effects("m-0") == [1]

    def test_commit_comes_before_ack(self) -> None:
        at_ack: list[int] = []
        [item] = make_messages(1)
        item.acking = Acking.calling(
            lambda: at_ack.append(elsewhere(lambda: self.read_note("m-0"))), lambda error: None
        )
        self.router().process([item])
        assert at_ack == [1]

    def test_an_ack_in_a_handler_waits_for_the_commit(self) -> None:
        at_ack: list[int] = []
        [item] = make_messages(1)
        item.acking = Acking.calling(
            lambda: at_ack.append(elsewhere(lambda: self.read_note("m-0"))), lambda error: None
        )
        self.router(run=lambda message: message.ack() and None).process([item])
        assert at_ack == [1]

    def test_an_ack_in_a_handler_that_fails_is_discarded(self) -> None:
        delivered = deliver(
            self.router(run=lambda message: message.ack() and None), *make_messages(2, "bad")
        )
        assert len(delivered.nacked) == 2
        assert self.effects("bad-0", "bad-1") == [0, 0]

    def test_a_failed_handler_leaves_no_effect_and_is_nacked(self) -> None:
        delivered = deliver(self.router(), *make_messages(1, "bad"))
        assert isinstance(delivered.errors[0], HandlerFailed)
        assert self.effects("bad-0") == [0]

    @pytest.mark.parametrize("place", [0, 2, 4])
    def test_one_failing_message_of_a_batch_costs_its_neighbours_nothing(self, place: int) -> None:
        batch = make_messages(4)
        batch[place:place] = make_messages(1, "bad")
        delivered = deliver(self.router(), *batch)
        assert ids(delivered.acked) == ["m-0", "m-1", "m-2", "m-3"]
        assert ids(delivered.nacked) == ["bad-0"]
        assert self.effects("m-0", "m-1", "m-2", "m-3", "bad-0") == [1, 1, 1, 1, 0]

    def test_all_of_a_batch_failing_leaves_nothing(self) -> None:
        delivered = deliver(self.router(), *make_messages(3, "bad"))
        assert len(delivered.nacked) == 3
        assert self.effects("bad-0", "bad-1", "bad-2") == [0, 0, 0]

    def test_a_transaction_works_after_one_that_failed(self) -> None:
        router = self.router()
        deliver(router, *make_messages(1, "bad"))
        assert len(deliver(router, *make_messages(1)).acked) == 1
        assert self.effects("m-0") == [1]

    def test_a_store_that_fails_once_is_tried_again_and_effects_happen_once(self) -> None:
        errors = [StoreError("deadlock")]

        def stumble(item: Message[Any]) -> None:
            if item.id == "m-1" and errors:
                raise errors.pop()

        delivered = deliver(self.router(run=stumble), *make_messages(3))
        assert len(delivered.acked) == 3
        assert self.effects("m-0", "m-1", "m-2") == [1, 1, 1]

    def test_a_store_that_keeps_failing_gives_the_batch_back_whole(self) -> None:
        def fail(item: Message[Any]) -> None:
            raise StoreError("the connection is lost")

        delivered = deliver(self.router(run=fail), *make_messages(3))
        assert [type(error) for error in delivered.errors] == [StoreError] * 3
        assert self.effects("m-0", "m-1", "m-2") == [0, 0, 0]

    def test_a_message_that_fails_alone_as_the_store_does_is_to_blame(self) -> None:
        def fail(item: Message[Any]) -> None:
            if item.id == "m-1":
                raise StoreError("could not obtain lock")

        delivered = deliver(self.router(run=fail), *make_messages(4))
        assert ids(delivered.acked) == ["m-0", "m-2", "m-3"]
        assert not isinstance(delivered.errors[0], Blameless)
        assert self.effects("m-0", "m-1", "m-2", "m-3") == [1, 0, 1, 1]

    def test_an_outage_costs_no_attempt_and_no_message(self) -> None:
        log = Log()
        log.append(make_messages(3))
        source, router = log.source("group"), self.router()
        with self.outage():
            for _ in range(2):
                router.process(batch := source.read(10, 0))
                assert [(item.id, item.deliveries) for item in batch] == [
                    ("m-0", 1),
                    ("m-1", 1),
                    ("m-2", 1),
                ]
        eventually(lambda: deliver(router, message(id="probe")).acked, timeout=30)
        router.process(source.read(10, 0))
        assert log.unsettled("group") == []
        assert self.effects("m-0", "m-1", "m-2") == [1, 1, 1]

    def test_effects_outside_a_failing_savepoint_stay(self) -> None:
        if not self.savepoints:
            pytest.skip("this store has no savepoints")
        transaction = self.transaction()
        with transaction.scope(()):
            self.note("outer")
            with suppress(HandlerFailed), transaction.scope(()):
                self.note("inner")
                raise HandlerFailed
            with transaction.scope(()):
                self.note("second")
        assert self.effects("outer", "inner", "second") == [1, 0, 1]

    def test_a_savepoint_is_undone_with_the_transaction_around_it(self) -> None:
        if not self.savepoints:
            pytest.skip("this store has no savepoints")
        transaction = self.transaction()
        with suppress(HandlerFailed), transaction.scope(()):
            with transaction.scope(()):
                self.note("inner")
            raise HandlerFailed
        assert self.effects("inner") == [0]

    def test_a_handle_used_after_its_transaction_ended_raises(self) -> None:
        kept: list[Callable[[], object]] = []
        deliver(self.router(run=lambda item: kept.append(self.handle())), *make_messages(1))
        with pytest.raises(Exception):  # noqa: B017 - each store has an error of its own
            kept[0]()

    def test_a_message_given_back_by_its_handler_costs_no_attempt(self) -> None:
        log = Log()
        log.append(make_messages(2))
        source = log.source("group")

        def refuse(item: Message[Any]) -> None:
            raise GivenBack("not now")

        self.router(run=refuse).process(source.read(10, 0))
        assert [item.deliveries for item in source.read(10, 0)] == [1, 1]
        assert self.effects("m-0", "m-1") == [0, 0]
