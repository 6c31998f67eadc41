"""What a test needs that a machine may lack: skipped by name here, and an error in CI."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn, TypeVar

import pytest

from conquiet.errors import ConfigError

Found = TypeVar("Found")

PREFIX = "needs "


def missing(what: str, why: object) -> NoReturn:
    """Skip the test that asks; the terminal summary lists it by name."""
    reason = f"{PREFIX}{what}: {why}"
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(f"nothing may be missing in CI, but this test {reason}", pytrace=False)
    pytest.skip(reason)


def found(what: str, find: Callable[[], Found]) -> Found:
    """The outcome of `find`, or a skip if it says that the server is not installed."""
    try:
        return find()
    except ConfigError as error:
        missing(what, error)
