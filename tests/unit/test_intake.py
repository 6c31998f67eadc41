"""The intake of an ordered worker: what may run next when messages come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.chains import Ledger

from conquiet import Message, intake
from conquiet.intake import ByKey, InFlight


class Script:
    """A source that gives these batches, one per read, and then nothing."""

    def __init__(self, *batches: Sequence[str]) -> None:
        self.ledger = Ledger()
        self._batches = list(batches)

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        names = self._batches.pop(0) if self._batches else ()
        return [self.ledger.message(name, b"{}", subject="key") for name in names]

    def close(self) -> None: ...


def by_key(source: Any, threads: int = 1) -> ByKey:
    return ByKey(source, InFlight(), threads, lambda message: message.key)


def names(messages: Sequence[Message[Any]]) -> list[str]:
    return [message.id for message in messages]


def test_what_came_back_runs_in_its_old_order_whatever_order_it_comes_in():
    taking = by_key(Script(["1"], ["2", "3"], ["1"], ["3"], ["2", "3"]))
    [first] = taking.read(0, 10, 0, 0)
    taking.note_failed([first])
    assert names(taking.read(0, 10, 0, 0)) == []  # they would overtake the first
    assert names(taking.read(0, 10, 0, 0)) == ["1"]
    assert names(taking.read(0, 10, 0, 0)) == []  # so would the third the second
    assert names(taking.read(0, 10, 0, 0)) == ["2", "3"]


def test_a_key_does_not_wait_for_ever_for_what_another_worker_took(monkeypatch):
    taking = by_key(Script(["1"], ["2"], ["2"], ["3"]))
    [first] = taking.read(0, 10, 0, 0)
    taking.note_failed([first])
    assert names(taking.read(0, 10, 0, 0)) == []
    monkeypatch.setattr(intake, "_SECONDS_TO_WAIT_FOR_A_KEY", -1.0)
    assert names(taking.read(0, 10, 0, 0)) == ["2"]
    assert names(taking.read(0, 10, 0, 0)) == ["3"]


def test_keys_that_nobody_waits_for_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(intake, "_MAX_KEYS", 10)
    monkeypatch.setattr(intake, "_SECONDS_TO_WAIT_FOR_A_KEY", -1.0)
    taking = by_key(Script(["1"]))
    for number in range(50):
        failed = Ledger().message(number)
        failed.order_key = str(number)
        taking.note_failed([failed])
    taking.read(0, 10, 0, 0)
    assert taking._returned == {}


@pytest.mark.parametrize("threads", [2, 3])
def test_a_stuck_lane_does_not_fill_the_memory(threads):
    source = Script(*[[f"{batch}-a", f"{batch}-b"] for batch in range(50)])
    taking = by_key(source, threads)
    stuck = {thread for thread in range(threads) if taking.read(thread, 2, 0, 0)}
    [idle, *_] = set(range(threads)) - stuck
    for _ in range(50):
        assert names(taking.read(idle, 2, 0, 0)) == []
    assert sum(map(len, taking._lanes)) <= 2 * threads
