"""Schedules of an app over SQLite, PostgreSQL and Redis: one tick however many processes run."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from conquiet import App, Tick
from conquiet.app.app import Running
from conquiet.errors import ConfigError, NotFound, StoreError
from conquiet.schedule import Schedule, Schedules, State
from conquiet.testing import eventually


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def database(request: pytest.FixtureRequest) -> str:
    names = {"sqlite": "sqlite_url", "postgresql": "database_url", "redis": "redis_url"}
    url: str = request.getfixturevalue(names[request.param])
    return url


@pytest.fixture
def app(database: str) -> Iterator[App]:
    app = App("shop", database)
    if app.engine is not None:
        app.create_tables()
    yield app
    app.close()


def written(app: App) -> list[str]:
    """Return the ids of the ticks in the outbox."""
    if app.engine is None:
        client: Any = app.store.client  # type: ignore[attr-defined]
        return [fields[b"id"].decode() for _, fields in client.xrange("conquiet:outbox:shop")]
    with app.engine.connect() as connection:
        return list(connection.scalars(text("SELECT event_id FROM outbox ORDER BY id")))


def schedules_of(app: App, *schedules: Schedule) -> Schedules:
    known = {schedule.name: schedule for schedule in schedules}
    return Schedules(known, app.store.schedules(), "shop", "/shop", app.store.publish)


def let_pass(app: App, name: str, seconds: float) -> float:
    """Move the next time of a schedule into the past; return the time of the store."""
    states = app.store.schedules()
    now, found = states.read()
    [state] = [state for state in found if state.name == name]
    assert states.replace(state, state._replace(next_at=now - seconds))
    return now


def state_of(app: App, name: str = "job") -> State | None:
    _, states = app.store.schedules().read()
    return next((state for state in states if state.name == name), None)


def test_of_many_processes_one_writes_a_tick(app: App) -> None:
    schedules = schedules_of(app, Schedule("job", seconds=3_600))
    schedules.register()
    assert written(app) == []  # the first time is the next one
    let_pass(app, "job", 3_600)
    start = threading.Barrier(8)

    def beat() -> None:
        start.wait()
        schedules.beat()

    with ThreadPoolExecutor(8) as threads:
        for one in [threads.submit(beat) for _ in range(8)]:
            one.result()
    state = state_of(app)
    assert state is not None
    assert state.last_at is not None
    assert written(app) == [f"job@{datetime.fromtimestamp(state.last_at, UTC):%Y-%m-%dT%H:%M:%SZ}"]
    assert state.next_at > app.store.schedules().read()[0]


def test_missed_ticks_are_all_written_if_asked_for(app: App) -> None:
    schedules = schedules_of(app, Schedule("job", seconds=1, missed="all"))
    schedules.register()
    let_pass(app, "job", 1_500.5)
    while schedules.beat() == 0.0:  # 1,000 in one transaction
        pass
    assert len(written(app)) == len(set(written(app))) >= 1_500


def test_a_stale_state_cannot_write(app: App) -> None:
    states = app.store.schedules()
    job = Schedule("job", seconds=60)
    tick = job.tick(60.0, "shop", "/shop")
    first = State("job", job.definition, 120.0)
    assert states.replace(None, first)
    assert not states.replace(None, first)
    assert states.replace(first, first._replace(next_at=180.5), [tick])
    assert not states.replace(first, first._replace(next_at=240.0), [tick])
    assert not states.replace(first, None)
    assert written(app) == ["job@1970-01-01T00:01:00Z"]
    assert state_of(app) == first._replace(next_at=180.5)


def test_a_schedule_changed_in_code_takes_effect_at_the_start(app: App) -> None:
    schedules_of(app, Schedule("job", seconds=60)).register()
    changed = schedules_of(app, Schedule("job", cron="0 6 * * MON", zone="Europe/Berlin"))
    changed.register()
    state = state_of(app)
    assert state is not None
    assert state.definition == "0 6 * * MON Europe/Berlin"
    # A process of the former release leaves it alone, until the other one has been away for long.
    former = schedules_of(app, Schedule("job", seconds=60))
    let_pass(app, "job", 10)
    former.beat()
    assert state_of(app).definition == "0 6 * * MON Europe/Berlin"  # type: ignore[union-attr]
    let_pass(app, "job", 100)
    former.beat()
    assert state_of(app).definition == "every 1 min"  # type: ignore[union-attr]
    assert written(app) == []


def test_a_clock_of_the_store_that_was_ahead_does_not_silence_a_schedule(app: App) -> None:
    job = Schedule("job", seconds=60, missed="skip")
    schedules = schedules_of(app, job)
    schedules.register()
    now = let_pass(app, "job", -365 * 86_400)
    schedules.beat()
    state = state_of(app)
    assert state is not None
    assert now < state.next_at < now + 180
    assert written(app) == []
    # If it was ahead by seconds, the tick of these was written; it is not written again.
    ahead = state._replace(next_at=job.following(now + 60))
    assert app.store.schedules().replace(state, ahead)
    schedules.beat()
    assert state_of(app) == ahead


def test_a_paused_schedule_writes_nothing_and_makes_nothing_up(app: App) -> None:
    schedules = schedules_of(app, Schedule("job", seconds=1, missed="all"))
    assert schedules.set_paused("job", True)
    assert not schedules.set_paused("job", True)
    let_pass(app, "job", 5)
    schedules.beat()
    assert written(app) == []
    let_pass(app, "job", 100)  # no process ran
    assert schedules.set_paused("job", False)
    schedules.beat()
    assert len(written(app)) <= 1
    [entry] = schedules.list()
    assert entry.state is not None
    assert not entry.state.is_paused


def test_a_removed_schedule_is_listed_as_stale_until_it_is_forgotten(app: App) -> None:
    schedules_of(app, Schedule("old", seconds=1), Schedule("job", seconds=60)).register()
    let_pass(app, "old", 500)
    schedules = schedules_of(app, Schedule("job", seconds=60))
    schedules.beat()
    assert written(app) == []
    assert [(entry.name, entry.schedule is None) for entry in schedules.list()] == [
        ("job", False),
        ("old", True),
    ]
    with pytest.raises(NotFound, match="it has: job"):
        schedules.run("old")
    with pytest.raises(ConfigError, match="is in the code"):
        schedules.forget("job")
    schedules.forget("old")
    assert [entry.name for entry in schedules.list()] == ["job"]


def test_a_tick_whose_transaction_fails_is_written_later(app: App) -> None:
    """The move of the next time and the tick are one transaction: a crash between loses none."""
    schedules = schedules_of(app, Schedule("job", seconds=3_600))
    schedules.register()
    let_pass(app, "job", 3_600)
    with outbox_away(app), pytest.raises(StoreError):
        schedules.beat()
    assert written(app) == []
    schedules.beat()
    assert len(written(app)) == 1


@contextmanager
def outbox_away(app: App) -> Iterator[None]:
    """Let every write to the outbox fail."""
    if app.engine is None:
        client: Any = app.store.client  # type: ignore[attr-defined]
        client.set("conquiet:outbox:shop", "no stream")
        yield
        client.delete("conquiet:outbox:shop")
        return
    for names in ("outbox RENAME TO away", "away RENAME TO outbox"):
        with app.engine.begin() as connection:
            connection.execute(text(f"ALTER TABLE {names}"))
        if names.startswith("outbox"):
            yield


def test_two_running_apps_handle_each_tick_once(database: str) -> None:
    seen: list[datetime] = []
    apps = []
    for _ in range(2):
        app = App("shop", database)

        @app.every(seconds=1)
        def job(tick: Tick) -> None:
            seen.append(tick.time)

        apps.append(app)
    if apps[0].engine is not None:
        apps[0].create_tables()
    running = [app.open() for app in apps]
    try:
        for one in running:
            one.start()
        eventually(lambda: len(seen) >= 3, timeout=60)
    finally:
        finished = [one.stop() for one in running]
        for app in apps:
            app.close()
    assert all(finished)
    assert len(seen) == len(set(seen))


def test_a_tick_of_another_release_is_left_to_it(database: str) -> None:
    """While two releases run, one without a new schedule may read its tick."""
    former, current = App("shop", database), App("shop", database)

    @former.every(hours=1)
    def old() -> None: ...

    seen: list[datetime] = []

    @current.every(hours=1)
    def new(tick: Tick) -> None:
        seen.append(tick.time)

    if current.engine is not None:
        current.create_tables()
    current.schedules.run("new")
    try:
        with started(former) as running:
            eventually(lambda: running.workers[0].health().failed > 0, timeout=60)
        with started(current):
            eventually(lambda: len(seen) == 1, timeout=60)
    finally:
        former.close()
        current.close()


@contextmanager
def started(app: App) -> Iterator[Running]:
    running = app.open()
    running.start()
    try:
        yield running
    finally:
        assert running.stop()


SHOP = """
from sqlalchemy import text
from sqlalchemy.orm import Session
from conquiet import App, Tick

app = App("shop", "sqlite:///shop.db")

@app.every(seconds=1, missed="all")
def job(tick: Tick, session: Session) -> None:
    session.execute(text("INSERT INTO done VALUES (:time)"), {"time": int(tick.time.timestamp())})
"""


@pytest.mark.slow
def test_kills_lose_no_tick_and_double_none(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE done (time INTEGER)")
        connection.commit()

    def times() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "shop.db", timeout=30)) as connection:
            return [row[0] for row in connection.execute("SELECT time FROM done ORDER BY time")]

    @contextmanager
    def at_work() -> Iterator[None]:
        children = [
            subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        try:
            yield
        finally:
            for child in children:
                child.kill()
                child.wait()

    command = [sys.executable, "-m", "conquiet", "run", "shop:app", "--create-tables"]
    environment = {**os.environ, "PYTHONPATH": ""}
    for _ in range(3):
        goal = len(times()) + 3
        with at_work():
            eventually(lambda goal=goal: len(times()) >= goal, timeout=120)
    before = times()
    with at_work():  # what was in flight comes when the leases end
        eventually(lambda: set(range(before[0], before[-1] + 3)) <= set(times()), timeout=120)
    assert len(times()) == len(set(times()))


# --- registration and tests -----------------------------------------------------------------


def report_app(tmp_path: Path) -> App:
    app = App("shop", f"sqlite:///{tmp_path}/shop.db")

    @app.every("0 6 * * MON", zone="Europe/Berlin")
    def report(tick: Tick, session: Session) -> None:
        session.execute(text("CREATE TABLE IF NOT EXISTS reports (week TEXT)"))
        session.execute(text("INSERT INTO reports VALUES (:week)"), {"week": str(tick.time.date())})

    @app.every(minutes=5)
    async def look() -> None:
        pass

    return app


def test_a_test_client_can_tick(tmp_path: Path) -> None:
    app = report_app(tmp_path)
    monday = datetime(2026, 1, 5, 5, tzinfo=UTC)
    with app.test() as shop:
        shop.tick("report", monday)
        shop.tick("report", monday)
        shop.tick("look")
        assert shop.redeliver() == 0
        assert shop.rows("SELECT week FROM reports") == [("2026-01-05",)]
        assert shop.outbox == []


def test_what_cannot_be_a_schedule_is_refused(tmp_path: Path) -> None:
    app = report_app(tmp_path)
    with pytest.raises(ConfigError, match="schedule report exists"):

        @app.every(minutes=1)
        def report() -> None: ...

    with pytest.raises(ConfigError, match="needs a schedule"):

        @app.every  # type: ignore[arg-type]
        def other() -> None: ...

    with pytest.raises(ConfigError, match=r"@app\.every\(minutes='5'\): give a number"):

        @app.every(minutes="5")  # type: ignore[arg-type]
        def often() -> None: ...

    with pytest.raises(ConfigError, match="no provider for the parameter what"):

        @app.every(minutes=1)
        def wanting(what: int) -> None: ...


def test_the_description_has_no_ticks_but_what_their_handlers_send(tmp_path: Path) -> None:
    from dataclasses import dataclass

    @dataclass
    class ReportDue:
        week: int

    app = App("shop", f"sqlite:///{tmp_path}/shop.db")

    @app.every(days=7)
    def ask() -> ReportDue:
        return ReportDue(1)

    document = app.describe()
    assert list(document["operations"]) == ["send.report.due"]
