"""The catalog, its envelopes, and the checks that come before any transaction."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum
from typing import Any

import msgspec
import pytest
from tests.integration.events.samples import NOON, filled, notification, one_of_each

from conquiet.errors import ConfigError, InvalidMessage
from conquiet.events import (
    ActorRef,
    Catalog,
    Envelope,
    ErrorEnvelope,
    ErrorRef,
    Event,
    InvalidEvent,
    UnknownEvent,
)
from conquiet.events.catalog import new_event_id
from conquiet.events.check import MAX_PAYLOAD_BYTES, check
from conquiet.events.outbox import statement
from marketplace import catalog as marketplace
from marketplace.catalog import CATALOG, AggregateType, EventType, NotificationRequested

ID = uuid.UUID("01900000-0000-7000-8000-000000000001")


def plain(**changes):
    data = {
        "notification_id": str(ID),
        "recipient_store_id": str(ID),
        "channel": "email",
        "kind": "welcome",
        **changes,
    }
    return {name: value for name, value in data.items() if value is not None}


def named(event_type="notification_requested", aggregate="notification", version=1, **changes):
    return CATALOG.event_of(
        event_type, aggregate, plain(**changes), aggregate_id=ID, version=version
    )


# --- the locked lists -----------------------------------------------------------------------


def test_the_lists_are_those_that_are_locked_no_more_and_no_fewer() -> None:
    assert [str(one) for one in AggregateType] == [
        *("vendor_order", "checkout_group", "license", "store", "media", "ledger_event"),
        *("notification", "ad"),
    ]
    assert [str(one) for one in EventType] == [
        *("order_created", "order_state_changed", "line_item_state_changed"),
        *("license_status_changed", "media_uploaded", "payment_settled", "cash_collected"),
        *("vendor_payout_recorded", "notification_requested", "order_expired", "order_canceled"),
        *("reservation_released", "ad_created", "ad_updated", "ad_paused", "ad_activated"),
        *("ad_expired", "ad_daily_rollup_ready"),
    ]


def test_every_event_type_has_a_declared_payload() -> None:
    assert {one.event_type for one in CATALOG.declarations} == set(EventType)


def test_every_published_type_is_accepted_by_a_declared_consumer() -> None:
    for event in one_of_each():
        takers = [one.name for one in CATALOG.consumers if event.event_type in one.accepts]
        assert takers, f"nobody takes {event.event_type}"
        payload = check(event).payload_json
        received = CATALOG.open(event.event_type, payload)
        assert received.data == event.data
        assert received.envelope.event_id == event.id


def test_payloads_are_snake_case_and_carry_no_names_phones_or_tokens() -> None:
    for declaration in CATALOG.declarations:
        for field in msgspec.structs.fields(declaration.data):
            assert field.encode_name == field.name
            assert not {"name", "phone", "token", "email"} & set(field.name.split("_"))


def test_the_relay_does_not_know_the_marketplace() -> None:
    import subprocess
    import sys

    code = (
        "import sys, conquiet.events.source, conquiet.relay;"
        " assert not any('marketplace' in name for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_consumer_needs_no_database_and_a_producer_no_redis() -> None:
    import subprocess
    import sys

    for module, foreign in (("idempotency", "sqlalchemy"), ("outbox", "redis")):
        code = f"import sys, conquiet.events.{module}; assert {foreign!r} not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)


# --- declaring ------------------------------------------------------------------------------


class Types(StrEnum):
    SOLD = "sold"


class Things(StrEnum):
    SHOP = "shop"
    TILL = "till"


class Sold(msgspec.Struct):
    cents: int


def test_what_is_not_in_the_enums_cannot_be_declared() -> None:
    catalog = Catalog(Types, Things)
    with pytest.raises(ConfigError, match="'bought' is not in the enum"):
        catalog.declare("bought", "shop")
    with pytest.raises(ConfigError, match="'mall' is not in the catalog"):
        catalog.declare("sold", "mall")
    with pytest.raises(ConfigError, match="whole numbers from 1 on"):
        catalog.declare("sold", "shop", 0)


def test_a_version_and_a_struct_are_declared_once() -> None:
    catalog = Catalog(Types, Things)
    catalog.declare("sold", "shop")(Sold)
    with pytest.raises(ConfigError, match="sold version 1 is declared twice"):
        catalog.declare("sold", "shop")
    with pytest.raises(ConfigError, match="Sold is declared twice"):
        catalog.declare("sold", "shop", 2)(Sold)


def test_versions_live_side_by_side() -> None:
    catalog = Catalog(Types, Things)
    catalog.declare("sold", "shop")(Sold)

    @catalog.declare("sold", "till", 2)
    class SoldAtTill(msgspec.Struct):
        cents: int
        till: str

    old, new = (catalog.event(one, aggregate_id=ID) for one in (Sold(5), SoldAtTill(5, "a")))
    assert [catalog.open("sold", check(one).payload_json).data for one in (old, new)] == [
        Sold(5),
        SoldAtTill(5, "a"),
    ]


def test_a_consumer_takes_only_what_is_declared() -> None:
    with pytest.raises(ConfigError, match="click is not declared"):
        Catalog(Types, Things).consumer("ads", ["click"])


def test_enum_values_need_no_quoting() -> None:
    with pytest.raises(ConfigError, match="snake_case"):
        Catalog(StrEnum("Odd", {"ODD": "it's"}), Things)


# --- envelopes ------------------------------------------------------------------------------


def test_the_envelope_has_the_locked_names() -> None:
    event = msgspec.structs.replace(notification(), actor=ActorRef("user", "u-1", ID))
    payload = msgspec.json.decode(check(event).payload_json)
    assert list(payload) == ["actor", "data", "eventId", "occurredAt", "version"]
    assert payload["actor"] == {"type": "user", "id": "u-1", "storeId": str(ID)}
    assert payload["eventId"] == str(event.id)
    assert payload["version"] == 1


def test_an_envelope_without_an_actor_leaves_it_out() -> None:
    assert '"actor"' not in check(notification()).payload_json


def test_times_are_written_in_utc_with_z() -> None:
    there = timezone(timedelta(hours=-6))
    event = notification(occurred_at=datetime(2026, 1, 31, 6, tzinfo=there))
    assert '"occurredAt":"2026-01-31T12:00:00Z"' in check(event).payload_json
    data = filled(marketplace.MediaUploaded)
    data.uploaded_at = NOON.astimezone(there)
    moved = CATALOG.event(data, aggregate_id=ID)
    assert '"uploaded_at":"2026-01-31T12:00:00Z"' in check(moved).payload_json


def test_the_same_content_is_the_same_bytes() -> None:
    event = notification()
    assert check(event) == check(event)
    assert " " not in check(event).payload_json


def test_an_error_envelope_has_names_like_the_others() -> None:
    made = ErrorEnvelope(
        version=1, event_id=ID, occurred_at=NOON, consumer="mailer", error=ErrorRef("gone", "410")
    )
    assert msgspec.json.decode(msgspec.json.encode(made)) == {
        "version": 1,
        "eventId": str(ID),
        "occurredAt": "2026-01-31T12:00:00Z",
        "consumer": "mailer",
        "error": {"code": "gone", "message": "410"},
    }


def test_a_reader_passes_over_fields_that_it_does_not_know() -> None:
    payload = msgspec.json.decode(check(notification()).payload_json)
    payload["later"] = payload["data"]["later"] = "added within the version"
    received = CATALOG.open("notification_requested", msgspec.json.encode(payload))
    assert isinstance(received.data, NotificationRequested)


def test_unknown_types_and_versions_are_told_apart_from_broken_payloads() -> None:
    payload = msgspec.json.decode(check(notification()).payload_json)
    with pytest.raises(UnknownEvent, match="ad_clicked version 1; known versions: none"):
        CATALOG.open("ad_clicked", msgspec.json.encode(payload))
    with pytest.raises(UnknownEvent, match="known versions: 1"):
        CATALOG.open("notification_requested", msgspec.json.encode({**payload, "version": 9}))
    with pytest.raises(InvalidMessage, match="not an envelope"):
        CATALOG.open("notification_requested", b"[]")
    with pytest.raises(InvalidMessage, match="notification_requested version 1"):
        CATALOG.open("notification_requested", msgspec.json.encode({**payload, "data": None}))


def test_an_envelope_keeps_its_data_as_it_came() -> None:
    payload = check(notification()).payload_json
    assert bytes(Envelope.read(payload).data) in payload.encode()


# --- what is refused ------------------------------------------------------------------------


class Loud(msgspec.Struct):
    cents: int


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (named("ad_clicked"), "its type is not in the catalog"),
        (named(aggregate="mall"), "aggregate type 'mall' is not in the catalog"),
        (named(aggregate="ad"), "it belongs to aggregate notification, not ad"),
        (named(version=2), "version 2 is not declared; known: 1"),
        (named(channel=7), "its data does not fit: .*`str`, got `int`"),
        (named(channel=None), "missing required field `channel`"),
        (named(phone="1"), "unknown fields: phone"),
        (named(channel="a\0b"), "NUL in a text"),
        (named(channel="x" * MAX_PAYLOAD_BYTES), "262144 are allowed"),
        (named(channel="\ud800"), "cannot be written as JSON"),
        (named(channel=object()), "cannot be written as JSON"),
        (notification(occurred_at=datetime(2026, 1, 1)), "has no offset"),
        (notification(id=uuid.uuid4()), "must be a UUIDv7"),
        (notification(id=str(ID)), "id must be a UUID, not str"),
        (notification(aggregate_id="7"), "aggregate_id must be a UUID, not str"),
        (notification(actor=ActorRef("robot", "r")), "cannot be written as JSON"),
        (notification(actor={"type": "user", "id": "1"}), "must be an ActorRef, not dict"),
        (notification(occurred_at="2026"), "must be a datetime, not str"),
        ([notification()], "list is not an event: .* emit\\(session, \\*events\\)"),
    ],
)
def test_an_event_is_refused_with_what_to_change(event, why: str) -> None:
    with pytest.raises(InvalidEvent, match=why):
        check(event)


class Line(msgspec.Struct):
    sku: str
    weight: float = 0.0


class Shipped(msgspec.Struct, omit_defaults=True):
    lines: list[Line]
    by: dict[str, Line] = {}


def shipped(**data: Any) -> Event:
    catalog = Catalog(StrEnum("T", {"A": "shipped"}), StrEnum("G", {"A": "parcel"}))
    catalog.declare("shipped", "parcel")(Shipped)
    return catalog.event_of("shipped", "parcel", data, aggregate_id=ID)


def test_unknown_fields_are_refused_at_every_level() -> None:
    with pytest.raises(InvalidEvent, match=r"unknown fields: lines\.1\.phone, by\.x\.name"):
        check(
            shipped(
                lines=[{"sku": "a"}, {"sku": "b", "phone": "1"}],
                by={"x": {"sku": "c", "name": "n"}},
            )
        )
    check(shipped(lines=[{"sku": "a", "weight": 0.0}], by={}))  # defaults, given


def test_what_is_no_number_of_json_is_refused_and_not_stored_as_null() -> None:
    with pytest.raises(InvalidEvent, match="nan is not a JSON number"):
        check(shipped(lines=[{"sku": "a", "weight": float("nan")}]))


@pytest.mark.parametrize("data", [int, dict, "Struct", object()])
def test_only_structs_are_declared(data: Any) -> None:
    catalog = Catalog(StrEnum("T", {"A": "shipped"}), StrEnum("G", {"A": "parcel"}))
    with pytest.raises(ConfigError, match=r"must be a msgspec\.Struct"):
        catalog.declare("shipped", "parcel")(data)
    with pytest.raises(ConfigError, match="whole numbers from 1 on"):
        catalog.declare("shipped", "parcel", "1")  # type: ignore[arg-type]


def test_the_same_event_twice_in_one_call_is_refused() -> None:
    event = notification()
    with pytest.raises(ConfigError, match="the same event twice"):
        statement(event, event)


def test_a_struct_that_nobody_declared_is_no_event() -> None:
    with pytest.raises(InvalidEvent, match="Loud is not declared"):
        CATALOG.event(Loud(1), aggregate_id=ID)


def test_a_struct_with_wrong_values_is_refused_though_its_constructor_took_them() -> None:
    data = NotificationRequested(ID, ID, "email", 7)
    with pytest.raises(InvalidEvent, match="does not fit"):
        check(CATALOG.event(data, aggregate_id=ID))


def test_a_backslash_before_u0000_is_no_nul() -> None:
    assert "u0000" in check(named(channel="\\u0000")).payload_json


def test_ids_are_uuidv7_and_ascend() -> None:
    ids = [new_event_id() for _ in range(1000)]
    assert ids == sorted(ids)
    assert {id_.version for id_ in ids} == {7}


def test_an_event_occurs_now_unless_said_otherwise() -> None:
    assert abs(notification().occurred_at - datetime.now(UTC)) < timedelta(minutes=1)
