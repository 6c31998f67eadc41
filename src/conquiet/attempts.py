"""Keep the errors of a message's attempts with it, while it waits for a later one.

A store holds them as JSON, `[[1,1795035157.997,"ValueError: no stock"], …]`: the number of the
attempt, its time in seconds since 1970, and the error. The time is that of the store's clock, which
the store writes between the two parts that `append` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

import msgspec

from conquiet.errors import RetriesExhausted, TryLater

MAX_ERRORS = 10
"""How many errors are kept: the first one, and the latest ones."""
MAX_CHARS = 200
"""How much of each error; stores keep more of the last one, and its traceback."""

_Row: TypeAlias = tuple[int, float, str]
_decode = msgspec.json.Decoder(list[_Row]).decode


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """Says when an attempt failed, and with what error."""

    attempt: int
    time: str
    """By the clock of the store."""
    error: str


def append(stored: str | None, attempt: int, error: BaseException | None) -> tuple[str, str]:
    """Return the JSON with one more error, in two parts: up to its time, and behind it.

    >>> append('[[1,1795035157.997,"ValueError: no stock"]]', 2, KeyError("sku"))
    ('[[1,1795035157.997,"ValueError: no stock"],[2,', ',"KeyError: \\'sku\\'"]]')
    """
    rows = _rows(stored)
    kept = [*rows[:1], *rows[1:][2 - MAX_ERRORS :]]
    before = "".join(f"{_encode(row)}," for row in kept)
    return f"[{before}[{attempt},", f",{_encode(error_text(error))}]]"


def read(stored: str | None) -> tuple[FailedAttempt, ...]:
    """Return the errors that a store holds, the oldest first.

    >>> read('[[1,1795035157.997,"ValueError: no stock"]]')[0].time
    '2026-11-18T20:52:37.997Z'
    """
    return tuple(
        FailedAttempt(number, _moment(time), error) for number, time, error in _rows(stored)
    )


def dump(errors: Sequence[FailedAttempt]) -> str:
    """Return errors as stores hold them."""
    return _encode(
        [(one.attempt, datetime.fromisoformat(one.time).timestamp(), one.error) for one in errors]
    )


def error_text(error: BaseException | None) -> str:
    """Return kind and text of an error in one line, as far as it is kept."""
    if isinstance(error, (TryLater, RetriesExhausted)) and error.__cause__ is not None:
        error = error.__cause__
    text = "nacked without a reason" if error is None else f"{type(error).__name__}: {error}"
    text = " ".join(text[: 2 * MAX_CHARS].split())
    text = text.encode("utf-8", "replace").decode()  # lone surrogates are not text
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"


def _rows(stored: str | None) -> list[_Row]:
    try:
        return _decode(stored) if stored else []
    except msgspec.DecodeError:  # written by hand, or cut
        return []


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _moment(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
