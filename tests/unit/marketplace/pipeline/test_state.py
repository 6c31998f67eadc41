"""What a refresh remembers: files of silver by day, and days that it began with."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from marketplace.pipeline.state import State, day_of

FIRST, SECOND = date(2026, 3, 1), date(2026, 3, 2)


def name(day: date | str, part: str, kind: str = "event") -> str:
    return f"kind={kind}/day={day}/part-{part}.parquet"


def test_a_day_changed_if_its_file_came_or_went_or_is_another(tmp_path: Path) -> None:
    state = State.at(tmp_path)
    assert state.changed_days(set()) == set()
    state.files = {name(FIRST, "a"), name(SECOND, "b")}
    assert state.changed_days({name(FIRST, "a"), name(SECOND, "c")}) == {SECOND}
    assert state.changed_days({name(FIRST, "a")}) == {SECOND}
    assert state.changed_days(state.files | {name(FIRST, "r", "refused")}) == {FIRST}


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = State.at(tmp_path)
    state.files, state.days, state.raw = {name(FIRST, "a")}, {SECOND}, {"ingest_date=…/0.parquet"}
    assert not State.is_at(tmp_path)
    state.write()
    assert State.is_at(tmp_path)
    again = State.at(tmp_path)
    assert (again.files, again.days, again.raw) == (state.files, state.days, state.raw)
    again.forget({FIRST})
    assert State.at(tmp_path).files == set()
    assert State.at(tmp_path).days == {SECOND}
    assert State.at(tmp_path).raw == set()  # else nothing in those days would be new


def test_rows_without_a_time_have_no_day() -> None:
    assert day_of(name("__HIVE_DEFAULT_PARTITION__", "a")) is None
    assert day_of(name(FIRST, "a")) == FIRST


def test_tables_that_were_not_made_from_the_same_files_are_made_anew(tmp_path: Path) -> None:
    state = State.at(tmp_path)
    state.files = {name(FIRST, "a")}
    state.choose({"fact_order", "zip_daily"})  # fewer: what is known of them holds
    assert state.files == {name(FIRST, "a")}
    state.write()
    again = State.at(tmp_path)
    assert again.tables == {"fact_order", "zip_daily"}
    again.choose({"fact_order", "ad_touches"})
    assert again.files == set()
    assert again.changed_days({name(FIRST, "a")}) == {FIRST}
