"""The contract of an inbox."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import pytest

from conquiet.errors import Blameless, ConfigError, HandlerError, PermanentError
from conquiet.inbox import Inbox
from conquiet.message import Message
from conquiet.router import Router
from conquiet.stage import Middleware
from conquiet.testing import deliver, eventually
from conquiet.testing.contracts.samples import TWINS, ids, make_messages
from conquiet.testing.contracts.transaction import HandlerFailed, StorageContract


class InboxContract(StorageContract):
    """An inbox lets a message take effect once per subscriber and handler.

    Binding: see `StorageContract`. Must also be given: `inbox`. As needed: `clean`.
    """

    bindings = StorageContract.bindings | {"inbox", "clean"}

    @abstractmethod
    def inbox(self, subscriber: str) -> Inbox:
        """Return the middleware, over the storage of `transaction`."""

    def clean(self, retention: float) -> None:
        """Forget what took effect more than `retention` seconds ago."""
        pytest.skip("this inbox cleans itself")

    def chain(self) -> list[Middleware]:
        return [self.transaction(), self.inbox("contract")]

    # --- one after the other ----------------------------------------------------------------

    def test_a_duplicate_is_acked_and_has_no_effect(self) -> None:
        router = self.router()
        for _ in range(3):
            assert len(deliver(router, *make_messages(2)).acked) == 2
        assert self.effects("m-0", "m-1") == [1, 1]

    def test_a_duplicate_is_known_to_another_process_too(self) -> None:
        deliver(self.router(), *make_messages(1))
        assert len(deliver(self.router(), *make_messages(1)).acked) == 1
        assert self.effects("m-0") == [1]

    def test_duplicates_inside_one_batch_take_effect_once(self) -> None:
        first, second = make_messages(2)
        delivered = deliver(self.router(), first, second, *make_messages(2), *make_messages(1))
        assert len(delivered.acked) == 5
        assert self.effects("m-0", "m-1") == [1, 1]

    def test_fresh_messages_among_duplicates_run_in_their_order(self) -> None:
        order: list[str] = []
        router = self.router(run=lambda item: order.append(item.id))
        deliver(router, *make_messages(5)[1:4:2])
        order.clear()
        assert len(deliver(router, *make_messages(5)).acked) == 5
        assert order == ["m-0", "m-2", "m-4"]
        assert self.effects("m-0", "m-1", "m-2", "m-3", "m-4") == [1] * 5

    def test_a_message_that_failed_is_not_remembered(self) -> None:
        failures = [HandlerFailed("at first")]

        def fail_once(item: Message[Any]) -> None:
            if failures:
                raise failures.pop()

        router = self.router(run=fail_once)
        assert len(deliver(router, *make_messages(1)).nacked) == 1
        assert self.effects("m-0") == [0]
        assert len(deliver(router, *make_messages(1)).acked) == 1
        assert self.effects("m-0") == [1]

    def test_one_failing_message_of_a_batch_leaves_the_others_done_once(self) -> None:
        batch = [*make_messages(2), *make_messages(1, "bad"), *make_messages(2, "n")]
        router = self.router()
        assert ids(deliver(router, *batch).nacked) == ["bad-0"]
        assert ids(deliver(router, *batch).nacked) == ["bad-0"]
        assert self.effects("m-0", "m-1", "bad-0", "n-0", "n-1") == [1, 1, 0, 1, 1]

    def test_a_big_batch_with_duplicates_takes_effect_once(self) -> None:
        router = self.router()
        deliver(router, *make_messages(300))
        assert len(deliver(router, *make_messages(1200)).acked) == 1200
        assert {self.read_note(f"m-{number}") for number in range(0, 1200, 50)} == {1}

    # --- who is who -------------------------------------------------------------------------

    def test_ids_that_look_alike_stay_apart(self) -> None:
        router = self.router()
        batch = [make_messages(1, id=name)[0] for name in TWINS]
        assert len(deliver(router, *batch).acked) == len(TWINS)
        assert self.effects(*TWINS) == [1] * len(TWINS)
        deliver(router, *batch)
        assert self.effects(*TWINS) == [1] * len(TWINS)

    def test_the_same_id_from_two_sources_is_two_messages(self) -> None:
        router = self.router()
        for source in ("/a", "/b", "/a"):
            deliver(router, *make_messages(1, source=source))
        assert self.effects("m-0") == [2]

    def test_each_subscriber_takes_a_message_once(self) -> None:
        for subscriber in ("billing", "shipping", "billing"):
            router = self.router(self.transaction(), self.inbox(subscriber))
            assert len(deliver(router, *make_messages(1)).acked) == 1
        assert self.effects("m-0") == [2]

    def test_each_handler_of_a_type_takes_a_message_once(self) -> None:
        router = Router()
        router.use(*self.chain())
        for name in ("first", "second"):

            def handle(item: Message[Any], name: str = name) -> None:
                self.note(name)

            router.raw(name=name)(handle)
        for _ in range(2):
            assert len(deliver(router, *make_messages(1)).acked) == 1
        assert self.effects("first", "second") == [1, 1]

    def test_a_message_without_id_fails_for_good_and_alone(self) -> None:
        nameless = make_messages(1, id="")
        delivered = deliver(self.router(), *make_messages(1), *nameless, *make_messages(1, "n"))
        assert ids(delivered.acked) == ["m-0", "n-0"]
        assert isinstance(delivered.errors[0], PermanentError)
        assert self.effects("m-0", "", "n-0") == [1, 0, 1]

    # --- at the same time -------------------------------------------------------------------

    def test_a_concurrent_duplicate_waits_and_is_skipped(self) -> None:
        assert self._race(first_fails=False) == ["first"]
        assert self.effects("m-0") == [1]

    def test_a_concurrent_duplicate_runs_if_the_other_rolled_back(self) -> None:
        assert self._race(first_fails=True) == ["first", "second"]
        assert self.effects("m-0") == [1]

    def _race(self, first_fails: bool) -> list[str]:
        """Deliver one message twice, the second while the first is in its handler."""
        runs: list[str] = []
        inside, go, began = threading.Event(), threading.Event(), threading.Event()

        def slow(item: Message[Any]) -> None:
            runs.append("first")
            inside.set()
            assert go.wait(30)
            if first_fails:
                raise HandlerFailed

        def second() -> None:
            router = self.router(run=lambda item: runs.append("second"))
            began.set()
            # A store that cannot wait gives the message back; its source delivers it again.
            eventually(lambda: _acked_or_given_back(router), timeout=30)

        threads = [_start(lambda: deliver(self.router(run=slow), *make_messages(1)))]
        try:
            assert inside.wait(30)
            threads.append(_start(second))
            assert began.wait(30)
            threads[1].join(0.3)  # time to arrive at the first one's entry, not to pass it
            assert runs == ["first"]
        finally:
            go.set()
            for thread in threads:
                thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        return runs

    # --- the rest ---------------------------------------------------------------------------

    def test_outputs_without_an_outbox_are_refused_and_leave_nothing(self) -> None:
        router = self.router(run=lambda item: [Message(b"", {"type": "lost"})])
        delivered = deliver(router, *make_messages(1))
        assert isinstance(delivered.errors[0], HandlerError)
        assert self.effects("m-0") == [0]

    def test_declared_outputs_without_an_outbox_are_refused_at_start(self) -> None:
        router = Router()
        router.use(*self.chain())

        @router.raw()
        def produce(item: Message[Any]) -> list[Message[bytes]]:
            return []

        with pytest.raises(ConfigError, match="outbox"):
            router.start()

    def test_cleaning_forgets_the_old_and_keeps_the_young(self) -> None:
        router = self.router()
        deliver(router, *make_messages(1))
        self.clean(3600)
        deliver(router, *make_messages(1))
        assert self.effects("m-0") == [1]

        def is_forgotten() -> bool:
            self.clean(0)
            deliver(router, *make_messages(1))
            return self.read_note("m-0") == 2

        eventually(is_forgotten)


def _acked_or_given_back(router: Router) -> bool:
    delivered = deliver(router, *make_messages(1))
    assert delivered.acked or isinstance(delivered.errors[0], Blameless), delivered.errors
    return bool(delivered.acked)


def _start(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
