"""Faults on purpose: what runs well under these runs well in production."""

from __future__ import annotations

import random

import pytest
from tests.unit.middleware.routers import atomic, nothing, order, placed, router_of

from conquiet.errors import ConfigError, GivenBack, PermanentError
from conquiet.middleware import Delay, Duplicate, FailAtRandom, InjectedFault
from conquiet.testing import deliver


def test_duplicate_delivers_a_second_time():
    seen = []
    router = router_of(lambda m: seen.append((m.id, m.deliveries)), Duplicate(1))
    assert len(deliver(router, order(1), order(2)).acked) == 2
    assert seen == [("1", 1), ("2", 1), ("1", 2), ("2", 2)]


def test_without_an_inbox_a_duplicate_doubles_the_outputs():
    assert len(deliver(router_of(lambda _: [placed()], Duplicate(1)), order()).outputs) == 2


def test_with_an_inbox_a_duplicate_has_no_effect():
    chain, store = atomic(outside=(Duplicate(1),))

    def handle(message):
        store.add("effects")
        return [placed()]

    deliver(router_of(handle, *chain), order(1), order(2))
    assert store.get("effects") == 2
    assert len(store.outbox()) == 2


def test_a_failed_message_is_not_duplicated():
    runs = []

    def handle(message):
        runs.append(message.id)
        raise ValueError

    deliver(router_of(handle, Duplicate(1)), order())
    assert runs == ["1"]


def test_a_second_delivery_that_fails_fails_the_message():
    def handle(message):
        if message.deliveries == 2:
            raise ValueError

    assert deliver(router_of(handle, Duplicate(1)), order()).nacked


def test_fail_at_random_fails_before_the_handler_runs():
    runs = []
    delivered = deliver(router_of(lambda m: runs.append(m.id), FailAtRandom(1)), order())
    assert isinstance(delivered.errors[0], InjectedFault)
    assert runs == []


def test_fail_at_random_can_fail_when_the_effects_are_done():
    runs = []
    delivered = deliver(
        router_of(lambda m: runs.append(m.id), FailAtRandom(1, after=True)), order()
    )
    assert isinstance(delivered.errors[0], InjectedFault)
    assert runs == ["1"]


def test_fail_at_random_after_the_commit_is_what_the_inbox_is_for():
    chain, store = atomic(outside=(FailAtRandom(0.5, after=True, dice=random.Random(1)),))
    router = router_of(lambda _: [placed()], *chain)
    rounds = 0
    waiting = [order(number) for number in range(20)]
    while waiting and rounds < 100:
        waiting = deliver(router, *waiting).nacked
        rounds += 1
    assert rounds > 1
    assert len(store.outbox()) == 20


def test_fail_at_random_raises_the_error_that_it_is_given():
    delivered = deliver(router_of(nothing, FailAtRandom(1, PermanentError)), order())
    assert type(delivered.errors[0]) is PermanentError


def test_fail_at_random_keeps_the_order_by_key():
    router = router_of(nothing, FailAtRandom(0.5, dice=random.Random(3)))
    delivered = deliver(router, *(order(number, key="a") for number in range(10)))
    assert isinstance(delivered.errors[0], InjectedFault)
    assert all(isinstance(error, GivenBack) for error in delivered.errors[1:])
    acked = [int(m.id) for m in delivered.acked]
    assert acked == list(range(len(acked)))


def test_the_same_dice_give_the_same_faults():
    def faults():
        router = router_of(nothing, FailAtRandom(0.3, dice=random.Random(42)))
        return [m.id for m in deliver(router, *(order(n) for n in range(50))).nacked]

    assert faults() == faults()
    assert 0 < len(faults()) < 50


def test_delay_waits_before_each_call_of_a_handler():
    waits = []
    delay = Delay(1, 2, dice=random.Random(1), sleep=waits.append)
    deliver(router_of(nothing, delay), order(1), order(2), order(3))
    assert len(waits) == 3
    assert all(1 <= wait <= 2 for wait in waits)


def test_delay_of_one_length():
    waits = []
    deliver(router_of(nothing, Delay(3, sleep=waits.append)), order())
    assert waits == [3]


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("fault", [Duplicate, FailAtRandom])
def test_a_probability_lies_between_0_and_1(fault, probability):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        fault(probability)


@pytest.mark.parametrize(("least", "most"), [(-1, 1), (2, 1), (0, float("inf"))])
def test_a_delay_is_a_range_of_seconds(least, most):
    with pytest.raises(ConfigError, match="smaller number first"):
        Delay(least, most)
