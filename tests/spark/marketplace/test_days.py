"""Days are those of Chicago, on the days when clocks change too, in a session of any zone."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest
from pyspark.sql import functions as f

from marketplace.pipeline.days import business_day, hour, utc_day, week

MOMENTS = {
    "2026-03-08T05:59:59.999999Z": date(2026, 3, 7),  # clocks go forward on the 8th, at 8:00 UTC
    "2026-03-08T06:00:00Z": date(2026, 3, 8),
    "2026-03-09T04:59:59Z": date(2026, 3, 8),
    "2026-03-09T05:00:00Z": date(2026, 3, 9),
    "2026-11-01T04:59:59Z": date(2026, 10, 31),  # and back on the 1st, at 7:00 UTC
    "2026-11-01T05:00:00Z": date(2026, 11, 1),
    "2026-11-02T05:59:59Z": date(2026, 11, 1),
    "2026-11-02T06:00:00Z": date(2026, 11, 2),
    "1969-12-31T23:30:00Z": date(1969, 12, 31),
}


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Chicago"])
def test_a_business_day_is_the_date_in_chicago(spark, zone: str) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        texts = spark.createDataFrame([(text,) for text in MOMENTS], "text string")
        at = f.to_timestamp("text")
        rows = texts.select(
            "text", business_day(at).alias("day"), utc_day(at).alias("utc"),
            week(business_day(at)).alias("week"), f.unix_seconds(hour(at)).alias("hour"),
        ).collect()  # fmt: skip
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert {row.text: row.day for row in rows} == MOMENTS
    for row in rows:
        moment = datetime.fromisoformat(row.text).astimezone(UTC)
        assert row.utc == moment.date()
        assert row.hour == moment.replace(minute=0, second=0, microsecond=0).timestamp()
        assert row.week.weekday() == 0
        assert 0 <= (row.day - row.week).days < 7
