"""What the store does beyond the contracts: values, handles, locks, injected failures."""

from __future__ import annotations

import threading
from contextlib import suppress
from contextvars import copy_context

import pytest

from conquiet import Message, Router
from conquiet.errors import ConfigError, HandlerError, StoreError
from conquiet.memory import Inbox, Outbox, Store, Transaction
from conquiet.testing import deliver, eventually, message


def test_a_transaction_reads_its_own_writes():
    store = Store()
    store.put("a", 1)
    with store.transaction():
        store.add("a", 5)
        store.put("b", "x")
        store.add("b", "y")
        store.delete("c")
        assert (store.get("a"), store.get("b"), store.get("c", "none")) == (6, "xy", "none")


def test_writes_outside_a_transaction_are_applied_at_once():
    store = Store()
    store.add("a")
    store.delete("a")
    assert store.get("a", "gone") == "gone"


def test_two_transactions_that_add_at_once_lose_nothing():
    store = Store()
    with store.transaction():
        store.add("a", 1)
        other = threading.Thread(target=lambda: store.add("a", 10))
        other.start()
        other.join()
    assert store.get("a") == 11


def test_transactions_over_two_stores_find_each_its_own():
    one, two = Store(), Store()
    with one.transaction(), suppress(ZeroDivisionError), two.transaction():
        _write_and_fail(one, two)
    assert (one.get("a"), two.get("b")) == (1, None)


def _write_and_fail(one: Store, two: Store) -> None:
    one.put("a", 1)
    two.put("b", 1)
    raise ZeroDivisionError


def test_a_change_that_cannot_be_applied_leaves_nothing():
    store = Store()
    with pytest.raises(TypeError):
        _write_nonsense(store)
    assert store.get("a") is None


def _write_nonsense(store: Store) -> None:
    with store.transaction():
        store.put("a", 1)
        store.add("a", "text")


def test_code_that_outlives_its_transaction_is_refused_instead_of_losing_writes():
    store = Store()
    with store.transaction():
        context = copy_context()
    with pytest.raises(HandlerError, match="has ended"):
        context.run(store.put, "late", 1)
    with pytest.raises(HandlerError, match="has ended"):
        context.run(store.get, "late")
    assert store.get("late") is None


@pytest.mark.parametrize("middleware", [Inbox("billing").remember, Outbox("orders").store])
def test_inbox_and_outbox_outside_a_transaction_say_what_is_missing(middleware):
    with pytest.raises(HandlerError, match="Transaction"):
        middleware([])


def test_a_commit_whose_reply_was_lost_takes_effect_once():
    """The outcome is unknown, so the batch runs again, and the inbox knows it."""
    store, router = Store(), Router()
    router.use(Transaction(store), Inbox("billing"), Outbox("orders"))

    @router.raw(source="/test")
    def handle(item: Message) -> None:
        store.add(item.id)

    store.fail_next("reply")
    assert len(deliver(router, message(id="a")).acked) == 1
    assert store.get("a") == 1


@pytest.mark.parametrize("point", ["begin", "commit"])
def test_a_failure_is_injected_as_often_as_asked(point):
    store = Store()
    store.fail_next(point, 2)
    for _ in range(2):
        with pytest.raises(StoreError), store.transaction():
            store.put("a", 1)
        assert store.get("a") is None
    with store.transaction():
        store.put("a", 1)
    assert store.get("a") == 1


def test_a_failure_at_an_unknown_point_is_refused():
    with pytest.raises(ConfigError, match="begin, commit, reply"):
        Store().fail_next("lunch")


def test_two_transactions_that_wait_for_each_other_are_a_store_error():
    store, outcomes, both = Store(), [], threading.Barrier(2)

    def run(first: str, second: str) -> None:
        inbox = Inbox("billing")
        try:
            with store.transaction():
                inbox.remember([("s", first)])
                both.wait(10)
                outcomes.append(list(inbox.remember([("s", second)])))
        except StoreError as error:
            outcomes.append(str(error)[:8])

    threads = [threading.Thread(target=run, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    outcomes.sort(key=str)
    assert outcomes in ([[("s", "a")], "deadlock"], [[("s", "b")], "deadlock"])


def test_waiting_for_another_transaction_ends_after_the_lock_timeout():
    store, inbox = Store(lock_timeout=0.05), Inbox("billing")
    failed: list[StoreError] = []

    def other() -> None:
        with pytest.raises(StoreError, match="held elsewhere") as caught, store.transaction():
            inbox.remember([("s", "a")])
        failed.append(caught.value)

    with store.transaction():
        inbox.remember([("s", "a")])
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
    assert failed


def test_an_entry_of_a_savepoint_that_failed_is_free_for_others():
    store, inbox = Store(lock_timeout=5), Inbox("billing")
    fresh: list[object] = []
    with store.transaction():
        with suppress(ZeroDivisionError), store.transaction():
            inbox.remember([("s", "a")])
            raise ZeroDivisionError
        thread = threading.Thread(
            target=lambda: fresh.extend(_remember(store, inbox, ("s", "a"))), daemon=True
        )
        thread.start()
        eventually(lambda: fresh == [("s", "a")])


def _remember(store: Store, inbox: Inbox, entry: tuple[str, str]) -> list[tuple[str, str]]:
    with store.transaction():
        return list(inbox.remember([entry]))


def test_the_inbox_is_cleaned_by_the_clock_of_the_store():
    now = [1000.0]
    store, inbox = Store(clock=lambda: now[0]), Inbox("billing")
    _remember(store, inbox, ("s", "old"))
    now[0] += 100
    _remember(store, inbox, ("s", "young"))
    assert store.clean_inbox(retention=50) == 1
    assert _remember(store, inbox, ("s", "old")) == [("s", "old")]
    assert _remember(store, inbox, ("s", "young")) == []


def test_the_outbox_shows_what_is_not_published_yet():
    store = Store()
    with store.transaction():
        Outbox("orders").store([message(id="a"), message(id="b")])
        assert store.outbox() == []
    first, _ = store.outbox_source().read(10, 0)
    first.ack()
    assert [event.id for event in store.outbox()] == ["b"]


def test_a_transaction_that_remembers_an_entry_twice_finds_it_new_once():
    store, inbox = Store(), Inbox("billing")
    with store.transaction():
        assert list(inbox.remember([("s", "a")])) == [("s", "a")]
        assert list(inbox.remember([("s", "a")])) == []
