"""Words: numbers, ages and payloads as a page shows them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from conquiet.message import printable
from conquiet.operations.history import BOUNDS

FIELD_CHARS = 2_000
"""Longest text of one field of a page, but for payloads."""
_SHOWN_CHARS = 200_000
"""Longest payload that is shown: more would block the browser."""
_BRIEF_CHARS = 120
_UNITS = ("B", "kB", "MB", "GB", "TB")


def number(value: int | float | None) -> str:
    """Format a number with digits in groups of three; a dash if it is unknown.

    >>> number(1234567), number(None)
    ('1,234,567', '–')
    """
    return "–" if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Format a rate per second: a digit after the point while there is only one before it.

    >>> rate(3.21), rate(1234.5), rate(None)
    ('3.2', '1,234', '–')
    """
    return "–" if value is None else f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"


def age(seconds: float | None) -> str:
    """Write a time span by its two largest units.

    >>> age(0.02), age(0.42), age(12), age(200), age(7500), age(100_000)
    ('< 0.1 s', '0.4 s', '12 s', '3 min 20 s', '2 h 5 min', '1 d 3 h')
    """
    if seconds is None:
        return "–"
    if 0 < seconds < 0.05:
        return "< 0.1 s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"


def since(seconds: float | None) -> str:
    """Write how long ago something was.

    >>> since(0.4), since(200), since(None)
    ('now', '3 min 20 s ago', '–')
    """
    if seconds is None:
        return "–"
    return "now" if seconds < 1 else f"{age(seconds)} ago"


def mark(value: float) -> str:
    """Write a number beside an axis.

    >>> mark(0.25), mark(40.0), mark(20_000)
    ('0.25', '40', '20,000')
    """
    return f"{value:,.0f}" if value >= 1_000 else f"{value:g}"


def duration(seconds: float | None) -> str:
    """Write how long a call took, to two digits.

    >>> duration(0.00042), duration(0.0123), duration(1.26), duration(75), duration(None)
    ('0.42 ms', '12 ms', '1.3 s', '75 s', '–')
    """
    if seconds is None:
        return "–"
    value, unit = (seconds * 1000, "ms") if seconds < 0.9995 else (seconds, "s")
    digits = 0 if value >= 10 or value == 0 else 1 if value >= 1 else 2
    return f"{value:.{digits}f} {unit}"


def estimate(seconds: float | None) -> str:
    """Write a duration that was estimated from a histogram: no less than its first bound.

    >>> estimate(0.0005), estimate(0.0123), estimate(300.0), estimate(None)
    ('< 1 ms', '12 ms', '≥ 300 s', '–')
    """
    if seconds is not None and seconds < BOUNDS[0]:
        return f"< {1000 * BOUNDS[0]:g} ms"
    at_least = "≥ " if seconds is not None and seconds >= BOUNDS[-1] else ""
    return f"{at_least}{duration(seconds)}"


def size(count: int | None) -> str:
    """Format a number of bytes.

    >>> size(512), size(1_234_567), size(None)
    ('512 B', '1.2 MB', '–')
    """
    if count is None:
        return "–"
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def moment(text: str | None) -> str:
    """Write an ISO time for the eye, in UTC.

    >>> moment("2026-01-31T12:00:00.123Z"), moment("soon")
    ('2026-01-31 12:00:00 UTC', 'soon')
    """
    at = _parse(text)
    return at.strftime("%Y-%m-%d %H:%M:%S UTC") if at is not None else text or "–"


def ago(text: str | None, now: datetime | None = None) -> str:
    """Write an ISO time as a distance from now.

    >>> noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    >>> ago("2026-01-31T11:56:40Z", noon), ago("2026-01-31T14:00:00Z", noon), ago("soon", noon)
    ('3 min 20 s ago', 'in 2 h 0 min', 'soon')
    """
    at = _parse(text)
    if at is None:
        return text or "–"
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    return since(seconds) if seconds > -1 else f"in {age(-seconds)}"


def iso(text: str | None) -> str:
    """Write an ISO time with its zone, for programs.

    >>> iso("2026-01-31 12:00:00"), iso("soon")
    ('2026-01-31T12:00:00+00:00', 'soon')
    """
    at = _parse(text)
    return at.isoformat() if at is not None else text or ""


def _parse(text: str | None) -> datetime | None:
    try:
        at = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


def field(text: str) -> str:
    r"""Cut a text for one field, and write out control and bidirectional characters.

    >>> field("invoice\u202efdp.exe"), len(field("x" * 1_000_000))
    ('invoice\\u202efdp.exe', 2026)
    """
    return _cut(text, FIELD_CHARS, " ")


def _cut(text: str, most: int, between: str) -> str:
    shown = printable(text[:most], keep="\n\t")
    return shown if len(text) <= most else f"{shown}{between}… {len(text) - most:,} characters more"


def brief(text: str) -> str:
    r"""Return the beginning of a text, in one line, for a list.

    >>> brief('{"a": 1,\n "b": 2}'), len(brief("word " * 100)) <= 122
    ('{"a": 1, "b": 2}', True)
    """
    line = " ".join(text[: 4 * _BRIEF_CHARS].split())
    return line if len(line) <= _BRIEF_CHARS else f"{line[:_BRIEF_CHARS]} …"


def payload(text: str | None) -> str:
    """Write JSON over several lines, anything else as it is; cut what a page cannot take.

    >>> print(payload('{"a": 1}'))
    {
      "a": 1
    }
    """
    if text is None:
        return ""
    if len(text) <= _SHOWN_CHARS:
        try:
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
            text = text.encode(errors="backslashreplace").decode()  # half a pair has no UTF-8
        except (ValueError, RecursionError):
            pass
    return _cut(text, _SHOWN_CHARS, "\n")


def plural(count: int, one: str, many: str = "") -> str:
    """Write a number and its noun.

    >>> plural(1, "row"), plural(2, "row"), plural(0, "entry", "entries")
    ('1 row', '2 rows', '0 entries')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def advise(why: str) -> str:
    """Return a sentence on what to do about an error of a store."""
    text = why.lower()
    if "no such table" in text or "does not exist" in text or "no file" in text:
        return "Create the tables with: conquiet outbox migrate"
    if "permission denied" in text:
        return "Its role lacks a right: the page Security of the docs lists them."
    if "password" in text or "auth" in text or "wrongpass" in text:
        return "Check user and password in the URL that the dashboard was started with."
    if "timeout" in text or "canceling statement" in text:
        return "It is slow or busy. Narrow the search, or try again later."
    return "Is it running, and can this machine reach it? conquiet doctor checks it."
