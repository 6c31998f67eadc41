"""Whatever an entry or a row holds, Spark gets a row of it; one that misfits harms no other."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType
from tests.security.hostile import HURTING, damaged, fuzzed, values

from conquiet.spark.columns import MALFORMED
from conquiet.spark.log.decoder import RowBuilder
from conquiet.spark.outbox.rows import attributes, render_payloads, times
from conquiet.spark.payload import RAW, Payload, as_text

GOOD = b'{"whole": 1}'
SCHEMA = StructType.fromJson(
    {
        "type": "struct",
        "fields": [
            {"name": name, "type": kind, "nullable": True, "metadata": more}
            for name, kind, more in (
                *(("text", "string", {}), ("flag", "boolean", {}), ("tiny", "byte", {})),
                *(("whole", "long", {}), ("small", "integer", {}), ("real", "double", {})),
                *(("single", "float", {}), ("bytes", "binary", {}), ("day", "date", {})),
                *(("at", "timestamp", {}), ("local", "timestamp_ntz", {})),
                *(("price", "decimal(10,2)", {}), ("any", "string", {"comment": "json"})),
                ("many", {"type": "array", "elementType": "integer", "containsNull": True}, {}),
                (
                    "named",
                    {
                        "type": "map",
                        "keyType": "string",
                        "valueType": "double",
                        "valueContainsNull": True,
                    },
                    {},
                ),
            )
        ],
    }
)
PAYLOAD = Payload(SCHEMA, to_arrow_type(SCHEMA, timezone="UTC"))

edges = st.sampled_from(
    [
        *(2**63, -(2**63) - 1, 2**31, 1e308, -1e308, "1e999999999", "1e-999999999", "NaN", "sNaN"),
        *("0001-01-01", "9999-12-31", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"),
        *("2026-01-31T12:00:00Z", "2026-01-31T12:00:00", "9" * 60, "0.005", "/w==", "\x00", ""),
    ]
)
objects = st.dictionaries(
    st.sampled_from(SCHEMA.names) | st.text(max_size=5), edges | values, max_size=6
)
documents = (objects | values).map(lambda value: json.dumps(value).encode())
data = st.none() | documents | damaged(documents) | st.binary(max_size=20)


def columns(found):
    flaws = ["already" if number % 5 == 4 else None for number in range(len(found))]
    return {"data": pa.array(found, pa.binary()), MALFORMED: pa.array(flaws, pa.string())}


def check(found) -> None:
    """Each row is typed or kept as it is, with the reason; a good neighbour stays good."""
    parsed = PAYLOAD.parse(columns([GOOD, *found, GOOD]))
    typed, raws = parsed["data"].to_pylist(), parsed[RAW].to_pylist()
    flaws = parsed[MALFORMED].to_pylist()
    assert typed[0]["whole"] == 1
    for value, raw, flaw, given_ in zip(typed, raws, flaws, [GOOD, *found, GOOD], strict=True):
        if flaw is not None:
            assert value is None
            assert raw == given_
        elif given_ is None:
            assert value is None
    text = as_text(columns([GOOD, *found]))
    assert text["data"][0].as_py() == GOOD.decode()
    assert len(text["data"]) == len(found) + 1


@fuzzed()
@given(st.lists(data, max_size=4))
def test_typed_data(found) -> None:
    check(found)


@pytest.mark.parametrize("name", HURTING)
def test_data_that_hurts(name) -> None:
    check([HURTING[name], *(b'{"%s": %s}' % (n.encode(), HURTING[name]) for n in SCHEMA.names)])


names = st.sampled_from([b"specversion", b"id", b"type", b"time", b"subject", b"data"])
entries = st.lists(
    st.lists(st.tuples(names | st.binary(max_size=4), st.binary(max_size=8) | st.just(b"1.0"))),
    max_size=4,
)


@fuzzed()
@given(entries, st.lists(st.sampled_from(["9999-12-31T23:59:59-14:00", "+1", "x", ""]), max_size=2))
def test_entries_become_columns(found, moments) -> None:
    rows = RowBuilder()
    for fields in found:
        rows.add("orders", b"1-1", [item for pair in fields for item in pair])
    for moment in moments:
        good = {b"specversion": b"1.0", b"id": b"1", b"type": b"t", b"time": moment.encode()}
        rows.add("orders", b"99999999999999999-1", [item for pair in good.items() for item in pair])
    assert {len(column) for column in rows.take().values()} == {len(found) + len(moments)}


# --- rows of an outbox ----------------------------------------------------------------------

good = st.lists(values.map(json.dumps), max_size=3)
bad = st.text(max_size=20) | st.sampled_from(["[" * 5_000, "[1", "2],3", "", '"', "{", "}"])


@fuzzed()
@given(good, bad, good)
def test_payloads_of_domain_events(before, between, after) -> None:
    """PostgreSQL takes nothing but JSON; what somebody wrote into SQLite may be anything."""
    found = [*before, between, *after]
    made, flaws = render_payloads(pa.array(found, pa.string()))
    assert len(made) == len(flaws) == len(found)
    for text, flaw in zip(found, flaws.to_pylist(), strict=True):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            assert flaw is not None


@fuzzed()
@given(st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), max_size=5))
def test_attributes_of_rows(found) -> None:
    made = attributes(pa.array([json.dumps(one) for one in found], pa.string()))
    assert [sorted(dict(one)) for one in made.to_pylist()] == [sorted(one) for one in found]


@fuzzed()
@given(st.lists(st.none() | st.text(max_size=12) | edges.map(str), max_size=4))
def test_times_of_rows(found) -> None:
    assert len(times(pa.array(found, pa.string()))) == len(found)
