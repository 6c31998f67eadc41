"""Reconciliation with an outbox: hours are counted again if the outbox has more of them."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import text
from tests.unit.lake.payments import START, entries, pipeline

from conquiet.lake.pipeline import as_table
from conquiet.sql import engine

MISSING = str(UUID(int=10**9))


@pytest.fixture(params=["database_url", "sqlite_url"])
def outbox(request):
    """The URL of a database with a row for each event of the log."""
    url = request.getfixturevalue(request.param)
    kind = "uuid" if request.param == "database_url" else "text"
    time = "timestamptz" if request.param == "database_url" else "text"
    database = engine(url)
    with database.begin() as connection:
        connection.execute(
            text(f"CREATE TABLE outbox_events (id {kind}, created_at {time}, attempt_count int)")
        )
        for one in {one["event_id"]: one for one in entries(12)}.values():
            add(connection, one["event_id"], one["time"])
    yield url
    database.dispose()


def add(connection, event_id, at) -> None:
    values = f"'{event_id}', '{at:%Y-%m-%d %H:%M:%S.%f}', 0"
    if connection.dialect.name == "postgresql":
        values = f"'{event_id}', '{at.isoformat()}', 0"
    connection.execute(text(f"INSERT INTO outbox_events VALUES ({values})"))


def counts(column: str, table: str = "recon_completeness") -> dict:
    rows = pipeline.read(table).to_pylist()
    return {(row["hour"] - START) // timedelta(hours=1): row[column] for row in rows}


def test_hours_are_counted_again_if_the_outbox_has_more(outbox, tmp_path):
    pipeline.lake = str(tmp_path / "lake")
    log = entries(12)
    pipeline.run(as_table(log[:20]))
    pipeline.run(as_table(log[20:]), outbox=outbox)  # the hours of this batch alone
    assert None in counts("outbox_count").values()
    pipeline.reconcile(outbox=outbox)
    assert all(counts("complete").values())
    assert counts("outbox_count") == counts("log_count")

    database = engine(outbox)
    with database.begin() as connection:
        add(connection, MISSING, START + timedelta(hours=9, minutes=59))
        raised = f"UPDATE outbox_events SET attempt_count = 3 WHERE id = '{UUID(int=40)}'"
        connection.execute(text(raised))  # hour 12
        removed = f"DELETE FROM outbox_events WHERE id = '{UUID(int=0)}'"
        connection.execute(text(removed))  # hour 0: published, and removed after a while
    database.dispose()
    pipeline.reconcile(outbox=outbox)
    assert [hour for hour, ok in counts("complete").items() if not ok] == [9]
    assert counts("missing_ids")[9] == [MISSING]
    assert counts("failed_attempts", "outbox_delivery")[12] == 3
    assert counts("foreign_ids")[0] == []

    pipeline.reconcile(outbox=outbox, all=True)
    assert [hour for hour, ok in counts("complete").items() if not ok] == [9]
    assert counts("outbox_count")[0] == counts("log_count")[0]
    assert counts("missing_ids")[9] == [MISSING]


def test_a_row_that_was_removed_is_not_foreign_but_an_event_that_never_had_one_is(outbox, tmp_path):
    pipeline.lake = str(tmp_path / "lake")
    log = entries(12)
    database = engine(outbox)

    def remove(event_id) -> None:
        with database.begin() as connection:
            connection.execute(text(f"DELETE FROM outbox_events WHERE id = '{event_id}'"))

    hours: dict[int, set[str]] = {}
    for one in log:
        hours.setdefault((one["time"] - START) // timedelta(hours=1), set()).add(one["event_id"])
    hour, [first, second, *_] = next(item for item in hours.items() if len(item[1]) > 1)
    remove(first)  # never counted
    pipeline.run(as_table(log), outbox=outbox)
    assert counts("foreign_ids")[hour] == [first]
    rows = counts("outbox_count")[hour]
    remove(second)  # counted, then removed after a while
    pipeline.reconcile(outbox=outbox, all=True)
    assert counts("foreign_ids")[hour] == [first]
    assert counts("outbox_count")[hour] == rows
    database.dispose()


def test_an_hour_that_was_not_complete_is_counted_until_it_is(outbox, tmp_path):
    pipeline.lake = str(tmp_path / "lake")
    pipeline.reconcile(outbox=outbox)  # of a lake without events
    log = entries(12)
    late, rest = log[0], [one for one in log if one["event_id"] != log[0]["event_id"]]
    pipeline.run(as_table(rest))
    pipeline.reconcile(outbox=outbox)
    assert counts("missing_ids")[0] == [late["event_id"]]
    pipeline.run(as_table([late]))
    pipeline.reconcile(outbox=outbox)
    assert all(counts("complete").values())
