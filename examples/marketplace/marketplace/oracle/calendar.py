"""Business days and weeks of America/Chicago, and percentiles by nearest rank."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

HOUR_MS = 3_600_000
_CHICAGO = ZoneInfo("America/Chicago")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Days(dict[int, date]):
    """Map each hour of UTC to its business day: Chicago's offset is in whole hours."""

    def __missing__(self, hour: int) -> date:
        found = (_EPOCH + timedelta(hours=hour)).astimezone(_CHICAGO).date()
        self[hour] = found
        return found


_days = _Days()


def business_day(ms: int) -> date:
    """Return the date in Chicago.

    >>> business_day(1_772_949_599_999), business_day(1_772_949_600_000)
    (datetime.date(2026, 3, 7), datetime.date(2026, 3, 8))
    """
    return _days[ms // HOUR_MS]


def week(day: date) -> date:
    """Return the Monday of its week."""
    return day - timedelta(days=day.weekday())


def nearest_rank(ordered: Sequence[int], percent: int) -> int | None:
    """Return the smallest value that so many percent do not exceed.

    >>> nearest_rank([10, 20, 30], 50), nearest_rank([10, 20, 30], 95), nearest_rank([], 50)
    (20, 30, None)
    """
    if not ordered:
        return None
    return ordered[-(-len(ordered) * percent // 100) - 1]
