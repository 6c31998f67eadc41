"""Rows of `outbox_events` are searched as those of the outbox; databases that cannot be used."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from sqlalchemy import text

from conquiet.cli import main
from conquiet.events import schema
from conquiet.relay.inspection import Inspection, Search
from conquiet.sql import engine as make_engine
from marketplace.catalog import CATALOG

INSERT = (
    "INSERT INTO outbox_events (id, event_type, aggregate_type, aggregate_id, payload_json,"
    " attempt_count, last_error) VALUES (:id, :type, 'vendor_order', :aggregate, :payload,"
    " :attempts, :error)"
)


@pytest.fixture(params=["sqlite_url", "database_url"])
def url(request) -> str:
    found: str = request.getfixturevalue(request.param)
    schema.init(found, CATALOG)
    return found


def test_domain_events_are_found_by_type_aggregate_and_error(url) -> None:
    engine = make_engine(url)
    first, second = str(uuid4()), str(uuid4())
    with engine.begin() as connection:
        for id_, type_, attempts, error in (
            (first, "order_created", 0, None),
            (second, "order_canceled", 10, "Timeout: 50% of it"),
        ):
            envelope = {
                "version": 1,
                "eventId": id_,
                "occurredAt": "2026-01-31T12:00:00Z",
                "data": {},
            }
            row = {"id": id_, "type": type_, "aggregate": id_, "payload": json.dumps(envelope)}
            connection.execute(text(INSERT), {**row, "attempts": attempts, "error": error})
    inspection = Inspection(engine, "outbox_events")
    for search, expected in (
        (Search(type="order*"), {first, second}),
        (Search(type="*canceled"), {second}),
        (Search(aggregate=first), {first}),
        (Search(aggregate="vendor_order"), {first, second}),
        (Search(error="timeout"), {second}),
        (Search(error="50%"), {second}),
        (Search("parked"), {second}),
        (Search("pending", attempts=1), set()),
        (Search(id=first), {first}),
        (Search(id="no uuid"), set()),
    ):
        assert {entry.event_id for entry in inspection.entries(search=search)} == expected, search
        assert {e.event_id for e in inspection.entries(search=search, newest=True)} == expected
    engine.dispose()


COMMANDS = [
    ("outbox", "status"),
    ("outbox", "list"),
    ("outbox", "show", "e-1"),
    ("outbox", "retry", "--all"),
    ("outbox", "prune", "--yes"),
    ("outbox", "verify"),
    ("trace", "e-1"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_database_that_is_not_there_is_told_in_one_line(
    command, database_url, capsys, monkeypatch
) -> None:
    monkeypatch.delenv("CONQUIET_BROKER_URL", raising=False)
    server, _, _ = database_url.rpartition("/")
    address = f"{server}/nowhere".replace("postgres@", "postgres:top-secret@")
    assert main([*command, "--database", address]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert 'database "nowhere" does not exist' in line
    assert "top-secret" not in line


@pytest.mark.parametrize("command", COMMANDS[:5], ids=" ".join)
def test_tables_that_are_not_there_are_told_with_the_command_that_makes_them(
    command, database_url, capsys
) -> None:
    assert main([*command, "--database", database_url]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "conquiet outbox migrate" in line
