"""The log in one batch."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from conquiet.spark.columns import ARROW_SCHEMA


def test_every_event_of_a_stream_is_a_row(log) -> None:
    [entry_id] = log.add("orders", 7, time="2026-01-31T12:00:00Z", correlationid="x")
    frame = log.read()
    assert frame.columns == ARROW_SCHEMA.names
    [row] = frame.collect()
    assert (row.stream, row.entry_id, row.event_id) == ("orders", entry_id, "7")
    assert (row.type, row.source, row.subject, row.key) == ("sold", "/shop", "c-7", "c-7")
    assert (row.data, row.attributes["correlationid"]) == (b'{"n": 7}', "x")
    assert row.time == datetime(2026, 1, 31, 12)
    milliseconds = int(entry_id.split("-")[0])
    assert row.entry_time == datetime(1970, 1, 1) + timedelta(milliseconds=milliseconds)
    assert row._malformed is None


def test_several_streams_are_read_by_name_and_pattern_in_many_tasks(log) -> None:
    for number in range(300):
        log.add(f"shop:{number % 3}", number)
    log.add("bank", 999)
    log.client.set("shop:x", "no stream")
    frame = log.read(streams="shop:*,bank", minPartitions=4)
    assert log.numbers(frame) == [*range(300), 999]
    assert frame.rdd.getNumPartitions() == 4


def test_nothing_to_read_is_no_rows(log) -> None:
    log.client.xgroup_create("empty", "group", mkstream=True)
    assert log.read(streams="empty,absent,none:*").count() == 0


def test_offsets_bound_what_is_read(log) -> None:
    log.add("orders", *range(1, 10), ids="{}-0")
    log.add("other", *range(11, 20), ids="{}-0")
    bounds = {
        "startingOffsets": json.dumps({"orders": "3-0"}),
        "endingOffsets": json.dumps({"orders": "6-0", "other": "13-0"}),
    }
    assert log.numbers(log.read(streams="orders,other", **bounds)) == [3, 4, 5, 11, 12]
    times = {"startingOffsets": "1970-01-01T00:00:00.008Z", "endingTimestamp": "12"}
    assert log.numbers(log.read(streams="orders,other", **times)) == [8, 9, 11]
    assert log.read(startingOffsets="latest").count() == 0


def test_a_large_stream_is_read_whole_whatever_its_values(log) -> None:
    """Replies of several shapes, with line ends in values, and a size that takes many replies."""
    pipeline = log.client.pipeline(transaction=False)
    expected = {}
    for number in range(1500):
        data = b"%d" % number + (b"\r\n" if number % 500 == 499 else b"") + b"x" * (number % 700)
        subject = {"subject": f"s{number}"} if number % 7 else {}
        fields = {"id": number, "type": "t", "source": "/s", "specversion": "1.0", **subject}
        pipeline.xadd("orders", fields | {"data": data}, id=f"{1 + number // 3}-{number % 3}")
        expected[str(number)] = data
    pipeline.execute()
    rows = log.read(minPartitions=3).select("event_id", "data").collect()
    assert len(rows) == 1500
    assert {row.event_id: bytes(row.data) for row in rows} == expected


def test_what_is_no_event_is_a_row_that_says_why(log) -> None:
    log.add("orders", 1)
    log.client.xadd("orders", {"name": "Ada"})
    log.client.xadd("orders", {"data": '{"order": 7}'})
    log.client.xadd("orders", {"data": "no JSON"})
    rows = {bytes(row.data): row._malformed for row in log.read().collect()}
    assert rows[b'{"n": 1}'] is None
    assert rows[b'{"order": 7}'] is None
    assert "specversion" in rows[b'{"name":"Ada"}']
    assert "no JSON object" in rows[b'{"data":"no JSON"}']


def test_deleted_entries_are_not_there(log) -> None:
    ids = log.add("orders", *range(10))
    log.client.xdel("orders", ids[3], ids[4])
    assert log.numbers(log.read()) == [0, 1, 2, 5, 6, 7, 8, 9]


def test_data_can_be_text(log) -> None:
    log.add("orders", 1)
    log.client.xadd("orders", {"specversion": "1.0", "data": b"\xff"})
    rows = log.read(dataType="string").collect()
    assert rows[0].data == '{"n": 1}'
    assert rows[1].data == '{"data_base64":"/w=="}'
    assert "UTF-8" in rows[1]._malformed


def test_data_can_be_a_struct(log) -> None:
    fields = {"id": "1", "type": "sold", "source": "/s", "specversion": "1.0"}
    good = {"n": 7, "at": "2026-01-31T12:00:00Z", "lines": [{"sku": "a", "price": "1.50"}]}
    for data in (good, good | {"new": {"x": 1}}, {}, {"n": "seven"}, {"n": 2**40}):
        log.client.xadd("orders", fields | {"data": json.dumps(data)})
    schema = "n INT, at TIMESTAMP, lines ARRAY<STRUCT<sku: STRING, price: DECIMAL(10,2)>>"
    whole, drifted, empty, wrong, large = log.read(schema=schema).collect()
    assert (whole.data.n, whole.data.at) == (7, datetime(2026, 1, 31, 12))
    assert str(whole.data.lines[0].price) == "1.50"
    assert drifted.data == whole.data
    assert empty.data.n is None
    assert (wrong.data, bytes(wrong._raw)) == (None, b'{"n": "seven"}')
    assert "Expected `int | null`, got `str`" in wrong._malformed
    assert "fit the schema" in large._malformed


def test_a_schema_may_name_the_columns_that_are_wanted(log) -> None:
    log.add("orders", 5)
    reader = log.spark.read.format("conquiet").schema("data STRING, entry_id STRING")
    [row] = reader.option("url", log.url).option("streams", "orders").load().collect()
    assert row.asDict().keys() == {"data", "entry_id"}
    assert row.data == '{"n": 5}'


# --- filters ----------------------------------------------------------------------------------


def scanned(frame):
    """How many rows came out of the source, before Spark filtered them."""
    frame.collect()
    plan = frame._jdf.queryExecution().executedPlan()
    return plan.collectLeaves().head().metrics().get("numOutputRows").get().value()


@pytest.mark.parametrize(
    ("condition", "expected", "from_source"),
    [
        ("stream = 'orders'", 5, 5),
        ("stream IN ('other', 'absent')", 5, 5),
        ("stream LIKE 'ord%' AND event_id <> '2'", 4, 5),
        ("entry_time >= '1970-01-01 00:00:00.003'", 8, 8),
        ("entry_time > '1970-01-01 00:00:00.003' AND stream = 'orders'", 2, 2),
        ("entry_time < '1970-01-01 00:00:00.0025'", 2, 2),
        ("entry_time = '1970-01-01 00:00:00.012'", 1, 1),
    ],
)
def test_filters_on_stream_and_time_are_pushed_down(log, condition, expected, from_source) -> None:
    log.add("orders", *range(1, 6), ids="{}-0")
    log.add("other", *range(11, 16), ids="{}-0")
    frame = log.read(streams="orders,other").where(condition)
    assert frame.count() == expected
    assert scanned(frame) == from_source


def test_without_the_setting_spark_filters(log) -> None:
    log.add("orders", *range(1, 6), ids="{}-0")
    log.spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        frame = log.read().where("entry_time > '1970-01-01 00:00:00.003'")
        assert frame.count() == 2
    finally:
        log.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_a_time_of_another_zone_is_the_same_moment(log) -> None:
    log.add("orders", 1)
    moment = datetime.now(UTC) - timedelta(hours=1)
    assert log.read(startingOffsets=moment.isoformat()).count() == 1
    assert log.read(startingOffsets=(moment + timedelta(hours=2)).isoformat()).count() == 0


# --- misuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"streams": ""}, "name what to read"),
        ({"url": ""}, "say where Redis is"),
        ({"startingOffset": "latest"}, "did you mean startingOffsets"),
        ({"startingOffsets": "noon"}, "none of earliest, latest"),
        ({"maxOffsetsPerTrigger": "many"}, "whole number"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"dataType": "json"}, "choose 'binary' or 'string'"),
    ],
)
def test_wrong_options_are_named(log, options, said) -> None:
    with pytest.raises(Exception, match=said):
        log.read(**options).collect()
