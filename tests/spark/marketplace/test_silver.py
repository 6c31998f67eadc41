"""Silver: one row per event id, the first delivery, however the deliveries are spread."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.spark.marketplace.entries import START, entry, envelope, frame, order, uuid
from tests.spark.marketplace.history import History, Order
from tests.spark.marketplace.tables import rows_of

from marketplace.pipeline.silver import events, events_quarantine, merged, silver

pytestmark = pytest.mark.slow


def delivery(second: int, body=None, **columns):
    place = {"entry_id": f"{second}-{columns.pop('count', 0)}"}
    body = envelope(1, order()) if body is None else body
    at = {"entry_time": START + timedelta(seconds=second)}
    return entry(1, "order_created", body, **place, **at, **columns)


def test_deliveries_of_one_event_are_one_row_in_one_batch_or_in_many(spark) -> None:
    deliveries = [
        delivery(5),
        delivery(3),
        delivery(9),
        delivery(3, count=10),
        delivery(3, count=9),
    ]
    at_once = silver(frame(spark, deliveries))
    one_by_one = merged(*(silver(frame(spark, [one])) for one in deliveries))
    assert rows_of(one_by_one) == rows_of(at_once)
    [row] = rows_of(events(at_once))
    assert row["event_id"] == uuid(1)
    assert row["first_seen_at"] == START + timedelta(seconds=3)
    assert row["delivery_count"] == 5
    assert rows_of(at_once)[0]["entry_id"] == "3-0"


def test_the_first_delivery_decides_even_if_it_is_found_last(spark) -> None:
    later, first = silver(frame(spark, [delivery(5)])), silver(frame(spark, [delivery(2, b"{")]))
    both = merged(later, first)
    assert rows_of(events(both)) == []
    [row] = rows_of(events_quarantine(both))
    assert (row["reason"], row["delivery_count"], row["data"]) == ("broken_json", 2, b"{")
    assert rows_of(both)[0]["order_id"] == order()["order_id"]  # to be made again without it


def test_entries_without_an_id_stay_apart(spark) -> None:
    nobody = [delivery(second, event_id=None, time=None) for second in (1, 2)]
    rows = rows_of(events_quarantine(silver(frame(spark, nobody))))
    assert [(row["event_id"], row["delivery_count"]) for row in rows] == [(None, 1)] * 2
    assert {row["entry_id"] for row in rows} == {"1-0", "2-0"}
    assert {row["day"] for row in rows} == {None}


def test_the_payload_is_kept_as_it_came(spark) -> None:
    body = b'{"version":1, "eventId":"%s","occurredAt":"2026-03-07T12:00:00Z" ,"data":%s}'
    import json

    text = json.dumps(order(line_title="x\u0000\u00e9")).encode()
    [row] = rows_of(events(silver(frame(spark, [delivery(1, body % (uuid(1).encode(), text))]))))
    assert row["payload"].encode() == body % (uuid(1).encode(), text)


def test_events_of_a_version_have_typed_columns(spark) -> None:
    from marketplace.pipeline.typed import typed, typed_names

    history = History()
    paid = Order(history, 1)
    paid.collects(1600, 2)
    paid.collects(7, 3)
    rows = events(history.silver(spark))
    names = typed_names()
    [created] = rows_of(typed(rows, names["order_created_v1"]))
    assert created["data"]["lines"][0]["qty"] == 2
    assert created["data"]["ship_to"] == {"postal_code": "60601"}
    collected = rows_of(typed(rows, names["cash_collected_v1"]))
    assert {(row["data"]["amount_cents"], row["data"]["collected_at"]) for row in collected} == {
        (1600, START + timedelta(days=2)),
        (7, START + timedelta(days=3)),
    }
    assert rows_of(typed(rows, names["ad_daily_rollup_ready_v1"])) == []
