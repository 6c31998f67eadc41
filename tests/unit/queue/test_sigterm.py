"""Section 6.3 of the seed: SIGTERM, only on request and only in the main thread."""

from __future__ import annotations

import signal
import threading

import pytest

from conquiet.queue import QueueError
from conquiet.queue.consumer import SigtermHandler


@pytest.fixture(autouse=True)
def _sigterm_as_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_6_3_the_previous_handler_is_kept_and_called_after_stop():
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    SigtermHandler(lambda: calls.append("stop"))
    signal.raise_signal(signal.SIGTERM)
    assert calls == ["stop", signal.SIGTERM]


@pytest.mark.parametrize("previous", [signal.SIG_DFL, signal.SIG_IGN])
def test_6_3_without_a_previous_handler_the_process_goes_on_to_its_end(previous):
    calls = []
    signal.signal(signal.SIGTERM, previous)
    SigtermHandler(lambda: calls.append("stop"))
    signal.raise_signal(signal.SIGTERM)
    assert calls == ["stop"]


def test_6_3_leaving_the_block_restores_the_previous_handler():
    def previous(number, frame): ...

    signal.signal(signal.SIGTERM, previous)
    with SigtermHandler(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not previous
    assert signal.getsignal(signal.SIGTERM) is previous


def test_6_3_a_handler_that_came_later_is_left_in_place():
    def later(number, frame): ...

    with SigtermHandler(lambda: None):
        signal.signal(signal.SIGTERM, later)
    assert signal.getsignal(signal.SIGTERM) is later


def test_6_3_two_consumers_both_stop():
    calls = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    SigtermHandler(lambda: calls.append("first"))
    SigtermHandler(lambda: calls.append("second"))
    signal.raise_signal(signal.SIGTERM)
    assert calls == ["second", "first"]


def test_6_3_another_thread_is_refused_and_changes_nothing():
    before = signal.getsignal(signal.SIGTERM)
    errors = []

    def ask():
        try:
            SigtermHandler(lambda: None)
        except QueueError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    assert signal.getsignal(signal.SIGTERM) is before


def test_6_3_a_handler_that_python_cannot_call_is_not_replaced(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with pytest.raises(QueueError, match="not installed by Python"):
        SigtermHandler(lambda: None)
