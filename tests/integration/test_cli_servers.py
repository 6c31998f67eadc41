"""Commands that talk to servers, on real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from tests import zygote
from tests.waiting import eventually

from conquiet import Message
from conquiet.cli import main
from conquiet.redis import Outbox as RedisOutbox
from conquiet.redis import OutboxSource, StreamSink


def test_outbox_migrate_and_verify_on_postgresql(database_url: str, capsys) -> None:
    assert main(["outbox", "verify", "--database", database_url]) == 1
    assert "outbox: table should be there, is missing" in capsys.readouterr().out
    assert main(["outbox", "migrate", "--database", database_url]) == 0
    assert main(["outbox", "verify", "--database", database_url]) == 0


@pytest.mark.parametrize("fixture", ["database_url", "sqlite_url"])
def test_a_url_of_an_async_driver_opens_the_same_database(
    request: pytest.FixtureRequest, fixture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_url(request.getfixturevalue(fixture))
    driver = {"sqlite": "sqlite+aiosqlite"}.get(url.drivername, "postgresql+asyncpg")
    plain = url.render_as_string(hide_password=False)
    is_async = url.set(drivername=driver).render_as_string(hide_password=False)
    monkeypatch.setenv("CONQUIET_DATABASE_URL", is_async)
    assert main(["outbox", "migrate"]) == 0
    assert main(["outbox", "status"]) == 0
    assert main(["outbox", "verify", "--database", plain]) == 0


def test_the_printed_schema_fits_postgresql(database_url: str, capsys) -> None:
    import psycopg

    assert main(["outbox", "schema", "--dialect", "postgresql"]) == 0
    with psycopg.connect(database_url) as connection:
        connection.execute(capsys.readouterr().out.encode())
    assert main(["outbox", "verify", "--database", database_url]) == 0


def test_doctor_reaches_the_servers_that_are_named(
    database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--json", "--broker", redis_url, "--database", database_url]
    assert main(arguments) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "postgresql" in checks["database"]["detail"]
    assert "version" in checks["redis server"]["detail"]
    for clock in ("redis clock", "database clock"):
        assert checks[clock]["status"] == "ok"
    assert checks["dead letters"]["detail"] == "no stream holds any"


def test_doctor_notices_dead_letters_and_memory_that_forgets(
    redis_url: str, redis_client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    letter = {"id": "e-1", "type": "sold", "source": "/", "deadreason": "no"}
    StreamSink(redis_client, "failed").publish([Message(b"", letter)])
    before = redis_client.config_get("maxmemory*")
    redis_client.config_set("maxmemory", "1gb")
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        assert main(["doctor", "--broker", redis_url]) == 0
    finally:
        for name in ("maxmemory", "maxmemory-policy"):
            redis_client.config_set(name, before[name])
    out = capsys.readouterr().out
    assert "1 in failed" in out
    assert "→ conquiet dead-letters list failed shows the reasons" in out
    assert "allkeys-lru deletes streams" in out


APP = """
import msgspec
from conquiet import Router

class Greet(msgspec.Struct):
    name: str

class Greeted(msgspec.Struct):
    name: str

router = Router()

@router.command(source="/hall")
def greet(order: Greet) -> Greeted:
    if order.name == "nobody":
        raise ValueError("nobody is here")
    return Greeted(order.name)
"""


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_a_router_works_from_stream_to_stream(
    redis_url: str, redis_client: Any, tmp_path: Path, processes: list[str]
) -> None:
    (tmp_path / "app.py").write_text(APP)
    names = [*(f"n-{number}" for number in range(50)), "nobody"]
    StreamSink(redis_client, "commands").publish(
        [
            Message(b'{"name": "%s"}' % name.encode(), {"id": name, "type": "greet", "source": "/"})
            for name in names
        ]
    )
    source = f"{redis_url}?stream=commands&group=hall&dead_letters=failed"
    command = [
        sys.executable,
        "-m",
        "conquiet",
        "worker",
        "run",
        "app:router",
        "--max-attempts",
        "2",
    ]
    process = zygote.Popen(
        [*command, "--source", source, "--sink", "redis:?stream=events", *processes],
        cwd=tmp_path,
        env={**os.environ, "CONQUIET_BROKER_URL": redis_url},
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(
            lambda: redis_client.xlen("events") == 50 and redis_client.xlen("failed") == 1,
            timeout=60,
        )
        eventually(lambda: redis_client.xpending("commands", "hall")["pending"] == 0, timeout=30)
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def test_delayed_events_of_an_outbox_in_redis_are_listed_and_cancelled(
    redis_url: str, redis_client, capsys
) -> None:
    at = ["--broker", redis_url]
    for stream, id_, seconds in (("one", "e-1", 7200), ("outbox:{two}", "e-2", 3600)):
        event = Message(b"{}", {"id": id_, "type": "remind", "source": "/s"})
        with redis_client.pipeline() as pipe:
            RedisOutbox("orders", stream).add(pipe, [event], after=seconds)
            pipe.execute()
    assert main(["outbox", "list", "--delayed", *at, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [item["event_id"] for item in listed] == ["e-2", "e-1"]
    assert 3500 < listed[0]["seconds_left"] <= 3600
    assert main(["outbox", "list", "--delayed", *at, "--limit", "1", "--type", "rem*"]) == 0
    assert "e-1" not in capsys.readouterr().out
    assert main(["outbox", "cancel", "e-1", "e-2", "e-3", "--yes", *at]) == 1
    said = capsys.readouterr()
    assert said.out == "e-1 is cancelled\ne-2 is cancelled\n"
    assert "e-3: no event of this id waits" in said.err
    assert main(["outbox", "list", "--delayed", *at]) == 0
    assert capsys.readouterr().out == "nothing is delayed\n"
    assert redis_client.keys("conquiet:delayed:*") == []
    with redis_client.pipeline() as pipe:
        last = Message(b"{}", {"id": "e-5", "type": "remind", "source": "/s"})
        RedisOutbox("orders", "one").add(pipe, [last], at=datetime.max.replace(tzinfo=UTC))
        pipe.execute()
    assert main(["outbox", "list", "--delayed", *at]) == 0
    assert "e-5  9999-12-31T23:59:59.999Z" in capsys.readouterr().out
    with redis_client.pipeline() as pipe:
        due = Message(b"{}", {"id": "e-4", "type": "remind", "source": "/s"})
        RedisOutbox("orders", "one").add(pipe, [due], after=0.001)
        pipe.execute()
    with closing(OutboxSource(redis_client, "one")) as source:
        [message] = source.read(10, 5.0)
        message.ack()
    assert main(["outbox", "cancel", "e-4", "e-3", "--yes", *at]) == 1
    said = capsys.readouterr().err
    assert "e-4: too late, it was due and moved to the outbox at 20" in said
    assert "e-3: no event of this id waits, nor is it among the last 10,000" in said
    assert main(["outbox", "cancel", "e-4", "e-3", "--yes", "--json", *at]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"cancelled": [], "too_late": {"e-4": "due", "e-3": "unknown"}}
    assert main(["outbox", "list", *at]) == 2
    assert "--delayed" in capsys.readouterr().err
    assert main(["outbox", "list", "--delayed", *at, "--table", "outbox"]) == 2
