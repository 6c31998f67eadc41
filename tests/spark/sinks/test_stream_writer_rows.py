"""Rows become the very commands that StreamSink would send."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import hiredis
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conquiet.errors import ConfigError, InvalidMessage
from conquiet.message import Message
from conquiet.redis import Topic
from conquiet.redis.entry import to_fields
from conquiet.spark.columns import ARROW_SCHEMA
from conquiet.spark.log.decoder import RowBuilder
from conquiet.spark.log.encoder import RowEncoder
from conquiet.spark.log.options import WriteOptions

URL = {"url": "redis://localhost"}

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
rows = st.fixed_dictionaries(
    {
        "event_id": texts,
        "type": texts,
        "source": texts,
        "subject": st.none() | texts,
        "key": st.none() | texts,
        "content_type": st.none() | texts,
        "time": st.none() | st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1)),
        "attributes": st.none()
        | st.dictionaries(st.sampled_from(["a", "traceparent", "x1"]), texts, max_size=3),
        "data": st.none() | st.binary(max_size=20) | st.sampled_from([b"\r\n", b"$3\r\n", b""]),
    }
)


def batch_of(items: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = {}
    for name in items[0]:
        kind = ARROW_SCHEMA.field(name).type if name in ARROW_SCHEMA.names else pa.string()
        values = [item[name] for item in items]
        if name == "attributes":
            values = [None if value is None else list(value.items()) for value in values]
        columns[name] = pa.array(values, kind)
    return pa.record_batch(columns)


def commands_of(encoder: RowEncoder, batch: pa.RecordBatch) -> list[list[bytes]]:
    reader = hiredis.Reader()
    found = []
    for entries in encoder.encode(batch):
        reader.feed(bytes(entries.pack()))
        found += [reader.gets() for _ in range(len(entries))]
    assert reader.gets() is False
    return found


def message_of(row: dict[str, Any]) -> Message[Any]:
    moment = row["time"]
    given = {
        "id": row["event_id"],
        "type": row["type"],
        "source": row["source"],
        "subject": row["subject"],
        "partitionkey": row["key"] if row["key"] != row["subject"] else None,
        "datacontenttype": row["content_type"],
        "time": moment and moment.isoformat(timespec="microseconds") + "Z",
        **(row["attributes"] or {}),
    }
    return Message(row["data"], {name: value for name, value in given.items() if value is not None})


@given(st.lists(rows, min_size=1, max_size=6))
def test_rows_become_what_the_sink_of_a_relay_sends(items) -> None:
    batch = batch_of(items)
    encoder = RowEncoder(batch.schema.names, WriteOptions.of(URL | {"topic": "orders"}))
    for row, command in zip(items, commands_of(encoder, batch), strict=True):
        assert command[:3] == [b"XADD", b"orders", b"*"]
        fields, expected = command[3:], to_fields(message_of(row))
        assert dict(zip(fields[::2], fields[1::2], strict=True)) == dict(
            zip(expected[::2], expected[1::2], strict=True)
        )


@given(st.lists(rows, min_size=1, max_size=20))
def test_a_partitioned_topic_gets_rows_by_key_in_order(items) -> None:
    batch = batch_of(items)
    options = WriteOptions.of(URL | {"topic": "orders", "partitions": "3"})
    topic = Topic("orders", 3)
    expected: dict[str, list[bytes]] = {}
    for row in items:
        message = message_of(row)
        expected.setdefault(topic.stream(message.key or message.id), []).append(
            row["event_id"].encode()
        )
    found: dict[str, list[bytes]] = {}
    for command in commands_of(RowEncoder(batch.schema.names, options), batch):
        found.setdefault(command[1].decode(), []).append(command[4])
    assert found == expected


keys = st.sampled_from(["partitionkey", "subject", "time", "x1", "specversion"])
events = st.dictionaries(keys, st.sampled_from(["1.0", "2026-01-31T12:00:00Z", "c-7"]))


@given(st.lists(events, min_size=1, max_size=6), st.booleans())
def test_what_is_read_from_a_log_is_written_as_it_stood(found, has_data) -> None:
    entries = [
        {"id": "1", "type": "t", "source": "/s"}
        | event
        | {"specversion": "1.0", "time": "2026-01-31T12:00:00Z"}
        | ({"data": "{}"} if has_data else {})
        for event in found
    ]
    reader = RowBuilder()
    for number, entry in enumerate(entries):
        fields = [text.encode() for pair in entry.items() for text in pair]
        reader.add("orders", b"1-%d" % number, fields)
    columns = reader.take()
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    encoder = RowEncoder(batch.schema.names, WriteOptions.of(URL | {"topic": "copy"}))
    for entry, command in zip(entries, commands_of(encoder, batch), strict=True):
        fields = [text.decode() for text in command[3:]]
        written = dict(zip(fields[::2], fields[1::2], strict=True))
        assert written.pop("time").startswith("2026-01-31T12:00:00.000000")
        assert written == {name: text for name, text in entry.items() if name != "time"}


def test_another_key_takes_the_place_of_the_one_that_was_read() -> None:
    item = {"event_id": "1", "type": "t", "source": "/s", "key": "new"}
    batch = batch_of([item | {"attributes": {"partitionkey": "old", "a": "1"}}])
    encoder = RowEncoder(batch.schema.names, WriteOptions.of(URL | {"topic": "orders"}))
    [command] = commands_of(encoder, batch)
    assert command[command.index(b"partitionkey") + 1] == b"new"
    assert b"old" not in command
    assert b"a" in command


def test_a_slice_of_a_batch_keeps_its_attributes() -> None:
    item = {"event_id": "1", "type": "t", "source": "/s"}
    items = [item | {"attributes": {"a": str(number)}} for number in range(4)]
    batch = batch_of(items).slice(2)
    encoder = RowEncoder(batch.schema.names, WriteOptions.of(URL | {"topic": "orders"}))
    found = commands_of(encoder, batch)
    assert [command[command.index(b"a") + 1] for command in found] == [b"2", b"3"]


def test_a_column_names_the_stream_or_the_topic_of_a_row() -> None:
    item = {"event_id": "1", "type": "t", "source": "/s"}
    for column in ("stream", "topic"):
        batch = batch_of([item | {column: "a"}, item | {column: "b"}])
        found = commands_of(RowEncoder(batch.schema.names, WriteOptions.of(URL)), batch)
        assert [command[1] for command in found] == [b"a", b"b"]


def test_dense_ids_count_up_from_zero() -> None:
    batch = batch_of([{"event_id": "1", "type": "t", "source": "/s"}])
    options = WriteOptions.of(URL | {"topic": "orders", "denseIds": "true"})
    [command] = commands_of(RowEncoder(batch.schema.names, options), batch)
    assert command[2] == b"0-*"


def test_pieces_have_few_enough_rows_and_bytes() -> None:
    item = {"type": "t", "source": "/s", "data": b"x" * 1000}
    batch = batch_of([item | {"event_id": str(number)} for number in range(20)])
    options = WriteOptions.of(URL | {"topic": "orders"})
    [entries] = RowEncoder(batch.schema.names, options).encode(batch)
    assert [len(piece) for piece in entries.slices(8, 10**6)] == [8, 8, 4]
    assert all(len(piece.pack()) <= 5000 for piece in entries.slices(20, 5000))
    assert [len(piece) for piece in entries.slices(20, 10)] == [1] * 20


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        (["type", "source"], {}, "option topic"),
        (["type", "source", "prize"], {"topic": "t"}, "has no columns prize"),
        (["type"], {"topic": "t"}, "needs a source"),
        (["source"], {"topic": "t"}, "needs a type"),
    ],
)
def test_a_frame_that_cannot_be_written_is_refused(columns, options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        RowEncoder(columns, WriteOptions.of(URL | options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partitions": "0"}, "partitions='0': must be a whole number"),
        ({"denseIds": "maybe"}, "true or false"),
        ({"topic": ""}, "a topic needs a name"),
        ({"writeId": ""}, "writeId is empty"),
        ({"partition": "2"}, "did you mean partitions"),
    ],
)
def test_a_wrong_option_is_refused(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        WriteOptions.of(URL | options)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"type": None}, "has no type"),
        ({"event_id": ""}, "has no event_id"),
        ({"attributes": {"No": "1"}}, "attribute 'No' cannot be written"),
        ({"attributes": {"id": "1"}}, "belongs there"),
        ({"attributes": {"partitionkey": "1"}}, "belongs there"),
    ],
)
def test_a_row_that_is_no_event_is_named(change, said) -> None:
    row = {"event_id": "1", "type": "t", "source": "/s", "attributes": None, **change}
    row["time"] = datetime.now(UTC)
    batch = batch_of([row])
    encoder = RowEncoder(batch.schema.names, WriteOptions.of(URL | {"topic": "t"}))
    with pytest.raises(InvalidMessage, match=said):
        list(encoder.encode(batch))
