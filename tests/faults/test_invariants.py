"""Each invariant can fail: stores that are broken by hand are found to be."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter

import psycopg
import pytest
from tests.faults import invariants
from tests.faults.invariants import Event, Facts, violations

from conquiet.sql import schema


def sound() -> Facts:
    """Two commands took effect and were told of; a third was rolled back."""
    rows = [Event(f"e-{n}", f"c-{n}", "k", n, published=True) for n in (1, 2)]
    return Facts(
        accepted=frozenset(("c-1", "c-2", "c-3")),
        hopeless=frozenset(("c-3",)),
        effects=Counter({"c-1": 1, "c-2": 1}),
        rows=rows,
        log=[*rows, rows[0]],  # one of them twice, which is allowed
        consumed=Counter({"e-1": 1, "e-2": 1}),
        ordered=True,
    )


def test_sound_stores_violate_nothing():
    assert violations(sound()) == []


def twice(facts):
    facts.effects["c-1"] = 2


def never(facts):
    del facts.effects["c-1"]
    facts.rows, facts.log = [facts.rows[1]], [facts.log[1]]


def unsent(facts):
    facts.effects["c-9"] = 1


def lost(facts):
    facts.log = facts.log[1:2]


def lost_row(facts):
    facts.rows = []
    facts.log = facts.log[1:2]


def renamed(facts):
    facts.log.append(Event("e-9", "c-1", "k", 1))


def rolled_back_effect(facts):
    facts.effects["c-3"] = 1


def rolled_back_event(facts):
    facts.log.append(Event("e-3", "c-3", "k", 3))


def event_without_effect(facts):
    facts.log.append(Event("e-8", "c-8", "k", 8))


def marked_too_early(facts):
    facts.rows.append(Event("e-4", "c-1", "k", 4, published=True))


def consumed_twice(facts):
    facts.consumed["e-2"] = 2


def not_consumed(facts):
    del facts.consumed["e-2"]


def consumed_from_nowhere(facts):
    facts.consumed["e-9"] = 1


def overtaken(facts):
    facts.log.insert(0, Event("e-5", "c-1", "k", 5))


def pending(facts):
    facts.unsettled.append("commands 1-1")


def locked(facts):
    facts.locked.append("a key")


def parked(facts):
    facts.rows.append(Event("e-6", "c-1", "k", 1, parked=True))


def unpublished(facts):
    facts.rows.append(Event("e-7", "c-1", "k", 1))


@pytest.mark.parametrize(
    ("break_it", "rule"),
    [
        (twice, "effects_happen_once"),
        (never, "effects_happen_once"),
        (unsent, "effects_happen_once"),
        (lost, "committed_events_are_in_the_log"),
        (lost_row, "committed_events_are_in_the_log"),
        (renamed, "committed_events_are_in_the_log"),
        (rolled_back_effect, "rolled_back_events_are_nowhere"),
        (rolled_back_event, "rolled_back_events_are_nowhere"),
        (event_without_effect, "rolled_back_events_are_nowhere"),
        (marked_too_early, "marks_mean_confirmed"),
        (consumed_twice, "consumers_saw_each_event_once"),
        (not_consumed, "consumers_saw_each_event_once"),
        (consumed_from_nowhere, "consumers_saw_each_event_once"),
        (overtaken, "keys_keep_their_order"),
        (pending, "nothing_waits_for_ever"),
        (locked, "nothing_waits_for_ever"),
        (parked, "nothing_waits_for_ever"),
        (unpublished, "nothing_waits_for_ever"),
    ],
)
def test_each_invariant_can_fail(break_it, rule):
    facts = sound()
    break_it(facts)
    assert rule in {violation.partition(":")[0] for violation in violations(facts)}


def test_memory_that_grows_is_not_flat():
    assert invariants.is_flat([50, 90, 100, 101, 99, 100, 102, 100, 101], slack=0.1)
    assert not invariants.is_flat([50, 60, 70, 80, 90, 100, 110, 120, 130], slack=0.1)


def test_a_second_connection_is_no_leak_and_a_third_and_fourth_are():
    assert invariants.is_flat([5, 5, 5, 5, 5, 6, 6, 6, 6], slack=0.1, least=1)
    assert not invariants.is_flat([5, 5, 5, 5, 6, 6, 7, 8, 8], slack=0.1, least=1)


# --- the readers --------------------------------------------------------------------------------

ROW = (
    'INSERT INTO outbox (topic, event_type, event_id, "key", content_type, data, attributes,'
    " published_at) VALUES ('t', 'placed', 'e-1', 'k', 'application/json', ?, '{}', ?)"
)
DATA = json.dumps({"command": "c-1", "number": 1}).encode()
ORDERS = "CREATE TABLE orders (id TEXT PRIMARY KEY, amount INTEGER)"


def test_a_row_that_is_marked_and_not_in_the_log_is_found_in_sqlite(tmp_path):
    connection = sqlite3.connect(tmp_path / "shop.sqlite", isolation_level=None)
    connection.executescript(schema.ddl("sqlite") + ORDERS)
    connection.execute(ROW, (DATA, "2026-01-01"))
    connection.execute("INSERT INTO orders VALUES ('c-1', 2)")
    facts = Facts(accepted=frozenset(("c-1",)), effects=Counter(), log=[])
    invariants.read_sql(connection, facts)
    assert {v.partition(":")[0] for v in violations(facts)} == {
        "effects_happen_once",
        "committed_events_are_in_the_log",
        "marks_mean_confirmed",
    }
    connection.execute("BEGIN IMMEDIATE")
    assert invariants.locks_left(tmp_path / "shop.sqlite") == ["shop.sqlite (database is locked)"]
    connection.close()


def test_a_row_that_waits_and_a_session_that_is_left_are_found_in_postgresql(database_url):
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(schema.ddl("postgresql") + ORDERS)
        connection.execute(ROW.replace("?", "%s"), (DATA, None))
        facts = Facts(log=[Event("e-1", "c-1", "k", 1)])
        invariants.read_sql(connection, facts)
        assert violations(facts) == ["nothing_waits_for_ever: event e-1 is not published"]
        assert invariants.sessions_left(connection) == []
        with psycopg.connect(database_url) as other:
            other.execute("SELECT 1")
            [left] = invariants.sessions_left(connection)
        assert "idle in transaction" in left


def test_entries_that_nobody_acked_and_leases_that_nobody_ended_are_found_in_redis(redis_client):
    redis_client.xgroup_create("commands", "g", id="0", mkstream=True)
    for number in range(2):
        redis_client.xadd("commands", {"n": number}, id=f"1-{number + 1}")
    redis_client.xreadgroup("g", "dead", {"commands": ">"}, count=1)
    assert invariants.unsettled_entries(redis_client, "commands", "g") == [
        "commands 1-1",
        "commands 1-2",
    ]
    redis_client.xack("commands", "g", "1-1")
    assert invariants.unsettled_entries(redis_client, "commands", "g") == ["commands 1-2"]
    redis_client.set("conquiet:inbox:{a}:1", "processing:x")
    redis_client.set("conquiet:inbox:{a}:2", "done")
    assert invariants.held_leases(redis_client) == ["conquiet:inbox:{a}:1 (processing:x)"]
    redis_client.hset("effects", "c-1", 2)
    assert invariants.read_counts(redis_client, "effects") == {"c-1": 2}
    redis_client.xadd("events", {"id": "e-1", "subject": "k", "data": DATA})
    assert invariants.read_log(redis_client, "events") == [Event("e-1", "c-1", "k", 1)]
