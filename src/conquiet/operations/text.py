"""Text of bytes and times."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime

_LATEST_MS = 253_402_300_799_999  # the end of the year 9999, where datetime ends
_MOST_DIGITS = 20  # of an unsigned number of 64 bits


def as_text(data: bytes) -> tuple[str, bool]:
    """Decode bytes as UTF-8, else encode them as base64; say which."""
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return b64encode(data).decode(), True


def escape_surrogates(text: str) -> str:
    """Escape unpaired surrogates, which have no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def whole(text: str) -> int:
    """Read a whole number; 0 if the text is none, or has more than 20 digits."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0


def moment(milliseconds: float) -> str:
    """Format a time as `2026-01-31T12:00:00.000Z`; empty if it is not after 1970."""
    if not 0 < milliseconds < _LATEST_MS:
        return ""
    at = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
