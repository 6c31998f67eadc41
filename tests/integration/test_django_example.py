"""The Django example, on real servers: order and event in Django's own transaction, or neither."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text
from tests.waiting import eventually

from conquiet.redis import StreamSink
from conquiet.relay import Relay
from conquiet.sql import OutboxSource, schema
from conquiet.sql import engine as make_engine

PROJECT = Path(__file__).resolve().parents[2] / "examples" / "django_outbox"
# Django's own test client, in a process of its own, since its settings are for the whole process.
CLIENT = """
import json, sys, django
from django.core.management import call_command
from django.test import Client
django.setup()
call_command("migrate", verbosity=0)
for order in json.loads(sys.argv[1]):
    print(Client().post("/orders", order, content_type="application/json").status_code)
"""
EMIT_ALONE = """
import django
django.setup()
from shop.outbox import OrderPlaced, emit
emit(OrderPlaced("alone", 1))
"""


class Project:
    """The project, as its users run it."""

    def __init__(self, database: str, broker: str = "") -> None:
        self.environment = {
            **os.environ,
            "DATABASE_URL": database,
            "REDIS_URL": broker,
            "DJANGO_SETTINGS_MODULE": "shop.settings",
        }
        self.engine: Engine = make_engine(database)

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=PROJECT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout

    def post(self, *orders: dict[str, Any]) -> list[int]:
        """Migrate, place orders; the codes that the service answered."""
        return [int(code) for code in self.run("-c", CLIENT, json.dumps(orders)).split()]

    @contextmanager
    def consumer(self) -> Iterator[None]:
        command = [sys.executable, "manage.py", "consume"]
        process = subprocess.Popen(command, cwd=PROJECT, env=self.environment)
        try:
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()

    def rows(self, statement: str) -> list[Any]:
        with self.engine.connect() as looking:
            return list(looking.execute(text(statement)).scalars())


@pytest.fixture(params=["postgresql", pytest.param("sqlite", marks=pytest.mark.slow)])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    if request.param == "sqlite":
        made = Project(f"sqlite:///{tmp_path}/shop.sqlite")
    else:
        made = Project(request.getfixturevalue("database_url"))
    yield made
    made.engine.dispose()


def test_an_order_and_its_event_are_committed_together_or_not_at_all(project: Project) -> None:
    good, twice, bad = {"id": "a", "amount": 7}, {"id": "a", "amount": 8}, {"id": "b", "amount": -1}
    assert project.post(good, twice, bad) == [201, 409, 422]
    assert schema.verify(project.engine, inbox=None) == []
    assert project.rows("SELECT id FROM shop_order") == ["a"]
    [data] = project.rows("SELECT data FROM outbox")
    assert bytes(data) == b'{"order":"a","amount":7}'


@pytest.mark.slow
def test_an_event_outside_a_transaction_is_refused(project: Project) -> None:
    project.post()
    with pytest.raises(RuntimeError, match=r"emit\(\) needs transaction.atomic"):
        project.run("-c", EMIT_ALONE)
    assert project.rows("SELECT count(*) FROM outbox") == [0]


@pytest.mark.slow
def test_the_migrations_are_those_of_the_models(tmp_path: Path) -> None:
    Project(f"sqlite:///{tmp_path}/shop.sqlite").run(
        "manage.py", "makemigrations", "--check", "--dry-run"
    )


@pytest.mark.slow
def test_an_event_that_is_published_twice_sends_one_parcel(
    database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    project = Project(database_url, redis_url)
    assert project.post({"id": "a", "amount": 7}, {"id": "b", "amount": 1}) == [201, 201]
    for _ in range(2):  # the mark of the first publication is lost, as in a crash
        relay = Relay(OutboxSource(project.engine, wakeup=False), StreamSink(redis_client))
        assert relay.run_once().published == 2
        relay.source.close()
        with project.engine.begin() as transaction:
            transaction.execute(text("UPDATE outbox SET published_at = NULL"))
    assert redis_client.xlen("orders") == 4

    def all_are_acked() -> bool:
        groups = redis_client.xinfo_groups("orders")
        return any(group["entries-read"] == 4 and not group["pending"] for group in groups)

    with project.consumer():
        eventually(all_are_acked)
    assert sorted(project.rows('SELECT "order" FROM shop_parcel')) == ["a", "b"]
    project.engine.dispose()
