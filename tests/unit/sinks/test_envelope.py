"""What every sink sends."""

from __future__ import annotations

from typing import Any

import pytest

from conquiet.errors import HandlerError, InvalidMessage
from conquiet.message import Message
from conquiet.relay.sinks.envelope import pack

GIVEN = {"id": "1", "type": "sold", "source": "/shop"}


def test_attributes_go_along_as_text() -> None:
    more = {"count": 7, "paid": True, "token": b"\x00\xff", "datacontenttype": "text/plain"}
    envelope = pack(Message(b"x", {**GIVEN, **more}))
    assert envelope.body == b"x"
    assert envelope.content_type == "text/plain"
    assert envelope.attributes == {
        **GIVEN,
        "specversion": "1.0",
        "count": "7",
        "paid": "true",
        "token": "AP8=",
    }


def test_what_consumers_filter_by_goes_without_a_prefix() -> None:
    time = "2026-01-31T12:00:00Z"
    named = {"aggregate_type": "store", "aggregate_id": "s-1", "created_at": time}
    assert pack(Message(b"", {**GIVEN, **named})).headers("ce-") == {
        "ce-id": "1",
        "ce-type": "sold",
        "ce-source": "/shop",
        "ce-specversion": "1.0",
        "event_id": "1",
        "event_type": "sold",
        "aggregate_type": "store",
        "aggregate_id": "s-1",
        "created_at": time,
    }


def test_names_as_cloudevents_spells_them_serve_as_well() -> None:
    named = {"aggregatetype": "store", "aggregateid": "s-1", "time": "2026-01-31T12:00:00Z"}
    envelope = pack(Message(b"", {**GIVEN, **named}))
    assert envelope.plain["aggregate_type"] == "store"
    assert envelope.plain["aggregate_id"] == "s-1"
    assert envelope.plain["created_at"] == "2026-01-31T12:00:00Z"


def test_the_subject_of_a_domain_event_is_its_aggregate() -> None:
    assert "aggregate_id" not in pack(Message(b"", {**GIVEN, "subject": "s-1"})).plain
    event = pack(Message(b"", {**GIVEN, "subject": "s-1", "aggregatetype": "store"}))
    assert event.plain["aggregate_id"] == "s-1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": ""},
        {"id": 7},
        {"some_name": "x"},
        {"Upper": "x"},
        {"lonely": "\ud800"},
        {"fraction": 1.5},
    ],
)
def test_what_no_sink_could_send_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        pack(Message(b"", {**GIVEN, **wrong}))


def test_data_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(HandlerError):
        pack(Message(object(), GIVEN))
