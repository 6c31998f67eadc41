"""`conquiet outbox status|list|show|retry|prune`, on SQLite."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert

from conquiet import Message
from conquiet.cli import main
from conquiet.relay.inspection import Inspection, Search
from conquiet.sql import Outbox, schema
from conquiet.sql import engine as make_engine
from conquiet.sql.schema import outbox_table

OUTBOX = outbox_table()
LONG_AGO = datetime.now(UTC) - timedelta(days=30)


def row(number: int, **columns):
    return {
        "topic": "orders",
        "event_type": "order.placed",
        "event_id": f"e-{number}",
        "key": f"o-{number}",
        "content_type": "application/json",
        "data": b'{"n": 1}',
        "attributes": {"id": f"e-{number}"},
        **columns,
    }


@pytest.fixture
def url(sqlite_url, monkeypatch) -> str:
    monkeypatch.setenv("CONQUIET_DATABASE_URL", sqlite_url)
    schema.init(sqlite_url)
    engine = make_engine(sqlite_url)
    with engine.begin() as connection:
        for values in (
            row(1),
            row(2, created_at=LONG_AGO),
            row(3, attempts=10, last_error="Refused: no", parked_at=LONG_AGO),
            row(4, attempts=10, last_error="Refused: no", parked_at=LONG_AGO),
            row(5, published_at=LONG_AGO),
            row(6, published_at=datetime.now(UTC)),
        ):
            connection.execute(insert(OUTBOX).values(**values))
    engine.dispose()
    return sqlite_url


def answer(capsys, *arguments: str, code: int = 0):
    assert main(["outbox", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_status_counts_what_waits_and_fails_if_something_is_parked(url, capsys) -> None:
    found = answer(capsys, "status", code=1)
    assert (found["pending"], found["parked"]) == (2, 2)
    assert 29 * 86_400 < found["oldest_seconds"] < 31 * 86_400
    assert main(["outbox", "status"]) == 1
    captured = capsys.readouterr()
    assert "parked   2" in captured.out
    assert "list --parked" in captured.err
    answer(capsys, "retry", "--all")
    assert answer(capsys, "status")["parked"] == 0


def test_a_line_break_in_an_event_forges_no_row(url, capsys) -> None:
    forged = "x\ne-9  parked      0 attempts\u2028\u202e\x1b[2J"
    engine = make_engine(url)
    with engine.begin() as connection:
        values = row(7, event_type=forged, key=forged, last_error=forged, event_id=forged)
        connection.execute(insert(OUTBOX).values(**values))
    engine.dispose()
    assert main(["outbox", "list"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 5 + 3  # three of the five rows have an error
    assert not {"\u2028", "\u202e", "\x1b"} & set(out)


def test_list_shows_the_oldest_first_or_only_what_is_parked(url, capsys) -> None:
    waiting = answer(capsys, "list")
    assert waiting[0]["event_id"] == "e-2"
    assert {entry["state"] for entry in waiting} == {"pending", "parked"}
    parked = answer(capsys, "list", "--parked")
    assert [entry["event_id"] for entry in parked] == ["e-3", "e-4"]
    assert len(answer(capsys, "list", "--limit", "1")) == 1
    assert main(["outbox", "list", "--parked"]) == 0
    assert "Refused: no" in capsys.readouterr().out


def test_an_empty_outbox_says_so(sqlite_url, capsys) -> None:
    schema.init(sqlite_url)
    assert main(["outbox", "list", "--database", sqlite_url]) == 0
    assert "nothing waits" in capsys.readouterr().out
    assert main(["outbox", "status", "--database", sqlite_url]) == 0


def test_show_has_payload_and_error(url, capsys) -> None:
    found = answer(capsys, "show", "e-3")
    assert found["payload"] == '{"n": 1}'
    assert found["last_error"] == "Refused: no"
    assert answer(capsys, "show", found["id"])["event_id"] == "e-3"
    assert main(["outbox", "show", "e-3"]) == 0
    assert "order.placed" in capsys.readouterr().out
    assert main(["outbox", "show", "nobody"]) == 1


def test_retry_takes_parked_rows_alone(url, capsys) -> None:
    assert answer(capsys, "retry", "e-3") == {"retried": ["e-3"], "not_parked": 0}
    assert answer(capsys, "retry", "e-3", "e-1", code=1) == {"retried": [], "not_parked": 2}
    entry = answer(capsys, "show", "e-3")
    assert (entry["state"], entry["attempts"]) == ("pending", 0)
    assert main(["outbox", "retry"]) == 2
    assert main(["outbox", "retry", "e-4", "--all"]) == 2


def test_prune_deletes_what_was_published_long_ago_and_nothing_else(url, capsys) -> None:
    assert answer(capsys, "prune", "--older-than", "7d", "--yes") == {"removed": 1}
    assert main(["outbox", "show", "e-5"]) == 1
    for kept in ("e-1", "e-2", "e-3", "e-4", "e-6"):
        assert main(["outbox", "show", kept]) == 0


def test_prune_asks(url, capsys, monkeypatch) -> None:
    assert main(["outbox", "prune"]) == 2
    assert "this would delete 1 rows of outbox" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["outbox", "prune"]) == 1
    assert main(["outbox", "show", "e-5"]) == 0
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["outbox", "prune"]) == 0


@pytest.mark.parametrize("age", ["7", "0d", "week", "-1d"])
def test_a_wrong_age_is_refused(url, age, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["outbox", "prune", f"--older-than={age}"])
    assert caught.value.code == 2


def test_a_table_that_is_not_there_is_one_line(sqlite_url, capsys) -> None:
    schema.init(sqlite_url)
    assert main(["outbox", "status", "--database", sqlite_url, "--table", "others"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "no such table: others" in line


def test_a_wrong_variable_is_named(url, capsys, monkeypatch) -> None:
    monkeypatch.setenv("CONQUIET_OUTBOX_MAX_ATTEMPTS", "many")
    assert main(["outbox", "status"]) == 2
    assert "CONQUIET_OUTBOX_MAX_ATTEMPTS: 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("search", "found"),
    [
        (Search(), ["e-2", "e-3", "e-4", "e-1"]),
        (Search("pending"), ["e-2", "e-1"]),
        (Search("published"), ["e-5", "e-6"]),
        (Search("any", id="e-6"), ["e-6"]),
        (Search(type="order.*"), ["e-2", "e-3", "e-4", "e-1"]),
        (Search(type="order_placed"), []),
        (Search("any", aggregate="o-4"), ["e-4"]),
        (Search(error="REFUSED"), ["e-3", "e-4"]),
        (Search(error="50%"), []),
        (Search(attempts=10), ["e-3", "e-4"]),
    ],
)
def test_rows_are_found_by_what_is_said_of_them(url, search, found) -> None:
    engine = make_engine(url)
    inspection = Inspection(engine, "outbox")
    ids = [entry.event_id for entry in inspection.entries(search=search)]
    assert sorted(ids) == sorted(found)
    newest = [entry.event_id for entry in inspection.entries(search=search, newest=True, limit=1)]
    assert newest == sorted(found)[-1:]
    engine.dispose()


def test_a_delayed_event_is_listed_and_cancelled_once(sqlite_url, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CONQUIET_DATABASE_URL", sqlite_url)
    made = make_engine(sqlite_url)
    schema.init(made)
    event = Message(b"{}", {"id": "e-1", "type": "remind", "source": "/s"})
    with made.begin() as connection:
        Outbox("orders").add(connection, [event], after=3600)
    assert main(["outbox", "list", "--delayed"]) == 0
    assert "e-1" in capsys.readouterr().out
    assert main(["outbox", "list", "--delayed", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["event_id"], listed["topic"]) == ("e-1", "orders")
    assert 3500 < listed["seconds_left"] <= 3600
    assert main(["outbox", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["delayed"] == 1
    assert main(["outbox", "show", "e-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "delayed"
    assert main(["trace", "e-1", "--database", sqlite_url]) == 0
    assert "outbox   outbox: delayed, remind, written" in capsys.readouterr().out
    with made.begin() as connection:
        last = Message(b"{}", {"id": "e-2", "type": "remind", "source": "/s"})
        Outbox("orders").add(connection, [last], at=datetime.max.replace(tzinfo=UTC))
    assert main(["outbox", "list", "--delayed"]) == 0
    assert "e-2  9999-12-31T23:59:59.999Z" in capsys.readouterr().out
    assert main(["outbox", "cancel", "e-1", "--yes"]) == 0
    assert capsys.readouterr().out == "e-1 is cancelled\n"
    assert main(["outbox", "cancel", "e-1", "--yes"]) == 1
    assert "no event of this id" in capsys.readouterr().err
    with made.begin() as connection:
        Outbox("orders").add(connection, [event])
    assert main(["outbox", "cancel", "e-1", "--yes"]) == 1
    assert "too late" in capsys.readouterr().err
