"""Which task reads what: tasks of about the same number of entries, however ids lie."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conquiet.redis.wire import Wire
from conquiet.spark.log import counting, splitting
from conquiet.spark.log.arrays import columns_of
from conquiet.spark.log.piece import Piece, parts
from conquiet.spark.log.ranges import Ranges
from conquiet.spark.log.resp import Table
from conquiet.spark.log.tasks import plan


@pytest.fixture
def wire(redis_client) -> Wire:
    return Wire(redis_client)


def fill(client, stream, ids):
    pipeline = client.pipeline(transaction=False)
    for entry_id in ids:
        pipeline.xadd(stream, {"a": "1"}, id=entry_id)
    pipeline.execute()
    return Piece(stream, "0-0", ids[-1], len(ids))


def sizes(client, pieces):
    """How many entries each piece has; they must follow each other without a gap."""
    for one, other in pairwise(pieces):
        assert one.until == other.after
    found = []
    for piece in pieces:
        entries = client.xrange(piece.stream, f"({piece.after}", piece.until)
        found.append(len(entries))
        assert piece.entries in (None, len(entries))
    return found


STEADY = [f"{1_700_000_000_000 + 7 * n}-0" for n in range(3000)]
BURST = [
    *[f"{1_600_000_000_000 + 86_400_000 * n}-0" for n in range(100)],
    *[f"1700000000000-{n}" for n in range(2800)],
    *[f"{1_700_000_000_001 + 86_400_000 * n}-0" for n in range(100)],
]


@pytest.mark.parametrize("ids", [STEADY, BURST], ids=["steady", "burst"])
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "probed"])
def test_parts_are_of_about_the_same_size(wire, redis_client, monkeypatch, ids, counted) -> None:
    monkeypatch.setattr(splitting, "_COUNTED_ANYWAY", 10_000 if counted else 0)
    piece = fill(redis_client, "orders", ids)
    pieces = splitting.split(wire, piece, 4)
    found = sizes(redis_client, pieces)
    assert sum(found) == 3000
    # A page of the count is 500 entries, so a part can be off by one.
    assert max(found) <= 1300


NUMBERS = st.one_of(
    st.integers(0, 3), st.integers(0, 2**64 - 1), st.sampled_from([2**64 - 2, 2**64 - 1])
)
ODD_IDS = st.sets(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ids=ODD_IDS, parts_wanted=st.integers(2, 9), counted=st.booleans(), after=st.data())
def test_parts_have_every_entry_once_however_odd_its_id(
    wire, redis_client, monkeypatch, ids, parts_wanted, counted, after
) -> None:
    monkeypatch.setattr(splitting, "_COUNTED_ANYWAY", 100 if counted else 0)
    monkeypatch.setattr(counting, "PAGE", 3)
    redis_client.delete("orders")
    there = sorted(one for one in ids if one != (0, 0)) or [(0, 1)]
    whole = fill(redis_client, "orders", [f"{ms}-{number}" for ms, number in there])
    skipped = after.draw(st.integers(0, len(there) - 1))
    begin = "0-0" if not skipped else "{}-{}".format(*there[skipped - 1])
    known = len(there) - skipped if after.draw(st.booleans()) else None
    pieces = splitting.split(wire, whole._replace(after=begin, entries=known), parts_wanted)
    assert (pieces[0].after, pieces[-1].until) == (begin, whole.until)
    assert all(parts(piece.after) < parts(piece.until) for piece in pieces)
    sizes(redis_client, pieces)
    read = [
        entry_id
        for piece in pieces
        for _, entries in Ranges(redis_client, None).read([piece])
        for entry_id in ids_of(entries)
    ]
    assert read == [f"{ms}-{number}" for ms, number in there[skipped:]]


def ids_of(entries):
    if isinstance(entries, Table):
        return columns_of(entries, "orders", {"entry_id"})["entry_id"].to_pylist()
    return [entry_id.decode() for entry_id, _ in entries]


def test_a_steady_stream_is_split_without_counting(wire, redis_client, monkeypatch) -> None:
    monkeypatch.setattr(splitting, "_COUNTED_ANYWAY", 0)
    monkeypatch.setattr(splitting, "walk", None)
    piece = fill(redis_client, "orders", STEADY)
    assert max(sizes(redis_client, splitting.split(wire, piece, 2))) < 1800


BURSTS = [
    f"{1_700_000_000_000 + 1_000 * burst + ms}-{number}"
    for burst in range(12)
    for ms in range(5)
    for number in range(50)
]


def test_bursts_with_much_in_a_millisecond_are_split_without_counting(
    wire, redis_client, monkeypatch
) -> None:
    monkeypatch.setattr(splitting, "_COUNTED_ANYWAY", 0)
    monkeypatch.setattr(splitting, "walk", None)
    piece = fill(redis_client, "orders", BURSTS)
    assert max(sizes(redis_client, splitting.split(wire, piece, 3))) <= 1250


def test_bursts_are_split_where_scripts_are_not_allowed(wire, redis_client, monkeypatch) -> None:
    monkeypatch.setattr(splitting, "_COUNTED_ANYWAY", 0)
    monkeypatch.setattr(splitting, "_PROBE", b"no script")
    monkeypatch.setattr(counting, "_WALK", b"no script")
    piece = fill(redis_client, "orders", BURSTS)
    assert max(sizes(redis_client, splitting.split(wire, piece, 3))) <= 1250


def test_small_streams_share_a_task_and_a_large_one_has_several(wire, redis_client) -> None:
    large = fill(redis_client, "large", STEADY)
    small = [Piece(f"small:{n}", "0-0", "9-9", 10) for n in range(50)]
    tasks = plan(wire, [*small, large], most_entries=1000)
    loads = [sum(piece.entries for piece in task.pieces) for task in tasks]
    assert len(tasks) == 4
    assert sum(loads) == 3500
    assert max(loads) <= 1100


def test_a_few_entries_are_one_task(wire) -> None:
    pieces = [Piece(f"s:{n}", "0-0", "9-9", 100) for n in range(10)]
    assert len(plan(wire, pieces)) == 1
    assert len(plan(wire, pieces, least=3)) == 3
    assert plan(wire, []) == []


def test_pieces_of_unknown_size_are_planned_too(wire, redis_client) -> None:
    piece = fill(redis_client, "orders", BURST)._replace(entries=None)
    tasks = plan(wire, [piece], least=3)
    pieces = sorted((p for task in tasks for p in task.pieces), key=lambda p: parts(p.until))
    assert sum(sizes(redis_client, pieces)) == 3000
