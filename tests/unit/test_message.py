from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from conquiet import Acking, Message
from conquiet.errors import InvalidMessage
from conquiet.message import new_id, now_text


def test_attributes_have_properties_with_cloudevents_names():
    message = Message(
        b"{}",
        {
            "id": "a-1",
            "type": "order.placed",
            "source": "/shop",
            "subject": "order/7",
            "time": "2026-01-31T12:00:00Z",
            "expirytime": "2026-01-31T13:00:00+01:00",
            "correlationid": "c-1",
            "datacontenttype": "application/json; charset=utf-8",
        },
    )
    assert (message.id, message.type, message.source) == ("a-1", "order.placed", "/shop")
    assert (message.subject, message.correlationid) == ("order/7", "c-1")
    assert message.time == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert message.expirytime == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert message.datacontenttype == "application/json; charset=utf-8"


def test_missing_attributes_are_empty():
    message = Message(b"")
    assert (message.id, message.type, message.source, message.subject) == ("", "", "", "")
    assert message.time is None
    assert message.datacontenttype == "application/json"


@pytest.mark.parametrize("value", [7, None, b"x", ["a"]])
def test_an_attribute_of_the_wrong_kind_is_named(value):
    with pytest.raises(InvalidMessage, match=r"id=a-1 .*'subject' must be a string"):
        _ = Message(b"", {"id": "a-1", "subject": value}).subject


def test_a_time_that_is_none_is_named_with_an_example():
    with pytest.raises(InvalidMessage, match=r"'time' must be an RFC 3339 time such as .*'soon'"):
        _ = Message(b"", {"time": "soon"}).time


def test_a_time_without_zone_is_utc():
    assert Message(b"", {"time": "2026-01-31T12:00:00"}).time == datetime(
        2026, 1, 31, 12, tzinfo=UTC
    )


def test_the_key_is_the_partition_key_or_the_subject():
    assert Message(b"", {"partitionkey": "p", "subject": "s"}).key == "p"
    assert Message(b"", {"subject": "s"}).key == "s"
    assert Message(b"").key == ""


def test_identity_is_source_and_id_and_cannot_be_confused():
    one = Message(b"", {"source": "/a b", "id": "c"})
    two = Message(b"", {"source": "/a", "id": "b c"})
    assert one.identity == "/a%20b c"
    assert two.identity == "/a b c"


def test_locals_stay_behind_in_no_attribute():
    message = Message(b"", {"id": "1"})
    assert not message.has_locals
    message.locals["token"] = object()
    assert message.attributes == {"id": "1"}
    assert message.copy().locals.keys() == {"token"}


def test_a_copy_changes_attributes_and_leaves_the_original_alone():
    message = Message(b"x", {"id": "1", "subject": "s"}, topic="t", deliveries=3)
    twin = message.copy(subject=None, type="other")
    assert twin.attributes == {"id": "1", "type": "other"}
    assert (twin.data, twin.topic, twin.deliveries, twin.acking) == (b"x", None, 1, None)
    assert message.attributes == {"id": "1", "subject": "s"}


def test_settling_goes_to_the_acking():
    heard: list[object] = []
    message = Message(b"", acking=Acking.calling(lambda: heard.append("ack"), heard.append))
    assert message.ack()
    assert not message.nack(ValueError())
    assert heard == ["ack"]


def test_a_message_without_acking_settles_nothing():
    assert not Message(b"").ack()
    assert not Message(b"").nack()


def test_ids_are_uuid7_in_the_order_they_were_made():
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    first = uuid.UUID(ids[0])
    assert (first.version, first.variant) == (7, uuid.RFC_4122)
    assert abs((first.int >> 80) / 1000 - datetime.now(UTC).timestamp()) < 60


def test_a_clock_that_jumps_ahead_and_back_again_is_believed(monkeypatch):
    now = time.time_ns()
    monkeypatch.setattr("conquiet.message.time.time_ns", lambda: now + 3600 * 10**9)
    ahead = new_id()
    monkeypatch.setattr("conquiet.message.time.time_ns", lambda: now)
    back = [new_id() for _ in range(5_000)]
    assert back[0] < ahead
    assert back == sorted(back)
    monkeypatch.setattr("conquiet.message.time.time_ns", lambda: now - 10**9)
    assert new_id() > back[-1]  # a second is what clocks are set back by every day


def test_ids_from_many_threads_are_all_different():
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: new_id(), range(5_000)))
    assert len(set(ids)) == 5_000


def test_now_is_written_as_cloudevents_wants_it():
    assert now_text().endswith("Z")
    assert Message(b"", {"time": now_text()}).time is not None


def test_a_message_shows_what_it_is():
    assert repr(Message(b"secret", {"id": "1", "type": "t", "source": "/s"})) == (
        "<Message t id=1 source=/s>"
    )
