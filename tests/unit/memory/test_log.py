"""What the log does beyond the contracts: clocks, topics, groups, late settlements, crashes."""

from __future__ import annotations

import threading

import pytest

from conquiet.errors import ConfigError, GivenBack
from conquiet.memory import Log
from conquiet.message import Message
from conquiet.source import EndOfSource, Leased, Replayable
from conquiet.testing import eventually, message


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def filled(*names: str, clock=None, **attributes: str) -> Log:
    log = Log(clock=clock) if clock else Log()
    log.append([message(id=name, **attributes) for name in names])
    return log


def ids(messages) -> list[str]:
    return [item.id for item in messages]


def test_a_log_source_is_leased_and_replayable():
    source = Log().source("group")
    assert isinstance(source, Leased)
    assert isinstance(source, Replayable)


def test_a_lease_ends_by_the_clock_of_the_log():
    clock = Clock()
    log = filled("a", clock=clock)
    first, second = log.source("group", lease=10), log.source("group")
    assert ids(first.read(1, 0)) == ["a"]
    clock.now += 9.9
    assert ids(second.read(1, 0)) == []
    clock.now += 0.2
    assert ids(second.read(1, 0)) == ["a"]


def test_an_ack_after_the_lease_counts_while_nobody_else_has_the_message():
    clock = Clock()
    log = filled("a", clock=clock)
    source = log.source("group", lease=10)
    [late] = source.read(1, 0)
    clock.now += 11
    late.ack()
    assert (ids(source.read(1, 0)), source.late) == ([], 0)
    assert log.unsettled("group") == []


@pytest.mark.parametrize("settle", [Message.ack, Message.nack])
def test_a_settlement_is_ignored_and_counted_once_the_message_is_somebody_elses(settle):
    clock = Clock()
    log = filled("a", clock=clock)
    first, second = log.source("group", lease=10), log.source("group", lease=10)
    [lost] = first.read(1, 0)
    clock.now += 11
    [held] = second.read(1, 0)
    settle(lost)
    assert first.late == 1
    held.nack(GivenBack("not now"))
    assert [item.deliveries for item in second.read(1, 0)] == [2]


def test_renewing_starts_the_lease_anew_for_its_holder_only():
    clock = Clock()
    log = filled("a", "b", clock=clock)
    first, second = log.source("group", lease=10), log.source("group", lease=10)
    a, _ = first.read(2, 0)
    clock.now += 8
    first.renew([a])
    clock.now += 8
    assert ids(second.read(2, 0)) == ["b"]


def test_a_crashed_source_keeps_its_messages_until_the_lease_ends_and_settles_nothing():
    clock = Clock()
    log = filled("a", clock=clock)
    source, other = log.source("group", lease=10), log.source("group")
    [held] = source.read(1, 0)
    source.crash()
    held.ack()
    source.renew([held])
    source.close()
    assert ids(other.read(1, 0)) == []
    clock.now += 11
    assert ids(other.read(1, 0)) == ["a"]


def test_closing_gives_back_at_once_and_costs_no_attempt():
    log = filled("a")
    source = log.source("group")
    source.read(1, 0)
    source.close()
    [again] = log.source("group").read(1, 0)
    assert again.deliveries == 1


def test_a_closed_source_says_that_nothing_will_come():
    source = filled("a").source("group")
    source.close()
    with pytest.raises(EndOfSource):
        source.read(1, 0)


def test_closing_wakes_a_waiting_read():
    source = Log().source("group")
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(EndOfSource):
            source.read(1, 60)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    source.close()
    assert ended.wait(10)


@pytest.mark.parametrize("wake", ["publish", "nack", "lease"])
def test_a_waiting_read_wakes_on(wake):
    log = Log() if wake == "publish" else filled("a")
    holder, waiting = log.source("group", lease=0.1 if wake == "lease" else 60), log.source("group")
    held = holder.read(1, 0)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.extend(ids(waiting.read(1, 60))))
    reader.start()
    if wake == "publish":
        log.append([message(id="a")])
    elif wake == "nack":
        held[0].nack()
    reader.join(10)
    assert got == ["a"]


def test_a_group_from_now_on_skips_what_was_there():
    log = filled("old")
    source = log.source("group", start="now")
    log.append([message(id="new")])
    assert ids(source.read(10, 0)) == ["new"]


def test_a_group_reads_the_topics_that_it_names():
    log = Log()
    log.sink("orders").publish([message(id="a")])
    log.sink("audit").publish([message(id="b")])
    source = log.source("group", topics=["orders"])
    assert ids(source.read(10, 0)) == ["a"]
    assert ids(source.replay()) == ["a"]
    assert ids(log.unsettled("group")) == ["a"]


def test_an_ordered_group_holds_a_key_back_while_it_is_worked_on():
    log = Log()
    log.append([message(id=f"{key}{n}", partitionkey=key) for n in range(3) for key in "ab"])
    first, second = log.source("group", ordered=True), log.source("group", ordered=True)
    [a0] = first.read(1, 0)
    assert ids(second.read(10, 0)) == ["b0", "b1", "b2"]
    assert ids(second.read(10, 0)) == []
    a0.nack(ValueError("failed"))
    assert ids(second.read(10, 0)) == ["a0", "a1", "a2"]


def test_messages_without_a_key_are_not_held_back():
    log = filled("a", "b")
    first, second = log.source("group", ordered=True), log.source("group", ordered=True)
    assert ids(first.read(1, 0)) == ["a"]
    assert ids(second.read(1, 0)) == ["b"]


def test_what_a_handler_does_to_a_message_does_not_change_the_log():
    log = filled("a")
    [first] = log.source("one").read(1, 0)
    first.attributes["id"] = "changed"
    assert ids(log.replay()) == ["a"]


def test_positions_sort_as_text_in_the_order_of_publication():
    log = filled(*map(str, range(12)))
    positions = [item.locals["position"] for item in log.replay()]
    assert positions == sorted(positions)
    assert len(set(positions)) == 12


def test_a_sink_can_be_told_to_be_out_of_reach():
    sink = Log().sink("orders")
    sink.fail_next()
    with pytest.raises(Exception, match="unavailable"):
        sink.publish([message()])
    assert list(sink.publish_each([message()])) == [None]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda log: log.source("group", lease=0),
        lambda log: log.source("group", lease=float("nan")),
        lambda log: log.source("group", start="yesterday"),
        lambda log: log.source("group", topics="orders"),
        lambda log: log.source("known", ordered=True),
        lambda log: log.source("group").read(0, 0),
        lambda log: list(log.replay("first")),
    ],
)
def test_a_wrong_setting_is_refused(wrong):
    log = Log()
    log.source("known")
    with pytest.raises(ConfigError):
        wrong(log)


def test_many_threads_lose_nothing():
    log = Log()
    got: list[str] = []
    sink = log.sink("orders")
    names = [f"{thread}-{n}" for thread in range(4) for n in range(50)]

    def publish(thread: int) -> None:
        for n in range(50):
            sink.publish([message(id=f"{thread}-{n}")])

    def consume() -> None:
        source = log.source("group")
        while len(got) < len(names):
            for item in source.read(5, 0.05):
                if item.deliveries == 1 and item.id.endswith("7"):
                    item.nack(ValueError("once"))
                else:
                    got.append(item.id)
                    item.ack()

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(4)]
    threads += [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    eventually(lambda: sorted(got) == sorted(names))
