"""Section 3 of the seed: what may be in an entry."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections import OrderedDict
from datetime import datetime
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conquiet.queue import InvalidPayloadError, QueueMessage
from conquiet.queue.message import decode, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


class Colour(enum.StrEnum):
    RED = "red"


class Shouting(str):
    __slots__ = ()

    def __str__(self):
        return self.upper()


class Metres(float):
    pass


class Count(int):
    pass


@given(st.dictionaries(st.text(), values))
@settings(max_examples=40, deadline=None)
def test_3_2_every_json_object_arrives_as_it_was_sent(payload):
    assert decode([b"data", encode(payload)]) == payload


@given(st.dictionaries(st.text(), values))
@settings(max_examples=40, deadline=None)
def test_3_1_the_value_is_utf_8_json(payload):
    assert json.loads(encode(payload).decode("utf-8")) == payload


@given(st.binary())
def test_3_1_any_bytes_are_an_object_or_a_value_error(data):
    try:
        assert isinstance(decode([b"data", data]), dict)
    except ValueError:
        pass


def test_3_2_kinds_of_primitives_are_sent_as_primitives():
    payload = {
        "enum": Colour.RED,
        Colour.RED: 1,
        "text": Shouting("quiet"),
        "number": Metres(1.5),
        "count": Count(3),
        "tuple": (1, 2),
        "mapping": OrderedDict(a=1),
        "large": 2**80,
    }
    assert json.loads(encode(payload)) == {
        "enum": "red",
        "red": 1,
        "text": "quiet",
        "number": 1.5,
        "count": 3,
        "tuple": [1, 2],
        "mapping": {"a": 1},
        "large": 2**80,
    }


@pytest.mark.parametrize("payload", [None, [], "text", 1, b"{}", [("a", 1)]])
def test_3_2_a_payload_that_is_no_dict_is_refused(payload):
    with pytest.raises(InvalidPayloadError, match=f"a dict, not {type(payload).__name__}"):
        encode(payload)


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ({1: "a"}, r"payload has the key 1: keys must be strings"),
        ({"a": [{"b": {None: 1}}]}, r"payload\['a'\]\[0\]\['b'\] has the key None"),
        ({"a": float("nan")}, r"payload\['a'\] is nan"),
        ({"a": [1, float("inf")]}, r"payload\['a'\]\[1\] is inf"),
        ({"a": b"bytes"}, r"payload\['a'\] is of type bytes"),
        ({"a": bytearray()}, r"payload\['a'\] is of type bytearray"),
        ({"a": {1, 2}}, r"payload\['a'\] is of type set"),
        ({"a": datetime(2024, 1, 1)}, r"payload\['a'\] is of type datetime"),
        ({"a": Decimal(1)}, r"payload\['a'\] is of type Decimal"),
        ({"a": object()}, r"payload\['a'\] is of type object"),
        ({"a": "\ud800"}, r"cannot be written as JSON"),
        ({"\ud800": 1}, r"cannot be written as JSON"),
        ({"a": 10**5000}, r"cannot be written as JSON"),
    ],
)
def test_3_2_what_json_cannot_carry_is_refused_and_named(payload, where):
    with pytest.raises(InvalidPayloadError, match=where):
        encode(payload)


def test_3_2_a_payload_that_contains_itself_is_refused():
    payload: dict = {}
    payload["self"] = payload
    with pytest.raises(InvalidPayloadError, match="contains itself"):
        encode(payload)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (None, "has: none"),
        ([], "has: none"),
        ([b"body", b"{}"], "has: body"),
        ([b"data", b"{}", b"more", b"1"], "has: data, more"),
        ([b"data", b"{}", b"data", b"{}"], "has: data, data"),
        ([b"\xff", b"{}"], r"has: \\xff"),
        ([b"data", b""], "not JSON"),
        ([b"data", b"{"], "not JSON"),
        ([b"data", b'{"a": NaN}'], "not JSON"),
        ([b"data", b'\xef\xbb\xbf{"a": 1}'], "not JSON"),
        ([b"data", '{"a": 1}'.encode("utf-16")], "not JSON"),
        ([b"data", b'{"a": "\xff"}'], "not UTF-8"),
        ([b"data", b"[1]"], "not a JSON object"),
        ([b"data", b"null"], "not a JSON object"),
        ([b"data", b'{"a": 1e999}'], "not a JSON object"),
        ([b"data", b'{"a":' + b"[" * 99_999 + b"]" * 99_999 + b"}"], "nested too deep"),
    ],
)
def test_3_1_an_entry_that_is_no_message_says_why(fields, reason):
    with pytest.raises(ValueError, match=reason):
        decode(fields)


@pytest.mark.parametrize("names", [[b"x" * 10_000], [b"%d" % n for n in range(10_000)]])
def test_3_1_foreign_field_names_are_cut_short_in_the_error(names):
    with pytest.raises(ValueError, match=r"has: .* …$") as caught:
        decode([part for name in names for part in (name, b"1")])
    assert len(str(caught.value)) < 300


def test_a_message_is_frozen():
    message = QueueMessage("1-0", {"a": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.id = "2-0"
    assert (message.id, message.payload) == ("1-0", {"a": 1})
