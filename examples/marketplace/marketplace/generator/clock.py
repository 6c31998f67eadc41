"""Times of the generated world: whole milliseconds since 1970, and how events write them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

CHICAGO = ZoneInfo("America/Chicago")

_EPOCH = date(1970, 1, 1)
_SECONDS = [f"T{n // 3600:02}:{n // 60 % 60:02}:{n % 60:02}" for n in range(86_400)]
_MILLIS = ["Z", *(f".{n:03}000Z" for n in range(1, 1_000))]


class _Dates(dict[int, str]):
    def __missing__(self, day: int) -> str:
        text = self[day] = (_EPOCH + timedelta(days=day)).isoformat()
        return text


_dates = _Dates()


def moment_text(ms: int) -> str:
    """Format as `emit` and the relay do: RFC 3339 with microseconds, or none if they are zero.

    >>> moment_text(1_772_956_799_123)
    '2026-03-08T07:59:59.123000Z'
    """
    second = ms // 1_000
    return _dates[second // 86_400] + _SECONDS[second % 86_400] + _MILLIS[ms % 1_000]


def milliseconds(moment: datetime) -> int:
    """Convert an aware moment to milliseconds, exactly: without floats."""
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000 + since.microseconds // 1_000


def midnight(day: date) -> int:
    """Return the milliseconds at which a business day begins."""
    return milliseconds(datetime(day.year, day.month, day.day, tzinfo=CHICAGO).astimezone(UTC))
