"""What a claim leaves in a row when it failed."""

from __future__ import annotations

from typing import Any, NamedTuple

from conquiet.acking import Error

MAX_ERROR_CHARACTERS = 2_000
"""How much of an error is kept in `last_error`."""


class Failure(NamedTuple):
    """What a nack leaves in a row."""

    id: Any
    error: str
    parks: bool


def error_text(error: Error) -> str:
    """An error as `last_error` keeps it: bounded, and text that every database takes."""
    if error is None:
        return "nacked without a reason"
    reason = str(error) or type(error).__name__
    if not isinstance(error, Exception) or type(error).__module__.partition(".")[0] != "conquiet":
        reason = f"{type(error).__name__}: {error}"
    reason = reason[: MAX_ERROR_CHARACTERS + 1].replace("\0", "\ufffd")
    reason = reason.encode("utf-8", "replace").decode()  # lone surrogates are not text
    if len(reason) > MAX_ERROR_CHARACTERS:
        reason = reason[: MAX_ERROR_CHARACTERS - 1] + "…"
    return reason
