"""Attributes without parsing: right, or left to the parser."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conquiet.spark.outbox.rows import attributes, plain_maps, render_payloads, times

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=8)
texts = st.text(max_size=12)
plain = st.dictionaries(
    names, st.text(st.characters(exclude_characters='"\\', exclude_categories=["C"]))
)
mixed = st.dictionaries(names, texts | st.integers() | st.booleans() | st.just('"') | st.just("\\"))


def column(objects: list[dict[str, object]], separators: tuple[str, str]) -> pa.Array:
    written = [json.dumps(one, separators=separators, ensure_ascii=False) for one in objects]
    return pa.array(written, pa.string())


def text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


separators = st.sampled_from([(", ", ": "), (",", ":")])


@given(st.lists(plain, max_size=6), separators, st.integers(0, 3))
def test_plain_attributes_need_no_parser(objects, separators, skipped):
    given_ = column(objects, separators).slice(skipped)
    if len(given_):
        found = plain_maps(given_)
        assert found is not None or not any(objects)
    assert [dict(one) for one in attributes(given_).to_pylist()] == objects[skipped:]


@given(st.lists(mixed, max_size=6), separators, st.integers(0, 3))
def test_attributes_are_right_whatever_is_in_them(objects, separators, skipped):
    given_ = column(objects, separators).slice(skipped)
    wanted = [{name: text(value) for name, value in one.items()} for one in objects[skipped:]]
    found = attributes(given_)
    found.validate(full=True)
    assert [dict(one) for one in found.to_pylist()] == wanted


@pytest.mark.parametrize(
    "written",
    [
        '{"a": 1}',
        '{"a": 1, "b": 2}',
        '{"a": "x", "b": 1, "c": true}',
        '{"a": "\\""}',
        '{"a": "\\u0041"}',
    ],
)
def test_what_quotation_marks_do_not_tell_is_parsed(written):
    given_ = pa.array(['{"a": "x"}', written])
    assert plain_maps(given_) is None
    wanted = {name: text(value) for name, value in json.loads(written).items()}
    assert dict(attributes(given_).to_pylist()[1]) == wanted


def test_times_of_every_form_are_read_and_others_are_null():
    forms = [
        "2026-01-31T12:00:00Z",
        "2026-01-31T13:00:00.5+01:00",
        "2026-01-31 12:00:00",
        "soon",
        None,
    ]
    found = [str(one) for one in times(pa.array(forms)).to_pylist()]
    assert found == [
        "2026-01-31 12:00:00+00:00",
        "2026-01-31 12:00:00.500000+00:00",
        "2026-01-31 12:00:00+00:00",
        "None",
        "None",
    ]


@pytest.mark.parametrize(
    "payloads",
    [['{"x": [1', "2]}, 3"], ["1, 2", ""], ['"a', 'b", 1'], ['{"b": 1, "a": 2}', "{"], ["", "1"]],
)
def test_documents_that_fit_together_are_malformed_each_by_itself(payloads):
    data, wrong = render_payloads(pa.array(payloads, pa.string()))
    for payload, written, why in zip(payloads, data.to_pylist(), wrong.to_pylist(), strict=True):
        try:
            whole = json.loads(payload)
        except ValueError:
            assert written == payload.encode()
            assert "payload_json is not JSON" in why
        else:
            assert json.loads(written) == whole
            assert why is None
