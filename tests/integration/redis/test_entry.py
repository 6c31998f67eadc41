"""Messages as stream entries and back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conquiet.errors import HandlerError, InvalidMessage
from conquiet.message import Message
from conquiet.redis.entry import encoder, from_fields, to_fields

BASE = {"id": "1", "type": "t", "source": "/s", "specversion": "1.0"}

texts = st.text(st.characters(exclude_categories=["Cs"]))
names = st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True).filter(
    lambda name: name not in {"data", "id", "type", "source", "specversion", "cloudevent"}
)


@given(data=st.binary(), extra=st.dictionaries(names, texts, max_size=5))
def test_binary_mode_keeps_every_byte_and_every_attribute(data, extra):
    sent = Message(data, {**BASE, **extra})
    assert from_fields(to_fields(sent)) == (data, sent.attributes, None)


@given(data=st.binary(), extra=st.dictionaries(names, texts, max_size=5))
def test_structured_mode_keeps_every_byte_and_every_attribute(data, extra):
    extra.pop("datacontenttype", None)
    sent = Message(data, {**BASE, **extra, "datacontenttype": "application/octet-stream"})
    fields = encoder("structured")(sent)
    assert len(fields) == 2
    assert from_fields(fields) == (data, sent.attributes, None)


def test_typed_data_is_written_as_json():
    class Placed(msgspec.Struct):
        order: int

    assert to_fields(Message(Placed(7), dict(BASE)))[-2:] == [b"data", b'{"order":7}']


def test_values_that_are_no_strings_are_written_as_cloudevents_says():
    attributes = {**BASE, "flag": True, "count": -3, "blob": b"\x00\xff"}
    _, got, _ = from_fields(to_fields(Message(b"", attributes)))
    assert (got["flag"], got["count"], got["blob"]) == ("true", "-3", "AP8=")


def test_no_data_is_no_field():
    assert b"data" not in to_fields(Message(None, dict(BASE)))
    assert from_fields(to_fields(Message(None, dict(BASE))))[0] == b""


def test_specversion_is_added_where_it_is_missing():
    message = Message(b"", {"id": "1", "type": "t", "source": "/s"})
    assert from_fields(to_fields(message))[1]["specversion"] == "1.0"


def test_a_field_of_ours_is_no_attribute():
    fields = [*to_fields(Message(b"x", dict(BASE))), b":topic", b"orders", b":other", b"1"]
    assert from_fields(fields) == (b"x", BASE, "orders")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"type": "t", "source": "/s"}, "'id' is missing"),
        ({"id": "", "type": "t", "source": "/s"}, "'id' is missing"),
        ({**BASE, "Upper": "x"}, "a-z and 0-9"),
        ({**BASE, "data": "x"}, "not be 'data'"),
        ({**BASE, "price": 1.5}, "not float"),
        ({**BASE, "lone": "\ud800"}, "surrogates"),
    ],
)
def test_what_is_no_cloudevent_is_not_written(attributes, reason):
    with pytest.raises(InvalidMessage, match=reason):
        to_fields(Message(b"", attributes))


def test_data_that_cannot_be_written_says_so():
    with pytest.raises(HandlerError):
        to_fields(Message(object(), dict(BASE)))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ([b"data", b'{"id": 1}'], "no field 'specversion'"),
        ([b"specversion", b"0.3", b"id", b"1"], "specversion must be '1.0'"),
        ([b"specversion", b"1.0", b"id", b"\xff"], "not UTF-8"),
        ([b"specversion", b"1.0", b"not ok", b"1"], "b'not ok' is not an attribute's name"),
        ([b"cloudevent", b"{"], "not a CloudEvents JSON object"),
        ([b"cloudevent", b'{"specversion": "1.0"}'], "'id' is missing"),
    ],
)
def test_what_is_no_cloudevent_is_not_read(fields, reason):
    with pytest.raises(InvalidMessage, match=reason):
        from_fields(fields)
