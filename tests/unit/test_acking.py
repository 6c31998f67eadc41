"""Acking: settles once, shared acking counts messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conquiet.acking import Acking, Error, State, settle


class Ledger:
    """A settler that writes down what it was told, call by call."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], list[tuple[Any, Error]]]] = []

    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Error]]) -> None:
        self.calls.append((list(acked), list(nacked)))


def test_a_new_acking_is_pending():
    acking = Acking(Ledger(), "a")
    assert acking.state is State.PENDING
    assert not acking.settled
    assert acking.error is None


def test_ack_tells_the_settler_once():
    ledger = Ledger()
    acking = Acking(ledger, "a")
    assert acking.ack()
    assert not acking.ack()
    assert not acking.nack(ValueError("late"))
    assert ledger.calls == [(["a"], [])]
    assert acking.state is State.ACKED
    assert acking.error is None


def test_nack_keeps_the_error():
    ledger = Ledger()
    error = ValueError("no")
    acking = Acking(ledger, "a")
    assert acking.nack(error)
    assert not acking.ack()
    assert ledger.calls == [([], [("a", error)])]
    assert acking.state is State.NACKED
    assert acking.error is error


def test_a4_nack_without_an_error_is_still_a_nack():
    heard: list[object] = []
    acking = Acking.calling(lambda: heard.append("ack"), lambda error: heard.append(error))
    assert acking.nack(None)
    assert heard == [None]
    assert acking.state is State.NACKED


def test_callbacks_run_outside_the_lock():
    """A callback that looks at its own acking, from another thread, must not hang."""
    seen: list[bool] = []

    def on_ack() -> None:
        other = threading.Thread(target=lambda: seen.append(acking.nack(None)))
        other.start()
        other.join(5)

    acking = Acking.calling(on_ack, lambda error: None)
    acking.ack()
    assert seen == [False]


def test_many_threads_settle_once():
    ledger = Ledger()
    acking = Acking(ledger, "a")
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        barrier.wait()
        acking.ack() if number % 2 else acking.nack(None)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.calls) == 1


def test_a_batch_is_one_call_per_settler():
    first, second = Ledger(), Ledger()
    a, b, c, d = Acking(first, "a"), Acking(first, "b"), Acking(second, "c"), Acking(first, "d")
    error = ValueError("no")
    assert settle([a, b, c], [(d, error)]) == 4
    assert first.calls == [(["a", "b"], [("d", error)])]
    assert second.calls == [(["c"], [])]


def test_what_is_settled_already_is_left_out_of_a_batch():
    ledger = Ledger()
    a, b = Acking(ledger, "a"), Acking(ledger, "b")
    a.nack(None)
    assert settle([a, b]) == 1
    assert ledger.calls[1:] == [(["b"], [])]


def test_a_settler_that_fails_does_not_keep_the_others_from_hearing():
    class Broken(Ledger):
        def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Error]]) -> None:
            raise ConnectionError("gone")

    ledger = Ledger()
    with pytest.raises(ConnectionError):
        settle([Acking(Broken(), "a"), Acking(ledger, "b")])
    assert ledger.calls == [(["b"], [])]


def test_a3_a_shared_acking_is_acked_when_every_share_is():
    ledger = Ledger()
    shares = Acking(ledger, "a").split(3)
    for share in shares[:2]:
        share.ack()
    assert ledger.calls == []
    shares[2].ack()
    assert ledger.calls == [(["a"], [])]


def test_a4_a_share_that_acks_twice_counts_once():
    ledger = Ledger()
    shares = Acking(ledger, "a").split(2)
    shares[0].ack()
    shares[0].ack()
    assert ledger.calls == []


def test_a3_the_first_nack_nacks_the_shared_one():
    ledger = Ledger()
    parent = Acking(ledger, "a")
    shares = parent.split(3)
    error = ValueError("no")
    shares[0].ack()
    shares[1].nack(error)
    shares[2].nack(ValueError("later"))
    assert ledger.calls == [([], [("a", error)])]
    assert parent.error is error


def test_shares_of_many_messages_still_settle_in_one_call():
    ledger = Ledger()
    shares = [share for token in "abc" for share in Acking(ledger, token).split(2)]
    settle(shares)
    assert ledger.calls == [(["a", "b", "c"], [])]


def test_a_share_can_be_shared_again():
    ledger = Ledger()
    left, right = Acking(ledger, "a").split(2)
    for share in left.split(2):
        share.ack()
    assert ledger.calls == []
    right.ack()
    assert ledger.calls == [(["a"], [])]


def test_sharing_among_nobody_is_refused():
    with pytest.raises(ValueError, match="1 message or more"):
        Acking(Ledger()).split(0)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_any_sequence_of_calls_settles_a_shared_acking_as_its_model(calls):
    """The model: first call per share counts; acked when all acked, nacked by the first nack."""
    ledger = Ledger()
    shares = Acking(ledger, "a").split(4)
    first: dict[int, bool] = {}
    expected: str | None = None
    for index, good in calls:
        shares[index].ack() if good else shares[index].nack(None)
        if index not in first:
            first[index] = good
            if expected is None and not good:
                expected = "nack"
            elif expected is None and len(first) == 4 and all(first.values()):
                expected = "ack"
    told = ["ack" if acked else "nack" for acked, _ in ledger.calls]
    assert told == ([expected] if expected else [])
