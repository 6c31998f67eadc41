"""Data that does not fit the schema of its type is refused, with the place."""

from __future__ import annotations

import sys

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.middleware.routers import atomic, nothing, order, router_of

from conquiet import Message
from conquiet.errors import ConfigError, InvalidMessage, PermanentError
from conquiet.middleware import JsonSchema
from conquiet.testing import deliver, message

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
    },
    "required": ["id"],
    "$defs": {"line": {"type": "object", "required": ["price"]}},
}
TREE = {"type": "object", "additionalProperties": {"$ref": "#"}}


def check(data, schema=ORDER, **attributes):
    checked = message(data, **{"type": "order", **attributes})
    JsonSchema({"order": schema}).admit(checked)


def test_data_that_fits_passes():
    check({"id": 1, "lines": [{"price": 2}]})


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"id": 0}, r"\$\.id: 0 is less"),
        ({}, r"\$: 'id' is a required"),
        ({"id": 1, "lines": [{"price": 1}, {}]}, r"\$\.lines\[1\]: 'price'"),
        ([], r"\$: \[\] is not"),
    ],
)
def test_data_that_does_not_fit_is_refused_with_its_place(data, place):
    with pytest.raises(InvalidMessage, match=place):
        check(data)


def test_a_misfit_is_permanent_and_nacks_its_message_alone():
    router = router_of(nothing, JsonSchema({"order": ORDER}))
    delivered = deliver(router, order(1), order(0), order(2))
    assert [m.id for m in delivered.nacked] == ["0"]
    assert isinstance(delivered.errors[0], PermanentError)


def test_a_misfit_costs_its_neighbours_no_second_transaction():
    runs = []
    chain, _ = atomic(JsonSchema({"order": ORDER}))
    deliver(router_of(lambda m: runs.append(m.id), *chain), order(1), order(0), order(2))
    assert runs == ["1", "2"]


@pytest.mark.parametrize("data", [b"{", b"\xff", b"", b"nan"])
def test_what_is_no_json_is_refused(data):
    with pytest.raises(InvalidMessage, match="not valid JSON"):
        check(data)


def test_what_says_that_it_is_no_json_is_refused():
    with pytest.raises(InvalidMessage, match="only JSON has a schema"):
        check(b"{}", datacontenttype="application/octet-stream")


def test_typed_data_is_checked_as_it_would_be_sent():
    class Typed(msgspec.Struct):
        id: int

    JsonSchema({"order": ORDER}).admit(Message(Typed(1), {"type": "order"}))
    with pytest.raises(InvalidMessage, match="less than"):
        JsonSchema({"order": ORDER}).admit(Message(Typed(0), {"type": "order"}))
    with pytest.raises(InvalidMessage):
        JsonSchema({"order": ORDER}).admit(Message(object(), {"type": "order"}))


@pytest.mark.parametrize("depth", [500, 900, 5_000, 1_000_000])
def test_a_depth_bomb_is_refused(depth):
    bomb = b'{"a":' * depth + b"{}" + b"}" * depth
    with pytest.raises(InvalidMessage, match="nested too deeply"):
        check(bomb, TREE)


def test_the_error_is_bounded():
    with pytest.raises(InvalidMessage) as raised:
        check(["x" * 100_000])
    assert len(str(raised.value)) < 1_000


orders = st.fixed_dictionaries(
    {}, optional={"id": st.integers(-2, 3) | st.text(max_size=2), "lines": st.lists(st.just({}))}
)
documents = orders | st.lists(st.integers(), max_size=2) | st.none()


@given(st.binary(max_size=60) | documents.map(msgspec.json.encode))
def test_any_bytes_are_refused_unless_they_are_an_order(data):
    try:
        check(data)
    except InvalidMessage:
        return
    jsonschema.validate(msgspec.json.decode(data), ORDER)


@given(documents)
def test_an_order_is_never_refused(document):
    if jsonschema.Draft202012Validator(ORDER).is_valid(document):
        check(document)


# --- types without a schema -----------------------------------------------------------------


def test_a_type_without_schema_passes():
    JsonSchema({"other": ORDER}).admit(order())


def test_a_type_without_schema_can_be_refused():
    with pytest.raises(InvalidMessage, match="no schema for this type"):
        JsonSchema({"other": ORDER}, unknown="refuse").admit(order())


def test_a_function_gives_the_schema_and_is_asked_once_per_type():
    asked = []

    def schema_of(kind):
        asked.append(kind)
        return ORDER if kind == "order" else None

    check_all = JsonSchema(schema_of)
    for kind in ("order", "other", "order", "other"):
        check_all.admit(message({"id": 1}, type=kind))
    assert asked == ["order", "other"]
    with pytest.raises(InvalidMessage):
        check_all.admit(order(0))


def test_types_from_outside_do_not_fill_the_memory():
    check_all = JsonSchema(lambda kind: None)
    for number in range(2_500):
        check_all.admit(message(type=f"t{number}"))
    assert len(check_all._compiled) <= 1_000


# --- schemas that are wrong -----------------------------------------------------------------


def test_a_wrong_schema_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"schema of 'order' is not valid at \$\.type"):
        JsonSchema({"order": {"type": "objekt"}})


def test_a_wrong_schema_from_a_function_blames_no_message():
    with pytest.raises(ConfigError):
        JsonSchema(lambda kind: {"type": "objekt"}).admit(order())


@pytest.mark.parametrize("reference", ["http://127.0.0.1:1/order.json", "#/$defs/missing"])
def test_a_reference_is_never_fetched_and_blames_no_message(reference):
    with pytest.raises(ConfigError, match=r"put it into \$defs"):
        JsonSchema({"order": {"$ref": reference}}).admit(order())


def test_true_and_false_are_schemas():
    JsonSchema({"order": True}).admit(order())
    with pytest.raises(InvalidMessage):
        JsonSchema({"order": False}).admit(order())


def test_it_refuses_an_unknown_option():
    with pytest.raises(ConfigError, match="pass, refuse"):
        JsonSchema({}, unknown="drop")


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r"pip install 'jsonschema>=4\.20'"):
        JsonSchema({})


def test_a_pattern_that_is_no_regular_expression_blames_no_message():
    with pytest.raises(ConfigError, match="schema of 'order'"):
        JsonSchema({"order": {"properties": {"id": {"pattern": "("}}}}).admit(
            message({"id": "text"}, type="order")
        )
