"""Structured CloudEvents JSON, checked against the official package, and typed data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypedDict

import msgspec
import pydantic
import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from conquiet import Message
from conquiet.codec import decoder, encode_data, from_json, to_json
from conquiet.errors import ConfigError, HandlerError, InvalidMessage

REQUIRED = {"id": "1", "type": "t", "source": "/s"}


class Order(msgspec.Struct):
    id: int
    name: str = ""


@dataclass
class Line:
    id: int


class Model(pydantic.BaseModel):
    id: int


class Typed(TypedDict):
    id: int


@pytest.mark.parametrize("kind", [Order, Line, Model, Typed, dict, dict[str, int]])
def test_data_becomes_what_the_handler_takes(kind):
    value = decoder(kind)(Message(b'{"id": 7}', dict(REQUIRED)))
    assert (value["id"] if isinstance(value, dict) else value.id) == 7


@pytest.mark.parametrize("kind", [Order, Line, Model, Typed])
def test_data_that_does_not_fit_names_the_message_the_type_and_the_place(kind):
    with pytest.raises(InvalidMessage, match=f"t id=1 .*not a valid {kind.__name__}.*id"):
        decoder(kind)(Message(b'{"id": "seven"}', dict(REQUIRED)))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b'{"id": 1} x'])
@pytest.mark.parametrize("kind", [Order, Model, dict])
def test_invalid_json_is_an_invalid_message(kind, data):
    with pytest.raises(InvalidMessage, match="id=1"):
        decoder(kind)(Message(data, dict(REQUIRED)))


@pytest.mark.parametrize("kind", [Order, Model, dict])
def test_a_depth_bomb_is_an_invalid_message(kind):
    bomb = b'{"id":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    with pytest.raises(InvalidMessage):
        decoder(kind)(Message(bomb, dict(REQUIRED)))


def test_bytes_come_as_they_are_whatever_the_content_type():
    message = Message(b"\x00\xff", {"datacontenttype": "image/png"})
    assert decoder(bytes)(message) == b"\x00\xff"


def test_structs_are_not_read_from_other_content_types():
    with pytest.raises(InvalidMessage, match="let the handler take bytes"):
        decoder(Order)(Message(b"<id>7</id>", {**REQUIRED, "datacontenttype": "application/xml"}))


def test_typed_data_passes_without_a_detour():
    order = Order(7)
    assert decoder(Order)(Message(order)) is order
    assert decoder(Order)(Message({"id": 7})) == order


@pytest.mark.parametrize("kind", [int, str, list, object, None])
def test_what_cannot_be_read_is_refused_at_registration(kind):
    with pytest.raises(ConfigError, match="use a msgspec Struct"):
        decoder(kind)


@pytest.mark.parametrize(
    "data", [Order(7, "ü"), Line(7), Model(id=7), {"id": 7}, b'{"id":7}', bytearray(b'{"id":7}')]
)
def test_data_is_written_as_json(data):
    assert json.loads(encode_data(Message(data)))["id"] == 7


def test_data_that_json_cannot_carry_is_the_handlers_fault():
    with pytest.raises(HandlerError, match="type object cannot be written as JSON"):
        encode_data(Message(object(), dict(REQUIRED)))
    with pytest.raises(HandlerError, match="give the data as bytes"):
        encode_data(Message(Order(1), {**REQUIRED, "datacontenttype": "text/csv"}))


# --- structured JSON ---------------------------------------------------------------------------


def test_the_official_package_reads_what_we_write():
    ours = Message(
        Order(7, "ü"),
        {**REQUIRED, "specversion": "1.0", "time": "2026-01-31T12:00:00Z", "tries": 3, "hot": True},
    )
    theirs = JSONFormat().read(CloudEvent, to_json(ours))
    assert theirs.get_id() == "1"
    assert theirs.get_type() == "t"
    assert theirs.get_source() == "/s"
    assert theirs.get_data() == {"id": 7, "name": "ü"}
    assert theirs.get_extension("tries") == 3
    assert theirs.get_extension("hot") is True


def test_the_official_package_reads_our_binary_data():
    ours = Message(b"\x00\xff", {**REQUIRED, "datacontenttype": "application/octet-stream"})
    assert JSONFormat().read(CloudEvent, to_json(ours)).get_data() == b"\x00\xff"


@pytest.mark.parametrize(
    ("data", "content_type", "expected"),
    [
        ({"id": 7}, "application/json", b'{"id":7}'),
        ("hello", "text/plain", b"hello"),
        (b"\x00\xff", "application/octet-stream", b"\x00\xff"),
    ],
)
def test_we_read_what_the_official_package_writes(data, content_type, expected):
    theirs = CloudEvent(
        {"id": "1", "type": "t", "source": "/s", "datacontenttype": content_type, "tries": 3}, data
    )
    ours = from_json(JSONFormat().write(theirs))
    assert ours.data.replace(b" ", b"") == expected
    assert ours.attributes["tries"] == 3
    assert ours.datacontenttype == content_type


@given(
    st.binary(max_size=200),
    st.sampled_from(["application/json", "text/plain", "application/octet-stream", "x/y+json"]),
    st.dictionaries(
        st.from_regex(r"x[a-z0-9]{1,10}", fullmatch=True),
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"])),
            st.booleans(),
            st.integers(-(2**31), 2**31 - 1),
        ),
        max_size=4,
    ),
)
def test_every_message_comes_back_as_it_was(data, content_type, extensions):
    message = Message(data, {**REQUIRED, "datacontenttype": content_type, **extensions})
    back = from_json(to_json(message))
    if message.datacontenttype.endswith("json") and b'"data":' in to_json(message):
        assert json.loads(back.data) == json.loads(data)  # white space around JSON is not data
    else:
        assert back.data == data
    assert back.attributes == {**message.attributes, "specversion": "1.0"}


def test_data_that_is_not_the_json_it_claims_to_be_is_still_carried():
    message = Message(b'{"broken', {**REQUIRED, "datacontenttype": "application/json"})
    assert from_json(to_json(message)).data == b'{"broken'


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (b"", "not a CloudEvents JSON object"),
        (b"[]", "not a CloudEvents JSON object"),
        (b"\xff", "not a CloudEvents JSON object"),
        (b'{"a":' + b"[" * 100_000, "not a CloudEvents JSON object"),
        (b'{"id":"1","source":"/s","specversion":"1.0"}', "'type' is missing or empty"),
        (b'{"id":1,"type":"t","source":"/s","specversion":"1.0"}', "'id' must be a string"),
        (b'{"id":"","type":"t","source":"/s","specversion":"1.0"}', "'id' is missing or empty"),
        (b'{"id":"1","type":"t","source":"/s"}', "specversion must be '1.0'"),
        (b'{"id":"1","type":"t","source":"/s","specversion":"0.3"}', "not '0.3'"),
        (b'{"id":"1","type":"t","source":"/s","specversion":"1.0","Bad-Name":"x"}', "a-z and 0-9"),
        (b'{"id":"1","type":"t","source":"/s","specversion":"1.0","x":1.5}', "without fraction"),
        (b'{"id":"1","type":"t","source":"/s","specversion":"1.0","x":{}}', "not dict"),
        (
            b'{"id":"1","type":"t","source":"/s","specversion":"1.0","datacontenttype":7}',
            "'datacontenttype' must be a string",
        ),
        (
            b'{"id":"1","type":"t","source":"/s","specversion":"1.0","data":1,"data_base64":"AA=="}',
            "both data and data_base64",
        ),
        (
            b'{"id":"1","type":"t","source":"/s","specversion":"1.0","data_base64":"?"}',
            "not base64",
        ),
        (
            b'{"id":"1","type":"t","source":"/s","specversion":"1.0","data_base64":7}',
            "not base64",
        ),
    ],
)
def test_a_broken_envelope_says_what_is_wrong(event, reason):
    with pytest.raises(InvalidMessage, match=reason):
        from_json(event)


@given(st.binary(max_size=100))
def test_no_bytes_from_outside_raise_anything_else(event):
    try:
        from_json(event)
    except InvalidMessage:
        pass


def test_null_attributes_count_as_unset():
    event = b'{"id":"1","type":"t","source":"/s","specversion":"1.0","subject":null}'
    assert "subject" not in from_json(event).attributes


def test_a_message_without_data_has_empty_bytes():
    assert from_json(b'{"id":"1","type":"t","source":"/s","specversion":"1.0"}').data == b""
