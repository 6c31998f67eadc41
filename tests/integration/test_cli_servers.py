"""Commands that talk to servers, on real ones."""

from __future__ import annotations

import json

import pytest

from conquiet.cli import main


def test_outbox_migrate_and_verify_on_postgresql(database_url: str, capsys) -> None:
    assert main(["outbox", "verify", "--url", database_url]) == 1
    assert "outbox: table should be there, is missing" in capsys.readouterr().out
    assert main(["outbox", "migrate", "--url", database_url]) == 0
    assert main(["outbox", "verify", "--url", database_url]) == 0


def test_the_printed_schema_fits_postgresql(database_url: str, capsys) -> None:
    import psycopg

    assert main(["outbox", "schema", "--dialect", "postgresql"]) == 0
    with psycopg.connect(database_url) as connection:
        connection.execute(capsys.readouterr().out.encode())
    assert main(["outbox", "verify", "--url", database_url]) == 0


def test_doctor_reaches_the_servers_that_are_named(
    database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--json", "--redis-url", redis_url, "--database-url", database_url]
    assert main(arguments) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "postgresql" in checks["database"]["detail"]
    assert "version" in checks["redis server"]["detail"]
