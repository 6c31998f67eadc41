"""outbox_events in batches: the same columns and bytes as what its relay publishes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text
from tests.integration.events.samples import notification, one_of_each, store
from tests.spark.outbox.rows import read

from conquiet.errors import ConfigError
from conquiet.events import EventSource, emit, schema
from conquiet.spark.outbox.source import OutboxSource
from conquiet.sql import engine as make_engine
from marketplace.catalog import CATALOG


@pytest.fixture
def events(url: str) -> Iterator[Engine]:
    """Each of the two databases in turn, with the marketplace's `outbox_events`."""
    made = make_engine(url)
    schema.init(made, CATALOG)
    yield made
    made.dispose()


def published(engine: Engine) -> list[dict[str, object]]:
    """What a relay to a Redis Stream is given of each row, in the columns of the log."""
    source = EventSource(engine, cloudevents=True, wakeup=False)
    try:
        messages = source.read(1000, 1.0)
    finally:
        source.close()
    return [
        {
            "stream": message.topic,
            "key": message.key,
            "event_id": message.id,
            "type": message.type,
            "source": message.source,
            "subject": message.subject,
            "time": message.attributes["time"],
            "content_type": message.attributes["datacontenttype"],
            "attributes": {
                "specversion": message.attributes["specversion"],
                "aggregatetype": message.attributes["aggregatetype"],
            },
            "data": message.data,
            "_malformed": None,
        }
        for message in messages
    ]


def test_a_batch_is_what_the_relay_publishes(url, events):
    with events.begin() as connection:
        emit(connection, *one_of_each())
    rows = read(url, table="outbox_events")
    for row in rows:
        assert row.pop("entry_id") == row["event_id"]
        assert row.pop("entry_time") == row["time"]
        row["attributes"] = dict(row["attributes"])
        moment = row["time"].replace(tzinfo=None)
        row["time"] = f"{moment.isoformat(timespec='auto')}Z"
    assert len(rows) == len(CATALOG.declarations)
    assert rows == sorted(published(events), key=lambda row: row["event_id"])


def test_spark_reads_them_too(on_spark, url, events):
    ids = store(events, 300)
    frame = on_spark(url, table="outbox_events", minPartitions=3).load()
    assert frame.rdd.getNumPartitions() == 3
    assert sorted(row.event_id for row in frame.collect()) == sorted(ids)


def test_ranges_hold_every_row_once(url, events):
    ids = store(events, 200)
    for tasks in (1, 5):
        rows = read(url, table="outbox_events", minPartitions=tasks)
        assert sorted(row["event_id"] for row in rows) == sorted(ids)


def test_types_times_and_deliveries_serve_a_reconciliation(url, events):
    [first, second] = store(events, 2)
    with events.begin() as connection:
        done = "UPDATE outbox_events SET published_at = '2026-02-03 04:05:06', attempt_count = 2"
        connection.execute(text(f"{done} WHERE id = '{first}'"))
    chosen = {"table": "outbox_events", "types": "notification_requested", "delivery": True}
    told = {row["event_id"]: dict(row["attributes"]) for row in read(url, **chosen)}
    assert told[first]["publishedat"].startswith("2026-02-03T04:05:06.0")
    assert told[first]["attempts"] == "2"
    assert "publishedat" not in told[second]
    assert read(url, table="outbox_events", types="order_created") == []
    assert read(url, table="outbox_events", until="2001-01-01T00:00:00Z") == []


def test_a_payload_that_is_no_json_is_told_in_its_row(sqlite_url):
    engine = make_engine(sqlite_url)
    schema.init(engine, CATALOG, append_only=False)
    store(engine, 1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_events SET payload_json = '{broken'"))
        emit(connection, notification())
    engine.dispose()
    broken, whole = read(sqlite_url, table="outbox_events")
    assert broken["data"] == b"{broken"
    assert "payload_json is not JSON" in broken["_malformed"]
    assert whole["_malformed"] is None


def test_domain_events_are_no_stream(url):
    source = OutboxSource({"url": url, "table": "sales.outbox_events"})
    with pytest.raises(ConfigError, match="cannot be read as a stream"):
        source.streamReader(source.schema())
