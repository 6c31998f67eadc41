"""The fast reading of XRANGE replies finds what a sequential reader finds, or leaves it to one."""

from __future__ import annotations

import hiredis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conquiet.spark.columns import ARROW_SCHEMA
from conquiet.spark.log.decoder import RowBuilder, columns_of
from conquiet.spark.log.resp import locate

COLUMNS = frozenset(ARROW_SCHEMA.names)


def bulk(value):
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


def reply(entries):
    parts = [b"*%d\r\n" % len(entries)]
    for entry_id, fields in entries:
        parts.append(b"*2\r\n" + bulk(entry_id))
        parts.append(b"*-1\r\n" if fields is None else b"*%d\r\n" % len(fields))
        parts.extend(bulk(item) for item in fields or ())
    return b"".join(parts)


def located(entries):
    """What the fast way finds in a reply with these entries; None if it leaves it."""
    content = reply(entries)
    start = content.index(b"\r\n") + 2
    return locate(np.frombuffer(bytearray(content), np.uint8), len(entries), start)


def values_of(table):
    """The entries of a table, cut out one by one."""
    found = {}
    for group in table.groups:
        for place, row in enumerate(group.rows):
            cut = [
                bytes(table.buffer[start:end])
                for start, end in zip(group.starts[:, place], group.ends[:, place], strict=True)
            ]
            fields = [x for pair in zip(group.names, cut[1:], strict=True) for x in pair]
            found[int(row)] = [cut[0], fields]
    return [found[row] for row in range(table.count)]


def sequential(entries):
    reader = hiredis.Reader()
    reader.feed(reply(entries))
    return reader.gets()


def one_by_one(entries):
    builder = RowBuilder()
    for entry_id, fields in entries:
        builder.add("orders", entry_id, fields)
    return builder.take()


# --- strategies -------------------------------------------------------------------------------

nasty = st.sampled_from(
    [b"", b"\r\n", b"\n", b"\r", b"*2\r\n$3\r\n", b"$1\r\nx\r\n", b"*18", b"\xff\x00", b"-", b"$"]
)
values = st.one_of(st.binary(max_size=30), nasty, st.lists(nasty, max_size=4).map(b"".join))
texts = st.one_of(st.text(max_size=12).map(str.encode), values)
ids = st.builds(
    lambda ms, seq: b"%d-%d" % (ms, seq),
    st.one_of(st.integers(0, 2**64 - 1), st.integers(10**12, 10**13 - 1)),
    st.integers(0, 2**64 - 1),
)
times = st.sampled_from(
    [b"2026-01-31T12:00:00Z", b"2026-01-31T12:00:00.123456789+02:00", b"noon", b"", b"2026-01-31"]
)
names = st.sampled_from(
    [b"id", b"type", b"source", b"subject", b"datacontenttype", b"partitionkey", b"x1", b":topic"]
)


@st.composite
def events(draw):
    chosen = draw(st.lists(names, max_size=6, unique=draw(st.booleans())))
    pairs = [(name, draw(texts)) for name in chosen]
    pairs.append((b"specversion", draw(st.sampled_from([b"1.0", b"1.0", b"1.0", b"0.3"]))))
    if draw(st.booleans()):
        pairs.append((b"time", draw(times)))
    if draw(st.booleans()):
        pairs.append((b"data", draw(values)))
    if draw(st.booleans()):
        pairs = draw(st.permutations(pairs))
    return [item for pair in pairs for item in pair]


others = st.one_of(
    st.lists(values, min_size=2, max_size=8).filter(lambda items: len(items) % 2 == 0),
    st.builds(lambda value: [b"data", value], st.one_of(values, st.just(b'{"a": 1}'))),
    st.just([b"cloudevent", b'{"specversion":"1.0","id":"1","type":"t","source":"/s","data":{}}']),
    st.just([b"cloudevent", b"{}"]),
)


@st.composite
def replies(draw):
    """Entries of a few shapes, as a real stream has them."""
    shapes = draw(st.lists(st.one_of(events(), events(), others), min_size=1, max_size=4))
    entries = []
    for fields in draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=12)):
        again = [
            draw(texts) if place % 2 and draw(st.integers(0, 5)) == 0 else item
            for place, item in enumerate(fields)
        ]
        entries.append((draw(ids), again))
    return entries


# --- properties -------------------------------------------------------------------------------


@given(replies())
@example([(b"1-0", [b"a", b"\r\n$1\r\n"]), (b"2-0", [b"b", b"x"])])
def test_what_is_located_is_what_a_sequential_reader_finds(entries) -> None:
    table = located(entries)
    if table is not None:
        assert values_of(table) == sequential(entries)


@given(replies(), st.frozensets(st.sampled_from(sorted(COLUMNS)), min_size=1))
@example([(b"1-0", [b"id", b"", b":topic", b"\x80", b"specversion", b"1.0"])], COLUMNS)
@example([(b"1-0", [b"time", b"noon", b"specversion", b"1.0"])], frozenset(["attributes"]))
@example([(b"1-0", [b"type", b"\xff", b"specversion", b"1.0"])], frozenset(["_malformed"]))
def test_columns_are_the_same_on_the_fast_way_and_one_by_one(entries, wanted) -> None:
    table = located(entries)
    if table is not None:
        fast, slow = columns_of(table, "orders", wanted), one_by_one(entries)
        for name in wanted:
            assert fast[name].to_pylist() == slow[name].to_pylist(), name
            assert fast[name].type == slow[name].type == ARROW_SCHEMA.field(name).type


@given(st.lists(events(), min_size=1, max_size=5))
def test_a_value_with_a_line_end_never_moves_another(shapes) -> None:
    """A value that imitates the rest of the reply is the hardest to tell from it."""
    entries = [(b"%d-0" % number, fields) for number, fields in enumerate(shapes, 1)]
    imitation = reply(entries)[4:-2]
    entries.append((b"9-9", [b"specversion", b"1.0", b"data", imitation]))
    table = located(entries)
    if table is not None:
        assert values_of(table) == sequential(entries)


# --- the fast way is taken ----------------------------------------------------------------------


def event(number, *more, data=b'{"a": 1}'):
    return [
        *(b"id", b"%d" % number, b"type", b"sold", b"source", b"/s", b"specversion", b"1.0"),
        *more,
        *(b"data", data),
    ]


def test_entries_of_one_shape_are_one_group() -> None:
    table = located([(b"1700000000000-%d" % n, event(n, data=b"x" * n)) for n in range(100)])
    assert [len(group.rows) for group in table.groups] == [100]


def test_entries_of_several_shapes_keep_their_order() -> None:
    entries = [
        (b"%d-0" % n, event(n, *([b"subject", b"s%d" % n] if n % 3 else []))) for n in range(1, 50)
    ]
    table = located(entries)
    assert len(table.groups) == 2
    columns = columns_of(table, "orders", COLUMNS)
    assert columns["event_id"].to_pylist() == [str(n) for n in range(1, 50)]
    assert columns["key"].to_pylist() == [f"s{n}" if n % 3 else None for n in range(1, 50)]


def test_a_lone_line_feed_does_not_slow_a_reply_down() -> None:
    assert located([(b"%d-0" % n, event(n, data=b'{\n "a": 1\n}')) for n in range(1, 9)])


def test_a_value_with_a_line_end_is_left_to_a_sequential_reader() -> None:
    assert located([(b"1-0", event(1)), (b"2-0", event(2, data=b"two\r\nlines"))]) is None


@pytest.mark.parametrize("fields", [None, []])
def test_an_entry_without_fields_is_left_to_a_sequential_reader(fields) -> None:
    entries = [(b"1-0", event(1)), (b"2-0", fields)]
    assert located(entries) is None
    columns = one_by_one(entries)
    assert columns["_malformed"].to_pylist() == [None, "it has no fields"]


def test_no_entries_are_no_groups() -> None:
    assert located([]).groups == []


# --- what entries mean --------------------------------------------------------------------------


def row(fields, entry_id=b"1700000000123-4"):
    batch = one_by_one([(entry_id, fields)])
    table = located([(entry_id, fields)])
    fast = columns_of(table, "orders", COLUMNS)
    one = {name: batch[name][0].as_py() for name in COLUMNS}
    assert one == {name: fast[name][0].as_py() for name in COLUMNS}
    return one


def test_an_event_in_binary_mode_has_a_column_per_attribute() -> None:
    one = row(
        [
            *(b"id", b"7", b"type", b"sold", b"source", b"/shop", b"specversion", b"1.0"),
            *(b"subject", b"c-1", b"time", b"2026-01-31T12:00:00.5Z"),
            *(b"datacontenttype", b"application/json", b"correlationid", b"x"),
            *(b"data", b"\xff\x00", b":topic", b"orders"),
        ]
    )
    assert (one["event_id"], one["type"], one["source"]) == ("7", "sold", "/shop")
    assert (one["subject"], one["key"]) == ("c-1", "c-1")
    assert one["content_type"] == "application/json"
    assert one["time"].isoformat() == "2026-01-31T12:00:00.500000+00:00"
    assert one["entry_time"].isoformat() == "2023-11-14T22:13:20.123000+00:00"
    assert one["attributes"] == [("specversion", "1.0"), ("correlationid", "x")]
    assert one["data"] == b"\xff\x00"
    assert one["_malformed"] is None


def test_the_partition_key_is_the_key() -> None:
    one = row([b"specversion", b"1.0", b"subject", b"c-1", b"partitionkey", b"p"])
    assert (one["key"], one["subject"], one["data"]) == ("p", "c-1", None)


def test_a_message_of_the_queue_is_its_json() -> None:
    one = row([b"data", b'{"order": 7}'])
    assert one["data"] == b'{"order": 7}'
    assert (one["attributes"], one["event_id"], one["_malformed"]) == ([], None, None)


def test_a_structured_event_is_taken_apart() -> None:
    event = b'{"specversion":"1.0","id":"1","type":"t","source":"/s","data":{"a":1}}'
    one = row([b"cloudevent", event])
    assert (one["event_id"], one["data"]) == ("1", b'{"a":1}')


def test_what_is_no_event_says_why_and_keeps_its_fields() -> None:
    one = row([b"name", b"Ada", b"photo", b"\xff"])
    assert "specversion" in one["_malformed"]
    assert one["data"] == b'{"name":"Ada","photo_base64":"/w=="}'
    assert one["attributes"] is None


def test_a_time_that_is_none_stays_as_text() -> None:
    one = row([b"specversion", b"1.0", b"time", b"noon"])
    assert one["time"] is None
    assert dict(one["attributes"])["time"] == "noon"


def test_an_id_that_no_clock_made_has_no_time() -> None:
    fields = [b"specversion", b"1.0"]
    assert row(fields, b"18446744073709551615-1")["entry_time"] is None
    assert row(fields, b"0-7")["entry_time"].year == 1970


def test_all_columns_fit_the_schema() -> None:
    table = located([(b"1700000000000-%d" % n, event(n)) for n in range(3)])
    columns = columns_of(table, "orders", COLUMNS)
    batch = pa.RecordBatch.from_arrays(
        [columns[name] for name in ARROW_SCHEMA.names], schema=ARROW_SCHEMA
    )
    batch.validate(full=True)
