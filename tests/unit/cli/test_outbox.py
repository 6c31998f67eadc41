"""`conquiet outbox`: schema, verify, migrate."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import inspect

from conquiet.cli import main
from conquiet.sql import engine as make_engine


@pytest.fixture(autouse=True)
def no_database_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONQUIET_DATABASE_URL", raising=False)


def execute(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.executescript(statement)
    connection.close()


def test_the_schema_creates_tables_that_verify(tmp_path, capsys) -> None:
    assert main(["outbox", "schema", "--dialect", "sqlite"]) == 0
    execute(tmp_path / "shop.db", capsys.readouterr().out)
    url = f"sqlite:///{tmp_path}/shop.db"
    assert main(["outbox", "verify", "--database", url]) == 0
    assert "as conquiet needs them" in capsys.readouterr().out


def test_the_schema_of_postgresql_has_its_own_types(capsys) -> None:
    assert main(["outbox", "schema", "--dialect", "postgresql"]) == 0
    text = capsys.readouterr().out
    assert "xid8" in text
    assert "JSONB" in text


def test_tables_can_be_named_and_the_inbox_left_out(capsys) -> None:
    arguments = ["outbox", "schema", "--dialect", "sqlite", "--table", "sales_outbox"]
    assert main([*arguments, "--inbox-table", "sales_inbox"]) == 0
    text = capsys.readouterr().out
    assert "EXISTS sales_outbox" in text
    assert "EXISTS sales_inbox" in text
    assert main([*arguments, "--no-inbox", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dialect"] == "sqlite"
    assert "subscriber" not in found["ddl"]


def test_a_name_that_would_have_to_be_quoted_is_refused(capsys) -> None:
    assert main(["outbox", "schema", "--dialect", "sqlite", "--table", 'x"; DROP']) == 2
    assert "table name" in capsys.readouterr().err


def test_migrate_makes_tables_that_verify_and_can_be_run_again(sqlite_url, capsys) -> None:
    assert main(["outbox", "migrate", "--database", sqlite_url]) == 0
    tables = (
        "outbox",
        "outbox_delayed",
        "outbox_history",
        "outbox_positions",
        "outbox_retries",
        "outbox_schedules",
        "processed_messages",
    )
    assert capsys.readouterr().out == "".join(f"created {name}\n" for name in tables)
    assert main(["outbox", "migrate", "--database", sqlite_url]) == 0
    assert capsys.readouterr().out == "the tables were up to date already\n"
    assert main(["outbox", "verify", "--database", sqlite_url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"ok": True, "differences": []}


def test_migrate_makes_a_second_pair_of_tables(sqlite_url) -> None:
    assert main(["outbox", "migrate", "--database", sqlite_url]) == 0
    second = ["--database", sqlite_url, "--table", "letters", "--inbox-table", "seen"]
    assert main(["outbox", "verify", *second]) == 1
    assert main(["outbox", "migrate", *second]) == 0
    assert main(["outbox", "verify", *second]) == 0


def test_migrate_fails_if_the_tables_still_differ(sqlite_url, capsys) -> None:
    assert main(["outbox", "migrate", "--database", sqlite_url]) == 0
    execute(Path(sqlite_url.removeprefix("sqlite:///")), "DROP INDEX outbox_claimable")
    assert main(["outbox", "migrate", "--database", sqlite_url]) == 1
    assert "index outbox_claimable should be" in capsys.readouterr().out


def test_the_database_may_be_named_by_the_environment(sqlite_url, monkeypatch) -> None:
    monkeypatch.setenv("CONQUIET_DATABASE_URL", sqlite_url)
    assert main(["outbox", "migrate"]) == 0
    assert main(["outbox", "verify"]) == 0


def test_verify_tells_what_differs_and_fails(tmp_path, sqlite_url, capsys) -> None:
    main(["outbox", "migrate", "--database", sqlite_url])
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    execute(path, "DROP INDEX outbox_claimable", "DROP TABLE processed_messages")
    capsys.readouterr()
    assert main(["outbox", "verify", "--database", sqlite_url]) == 1
    captured = capsys.readouterr()
    assert "processed_messages: table should be there, is missing" in captured.out
    assert "outbox: index outbox_claimable should be" in captured.out
    assert "conquiet outbox migrate" in captured.err
    assert main(["outbox", "verify", "--database", sqlite_url, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [item["what"] for item in found["differences"]] == ["index outbox_claimable", "table"]


def test_an_error_names_the_variable_or_the_flag_that_was_used(monkeypatch, capsys) -> None:
    monkeypatch.setenv("CONQUIET_DATABASE_URL", "sqlite:////nonexistent/x.db")
    assert main(["outbox", "verify"]) == 2
    assert "CONQUIET_DATABASE_URL: no file" in capsys.readouterr().err
    assert main(["outbox", "verify", "--database", "sqlite:////nonexistent/y.db"]) == 2
    assert "--database: no file" in capsys.readouterr().err
    for verb in (["relay", "run", "--health", "off"], ["outbox", "status"]):
        assert main(verb) == 2
        assert "CONQUIET_DATABASE_URL: no file" in capsys.readouterr().err
        assert main([*verb, "--database", "sqlite:////nonexistent/y.db"]) == 2
        assert "--database: no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "--database: 'nonsense' is not postgresql://"),
        ("mysql://h/d", "--database: 'mysql://h/d' is not postgresql://"),
        ("sqlite:////nonexistent/x.db", "conquiet outbox migrate would create it"),
        (None, "use --database, or set CONQUIET_DATABASE_URL"),
    ],
)
def test_a_url_that_cannot_work_is_refused_in_one_line(url, says, capsys) -> None:
    assert main(["outbox", "verify", *(["--database", url] if url else [])]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_database_out_of_reach_is_one_line_without_the_password(capsys) -> None:
    assert main(["outbox", "migrate", "--database", "postgresql://u:top-secret@127.0.0.1:1/d"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "127.0.0.1" in line
    assert "top-secret" not in line


# --- outbox_events ----------------------------------------------------------------------------

MARKETPLACE = "marketplace.catalog:CATALOG"


def test_outbox_events_is_made_with_the_enums_of_a_catalog(tmp_path, capsys):
    url = f"sqlite:///{tmp_path / 'shop.sqlite'}"
    named = ["--database", url, "--table", "outbox_events", "--catalog", MARKETPLACE]
    assert main(["outbox", "migrate", *named]) == 0
    assert main(["outbox", "verify", *named]) == 0
    made = make_engine(url)
    with made.connect() as connection:
        assert inspect(connection).get_table_names() == [
            "conquiet_events_alembic_version",
            "outbox_events",
        ]
    made.dispose()
    capsys.readouterr()
    assert main(["outbox", "schema", "--dialect", "postgresql", *named[2:]]) == 0
    printed = capsys.readouterr().out
    assert "'ad_daily_rollup_ready'" in printed
    assert "CREATE TRIGGER" in printed
    assert main(["outbox", "schema", "--dialect", "sqlite", *named[2:], "--no-trigger"]) == 0
    assert "CREATE TRIGGER" not in capsys.readouterr().out


def test_table_and_catalog_may_come_from_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONQUIET_DATABASE_URL", f"sqlite:///{tmp_path / 'shop.sqlite'}")
    monkeypatch.setenv("CONQUIET_OUTBOX_TABLE", "outbox_events")
    assert main(["outbox", "migrate"]) == 2
    told = capsys.readouterr().err
    assert "--catalog" in told
    assert "shop.events:CATALOG" in told
    monkeypatch.setenv("CONQUIET_OUTBOX_CATALOG", MARKETPLACE)
    assert main(["outbox", "migrate"]) == 0
    monkeypatch.setenv("CONQUIET_OUTBOX_CATALOG", "marketplace.catalog:EventType")
    assert main(["outbox", "migrate"]) == 2
    assert "not a conquiet.events.Catalog" in capsys.readouterr().err


def test_the_file_of_the_relay_is_read_too(tmp_path, monkeypatch, capsys):
    config = tmp_path / "relay.toml"
    database = f"sqlite:///{tmp_path / 'shop.sqlite'}"
    config.write_text(f'[relay]\ndatabase = "{database}"\ntable = "sales_outbox"\n')
    monkeypatch.delenv("CONQUIET_DATABASE_URL", raising=False)
    monkeypatch.setenv("CONQUIET_CONFIG", str(config))
    assert main(["outbox", "migrate"]) == 0
    assert main(["outbox", "status", "--json"]) == 0
    assert '"sales_outbox"' in capsys.readouterr().out


def test_a_catalog_is_for_outbox_events_alone(tmp_path, capsys):
    url = f"sqlite:///{tmp_path / 'shop.sqlite'}"
    assert main(["outbox", "migrate", "--database", url, "--catalog", MARKETPLACE]) == 2
    assert "--table outbox_events" in capsys.readouterr().err
    assert not (tmp_path / "shop.sqlite").exists()
