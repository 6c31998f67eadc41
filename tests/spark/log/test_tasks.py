"""Which task reads what: tasks of about the same number of entries, however ids lie."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conquiet.redis.ids import parse
from conquiet.redis.wire import Wire
from conquiet.spark.log import ranges, tasks
from conquiet.spark.log.connection import ask
from conquiet.spark.log.decoder import columns_of
from conquiet.spark.log.fetch import RangeReader
from conquiet.spark.log.ranges import EntryRange
from conquiet.spark.log.resp import Table
from conquiet.spark.log.tasks import plan_tasks


@pytest.fixture
def wire(redis_client) -> Wire:
    return Wire(redis_client)


def fill(client, stream, ids):
    pipeline = client.pipeline(transaction=False)
    for entry_id in ids:
        pipeline.xadd(stream, {"a": "1"}, id=entry_id)
    pipeline.execute()
    return EntryRange(stream, "0-0", ids[-1], len(ids))


def sizes(client, parts):
    """How many entries each whole has; they must follow each other without a gap."""
    for one, other in pairwise(parts):
        assert one.until == other.after
    found = []
    for part in parts:
        entries = client.xrange(part.stream, f"({part.after}", part.until)
        found.append(len(entries))
        assert part.entries in (None, len(entries))
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
    monkeypatch.setattr(tasks, "INDEXED_ANYWAY", 10_000 if counted else 0)
    whole = fill(redis_client, "orders", ids)
    parts = tasks.split(wire, whole, 4)
    found = sizes(redis_client, parts)
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
    monkeypatch.setattr(tasks, "INDEXED_ANYWAY", 100 if counted else 0)
    monkeypatch.setattr(ranges, "PAGE", 3)
    redis_client.delete("orders")
    there = sorted(one for one in ids if one != (0, 0)) or [(0, 1)]
    whole = fill(redis_client, "orders", [f"{ms}-{number}" for ms, number in there])
    skipped = after.draw(st.integers(0, len(there) - 1))
    begin = "0-0" if not skipped else "{}-{}".format(*there[skipped - 1])
    known = len(there) - skipped if after.draw(st.booleans()) else None
    parts = tasks.split(wire, whole._replace(after=begin, entries=known), parts_wanted)
    assert (parts[0].after, parts[-1].until) == (begin, whole.until)
    assert all(parse(part.after) < parse(part.until) for part in parts)
    sizes(redis_client, parts)
    read = [
        entry_id
        for part in parts
        for _, entries in RangeReader(redis_client, None).read([part])
        for entry_id in ids_of(entries)
    ]
    assert read == [f"{ms}-{number}" for ms, number in there[skipped:]]


def ids_of(entries):
    if isinstance(entries, Table):
        return columns_of(entries, "orders", {"entry_id"})["entry_id"].to_pylist()
    return [entry_id.decode() for entry_id, _ in entries]


def test_a_steady_stream_is_split_without_counting(wire, redis_client, monkeypatch) -> None:
    monkeypatch.setattr(tasks, "INDEXED_ANYWAY", 0)
    monkeypatch.setattr(tasks, "index_ranges", None)
    whole = fill(redis_client, "orders", STEADY)
    assert max(sizes(redis_client, tasks.split(wire, whole, 2))) < 1800


BURSTS = [
    f"{1_700_000_000_000 + 1_000 * burst + ms}-{number}"
    for burst in range(12)
    for ms in range(5)
    for number in range(50)
]


def test_bursts_with_much_in_a_millisecond_are_split_without_counting(
    wire, redis_client, monkeypatch
) -> None:
    monkeypatch.setattr(tasks, "INDEXED_ANYWAY", 0)
    monkeypatch.setattr(tasks, "index_ranges", None)
    whole = fill(redis_client, "orders", BURSTS)
    assert max(sizes(redis_client, tasks.split(wire, whole, 3))) <= 1250


def test_bursts_are_split_where_scripts_are_not_allowed(wire, redis_client, monkeypatch) -> None:
    monkeypatch.setattr(tasks, "INDEXED_ANYWAY", 0)
    monkeypatch.setattr(tasks, "_PROBE", b"no script")
    monkeypatch.setattr(ranges, "_WALK", b"no script")
    whole = fill(redis_client, "orders", BURSTS)
    assert max(sizes(redis_client, tasks.split(wire, whole, 3))) <= 1250


def test_small_streams_share_a_task_and_a_large_one_has_several(wire, redis_client) -> None:
    large = fill(redis_client, "large", STEADY)
    small = [EntryRange(f"small:{n}", "0-0", "9-9", 10) for n in range(50)]
    planned = plan_tasks(wire, [*small, large], max_entries=1000)
    loads = [sum(part.entries for part in task.ranges) for task in planned]
    assert len(planned) == 4
    assert sum(loads) == 3500
    assert max(loads) <= 1100


def test_a_few_entries_are_one_task(wire) -> None:
    parts = [EntryRange(f"s:{n}", "0-0", "9-9", 100) for n in range(10)]
    assert len(plan_tasks(wire, parts)) == 1
    assert len(plan_tasks(wire, parts, min_tasks=3)) == 3
    assert plan_tasks(wire, []) == []


HIDDEN = [
    *[f"{1_700_000_000_000 + 7_000 * n}-0" for n in range(2000)],
    *[f"1700014000000-{n}" for n in range(3000)],
    *[f"{1_700_014_000_000 + 7_000 * n}-0" for n in range(1, 1000)],
]


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown size"])
@pytest.mark.parametrize("count", [2, 8])
def test_a_burst_within_a_millisecond_is_found_and_cut_without_counting(
    wire, redis_client, monkeypatch, known, count
) -> None:
    """As in a stream too large to be counted, where a look at each part ends before the burst."""
    monkeypatch.setattr(tasks, "INDEXED_ANYWAY", 0)
    monkeypatch.setattr(tasks, "_MOST_ENTRIES", 8)
    monkeypatch.setattr(tasks, "index_ranges", None)
    whole = fill(redis_client, "orders", HIDDEN)
    if not known:
        whole = whole._replace(entries=None)
    found = sizes(redis_client, tasks.split(wire, whole, count))
    assert len(found) == count
    assert max(found) < 1.5 * len(HIDDEN) / count


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_a_burst_in_a_stream_too_large_to_be_counted_is_cut(wire, redis_client, count) -> None:
    begin, burst = 1_700_000_000_000, 120_000
    ids = [f"{begin + 1_000_000 * n + 900 * k}-0" for n in range(128) for k in range(1000)]
    ids += [f"{begin + 100_950_000}-{n}" for n in range(burst)]
    ids.sort(key=parse)
    found = sizes(redis_client, tasks.split(wire, fill(redis_client, "orders", ids), count))
    assert max(found) < 1.25 * len(ids) / count


@pytest.mark.parametrize("ids", [STEADY, BURST, HIDDEN], ids=["steady", "burst", "hidden"])
def test_a_range_of_unknown_size_is_split_like_any_other(
    wire, redis_client, monkeypatch, ids
) -> None:
    monkeypatch.setattr(tasks, "WORTH_A_TASK", 100)
    whole = fill(redis_client, "orders", ids)._replace(entries=None)
    planned = plan_tasks(wire, [whole._replace(at_most=len(ids))], max_entries=len(ids) // 4)
    parts = sorted((p for task in planned for p in task.ranges), key=lambda p: parse(p.until))
    found = sizes(redis_client, parts)
    assert sum(found) == len(ids)
    assert 4 <= len(found) <= 5
    assert max(found) < 1.5 * len(ids) / 4


def test_a_small_part_of_a_large_stream_is_one_task(wire, redis_client) -> None:
    whole = fill(redis_client, "orders", STEADY)._replace(entries=None, at_most=1_000_000)
    [task] = plan_tasks(wire, [whole._replace(after=STEADY[-11])], max_entries=100)
    assert sizes(redis_client, task.ranges) == [10]


def test_large_parts_of_unknown_size_weigh_what_they_have(wire, redis_client) -> None:
    large = fill(redis_client, "large", STEADY)._replace(entries=None)
    small = [fill(redis_client, f"s:{n}", STEADY[:100])._replace(entries=None) for n in range(10)]
    planned = plan_tasks(wire, [*small, large], min_tasks=4)
    loads = [sum(sizes(redis_client, [part])[0] for part in task.ranges) for task in planned]
    assert sum(loads) == 4000
    assert max(loads) < 1500


def test_entries_with_numbers_instead_of_times_are_split_by_their_numbers(
    wire, redis_client, monkeypatch
) -> None:
    monkeypatch.setattr(tasks, "index_ranges", None)
    whole = fill(redis_client, "orders", [f"0-{n}" for n in range(1, 3001)])
    parts = tasks.split(wire, whole._replace(entries=None, after="0-1000"), 4)
    assert max(sizes(redis_client, parts)) <= 510


def test_a_look_takes_few_large_entries_at_a_time(wire, redis_client, monkeypatch) -> None:
    """A script copies entries with their data, and Redis serves nobody meanwhile."""
    monkeypatch.setattr(tasks, "_CALL_BYTES", 20_000)
    pipeline = redis_client.pipeline(transaction=False)
    for number in range(400):
        pipeline.xadd("orders", {"data": "x" * 1000}, id=f"{1000 + number}-0")
    pipeline.execute()
    replies = []
    monkeypatch.setattr(tasks, "ask", recording(replies))
    found = tasks.take_sample(wire, EntryRange("orders", "0-0", "1399-0"))
    looked = [sum(entries for entries, _, _ in reply) for [reply] in replies[1:]]
    assert max(looked) <= 20
    assert found.total == 400


def recording(replies):
    """Asks, and keeps what was said."""

    def asked(wire, commands):
        replies.append(ask(wire, commands))
        return replies[-1]

    return asked
