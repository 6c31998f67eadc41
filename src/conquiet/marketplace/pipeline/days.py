"""Days and weeks of the business, which are those of Chicago; and days of UTC, to group files by.

None of it depends on the time zone of the session.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as f

ZONE = "America/Chicago"
_SECONDS = 24 * 3600


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
