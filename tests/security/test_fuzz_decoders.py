"""Whatever bytes a broker hands over, a decoder returns or raises the error of its room."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
from hypothesis import given
from hypothesis import strategies as st
from tests.security.hostile import damaged, fuzzed, refusal, values

from conquiet import Message
from conquiet.codec import decoder, from_json, to_json
from conquiet.errors import ConquietError, InvalidMessage
from conquiet.jsonlines import LinesSink, LinesSource
from conquiet.message import describe
from conquiet.middleware.dead_letter import replay
from conquiet.operations.dead_letter_streams import original_fields
from conquiet.operations.dead_letters import letter_of
from conquiet.operations.streams import decode
from conquiet.queue import message as queue_message
from conquiet.redis.consumer import Delivery
from conquiet.redis.dead_letter import UNREADABLE_TYPE, to_dead_letter
from conquiet.redis.entry import from_fields
from conquiet.relay.sinks.envelope import pack
from conquiet.source import EndOfSource

ATTRIBUTES = {"specversion": "1.0", "id": "1", "type": "t", "source": "/s"}
NAMES = ["id", "type", "source", "specversion", "time", "expirytime", "datacontenttype", "data"]

members = st.dictionaries(
    st.sampled_from([*NAMES, "data_base64", "subject", "deadattempts"]) | st.text(max_size=10),
    values,
    max_size=5,
).map(lambda more: {**ATTRIBUTES, **more})
documents = members.map(lambda event: json.dumps(event).encode())
events = st.binary(max_size=60) | documents | damaged(documents)

names = st.sampled_from(
    [name.encode() for name in (*NAMES, "cloudevent", ":topic", "deadreason", "deadattempts")]
) | st.binary(max_size=10)
fields = st.lists(st.tuples(names, st.binary(max_size=20) | events), max_size=6).map(
    lambda pairs: [item for pair in pairs for item in pair]
)
whole_fields = fields.map(lambda more: [b"specversion", b"1.0", b"id", b"1", b"type", b"t", *more])
entries = fields | whole_fields | st.lists(st.binary(max_size=8), max_size=5)


class Order(msgspec.Struct):
    id: int
    name: str = ""
    more: dict[str, float] = {}


@dataclass
class Line:
    id: int
    parts: list[str]


class Model(pydantic.BaseModel):
    id: int


DECODERS = [decoder(kind) for kind in (Order, Line, Model, dict, bytes)]


@fuzzed()
@given(events)
def test_structured_events(event) -> None:
    try:
        message = from_json(event)
    except InvalidMessage:
        return
    again = from_json(to_json(message))
    assert again.attributes == message.attributes
    for name in ("time", "expirytime"):
        error = refusal(getattr, message, name)
        assert error is None or name in str(error)
    pack(message)


@fuzzed()
@given(entries)
def test_entries_of_streams(found) -> None:
    try:
        data, attributes, topic = from_fields(list(found))
    except InvalidMessage:
        pass
    else:
        assert type(data) is bytes
        assert topic is None or type(topic) is str
        describe(attributes)
    if len(found) % 2 == 0:  # as Redis has them
        decode("orders", b"1-1", list(found))


class _Stream:
    name = origin = topic = "orders"
    decode = staticmethod(from_fields)


@fuzzed(40)
@given(whole_fields | fields, st.text(max_size=20))
def test_whatever_an_entry_holds_its_dead_letter_gives_it_back(found, why) -> None:
    delivery = Delivery(_Stream(), b"1-1", list(found), 3, 0.0)
    data, attributes, _ = from_fields(to_dead_letter(delivery, 3, InvalidMessage(why)))
    assert letter_of("1-1", attributes, data).stream == "orders"
    again = original_fields(data, attributes)
    if attributes["type"] == UNREADABLE_TYPE:
        assert again == found


@fuzzed()
@given(st.dictionaries(st.sampled_from(["deadreason", "deadattributes", "id"]), st.text()), events)
def test_dead_letters_of_others(attributes, data) -> None:
    letter_of("1", attributes, data)
    refusal(replay, Message(data, dict(attributes)))
    refusal(original_fields, data, {**attributes, "type": UNREADABLE_TYPE})


@fuzzed()
@given(st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()) | events)
def test_typed_data(data) -> None:
    message = Message(data, dict(ATTRIBUTES))
    for each in DECODERS:
        error = refusal(each, message)
        assert error is None or "t id=1 source=/s" in str(error)


@fuzzed()
@given(entries | events.map(lambda data: [b"data", data]) | st.none())
def test_payloads_of_the_queue(found) -> None:
    error = refusal(queue_message.decode, found, by=ValueError)
    assert type(error) in (type(None), ValueError)


@fuzzed(40)
@given(st.lists(events, max_size=4), st.integers(1, 200))
def test_lines(lines, longest) -> None:
    """Every line that is not blank is delivered or dead; none is lost, and none stops the rest."""
    content, letters = b"\n".join(lines), io.BytesIO()
    source = LinesSource(io.BytesIO(content), LinesSink(letters), max_line_bytes=longest)
    count = 0
    try:
        while True:
            for message in source.read(10, 0):
                count += message.ack()
    except EndOfSource:
        pass
    source.close()
    assert count + source.dead == sum(bool(line.strip()) for line in content.split(b"\n"))
    assert len(letters.getvalue().splitlines()) == source.dead


attribute_values = st.text(max_size=10) | st.binary(max_size=5) | values


@fuzzed()
@given(
    st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), attribute_values, max_size=5),
    st.none() | st.binary(max_size=20) | values,
)
def test_what_a_handler_sends_is_sent_or_refused(attributes: dict[str, Any], data: Any) -> None:
    message: Message[Any] = Message(data, {**ATTRIBUTES, **attributes})
    for write in (to_json, pack):
        error = refusal(write, message, by=ConquietError)
        assert error is None or str(error)
    describe(message.attributes)
