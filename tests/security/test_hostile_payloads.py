"""What hurts is refused with the room's own error; the message dies, and the process lives."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest
from tests.security.hostile import DEEP_LIST, DEEP_OBJECT, HURTING, refusal

from conquiet import Message, Router, Worker
from conquiet.codec import decoder, from_json, to_json
from conquiet.errors import InvalidMessage
from conquiet.jsonlines import LinesSink, LinesSource
from conquiet.memory import Store, Transaction
from conquiet.middleware import JsonSchema
from conquiet.middleware.dead_letter import replay
from conquiet.operations.dead_letter_queues import _headers
from conquiet.operations.dead_letter_streams import original_fields
from conquiet.operations.text import whole
from conquiet.queue import message as queue_message
from conquiet.redis.dead_letter import UNREADABLE_TYPE
from conquiet.redis.entry import from_fields, to_fields

ATTRIBUTES = {"specversion": "1.0", "id": "1", "type": "t", "source": "/s"}
EVENT = b'{"specversion":"1.0","id":"1","type":"t","source":"/s",%s}'
MEMBERS = {
    "data": b'"data":%s',
    "data as text": b'"datacontenttype":"text/plain","data":%s',
    "data as base64": b'"data_base64":%s',
    "an attribute": b'"more":%s',
    "a number too long to be shown": b'"deadattempts":%s',
}


class Order(msgspec.Struct):
    a: Any


@dataclass
class Line:
    a: Any


class Model(pydantic.BaseModel):
    a: Any


hurting = pytest.mark.parametrize("value", HURTING.values(), ids=HURTING)


def refused_or_read(decode, *given, by=InvalidMessage):
    error = refusal(decode, *given, by=by)
    assert error is None or len(str(error)) < 2_000, "an error must not repeat the whole message"
    return error


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
@hurting
def test_a_structured_event(member, value) -> None:
    event = EVENT % (member % value)
    refused_or_read(from_json, event)
    refused_or_read(from_fields, [b"cloudevent", event])


@pytest.mark.parametrize("kind", [dict, Order, Line, Model, dict[str, Any]])
@hurting
def test_typed_data(kind, value) -> None:
    message = Message(b'{"a":%s}' % value, dict(ATTRIBUTES))
    refused_or_read(decoder(kind), message)


@hurting
def test_data_under_a_schema(value) -> None:
    schema = JsonSchema({"t": {"type": "object", "properties": {"a": {"type": "string"}}}})
    refused_or_read(schema.admit, Message(b'{"a":%s}' % value, dict(ATTRIBUTES)))


@hurting
def test_a_payload_of_the_queue(value) -> None:
    # ValueError itself, which the queue makes a MalformedEntryError of
    error = refused_or_read(queue_message.decode, [b"data", b'{"a":%s}' % value], by=ValueError)
    assert type(error) in (type(None), ValueError)


@hurting
def test_what_is_written_can_be_read_again(value) -> None:
    """Data that is no JSON, or more than a reader of JSON would bear, goes as base64."""
    data = b'{"a":%s}' % value
    event = to_json(Message(data, dict(ATTRIBUTES)))
    event.decode()
    assert from_json(event).data == data


@pytest.mark.parametrize("text", ["\ud800", "a\udcff"])
def test_an_attribute_that_is_no_text_is_refused(text) -> None:
    message = Message(b"{}", {**ATTRIBUTES, "more": text})
    for write in (to_json, to_fields):
        with pytest.raises(InvalidMessage, match="t id=1 source=/s"):
            write(message)


@hurting
def test_dead_letters_of_others(value) -> None:
    refused_or_read(original_fields, value, {**ATTRIBUTES, "type": UNREADABLE_TYPE})
    text = value.decode(errors="surrogateescape")
    letter = {**ATTRIBUTES, "deadreason": "no", "deadattributes": text}
    refused_or_read(replay, Message(b"", letter))
    assert isinstance(_headers(b'{"headers":%s}' % value), dict)
    assert whole(text) == 0


def test_the_last_of_several_members_of_one_name_counts() -> None:
    """Of JSON that says a thing twice, all rooms read the same: nobody is told two things."""
    event = EVENT % b'"id":"2","data":1,"data":2'
    message = from_json(event)
    assert (message.id, message.data) == ("2", b"2")
    assert decoder(dict)(Message(b'{"a":1,"a":2}', dict(ATTRIBUTES))) == {"a": 2}
    assert queue_message.decode([b"data", b'{"a":1,"a":2}']) == {"a": 2}
    fields = [b"specversion", b"1.0", b"id", b"1", b"id", b"2"]
    assert from_fields(fields)[1]["id"] == "2"


def test_a_worker_buries_them_all_and_goes_on() -> None:
    """Handlers see none of it, and what is good among it is handled."""
    seen: list[Any] = []
    router = Router(max_data_bytes=1_000_000)

    @router.event(type="t")
    def take(order: Order) -> None:
        seen.append(order.a)

    good = EVENT % b'"data":{"a":"good"}'
    lines = [EVENT % b'"data":{"b":%s}' % value for value in HURTING.values()]
    lines += [EVENT % b'"data":%s' % DEEP_LIST, EVENT % b'"data":%s' % DEEP_OBJECT]
    lines += [EVENT % b'"data":{"a":"%s"}' % (b"x" * 1_000_001), b"\x00\xff", good]
    letters, stream = io.BytesIO(), io.BytesIO(b"\n".join(lines))
    source = LinesSource(stream, LinesSink(letters), max_attempts=1)
    worker = Worker(source, router, LinesSink(io.BytesIO()))
    assert worker.run()
    assert seen == ["good"]
    assert source.dead == len(lines) - 1
    reasons = [from_json(line).attributes["deadreason"] for line in letters.getvalue().splitlines()]
    assert len(reasons) == source.dead
    assert all("InvalidMessage" in reason for reason in reasons)


def test_validation_comes_before_the_transaction_and_the_handler() -> None:
    """By the type that a handler takes, and by JSON Schema where one is given."""
    calls: list[str] = []
    router = Router()
    router.use(JsonSchema({"raw": {"type": "object", "required": ["id"]}}))

    class Watched(Transaction):
        def scope(self, batch):
            calls.append("begin")
            return super().scope(batch)

    router.use(Watched(Store()))

    @router.event(type="typed")
    def typed(order: Order) -> None:
        calls.append("typed")

    @router.raw(type="raw")
    def raw(message: Message[bytes]) -> None:
        calls.append("raw")

    batch = [
        Message(b'{"b": 1}', {**ATTRIBUTES, "type": "typed"}),
        Message(b'{"name": 1}', {**ATTRIBUTES, "type": "raw"}),
    ]
    results = router.process(batch)
    assert [type(result) for result in results] == [InvalidMessage, InvalidMessage]
    assert "missing required field `a`" in str(results[0])
    assert "'id' is a required property" in str(results[1])
    assert calls == []
