"""When schedules are due: cron in a time zone, daylight saving, intervals, missed ticks."""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from zoneinfo import ZoneInfo

import pytest

from conquiet.errors import ConfigError
from conquiet.schedule import Schedule


def berlin(cron: str, missed: str = "one") -> Schedule:
    return Schedule("job", cron=cron, zone="Europe/Berlin", missed=missed)  # type: ignore[arg-type]


def utc(*when: int) -> datetime:
    return datetime(*when, tzinfo=UTC)  # type: ignore[misc, arg-type]


def next_times(schedule: Schedule, start: datetime, count: int) -> list[str]:
    found: list[str] = []
    for _ in range(count):
        start = schedule.after(start)
        found.append(start.strftime("%m-%d %H:%M"))
    return found


def test_the_skipped_hour_runs_the_job_once_when_the_hour_is_over() -> None:
    # On 29 March 2026 the clock in Berlin goes from 02:00 to 03:00, which is 01:00 UTC.
    times = next_times(berlin("30 2 * * *"), utc(2026, 3, 27, 12), 4)
    assert times == ["03-28 01:30", "03-29 01:00", "03-30 00:30", "03-31 00:30"]


def test_the_doubled_hour_runs_the_job_once_in_the_first_of_the_two() -> None:
    # On 25 October 2026 the clock goes from 03:00 back to 02:00: 02:30 is at 00:30 and 01:30 UTC.
    times = next_times(berlin("30 2 * * *"), utc(2026, 10, 23, 12), 4)
    assert times == ["10-24 00:30", "10-25 00:30", "10-26 01:30", "10-27 01:30"]


@pytest.mark.parametrize("minute", [0, 10, 29, 31, 59])
def test_a_process_that_starts_in_the_doubled_hour_does_not_run_the_job_again(minute: int) -> None:
    # In the second of the two hours, in which 02:30 comes once more.
    assert berlin("30 2 * * *").after(utc(2026, 10, 25, 1, minute)) == utc(2026, 10, 26, 1, 30)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Australia/Lord_Howe", "America/Sao_Paulo"])
@pytest.mark.parametrize("cron", ["30 2 * * *", "*/30 * * * *", "0 0 * * *", "*/7 1-3 * * *"])
def test_from_any_moment_the_next_time_is_that_of_one_who_began_long_before(
    zone: str, cron: str
) -> None:
    """A process may start at any moment, also amid a change of the clock."""
    schedule = Schedule("job", cron=cron, zone=zone)
    year = range(int(utc(2016, 1, 1).timestamp()), int(utc(2017, 1, 1).timestamp()), 3_600)
    offsets = {hour: datetime.fromtimestamp(hour, ZoneInfo(zone)).utcoffset() for hour in year}
    changes = [later for earlier, later in pairwise(year) if offsets[earlier] != offsets[later]]
    assert len(changes) == 2
    for change in changes:
        begun, end = change - 2 * 86_400, change + 2 * 86_400
        times = list(takewhile(lambda time, end=end: time < end, schedule._times(begun)))
        assert all(earlier < later for earlier, later in pairwise(times))
        for moment in range(change - 3 * 3_600, change + 3 * 3_600, 613):
            assert schedule.following(moment) == times[bisect_right(times, moment)]


def test_a_job_of_every_quarter_keeps_its_distance_through_both_changes() -> None:
    for start in (utc(2026, 3, 29, 0, 1), utc(2026, 10, 25, 0, 1)):
        schedule = berlin("*/15 * * * *")
        times = [start]
        for _ in range(12):
            times.append(schedule.after(times[-1]))
        steps = {later - earlier for earlier, later in pairwise(times[1:])}
        assert steps == {timedelta(minutes=15)}


def test_six_in_the_morning_is_another_hour_of_utc_in_summer() -> None:
    monday = berlin("0 6 * * MON")
    assert monday.after(utc(2026, 7, 1)) == utc(2026, 7, 6, 4)
    assert monday.after(utc(2026, 12, 1)) == utc(2026, 12, 7, 5)


def test_intervals_are_counted_from_1970_so_that_all_processes_agree() -> None:
    schedule = Schedule("job", seconds=300)
    assert schedule.after(utc(2026, 1, 1, 12, 1)) == utc(2026, 1, 1, 12, 5)
    assert schedule.after(utc(2026, 1, 1, 12, 5)) == utc(2026, 1, 1, 12, 10)


@pytest.mark.parametrize("schedule", [{"cron": "*/5 * * * *"}, {"seconds": 300}])
def test_missed_ticks_follow_the_policy(schedule: dict[str, object]) -> None:
    since = utc(2026, 1, 1, 12).timestamp()
    for late, expected in {
        30: {"skip": [0], "one": [0], "all": [0]},
        100: {"skip": [], "one": [0], "all": [0]},
        3_700: {"skip": [], "one": [3_600], "all": list(range(0, 3_601, 300))},
        3_610: {"skip": [3_600], "one": [3_600], "all": list(range(0, 3_601, 300))},
    }.items():
        for missed, offsets in expected.items():
            job = Schedule("job", missed=missed, **schedule)  # type: ignore[arg-type]
            times, following = job.due(since, since + late)
            assert [time - since for time in times] == offsets, (late, missed)
            assert following == since + (late // 300 + 1) * 300


def test_years_of_missed_minutes_are_one_tick_at_once_or_all_in_portions() -> None:
    now = utc(2026, 1, 1, 12, 0, 30).timestamp()
    long_ago = utc(1996, 1, 1).timestamp()
    times, _ = Schedule("job", cron="* * * * *").due(long_ago, now)
    assert times == (now - 30,)
    every = Schedule("job", cron="* * * * *", missed="all")
    first, following = every.due(long_ago, now)
    second, _ = every.due(following, now)
    assert [*first, *islice(second, 1)] == [long_ago + 60 * n for n in range(1_001)]


def test_a_rare_time_of_long_ago_is_found() -> None:
    leap = Schedule("job", cron="0 0 29 2 *")
    now = utc(2027, 6, 1).timestamp()
    assert leap.due(utc(2020, 1, 1).timestamp(), now)[0] == (utc(2024, 2, 29).timestamp(),)
    assert leap.due(utc(2025, 1, 1).timestamp(), now)[0] == ()


def test_a_tick_has_an_id_of_schedule_and_time() -> None:
    tick = berlin("0 6 * * *").tick(utc(2026, 1, 1, 5).timestamp(), "shop", "/shop")
    assert (tick.id, tick.type) == ("job@2026-01-01T05:00:00Z", "tick.job")
    assert tick.data.time == utc(2026, 1, 1, 5)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "cron expression or an interval"),
        ({"cron": "0 6 * * *", "seconds": 5}, "cron expression or an interval"),
        ({"cron": "0 6 * *"}, "4 fields"),
        ({"cron": "0 0 6 * * *"}, "6 fields"),
        ({"cron": "99 6 * * *"}, "Bad minute"),
        ({"cron": "0 0 30 2 *"}, "Bad day-of-month"),
        ({"cron": "@daily"}, "1 fields"),
        ({"cron": 5}, "cron=5: write it as"),
        ({"cron": "0 6 * * *", "zone": "Berlin"}, "zone='Berlin' is not known"),
        ({"cron": "0 6 * * *", "zone": "../etc/passwd"}, "is not known"),
        ({"seconds": 0.5}, "whole seconds"),
        ({"seconds": -5}, "whole seconds"),
        ({"seconds": float("nan")}, "whole seconds"),
        ({"seconds": 5, "zone": "Europe/Berlin"}, "has no zone"),
        ({"seconds": 5, "missed": "some"}, "choose one of skip, one, all"),
    ],
)
def test_a_wrong_schedule_is_refused(given: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Schedule("job", **given)  # type: ignore[arg-type]
