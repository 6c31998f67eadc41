"""Days and weeks of the business, which are those of Chicago; and days of UTC, to group files by.

None of it depends on the time zone of the session.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, date, datetime, timedelta

from pyspark.sql import Column
from pyspark.sql import functions as f

ZONE = "America/Chicago"
_SECONDS = 24 * 3600
_FIRST, _END = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


def plausible(moment: Column) -> Column:
    """The moment, or null where nothing can have happened: before 1970, or after the year 9998.

    Python, which names the days of files, has no year 0 and no year 10000: one event of such a time
    would end every run.
    """
    return f.when((moment >= _FIRST) & (moment < _END), moment)


def may_be_of(moment: Column, days: Collection[date]) -> Column:
    """Whether a moment is near one of the days, or of no day at all: in words that the statistics
    of Parquet files can answer, so that what lies elsewhere is not read."""
    found = moment.isNull() | (moment < _FIRST) | (moment >= _END)
    if days:
        found |= (moment >= _midnight(min(days))) & (
            moment < _midnight(max(days)) + timedelta(days=1)
        )
    return found


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def utc_day(moment: Column) -> Column:
    """The date in UTC."""
    days = f.floor(f.unix_seconds(moment) / _SECONDS).cast("int")
    return f.date_from_unix_date(days)


def business_day(moment: Column) -> Column:
    """The date in Chicago."""
    return utc_day(f.from_utc_timestamp(moment, ZONE))  # shifted by the offset of that moment


def week(day: Column) -> Column:
    """The Monday of its week."""
    return f.date_sub(day, f.weekday(day))


def hour(moment: Column) -> Column:
    """Its full hour, in UTC."""
    return f.timestamp_seconds(f.floor(f.unix_seconds(moment) / 3600) * 3600)


def milliseconds(start: Column, end: Column) -> Column:
    """Whole milliseconds between two moments; null if one of them is."""
    return f.floor((f.unix_micros(end) - f.unix_micros(start)) / 1_000)
