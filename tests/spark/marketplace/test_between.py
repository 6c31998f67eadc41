"""What a kill leaves between two commits is made good by whatever is run next."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.spark.marketplace.entries import START, entry, envelope, frame, order
from tests.spark.marketplace.tables import rows_of

from conquiet.errors import ConfigError
from conquiet.spark.bronze import INGEST_DATE, raw_events
from conquiet.spark.tables.writing import append_once
from marketplace.pipeline import Job, Lake, replay
from marketplace.pipeline.refresh import refresh
from marketplace.pipeline.tables import RAW
from marketplace.pipeline.taking import ROWS, applied, take

pytestmark = pytest.mark.slow

SINCE, UNTIL = date(2020, 1, 1), date(2100, 1, 1)


class Stopped(Exception):
    pass


class Stopping(Lake):
    """A lake that does not come to one of its tables."""

    never = ""

    def replace(self, frame: Any, name: str, values: Any) -> None:
        if name == self.never:
            raise Stopped(name)
        super().replace(frame, name, values)


def delivery(second: int, body: Any = None, **columns: Any) -> dict[str, Any]:
    body = envelope(1, order()) if body is None else body
    place = {"entry_id": f"{second}-0", "entry_time": START + timedelta(seconds=second)}
    return entry(1, "order_created", body, **place, **columns)


def batch(spark: Any, *entries: dict[str, Any]) -> Any:
    return raw_events(frame(spark, list(entries)))


def into_bronze_only(lake: Lake, rows: Any, number: int) -> None:
    append_once(rows, lake.path(RAW), query=ROWS, batch=number, format=lake.format,
                partition_by=[INGEST_DATE])  # fmt: skip


def test_an_order_that_vanishes_leaves_no_lines_when_a_refresh_was_killed(
    spark, tmp_path: Path
) -> None:
    lake, tables = Stopping(spark, tmp_path / "lake"), ["fact_order_line"]
    take(lake, batch(spark, delivery(5)), "log", 0)
    refresh(lake, tables=tables)
    assert len(rows_of(lake.read("fact_order_line"))) == 1
    take(lake, batch(spark, delivery(2, b"{")), "log", 1)  # the first delivery, found last
    lake.never = "fact_order_line"
    with pytest.raises(Stopped):
        refresh(lake, tables=tables)
    assert rows_of(lake.read("fact_order")) == []  # which knows no day of the order any more
    lake.never = ""
    refresh(lake, tables=tables)
    assert rows_of(lake.read("fact_order_line")) == []


def test_a_batch_that_was_killed_after_bronze_is_counted_once_by_a_replay(
    spark, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path / "lake")
    job = Job(lake, once=True, tables=["events"])
    take(lake, batch(spark, delivery(5)), ROWS, 0)
    into_bronze_only(lake, batch(spark, delivery(6)), 1)
    assert replay(job, SINCE, UNTIL) == 1
    take(lake, batch(spark, delivery(6)), ROWS, 1)  # as the run does that goes on
    [row] = rows_of(lake.read("events"))
    assert row["delivery_count"] == 2


def test_what_bronze_has_and_silver_has_not_is_finished_with_the_tables(
    spark, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path / "lake")
    into_bronze_only(lake, batch(spark, delivery(5)), 0)
    Job(lake, once=True, tables=["fact_order"]).finish()
    assert len(rows_of(lake.read("fact_order"))) == 1


def test_entries_without_a_time_can_be_replayed(spark, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path / "lake")
    times = (None, datetime(1, 1, 1, tzinfo=UTC))  # the second cannot be a day of a file
    for number, time in enumerate(times):
        take(lake, batch(spark, delivery(5 + number, time=time)), ROWS, number)
    job = Job(lake, once=True, tables=["recon_completeness"])
    job.finish()
    assert replay(job, START.date(), START.date() + timedelta(days=1)) == 1
    [row] = rows_of(lake.read("events"))
    assert (row["day"], row["delivery_count"]) == (None, 2)
    [hour] = rows_of(lake.read("recon_completeness"))
    assert (hour["hour"], hour["entry_count"], hour["complete"]) == (START, 2, True)


def test_bronze_that_somebody_else_filled_is_refused(spark, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path / "lake")
    append_once(batch(spark, delivery(5)), lake.path(RAW), query="another", batch=0,
                format="parquet", partition_by=[INGEST_DATE])  # fmt: skip
    assert applied(lake, RAW, "another") == 0
    with pytest.raises(ConfigError, match="was filled by another query"):
        Job(lake, once=True).take_outbox(frame(spark, [delivery(5)]))
