"""Numbers and times as options of commands take them, refused by name otherwise."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from datetime import UTC, datetime, timedelta


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def age(text: str) -> timedelta:
    """`90m`, `12h`, `7d`: more than nothing."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None or int(found[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is not an age such as 90m, 12h or 7d")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


def span(text: str) -> timedelta:
    """An age, or 0."""
    return timedelta(0) if text in ("0", "0s") else age(text)


def moment(text: str) -> datetime:
    """An age, which is so long ago, or a date with or without time; UTC unless it says so."""
    try:
        return datetime.now(UTC) - age(text)
    except ArgumentTypeError:
        pass
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is neither an age such as 2h nor a time such as 2026-01-31T12:00"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)
