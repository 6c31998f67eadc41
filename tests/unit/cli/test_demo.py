"""`conquiet demo` finds the demo by an entry point, and says in one line how to get it."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from conquiet.cli import main


def install(monkeypatch: pytest.MonkeyPatch, *demos: Any) -> None:
    """Replace the installed demos."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: demos)


def test_without_a_demo_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    assert main(["demo"]) == 2
    errors = capsys.readouterr().err
    assert "pip install -e examples/marketplace" in errors
    assert errors.count("\n") == 1


def test_a_demo_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise ImportError("No module named 'psycopg'")

    install(monkeypatch, SimpleNamespace(value="shop:start", load=load))
    assert main(["demo", "--no-spark"]) == 2
    errors = capsys.readouterr().err
    assert "shop:start" in errors
    assert "psycopg" in errors


@pytest.mark.parametrize(("is_right", "code"), [(True, 0), (False, 1)])
def test_the_verdict_of_the_demo_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_right: bool,
    code: int,
) -> None:
    given: dict[str, Any] = {}

    def start(progress: Any, when_done: Any, **settings: Any) -> Any:
        given.update(settings)
        progress.begin("servers start", "starting")
        progress.advance(1, 2)
        line = SimpleNamespace(name="events lost", expected=0, found=1, is_right=is_right, text=str)
        verdict = SimpleNamespace(is_right=is_right, lines=[line], differences=["event 7"])
        story = SimpleNamespace(verdict=verdict, seconds=3.0)
        when_done(story, None)
        return story

    install(monkeypatch, SimpleNamespace(value="shop:start", load=lambda: start))
    options = ["--orders", "50", "--database", "postgresql://db", "--broker", "redis://broker"]
    assert main(["demo", "--no-spark", *options]) == code
    assert (given["database"], given["broker"]) == ("postgresql://db", "redis://broker")
    assert (given["orders"], given["spark"], given["keep"]) == (50, False, False)
    assert ("WRONG: 1 lines" in capsys.readouterr().out) is not is_right
