"""What a task adds to a stream, it adds once: attempts die, race, come late, see another order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
import redis
from tests.faults.proxy import Proxy

from conquiet.errors import StoreError
from conquiet.redis.connection import Database
from conquiet.redis.entry import from_fields
from conquiet.spark.log.encoder import Entries, RowEncoder
from conquiet.spark.log.options import WriteOptions
from conquiet.spark.log.writer import Attempt, Lane, NotRepeatable, Superseded, connect_to

ROWS = 50
SLICE_ROWS = 10
IDS = [f"e-{number:03}" for number in range(ROWS)]


@pytest.fixture
def options(redis_url: str) -> WriteOptions:
    return WriteOptions.of({"url": redis_url, "topic": "orders", "source": "/shop", "type": "sold"})


class Writing:
    """One attempt of a partition, slice by slice."""

    def __init__(
        self,
        client: redis.Redis,
        options: WriteOptions,
        ids: Sequence[str] | None = IDS,
        *,
        data: Sequence[str] | None = None,
        run: str = "run-1",
        batch: int = 7,
        partition: int = 0,
        task: int = 1,
    ) -> None:
        columns = {"data": pa.array(data or ids)} | ({"event_id": pa.array(ids)} if ids else {})
        rows = RowEncoder(list(columns), options, f"q-{batch}-{partition}-")
        [entries] = rows.encode(pa.record_batch(columns))
        self.slices = list(entries.slices(SLICE_ROWS, 1_000_000))
        self.session = connect_to(Database(client), "orders")
        attempt = Attempt("q", run, batch, partition, task)
        self.lane = Lane(self.session, "orders", attempt, options, named=ids is not None)
        self.left = iter(self.slices)

    def put(self, entries: Entries) -> None:
        while self.lane.offer(entries) and not self.lane.confirm():
            pass

    def step(self, slices: int) -> None:
        for entries in islice(self.left, slices):
            self.put(entries)

    def finish(self) -> None:
        self.step(len(self.slices))
        self.lane.close()
        self.session.close()


def ids_in(client: redis.Redis, stream: str = "orders") -> list[str]:
    return [fields[b"id"].decode() for _, fields in client.xrange(stream)]


def test_all_rows_are_added_in_order(redis_client, options) -> None:
    Writing(redis_client, options).finish()
    assert ids_in(redis_client) == IDS


def test_a_second_attempt_adds_nothing(redis_client, options) -> None:
    Writing(redis_client, options).finish()
    Writing(redis_client, options, task=2).finish()
    assert ids_in(redis_client) == IDS


@pytest.mark.parametrize("slices", range(6))
def test_an_attempt_goes_on_where_the_one_before_it_died(redis_client, options, slices) -> None:
    Writing(redis_client, options).step(slices)
    Writing(redis_client, options, task=2).finish()
    assert ids_in(redis_client) == IDS


def test_two_attempts_at_once_add_each_row_once(redis_client, options) -> None:
    first = Writing(redis_client, options)
    second = Writing(redis_client, options, task=2)
    for turn in range(5):
        (first if turn % 2 else second).step(1)
        (second if turn % 2 else first).step(1)
    first.finish()
    second.finish()
    assert ids_in(redis_client) == IDS


def test_of_two_attempts_that_look_at_the_same_time_one_adds(redis_client, options) -> None:
    first = Writing(redis_client, options)
    second = Writing(redis_client, options, task=2)
    entries = next(first.left)
    next(second.left)
    fence = second.lane._look()  # the second looks, then the first adds, then the second sends
    first.put(entries)
    assert second.lane._by_count(entries, fence) is not None
    second.lane._send(entries)
    assert not second.lane.confirm()
    assert not second.lane.offer(entries)
    first.finish()
    second.finish()
    assert ids_in(redis_client) == IDS


def test_rows_in_another_order_are_told_by_their_ids(redis_client, options) -> None:
    Writing(redis_client, options).step(2)
    with pytest.raises(NotRepeatable, match="the next compares the ids"):
        Writing(redis_client, options, IDS[::-1], task=2).finish()
    assert len(ids_in(redis_client)) == 2 * SLICE_ROWS
    Writing(redis_client, options, IDS[::-1], task=3).finish()
    assert sorted(ids_in(redis_client)) == IDS


def test_fewer_rows_than_before_are_noticed(redis_client, options) -> None:
    Writing(redis_client, options).step(2)
    with pytest.raises(NotRepeatable, match="fewer rows"):
        Writing(redis_client, options, IDS[:15], task=2).finish()


def test_a_restarted_query_may_have_other_partitions(redis_client, options) -> None:
    Writing(redis_client, options, IDS[:25]).step(1)
    Writing(redis_client, options, IDS[25:], partition=1).finish()
    for partition in range(3):  # another run, three partitions instead of two
        part = IDS[partition::3]
        Writing(redis_client, options, part, run="run-2", partition=partition).finish()
    assert sorted(ids_in(redis_client)) == IDS


def test_a_restarted_query_goes_on_in_the_next_batch(redis_client, options) -> None:
    Writing(redis_client, options, IDS[:20]).finish()
    Writing(redis_client, options, IDS[20:], run="run-2", batch=8).finish()
    assert ids_in(redis_client) == IDS


def test_ids_that_the_sink_makes_are_the_same_at_each_attempt(redis_client, options) -> None:
    data = [f"row {number}" for number in range(ROWS)]
    Writing(redis_client, options, None, data=data).step(3)
    Writing(redis_client, options, None, data=data, run="run-2").finish()
    assert ids_in(redis_client) == [f"q-7-0-{number}" for number in range(ROWS)]


def test_made_ids_do_not_hide_that_the_rows_are_others(redis_client, options) -> None:
    data = [f"row {number}" for number in range(ROWS)]
    Writing(redis_client, options, None, data=data).step(1)
    with pytest.raises(NotRepeatable, match="event_id of their own"):
        Writing(redis_client, options, None, data=data[::-1], run="run-2").finish()


def test_a_run_that_was_replaced_adds_nothing_more(redis_client, options) -> None:
    late = Writing(redis_client, options)
    late.step(1)
    Writing(redis_client, options, run="run-2").finish()
    with pytest.raises(Superseded, match="run-2"):
        late.step(1)
    assert sorted(ids_in(redis_client)) == IDS


def test_an_earlier_batch_adds_nothing_more(redis_client, options) -> None:
    Writing(redis_client, options, batch=8).finish()
    with pytest.raises(Superseded, match="batch 8"):
        Writing(redis_client, options, batch=7)


def test_a_refused_slice_does_not_count_as_added(redis_client, options) -> None:
    writing = Writing(redis_client, options)
    redis_client.set("orders", "no stream")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        writing.step(1)
    redis_client.delete("orders")
    Writing(redis_client, options, task=2).finish()
    assert ids_in(redis_client) == IDS


def test_a_fence_that_vanished_is_noticed(redis_client, options) -> None:
    writing = Writing(redis_client, options)
    writing.step(1)
    for key in redis_client.keys("conquiet:fence:{orders}:q:*"):
        redis_client.delete(key)
    with pytest.raises(StoreError, match="noeviction"):
        writing.step(1)


def test_fences_do_not_stay_for_ever(redis_client, options) -> None:
    Writing(redis_client, options).finish()
    keys = redis_client.keys("conquiet:fence:*")
    assert len(keys) == 2
    assert all(0 < redis_client.ttl(key) <= options.fence_seconds for key in keys)


def test_entries_are_events_as_any_reader_knows_them(redis_client, options) -> None:
    Writing(redis_client, options).finish()
    [(_, fields), *_] = redis_client.xrange("orders")
    flat = [item for pair in fields.items() for item in pair]
    data, attributes, _ = from_fields(flat)
    assert data == b"e-000"
    assert attributes == {"id": "e-000", "type": "sold", "source": "/shop", "specversion": "1.0"}


@pytest.mark.parametrize("lost", ["the look", "the slice"])
def test_a_lost_reply_leaves_no_doubt(redis_client, redis_url, options, lost) -> None:
    with Proxy(urlsplit(redis_url).port) as proxy, redis.Redis.from_url(proxy.url) as client:
        writing = Writing(client, options)
        writing.step(1)
        entries = next(writing.left)
        if lost == "the slice":
            fence = writing.lane._look()
            proxy.lose_replies(1)
            writing.lane._send(writing.lane._by_count(entries, fence))
            call = writing.lane.confirm
        else:
            proxy.lose_replies(1)
            call = partial(writing.lane.offer, entries)
        with pytest.raises(StoreError, match="cannot be reached"):
            call()
    added = len(ids_in(redis_client))
    assert added == (1 if lost == "the look" else 2) * SLICE_ROWS
    Writing(redis_client, options, task=2).finish()
    assert ids_in(redis_client) == IDS
