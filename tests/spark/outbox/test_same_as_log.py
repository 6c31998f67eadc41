"""A pipeline can be fed by the log or by the outbox: the same events come in the same columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType
from tests.integration.events.samples import one_of_each
from tests.spark.outbox.rows import message, read

from conquiet import Message
from conquiet.events import EventSource, emit
from conquiet.events import schema as events_schema
from conquiet.redis import StreamSink
from conquiet.spark.columns import ARROW_SCHEMA, MALFORMED
from conquiet.spark.log.source import LogSource
from conquiet.spark.outbox.source import OutboxSource
from conquiet.sql import Outbox
from conquiet.sql.log import OutboxLog
from marketplace.catalog import CATALOG

ODD = {"id": "x", "type": "t", "source": "/s"}
PLACE = ("entry_id", "entry_time")


def read_log(url: str, streams: str) -> list[dict[str, Any]]:
    source = LogSource({"url": url, "streams": streams})
    reader = source.reader(from_arrow_schema(ARROW_SCHEMA))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches, ARROW_SCHEMA).to_pylist()


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the place where they were found; attributes in any order."""
    for row in rows:
        for name in PLACE:
            del row[name]
        row["attributes"] = sorted(row["attributes"])
    return sorted(rows, key=lambda row: row["event_id"])


def test_what_a_relay_has_published_is_what_the_outbox_holds(url, engine, redis_url, redis_client):
    odd = Message(
        bytes(range(256)),
        {"id": "x", "type": "t", "source": "/s", "partitionkey": "p", "answer": 42, "sure": True},
    )
    plain = [message(number) for number in range(5)]
    with engine.begin() as connection:
        Outbox("orders").add(connection, [*plain, odd])
    answers = StreamSink(redis_client).publish_each(OutboxLog(engine).read())
    assert set(answers) == {None}
    assert compared(read(url)) == compared(read_log(redis_url, "orders"))


def test_domain_events_are_the_same_too(url, engine, redis_url, redis_client):
    events_schema.init(engine, CATALOG)
    with engine.begin() as connection:
        emit(connection, *one_of_each())
    source = EventSource(engine, cloudevents=True, wakeup=False)
    answers = StreamSink(redis_client).publish_each(source.read(1000, 5.0))
    source.close()
    assert set(answers) == {None}
    found = compared(read(url, table="outbox_events"))
    assert len(found) == len(CATALOG.declarations)
    assert found == compared(read_log(redis_url, "domain-events"))


def test_data_of_an_outbox_is_a_struct_or_text_if_asked_for(url, engine):
    with engine.begin() as connection:
        Outbox("orders").add(connection, [message(7), Message(b"no JSON", ODD)])
    source = OutboxSource({"url": url, "schema": "number INT"})
    assert "data STRUCT<number INT>" in source.schema()
    columns = StructType().add("data", StructType().add("number", "integer"))
    rows = rows_of(source.reader(columns.add(MALFORMED, "string").add("_raw", "binary")))
    good, bad = sorted(rows, key=lambda row: row["_raw"] or b"")
    assert good == {"data": {"number": 7}, MALFORMED: None, "_raw": None}
    assert (bad["data"], bad["_raw"]) == (None, b"no JSON")
    assert "does not fit the schema" in bad[MALFORMED]
    texts = rows_of(OutboxSource({"url": url}).reader(StructType().add("data", "string")))
    assert sorted(row["data"] for row in texts) == ["no JSON", '{"number": 7}']


def rows_of(reader) -> list[dict[str, Any]]:
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches).to_pylist()
