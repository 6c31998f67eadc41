"""The progress bar: for terminals, after two seconds, gone at the end."""

from __future__ import annotations

import io

from tests.waiting import eventually

from conquiet.cli.progress import Progress, Waiting, end_waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_quick_shows_nothing() -> None:
    screen = Terminal()
    with Progress("replaying", 10, stream=screen) as progress:
        for _ in range(10):
            progress.add()
    assert screen.getvalue() == ""
    assert progress.done == 10


def test_what_takes_long_shows_how_far_it_is_and_is_taken_away() -> None:
    screen = Terminal()
    with Progress("replaying", 200, after=0.0, stream=screen) as progress:
        progress.show(50)
        assert "replaying  [" in screen.getvalue()
        assert "25%  50 of 200" in screen.getvalue()
        assert "left" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")


def test_without_a_total_it_counts() -> None:
    screen = Terminal()
    progress = Progress("pruning", after=0.0, stream=screen)
    progress.show(12_000, "pruning outbox")
    assert "pruning outbox  12,000  " in screen.getvalue()


def test_a_pipe_sees_nothing_of_it() -> None:
    pipe = io.StringIO()
    with Progress("replaying", 2, after=0.0, stream=pipe) as progress:
        progress.show(1)
        progress.draw()
    assert pipe.getvalue() == ""


def test_waiting_says_what_for_and_is_taken_away() -> None:
    screen = Terminal()
    with Waiting("asking redis://localhost", after=0.0, stream=screen):
        eventually(lambda: "asking redis://localhost  0:0" in screen.getvalue())
    assert screen.getvalue().endswith("\r\x1b[K")


def test_waiting_ends_when_somebody_is_asked_and_is_silent_before_its_time() -> None:
    screen = Terminal()
    with Waiting("asking", stream=screen):
        end_waiting()
    with Waiting("asking", after=0.0, stream=io.StringIO()) as piped:
        end_waiting()
    assert screen.getvalue() == ""
    assert piped._stream.getvalue() == ""
