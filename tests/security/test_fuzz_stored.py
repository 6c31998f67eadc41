"""What lies in a store for later is read, refused by the room's own error, or shown as it is."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.security.hostile import HURTING, damaged, fuzzed, refusal, values

from conquiet import Message
from conquiet.acking import Acking
from conquiet.errors import InvalidMessage
from conquiet.events.catalog import Catalog
from conquiet.events.source import EventRow as DomainRow
from conquiet.events.source import EventSource
from conquiet.kombu.topology import decode_binding, encode_binding
from conquiet.middleware import JsonSchema
from conquiet.operations.dead_letter_queues import KombuLetters
from conquiet.operations.dead_letters import FileLetters, Filter
from conquiet.operations.trace import _source
from conquiet.redis.entry import to_fields
from conquiet.relay.sinks.envelope import pack
from conquiet.sql.outbox_source import OutboxRow, OutboxSource
from conquiet.web import words

EVENT = {"specversion": "1.0", "id": "1", "type": "sold", "source": "/shop"}
ENVELOPE = {
    "version": 1,
    "eventId": "01900000-0000-7000-8000-000000000001",
    "occurredAt": "2026-01-31T12:00:00Z",
    "actor": {"type": "user", "id": "7"},
    "data": {"total_cents": 499},
}
texts = values.map(json.dumps) | st.text(max_size=30) | st.sampled_from(sorted(HURTING))


class EventType(StrEnum):
    SOLD = "sold"


class AggregateType(StrEnum):
    ORDER = "order"


CATALOG = Catalog(EventType, AggregateType)


@CATALOG.declare("sold", "order")
class Sold(msgspec.Struct):
    total_cents: int
    note: str | None = None


# --- envelopes ------------------------------------------------------------------------------

envelopes = st.fixed_dictionaries(
    {}, optional={name: values | st.just(good) for name, good in ENVELOPE.items()}
).map(lambda changed: json.dumps({**ENVELOPE, **changed}).encode())


def opened(payload: bytes) -> None:
    error = refusal(CATALOG.open, "sold", payload)
    assert error is None or str(error).startswith("sold")


@fuzzed()
@given(envelopes | damaged(envelopes) | st.binary(max_size=40))
def test_envelopes_of_domain_events(payload) -> None:
    opened(payload)


@pytest.mark.parametrize("place", ["data", "version", "eventId", "occurredAt", "actor", "more"])
@pytest.mark.parametrize("name", HURTING)
def test_an_envelope_with_what_hurts(name, place) -> None:
    whole = {key: json.dumps(value).encode() for key, value in ENVELOPE.items()}
    whole[place] = HURTING[name]
    opened(b"{%s}" % b",".join(b'"%s":%s' % (key.encode(), text) for key, text in whole.items()))


# --- rows of outboxes -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources():
    made = OutboxSource("sqlite://", wakeup=False), EventSource("sqlite://", wakeup=False)
    yield made
    for one in made:
        one.close()


def sent(message: Message[bytes]) -> None:
    """The message of a row goes out, or is refused for itself."""
    for write in (pack, lambda one: to_fields(one)):
        refusal(write, message)


@fuzzed()
@given(attributes=texts, data=st.binary(max_size=20), words=st.lists(st.text(), min_size=5))
def test_rows_of_an_outbox(sources, attributes, data, words) -> None:
    topic, kind, event_id, key, content_type = words[:5]
    row = OutboxRow(1, topic, kind, event_id, key or None, content_type, data, attributes, 0)
    try:
        message = sources[0]._message(row, Acking.calling(lambda: None, lambda error: None))
    except InvalidMessage:
        return
    sent(message)


@fuzzed()
@given(payload=texts, kind=st.text(max_size=10))
def test_rows_of_domain_events(sources, payload, kind) -> None:
    row = DomainRow(
        id=UUID(int=1),
        event_type=kind,
        aggregate_type="order",
        aggregate_id=UUID(int=7),
        payload_json=payload,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        attempt_count=0,
    )
    try:
        message = sources[1]._message(row, Acking.calling(lambda: None, lambda error: None))
    except InvalidMessage:
        return
    sent(message)


@fuzzed()
@given(texts)
def test_the_source_of_a_row_that_is_traced(attributes) -> None:
    assert isinstance(_source(attributes), str)


# --- what operators look at -----------------------------------------------------------------

lines = st.lists(
    st.binary(max_size=40)
    | st.dictionaries(st.sampled_from(["deadreason", "deadattributes", "data"]), values).map(
        lambda more: json.dumps({**EVENT, **more}).encode()
    )
    | st.sampled_from(sorted(HURTING.values())),
    max_size=4,
)


def readable(*shown: object) -> None:
    """A page and a terminal can show it."""
    for item in shown:
        str(item).encode()


@fuzzed()
@given(lines)
def test_dead_letters_in_a_file(found) -> None:
    content = b"\n".join(found)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        letters = [letter for letter, _ in FileLetters(file.name).scan(Filter())]
    assert len(letters) == sum(bool(line.strip()) for line in content.split(b"\n"))
    for letter in letters:
        readable(letter.reason, letter.event_id, letter.attributes, letter.data)


headers = st.dictionaries(st.sampled_from(["id", "task", "origin", "retries"]), values)
kombu = values | headers.map(lambda given: {"headers": given, "body": ""})


@fuzzed()
@given(
    kombu.map(lambda message: json.dumps(message).encode())
    | st.sampled_from([b'{"headers": {"task": %s}}' % value for value in HURTING.values()])
    | st.binary(max_size=20),
    st.binary(max_size=10),
)
def test_dead_letters_of_kombu(payload, number) -> None:
    named = {b"m": payload, b"reason": number, b"deliveries": number, b"id": number}
    letter = KombuLetters._letter(_Queue(), b"1-1", named)
    readable(letter.event_id, letter.event_type, letter.source, letter.data)
    readable(*letter.attributes, *letter.attributes.values(), letter.attempts, letter.reason)


class _Queue(KombuLetters):
    """One that is connected to nothing."""

    def __init__(self) -> None:
        self.queue = "mail"


@fuzzed()
@given(texts | st.sampled_from([value.decode(errors="replace") for value in HURTING.values()]))
def test_payloads_on_a_page(text) -> None:
    readable(words.payload(text))


# --- bindings and schemas -------------------------------------------------------------------


@fuzzed()
@given(st.binary(max_size=20) | values.map(lambda value: json.dumps(value).encode()))
def test_bindings_of_strangers(member) -> None:
    found = decode_binding(member)
    assert found is None or all(isinstance(part, str) for part in found)
    assert decode_binding(encode_binding("a.*", None, "mail").encode()) == ("a.*", "", "mail")


SCHEMA = JsonSchema({"sold": {"type": "object", "properties": {"n": {"type": "integer"}}}})


@fuzzed()
@given(st.binary(max_size=20) | values.map(lambda value: json.dumps(value).encode()))
def test_data_that_has_a_schema(data) -> None:
    error = refusal(SCHEMA.admit, Message(data, dict(EVENT)))
    assert error is None or "sold id=1 source=/shop" in str(error)


@pytest.mark.parametrize("name", HURTING)
def test_what_hurts_and_has_a_schema(name) -> None:
    refusal(SCHEMA.admit, Message(b'{"n": %s}' % HURTING[name], dict(EVENT)))
