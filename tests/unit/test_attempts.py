"""The errors of attempts, as stores keep them: bounded in number and length, valid as text."""

from __future__ import annotations

import pytest

from conquiet import attempts
from conquiet.errors import RetriesExhausted, TryLater


def keep(stored: str | None, attempt: int, error: Exception | None) -> str:
    return f"{1_795_035_157.997 + attempt}".join(attempts.append(stored, attempt, error))


def test_the_first_error_and_the_latest_ones_are_kept() -> None:
    stored = None
    for attempt in range(1, 31):
        stored = keep(stored, attempt, ValueError(f"error {attempt}"))
    found = attempts.read(stored)
    assert [one.attempt for one in found] == [1, *range(22, 31)]
    assert found[1].error == "ValueError: error 22"
    assert found[0].time == "2026-11-18T20:52:38.997Z"
    assert attempts.read(attempts.dump(found)) == found


def test_a_long_error_of_several_lines_is_cut_to_one_line() -> None:
    [found] = attempts.read(keep(None, 1, ValueError("a\nb " * 10_000)))
    assert len(found.error) == attempts.MAX_CHARS
    assert found.error.startswith("ValueError: a b a b")
    assert found.error.endswith("…")


def test_any_text_can_be_stored() -> None:
    stored = keep(None, 1, ValueError('\0 \ud800 "é" \\'))
    assert "\0" not in stored
    stored.encode()
    assert attempts.read(stored)[0].error == 'ValueError: \0 ? "é" \\'


@pytest.mark.parametrize("wrap", [lambda error: TryLater(1.0, error), None])
def test_the_error_of_the_handler_is_kept_not_what_wraps_it(wrap: object) -> None:
    cause = ValueError("no stock")
    wrapped = wrap(cause) if callable(wrap) else RetriesExhausted("failed 3 times")
    wrapped.__cause__ = cause
    assert attempts.error_text(wrapped) == "ValueError: no stock"


@pytest.mark.parametrize("stored", ["", None, "[", "{}", '[[1, "x", 2]]', "[[1]]"])
def test_what_cannot_be_read_counts_as_no_errors(stored: str | None) -> None:
    assert attempts.read(stored) == ()
    assert len(attempts.read(keep(stored, 3, None))) == 1
