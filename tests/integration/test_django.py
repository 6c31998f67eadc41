"""`conquiet.django` and its example, on real servers: effects, inbox and outbox in one transaction.

`django_checks.py` has the checks that run inside a process of the example, all in one.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from tests.waiting import eventually

from conquiet.config import MissingExtra
from conquiet.sql import engine as make_engine

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples" / "django_shop"
CHECKS = Path(__file__).with_name("django_checks.py")
NAMES = re.findall(r"^def (\w+)", CHECKS.read_text().split("# --- ")[1], re.MULTILINE)
PLACED = 300
EMIT = f"""
import django
django.setup()
from django.db import transaction
from shop.messages import OrderPlaced, app
with transaction.atomic():
    app.emit(*(OrderPlaced(f"o-{{number}}", number) for number in range({PLACED})))
"""


class Project:
    """The project, as its users run it."""

    def __init__(self, database: str) -> None:
        self.environment = {
            **os.environ,
            "DATABASE_URL": database,
            "BROKER_URL": "",
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "PYTHONPATH": f"{PROJECT}:{ROOT}:{ROOT}/src",
        }
        self.engine: Engine = make_engine(database)

    def run(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=PROJECT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if not code else done.stderr

    @contextmanager
    def running(self, *options: str, end: signal.Signals = signal.SIGTERM) -> Iterator[None]:
        command = [sys.executable, "manage.py", "conquiet", "run", *options]
        process = subprocess.Popen(command, cwd=PROJECT, env=self.environment)
        try:
            yield
            assert process.poll() is None
            process.send_signal(end)
            assert process.wait(60) == (0 if end == signal.SIGTERM else -end)
        finally:
            process.kill()
            process.wait()

    def rows(self, statement: str) -> list[Any]:
        with self.engine.connect() as looking:
            return list(looking.execute(text(statement)).scalars())


@pytest.fixture
def project(database_url: str) -> Iterator[Project]:
    made = Project(database_url)
    yield made
    made.engine.dispose()


def check(project: Project) -> None:
    outcome = json.loads(project.run(str(CHECKS), *NAMES))
    project.engine.dispose()
    assert not any(outcome.values()), "".join(outcome.values())
    assert outcome == dict.fromkeys(NAMES, "")


def test_on_postgresql(project: Project) -> None:
    check(project)


def test_without_django_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "django", None)
    with pytest.raises(MissingExtra, match=r"pip install 'conquiet\[django\]'"):
        importlib.import_module("conquiet.django")


@pytest.mark.slow
def test_on_sqlite(tmp_path: Path) -> None:
    check(Project(f"sqlite:///{tmp_path}/shop.sqlite"))


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_sends_each_parcel_once(project: Project) -> None:
    project.run("manage.py", "migrate", "-v0")
    project.run("-c", EMIT)
    with project.running("--batch-size", "1", end=signal.SIGKILL):
        eventually(lambda: project.rows("SELECT 1 FROM shop_parcel"), timeout=60)
    assert project.rows("SELECT count(*) FROM shop_parcel") < [PLACED]
    with project.running():
        different = 'SELECT count(DISTINCT "order") FROM shop_parcel'
        eventually(lambda: project.rows(different) == [PLACED], timeout=60)
    assert project.rows("SELECT count(*) FROM shop_parcel") == [PLACED]
    sent = "SELECT count(*) FROM outbox WHERE event_type = 'parcel.sent'"
    assert project.rows(sent) == [PLACED]


@pytest.mark.slow
def test_with_a_broker_the_relay_runs_too(project: Project, redis_url: str) -> None:
    project.environment["BROKER_URL"] = redis_url
    project.run("manage.py", "migrate", "-v0")
    project.run("-c", EMIT)
    with project.running():
        count = "SELECT count(*) FROM shop_parcel"
        eventually(lambda: project.rows(count) == [PLACED], timeout=60)
        waiting = "SELECT 1 FROM outbox WHERE published_at IS NULL"
        eventually(lambda: not project.rows(waiting), timeout=60)


@pytest.mark.slow
def test_without_its_tables_the_command_names_the_migration(project: Project) -> None:
    error = project.run("manage.py", "conquiet", "run", code=2)
    assert "run manage.py migrate" in error
