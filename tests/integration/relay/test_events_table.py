"""`outbox_events` by the same commands: relay run, and outbox status, list, show, retry, prune."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from uuid import uuid4

import pytest
from sqlalchemy import text
from tests.unit.sinks.http_receiver import Receiver
from tests.waiting import eventually

from conquiet.cli import main
from conquiet.events import schema
from conquiet.sql import engine as make_engine
from marketplace.catalog import CATALOG

QUICK = ("--table", "outbox_events", "--poll-ms", "50", "--max-attempts", "1")
INSERT = (
    "INSERT INTO outbox_events (id, event_type, aggregate_type, aggregate_id, payload_json)"
    " VALUES (:id, 'order_created', 'vendor_order', :aggregate, :payload)"
)


@pytest.fixture(params=[pytest.param("sqlite_url", marks=pytest.mark.slow), "database_url"])
def url(request) -> str:
    found: str = request.getfixturevalue(request.param)
    schema.init(found, CATALOG)
    return found


def store(url: str, count: int, aggregates: list[str] | None = None) -> list[str]:
    """Rows of these aggregates in turn, or of one each; their ids, in order."""
    engine = make_engine(url)
    ids = sorted(str(uuid4()) for _ in range(count))
    with engine.begin() as connection:
        for number, id_ in enumerate(ids):
            aggregate = aggregates[number % len(aggregates)] if aggregates else str(uuid4())
            envelope = {
                "version": 1,
                "eventId": id_,
                "occurredAt": "2026-01-31T12:00:00Z",
                "data": {},
            }
            given = {"id": id_, "aggregate": aggregate, "payload": json.dumps(envelope)}
            connection.execute(text(INSERT), given)
    engine.dispose()
    return ids


def outbox(url: str, *arguments: str, code: int = 0):
    said = io.StringIO()
    where = ["--database", url, "--table", "outbox_events", "--max-attempts", "1", "--json"]
    with redirect_stdout(said):
        assert main(["outbox", *arguments, *where]) == code
    return json.loads(said.getvalue())


def test_events_are_published_with_their_ids_and_logged_with_their_aggregate(
    url, redis_url, redis_client, start
):
    ids = store(url, 5)
    relay = start(url, redis_url, *QUICK)
    assert eventually(lambda: outbox(url, "status")["pending"] == 0, timeout=30, interval=0.2)
    found = [fields[b"id"].decode() for _, fields in redis_client.xrange("domain-events")]
    assert sorted(found) == sorted(ids)
    assert eventually(lambda: len(relay.said("published")) == 5)
    line = relay.said("published")[0]
    assert line["event_type"] == "order_created"
    assert line["aggregate_type"] == "vendor_order"
    assert line["aggregate_id"]
    assert relay.stop() == 0


def test_parked_events_are_shown_sent_again_and_pruned(url, start):
    [id_] = store(url, 1)
    with Receiver() as receiver:
        receiver.answers[id_] = [500]
        relay = start(url, receiver.url, *QUICK)
        assert eventually(
            lambda: relay.ready()["checks"]["database"].get("parked") == 1, timeout=30, interval=0.2
        )
        assert outbox(url, "status", code=1)["parked"] == 1
        [entry] = outbox(url, "list", "--parked")
        assert (entry["event_id"], entry["state"], entry["attempts"]) == (id_, "parked", 1)
        assert entry["aggregate_type"] == "vendor_order"
        shown = outbox(url, "show", id_)
        assert json.loads(shown["payload"])["eventId"] == id_
        receiver.answers.clear()
        assert outbox(url, "retry", id_)["retried"] == [id_]
        assert eventually(lambda: outbox(url, "status")["pending"] == 0, timeout=30, interval=0.2)
        assert relay.stop() == 0
        assert [message.id for message in receiver.arrived] == [id_]
    assert outbox(url, "prune", "--older-than", "1h", "--yes") == {"removed": 0}
    assert eventually(lambda: outbox(url, "prune", "--older-than", "1s", "--yes")["removed"] == 1)


def test_relays_keep_the_order_of_each_aggregate(url, redis_url, redis_client, start):
    aggregates = [str(uuid4()) for _ in range(5)]
    ids = store(url, 60, aggregates)
    relays = [start(url, redis_url, *QUICK, "--ordered", "--batch-size", "7") for _ in range(2)]
    assert all(eventually(lambda relay=relay: relay.port, timeout=30) for relay in relays)
    assert eventually(lambda: outbox(url, "status")["pending"] == 0, timeout=30, interval=0.2)
    assert [relay.stop() for relay in relays] == [0, 0]
    found = [fields for _, fields in redis_client.xrange("domain-events")]
    for number, aggregate in enumerate(aggregates):
        sent = [one[b"id"].decode() for one in found if one[b"subject"].decode() == aggregate]
        assert sent == ids[number::5]


def test_a_topic_in_partitions_keeps_each_aggregate_in_one(url, redis_url, redis_client, start):
    aggregates = [str(uuid4()) for _ in range(8)]
    store(url, 24, aggregates)
    relay = start(url, f"{redis_url}?partitions=3", *QUICK)
    assert eventually(lambda: outbox(url, "status")["pending"] == 0, timeout=30, interval=0.2)
    assert relay.stop() == 0
    streams = redis_client.keys("domain-events*")
    places = [
        {fields[b"subject"] for _, fields in redis_client.xrange(stream)} for stream in streams
    ]
    assert 1 < len(streams) <= 3
    assert sum(map(len, places)) == 8  # no aggregate stands in two of them


def test_an_idle_relay_ends_at_once_however_long_it_waits(url, redis_url, start):
    relay = start(url, redis_url, "--table", "outbox_events", "--poll-ms", "60000")
    assert relay.port
    assert eventually(lambda: relay.ready()["status"] == 200, timeout=30)
    assert relay.stop() == 0  # and not 1 after the grace time of 25 s
    assert not relay.said("abandoned")


def test_an_id_may_be_written_in_any_way_of_a_uuid(url):
    [id_] = store(url, 1)
    for written in (id_.upper(), id_.replace("-", "")):
        assert outbox(url, "show", written)["event_id"] == id_


def test_prune_takes_old_published_rows_alone_by_the_databases_clock(url):
    waits, parked, fresh, old = store(url, 4)
    engine = make_engine(url)
    mark = "UPDATE outbox_events SET published_at = {} WHERE id = :id"
    is_sqlite = engine.dialect.name == "sqlite"
    now, before = (
        ("datetime('now')", "datetime('now', '-8 days')")
        if is_sqlite
        else ("now()", "now() - interval '8 days'")
    )
    with engine.begin() as connection:
        connection.execute(text(mark.format(now)), {"id": fresh})
        connection.execute(text(mark.format(before)), {"id": old})
        connection.execute(
            text("UPDATE outbox_events SET attempt_count = 10 WHERE id = :id"), {"id": parked}
        )
    assert outbox(url, "prune", "--yes") == {"removed": 1}
    with engine.connect() as connection:
        left = {str(id_) for (id_,) in connection.execute(text("SELECT id FROM outbox_events"))}
    engine.dispose()
    assert left == {waits, parked, fresh}
