"""Generated entries in a real log and in a real outbox."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from conquiet.events import EventSource
from conquiet.events.table import events_table
from conquiet.redis import StreamSink
from conquiet.redis.entry import from_fields
from conquiet.redis.topic import Topic
from conquiet.relay import Relay
from marketplace.catalog import CATALOG
from marketplace.generator import (
    DOMAIN_TOPIC,
    TELEMETRY_TOPIC,
    Generator,
    write_log,
    write_outbox,
)
from marketplace.generator.writers import LogRefused
from marketplace.oracle import Oracle

WORLD = Generator(seed=5, orders=40, faults="all", days=5)
EVENTS = events_table(CATALOG)


def read(client, stream):
    for entry_id, fields in client.xrange(stream):
        flat = [part for pair in fields.items() for part in pair]
        yield entry_id.decode(), from_fields(flat)


def test_a_log_in_redis_has_every_entry_with_its_time_and_the_fields_of_the_relay(redis_client):
    entries = list(WORLD.entries())
    assert write_log(redis_client, entries) == len(entries)
    for topic in (DOMAIN_TOPIC, TELEMETRY_TOPIC):
        own = [entry for entry in entries if entry.topic == topic]
        for (entry_id, (data, attributes, _)), entry in zip(
            read(redis_client, topic), own, strict=True
        ):
            assert entry_id.partition("-")[0] == str(entry.ms)
            assert (data, attributes) == (entry.data, entry.attributes())


def test_partitions_are_those_of_the_sink(redis_client):
    entries = list(WORLD.entries())
    write_log(redis_client, entries, partitions=3)
    topic = Topic(DOMAIN_TOPIC, 3)
    for stream in topic.streams:
        found = [attributes["subject"] for _, (_, attributes, _) in read(redis_client, stream)]
        assert found
        assert {topic.stream(subject) for subject in found} == {stream}


def test_a_log_that_is_not_empty_is_refused_with_what_to_do(redis_client):
    write_log(redis_client, WORLD.entries())
    with pytest.raises(LogRefused, match="DEL pf-domain-events"):
        write_log(redis_client, WORLD.entries())


def test_a_relay_publishes_the_outbox_as_the_generator_did(engine, redis_client):
    entries = [e for e in WORLD.entries() if not e.is_telemetry]
    expected = {e.event_id: e for e in entries if not e.is_foreign}
    assert write_outbox(engine, entries) == len(expected)
    source = EventSource(engine, topic=DOMAIN_TOPIC, cloudevents=True)
    relay = Relay(source, StreamSink(redis_client), batch_size=500)
    while relay.run_once(0.0).published:
        pass
    relay.source.close()
    found = {a["id"]: (data, a) for _, (data, a, _) in read(redis_client, DOMAIN_TOPIC)}
    assert found == {id_: (e.data, e.attributes()) for id_, e in expected.items()}


def test_a_published_outbox_counts_as_the_oracle_says(engine):
    oracle = Oracle()
    write_outbox(engine, WORLD.entries(oracle), published=True)
    count = func.count()
    with engine.connect() as connection:
        rows, waiting, failed = connection.execute(
            select(
                count,
                count.filter(EVENTS.c.published_at.is_(None)),
                func.sum(EVENTS.c.attempt_count),
            ).select_from(EVENTS)
        ).one()
    hours = oracle.rows("recon_completeness")
    assert rows == sum(row["outbox_count"] for row in hours)
    assert waiting == 0
    assert failed == sum(row["failed_attempts"] for row in oracle.rows("outbox_delivery")) > 0
