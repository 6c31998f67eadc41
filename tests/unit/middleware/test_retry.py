"""Failed messages run again; the others are not touched, and order by key holds."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.middleware.routers import atomic, nothing, order, placed, router_of

from conquiet.errors import (
    ConfigError,
    GivenBack,
    InvalidMessage,
    NoHandler,
    PermanentError,
    StoreError,
)
from conquiet.middleware import DeadLetter, Retry
from conquiet.shutdown import STOPPING
from conquiet.testing import deliver, message


def at_once(attempts=3, **options):
    return Retry(attempts, first=0, **options)


class FailsAtFirst:
    """A handler that fails each of some messages a number of times, then takes it."""

    def __init__(self, failures, error=ValueError):
        self.failures = Counter(failures)
        self.error = error
        self.runs = []
        self.done = []

    def __call__(self, message):
        self.runs.append(message.id)
        if self.failures[message.id] > 0:
            self.failures[message.id] -= 1
            raise self.error(message.id)
        self.done.append(message.id)


def test_a_message_that_fails_is_tried_again_and_acked():
    handle = FailsAtFirst({"1": 2})
    assert deliver(router_of(handle, at_once(3)), order(1)).acked
    assert handle.runs == ["1", "1", "1"]


def test_after_its_attempts_it_is_nacked_with_the_last_error():
    handle = FailsAtFirst({"1": 9})
    delivered = deliver(router_of(handle, at_once(3)), order(1))
    assert isinstance(delivered.errors[0], ValueError)
    assert len(handle.runs) == 3


def test_one_attempt_means_no_retry():
    handle = FailsAtFirst({"1": 1})
    assert deliver(router_of(handle, at_once(1)), order(1)).nacked


def test_only_the_failed_ones_of_a_batch_run_again():
    handle = FailsAtFirst({"2": 1, "4": 2})
    delivered = deliver(router_of(handle, at_once()), *(order(n) for n in range(1, 5)))
    assert len(delivered.acked) == 4
    assert handle.runs == ["1", "2", "3", "4", "2", "4", "4"]


def test_the_failed_ones_run_again_as_one_batch():
    sizes = []

    def rest(batch):
        sizes.append(len(batch))
        return [ValueError()] * len(batch) if len(sizes) == 1 else [()] * len(batch)

    at_once()(rest)([order(1), order(2)])
    assert sizes == [2, 2]


@pytest.mark.parametrize(
    "error", [PermanentError, InvalidMessage, NoHandler, StoreError, GivenBack]
)
def test_what_is_hopeless_or_not_its_fault_is_not_tried_again(error):
    handle = FailsAtFirst({"1": 9}, error)
    assert deliver(router_of(handle, at_once()), order(1)).nacked
    assert handle.runs == ["1"]


def test_a_message_that_nobody_takes_is_not_tried_again():
    delivered = deliver(router_of(nothing, at_once()), message(type="unknown"))
    assert isinstance(delivered.errors[0], NoHandler)


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({"on": ValueError}, 3),
        ({"on": (KeyError, ValueError)}, 3),
        ({"on": KeyError}, 1),
        ({"never": ValueError}, 1),
        ({"on": Exception, "never": (KeyError, ValueError)}, 1),
        ({"never": KeyError}, 3),
    ],
)
def test_on_and_never_say_which_errors(options, runs):
    handle = FailsAtFirst({"1": 9})
    deliver(router_of(handle, at_once(**options)), order(1))
    assert len(handle.runs) == runs


def test_the_hook_hears_of_each_message_that_is_exhausted_once():
    heard = []
    retry = at_once(2, exhausted=lambda *what: heard.append(what))
    deliver(router_of(FailsAtFirst({"1": 9, "3": 1}), retry), order(1), order(2), order(3))
    [(exhausted, error, attempts)] = heard
    assert (exhausted.id, str(error), attempts) == ("1", "1", 2)


def test_a_hook_that_fails_changes_nothing(caplog):
    retry = at_once(1, exhausted=lambda *_: 1 / 0)
    assert deliver(router_of(FailsAtFirst({"1": 9}), retry), order(1)).nacked
    assert "`exhausted` failed" in caplog.text


def test_what_the_chain_raises_is_the_error_of_each():
    runs = []

    def breaks_once(batch):
        runs.append(len(batch))
        if len(runs) == 1:
            raise ValueError
        return [()] * len(batch)

    assert at_once()(breaks_once)([order(1), order(2)]) == [(), ()]
    assert runs == [2, 2]


# --- pauses ---------------------------------------------------------------------------------


def test_without_jitter_pauses_grow_by_the_factor_up_to_the_cap():
    retry = Retry(first=1, factor=3, cap=20, jitter=False)
    assert [retry.seconds(failures) for failures in range(1, 6)] == [1, 3, 9, 20, 20]


@given(
    st.floats(0, 1e6), st.floats(1, 1e6), st.floats(0, 1e6), st.integers(1, 10_000), st.integers()
)
def test_a_pause_is_never_negative_nor_longer_than_the_cap(first, factor, cap, failures, seed):
    retry = Retry(first=first, factor=factor, cap=cap, dice=random.Random(seed))
    assert 0 <= retry.seconds(failures) <= cap


def test_the_same_dice_give_the_same_pauses():
    def pauses():
        retry = Retry(dice=random.Random(5))
        return [retry.seconds(failures) for failures in range(1, 10)]

    assert pauses() == pauses()


def test_a_stopping_worker_ends_the_pause_and_gives_the_message_back():
    stopping = threading.Event()

    def handle(message):
        stopping.set()
        raise ValueError("so far")

    token = STOPPING.set(stopping)
    try:
        delivered = deliver(router_of(handle, Retry(first=3600, cap=3600, jitter=False)), order(1))
    finally:
        STOPPING.reset(token)
    [error] = delivered.errors
    assert isinstance(error, GivenBack)
    assert "so far" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_a_stopping_worker_acks_what_was_done():
    stopping = threading.Event()
    stopping.set()
    token = STOPPING.set(stopping)
    try:
        router = router_of(FailsAtFirst({"1": 9}), Retry(first=3600, cap=3600))
        delivered = deliver(router, order(1), order(2))
    finally:
        STOPPING.reset(token)
    assert [m.id for m in delivered.acked] == ["2"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 0},
        {"first": -1},
        {"cap": float("inf")},
        {"factor": 0.5},
        {"first": float("nan")},
    ],
)
def test_it_refuses_settings_that_make_no_sense(options):
    with pytest.raises(ConfigError, match=r"Retry\("):
        Retry(**options)


# --- order by key ---------------------------------------------------------------------------


def test_those_that_wait_for_a_failed_one_of_their_key_go_along_with_it():
    handle = FailsAtFirst({"1": 1})
    batch = order(1, key="a"), order(2, key="b"), order(3, key="a")
    assert len(deliver(router_of(handle, at_once()), *batch).acked) == 3
    assert handle.done == ["2", "1", "3"]


def test_one_that_waited_has_all_its_own_attempts():
    handle = FailsAtFirst({"1": 2, "2": 2})
    batch = order(1, key="a"), order(2, key="a")
    assert len(deliver(router_of(handle, at_once(3)), *batch).acked) == 2
    assert handle.done == ["1", "2"]


def test_behind_one_that_is_exhausted_the_others_are_given_back():
    handle = FailsAtFirst({"1": 9})
    delivered = deliver(router_of(handle, at_once(2)), order(1, key="a"), order(2, key="a"))
    assert [type(error) for error in delivered.errors] == [ValueError, GivenBack]
    assert handle.done == []


def test_behind_one_that_is_hopeless_the_others_are_given_back():
    def handle(message):
        if message.id == "1":
            raise PermanentError("no")

    delivered = deliver(router_of(handle, at_once()), order(1, key="a"), order(2, key="a"))
    assert [type(error) for error in delivered.errors] == [PermanentError, GivenBack]


keyed = st.lists(
    st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 4)), min_size=1, max_size=8
)


@given(keyed, st.integers(1, 4), st.booleans())
def test_whatever_fails_what_is_done_of_a_key_is_done_in_order(plan, attempts, in_transaction):
    handle = FailsAtFirst({str(number): failures for number, (_, failures) in enumerate(plan)})
    chain = atomic(outside=(at_once(attempts),))[0] if in_transaction else (at_once(attempts),)
    router = router_of(handle, *chain)
    keys = {str(number): key for number, (key, _) in enumerate(plan)}
    waiting = [order(number, key=key) for number, (key, _) in enumerate(plan)]
    acked = []
    while waiting:  # as an ordered worker: what was nacked comes again, in its order
        delivered = deliver(router, *waiting)
        acked += [m.id for m in delivered.acked]
        waiting = delivered.nacked
    assert sorted(acked, key=int) == [str(number) for number in range(len(plan))]
    for key in ("a", "b"):
        committed = [number for number in acked if keys[number] == key]
        assert committed == sorted(committed, key=int)
        last_runs = {number: index for index, number in enumerate(handle.done)}
        order_of_last = sorted(committed, key=last_runs.__getitem__)
        assert order_of_last == committed


# --- its place ------------------------------------------------------------------------------


def test_each_try_has_a_transaction_of_its_own():
    chain, store = atomic(outside=(at_once(),))
    tries = []

    def handle(message):
        store.add("effects")
        tries.append(message.id)
        if len(tries) < 3:
            raise ValueError
        return [placed()]

    assert deliver(router_of(handle, *chain), order(1)).acked
    assert store.get("effects") == 1
    assert len(store.outbox()) == 1


def test_inside_a_transaction_it_is_refused():
    chain, _ = atomic(at_once())
    with pytest.raises(ConfigError, match=r"Retry, Transaction, Inbox, Outbox\)"):
        router_of(nothing, *chain).start()


def test_outside_the_dead_letters_it_is_refused():
    with pytest.raises(ConfigError, match=r"router.use\(DeadLetter, Retry\)"):
        router_of(nothing, at_once(), DeadLetter(None)).start()
