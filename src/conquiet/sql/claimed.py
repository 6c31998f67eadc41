"""What a claim gets out of an outbox, and what it leaves in the row when it failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from conquiet.acking import Error

MAX_ERROR_CHARACTERS = 2_000
"""How much of an error is kept in `last_error`."""

COLUMNS = (
    *("id", "topic", "event_type", "event_id", "key", "content_type", "data"),
    *("attributes", "attempts"),
)


class Row(NamedTuple):
    """A claimed row of the outbox."""

    id: int
    topic: str
    event_type: str
    event_id: str
    key: str | None
    content_type: str
    data: bytes
    attributes: str
    attempts: int


class Failure(NamedTuple):
    """What a nack leaves in a row."""

    id: int
    error: str
    parks: bool


def as_rows(found: Iterable[Sequence[Any]]) -> list[Row]:
    return [Row._make(row) for row in found]


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
