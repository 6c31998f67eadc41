"""How long a failed row rests, and what the relay makes of failures; no server needed."""

from __future__ import annotations

import math

import pytest
from tests.integration.sql.claiming import ListSink

from conquiet.acking import Acking
from conquiet.errors import ConfigError, GivenBack, SinkUnavailable
from conquiet.message import Message
from conquiet.relay import Relay, publish_batch
from conquiet.sql import claim as module
from conquiet.sql.claim import RowBackoff


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_row_rests_twice_as_long_each_time_up_to_five_minutes(clock):
    rests = RowBackoff(by_key=False, clock=clock)
    for times in range(12):
        rests.add(1, None, times, costs=True)
        longest = min(300.0, 2.0**times)
        assert longest / 2 <= rests.seconds_to_next() <= longest
    clock.now += 300
    assert rests.ids() == []
    assert rests.seconds_to_next() == math.inf


def test_a_published_row_is_forgotten(clock):
    rests = RowBackoff(by_key=False, clock=clock)
    rests.add(1, None, 0, costs=True)
    rests.forget([1])
    assert rests.ids() == []


def test_what_an_outage_held_up_returns_within_a_second_of_the_first_success(clock):
    rests = RowBackoff(by_key=False, clock=clock)
    for _ in range(10):
        rests.add(1, None, 0, costs=False)
    rests.add(2, None, 9, costs=True)
    clock.now += 2
    assert rests.ids() == [1, 2]
    rests.forget([3])
    clock.now += 1
    assert rests.ids() == [2]


def test_an_ordered_relay_rests_keys_and_rows_without_key(clock):
    rests = RowBackoff(by_key=True, clock=clock)
    rests.add(1, "k", 0, costs=True)
    rests.add(2, "k", 0, costs=True)
    rests.add(3, None, 0, costs=True)
    rests.add(4, "", 0, costs=True)
    assert rests.ids() == [3]
    assert sorted(rests.keys()) == ["", "k"]


def test_the_number_of_resting_rows_is_bounded(clock, monkeypatch):
    monkeypatch.setattr(module, "_MAX_DELAYED_ROWS", 3)
    rests = RowBackoff(by_key=False, clock=clock)
    for id_ in range(10):
        rests.add(id_, None, 0, costs=bool(id_ % 2))
    assert rests.ids() == [7, 8, 9]


class Settled:
    """A source with given messages, which notes how they were settled."""

    def __init__(self, *messages: Message) -> None:
        self.messages = messages
        self.acked: list = []
        self.nacked: dict = {}
        for message in messages:
            message.acking = Acking(self, message.id)

    def read(self, limit, timeout):
        return self.messages[:limit]

    def settle(self, acked, nacked):
        self.acked += acked
        self.nacked |= dict(nacked)

    def close(self): ...


def messages(count, key=""):
    return [
        Message(b"", {"id": f"m{n}", "type": "t", "partitionkey": key or f"k{n}"})
        for n in range(count)
    ]


def test_a_batch_of_one_that_fails_is_judged_by_itself():
    source, sink = Settled(*messages(1)), ListSink()
    sink.bad = {"m0"}
    outcome = publish_batch(source, sink, 10)
    assert (outcome.failed, outcome.outage) == (1, None)
    assert isinstance(source.nacked["m0"], ValueError)


def test_the_failed_head_of_a_key_pays_and_what_waits_behind_it_does_not():
    source, sink = Settled(*messages(3, key="k")), ListSink()
    sink.bad = {"m0"}
    outcome = publish_batch(source, sink, 10, ordered=True)
    assert (outcome.failed, outcome.outage) == (1, None)
    assert isinstance(source.nacked["m0"], ValueError)
    assert isinstance(source.nacked["m1"], GivenBack)


def test_batches_shrink_while_nothing_goes_out_and_grow_again():
    sink = ListSink()
    relay = Relay(Settled(*messages(100)), sink, batch_size=100)
    sink.out = True
    for _ in range(3):
        assert isinstance(relay.run_once().outage, SinkUnavailable)
    sink.out = False
    assert [relay.run_once().published for _ in range(5)] == [12, 24, 48, 96, 100]


def test_a_sink_that_raises_or_miscounts_confirms_nothing():
    class Broken(ListSink):
        def publish_each(self, messages):
            raise RuntimeError("bug")

    class Short(ListSink):
        def publish_each(self, messages):
            return [None]

    for sink in (Broken(), Short()):
        source = Settled(*messages(3))
        assert isinstance(publish_batch(source, sink, 10).outage, SinkUnavailable)
        assert source.acked == []


def test_a_sink_that_keeps_order_gets_whole_batches():
    class Keeps(ListSink):
        keeps_order = True

    sink = Keeps()
    publish_batch(Settled(*messages(4, key="k")), sink, 10, ordered=True)
    assert sink.calls == [4]


def test_a_batch_size_that_cannot_work_is_refused():
    with pytest.raises(ConfigError):
        Relay(Settled(), ListSink(), batch_size=0)


def test_a_rest_by_nobodys_fault_is_short(clock):
    """Or the last rows of an outage would wait for minutes when it is over."""
    rests = RowBackoff(by_key=False, clock=clock)
    for _ in range(30):
        rests.add(1, None, 0, costs=False)
    assert rests.seconds_to_next() <= 10


class Waiting:
    """A source over messages in memory; each may be tried at once again."""

    def __init__(self, count):
        self.waiting = {str(n): 0 for n in range(count)}

    def read(self, limit, timeout):
        return [
            Message(b"", {"id": id_, "type": "t"}, acking=Acking(self, id_))
            for id_ in list(self.waiting)[:limit]
        ]

    def settle(self, acked, nacked):
        for id_ in acked:
            del self.waiting[id_]
        for id_, error in nacked:
            attempts = self.waiting.pop(id_)  # to the end: it rests, and the others go first
            self.waiting[id_] = attempts + (not isinstance(error, SinkUnavailable))

    def close(self): ...


def test_a_sink_that_refuses_everything_costs_one_row_its_attempts_and_no_other():
    source, sink = Waiting(20), ListSink()
    sink.bad = set(source.waiting)
    relay = Relay(source, sink, batch_size=8)
    outcomes = [relay.run_once() for _ in range(100)]
    assert sorted(source.waiting.values())[:-1] == [0] * 19
    assert max(source.waiting.values()) > 1  # the one that is suspected
    assert sum(outcome.outage is not None for outcome in outcomes) > 90  # each of them a pause


def test_what_fails_while_others_go_out_pays_for_itself():
    source, sink = Waiting(20), ListSink()
    sink.bad = {"3", "7"}
    relay = Relay(source, sink, batch_size=1)
    for _ in range(40):
        relay.run_once()
    assert source.waiting.keys() == {"3", "7"}
    assert all(attempts >= 1 for attempts in source.waiting.values())
