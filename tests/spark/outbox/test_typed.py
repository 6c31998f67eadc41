"""The events of a catalog, with the types that it declares, from the outbox as from the log."""

from __future__ import annotations

import pytest
from tests.integration.events.samples import one_of_each

from conquiet.events import EventSource, emit
from conquiet.events import schema as events_schema
from conquiet.redis import StreamSink
from conquiet.spark import events
from marketplace.catalog import CATALOG

PLACE = ("entry_id", "entry_time")


@pytest.mark.slow
def test_typed_events_of_the_log_and_of_the_outbox_are_the_same(
    spark, url, engine, redis_url, redis_client
):
    events_schema.init(engine, CATALOG)
    with engine.begin() as connection:
        emit(connection, *one_of_each())
    source = EventSource(engine, cloudevents=True, wakeup=False)
    StreamSink(redis_client).publish(source.read(1000, 5.0))
    source.close()
    log = events(spark, CATALOG, "order_created", url=redis_url, streams="domain-events")
    outbox = {"url": url, "table": "outbox_events", "format": "conquiet-outbox"}
    frames = [log, events(spark, CATALOG, "order_created", **outbox)]
    [[published], [stored]] = [frame.drop(*PLACE, "attributes").collect() for frame in frames]
    assert stored.data.lines
    assert stored._malformed is None
    assert stored == published
