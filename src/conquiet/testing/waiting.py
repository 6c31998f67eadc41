"""Wait for what a test is about, and never for a guessed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Outcome = TypeVar("Outcome")


def eventually(
    condition: Callable[[], Outcome],
    *,
    timeout: float = 10.0,
    message: str = "",
    interval: float = 0.005,
) -> Outcome:
    """Call `condition` until it returns something true, and return that.

    A condition that raises AssertionError counts as not yet true; the last one explains a failure.
    """
    deadline = time.monotonic() + timeout
    last_error: AssertionError | None = None
    while True:
        try:
            outcome = condition()
            last_error = None
            if outcome:
                return outcome
        except AssertionError as error:
            last_error = error
        if time.monotonic() > deadline:
            what = message or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not within {timeout:g} s: {what}") from last_error
        time.sleep(interval)
