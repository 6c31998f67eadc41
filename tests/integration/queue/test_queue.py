"""Section 5 of the seed: RedisStreamsQueue, and the same on an event loop."""

from __future__ import annotations

import time

import pytest
import redis
from tests.integration.queue.names import GROUP, STREAM, find_stale
from tests.waiting import eventually

from conquiet.queue import (
    InvalidSettingError,
    QueueConfig,
    QueueError,
    QueueMessage,
    RedisStreamsQueue,
)
from conquiet.queue import queue as queue_module

NOT_A_COUNT = [0, -1, 2**63, True, 1.0, "1", None]
HOUR_MS = 3_600_000


@pytest.fixture(params=["sync", "async"])
def shell(request):
    return request.param


@pytest.fixture
def age(redis_client):
    """Let entries of a consumer look as if it had got them two hours ago."""

    def make_old(consumer, *ids):
        redis_client.xclaim(STREAM, GROUP, consumer, 0, ids, idle=2 * HOUR_MS, justid=True)

    return make_old


def test_5_1_nothing_is_buffered(queue, redis_client, pending):
    sent = [queue.enqueue({"n": n}) for n in range(3)]
    queue.read(1_000)
    assert list(pending()) == sent[:1]


def test_5_1_one_call_is_one_command(queue, calls):
    queue.enqueue({"n": 1})
    [message] = queue.read(1_000)
    queue.ack(message)
    queue.read(1)
    assert [calls(name) for name in ("xadd", "xreadgroup", "xack")] == [1, 2, 1]


def test_5_2_the_group_is_made_at_the_start_of_a_stream_that_need_not_exist(queue, redis_client):
    [group] = redis_client.xinfo_groups(STREAM)
    assert (group["name"], group["last-delivered-id"]) == (GROUP.encode(), b"0-0")


def test_5_2_entries_that_were_there_before_the_group_are_delivered(redis_client, make_queue):
    redis_client.xadd(STREAM, {"data": '{"n": 1}'})
    assert [message.payload for message in make_queue().read(1_000)] == [{"n": 1}]


def test_5_2_a_group_that_exists_is_left_as_it_is(make_queue):
    first = make_queue("b-1")
    first.enqueue({"n": 1})
    first.ack(first.read(1_000)[0])
    assert make_queue("b-2").read(1) == []


def test_5_2_any_other_error_propagates(redis_client, make_queue):
    redis_client.set(STREAM, "not a stream")
    with pytest.raises(QueueError, match="XGROUP failed") as caught:
        make_queue()
    assert isinstance(caught.value.__cause__, redis.ResponseError)


def test_5_2_a_group_that_is_gone_is_not_made_again(queue, redis_client):
    redis_client.xgroup_destroy(STREAM, GROUP)
    queue.enqueue({"n": 1})
    for _ in range(2):
        with pytest.raises(QueueError, match="NOGROUP"):
            queue.read(1)
    assert redis_client.xinfo_groups(STREAM) == []


def test_5_3_enqueue_returns_the_entry_id(queue, redis_client):
    entry_id = queue.enqueue({"n": 1})
    assert isinstance(entry_id, str)
    assert [stored.decode() for stored, _ in redis_client.xrange(STREAM)] == [entry_id]


def test_5_4_a_read_message_is_pending(queue, pending):
    entry_id = queue.enqueue({"n": 1})
    assert queue.read(1_000) == [QueueMessage(entry_id, {"n": 1})]
    assert pending() == {entry_id: "b-1"}


def test_5_4_the_list_may_be_empty(queue):
    assert queue.read(1) == []


def test_5_4_read_waits_as_long_as_it_is_told(queue):
    started = time.monotonic()
    assert queue.read(200) == []
    assert time.monotonic() - started >= 0.2


def test_5_4_block_zero_is_rejected(queue, calls):
    with pytest.raises(InvalidSettingError, match="block_ms=0"):
        queue.read(0)
    assert calls("xreadgroup") == 0


@pytest.mark.parametrize("block_ms", [-1, 2**63, True, 1.5, "100", None])
def test_5_4_block_ms_must_be_a_positive_integer(queue, block_ms):
    with pytest.raises(InvalidSettingError, match=f"block_ms={block_ms!r}"):
        queue.read(block_ms)


@pytest.mark.parametrize("count", NOT_A_COUNT)
def test_5_4_count_must_be_a_positive_integer(queue, count):
    with pytest.raises(InvalidSettingError, match=f"count={count!r}"):
        queue.read(1, count)


def test_5_4_count_is_advisory(queue):
    sent = [queue.enqueue({"n": n}) for n in range(3)]
    assert [message.id for message in queue.read(1_000, count=2)] == sent[:2]
    assert [message.id for message in queue.read(1_000, count=100)] == sent[2:]


def test_5_5_ack_settles(queue, pending):
    queue.enqueue({"n": 1})
    queue.ack(queue.read(1_000)[0])
    assert pending() == {}


def test_5_5_acking_again_or_what_is_not_pending_is_allowed(queue):
    queue.enqueue({"n": 1})
    [message] = queue.read(1_000)
    queue.ack(message)
    queue.ack(message)
    queue.ack(QueueMessage("123-0", {}))


def test_5_5_errors_propagate(queue, redis_client):
    with pytest.raises(QueueError, match="XACK failed") as caught:
        queue.ack(QueueMessage("not an id", {}))
    assert isinstance(caught.value.__cause__, redis.ResponseError)


def test_5_6_what_xclaim_returned_is_returned(make_queue, pending):
    # a claimed entry never shows up in a read of new messages
    first, second = make_queue("b-1"), make_queue("b-2")
    entry_id = first.enqueue({"n": 1})
    first.read(1_000)
    assert eventually(lambda: second.claim_stale(20)) == [QueueMessage(entry_id, {"n": 1})]
    assert pending() == {entry_id: "b-2"}
    assert second.read(1) == []


def test_5_6_a_message_that_is_not_idle_for_long_enough_stays_where_it_is(make_queue, pending):
    first, second = make_queue("b-1"), make_queue("b-2")
    entry_id = first.enqueue({"n": 1})
    first.read(1_000)
    assert second.claim_stale(60_000) == []
    assert pending() == {entry_id: "b-1"}


def test_5_6_redis_has_the_last_word_on_idle_time(make_queue, monkeypatch, pending):
    first, second = make_queue("b-1"), make_queue("b-2")
    entry_id = first.enqueue({"n": 1})
    first.read(1_000)
    monkeypatch.setattr(second._protocol, "_stale_ids", find_stale(entry_id.encode()))
    assert second.claim_stale(60_000) == []
    assert pending() == {entry_id: "b-1"}


def test_5_6_two_that_claim_at_once_do_not_both_get_a_message(make_queue, age, monkeypatch):
    first, second, third = make_queue("b-1"), make_queue("b-2"), make_queue("b-3")
    entry_id = first.enqueue({"n": 1})
    first.read(1_000)
    age("b-1", entry_id)
    monkeypatch.setattr(third._protocol, "_stale_ids", find_stale(entry_id.encode()))
    assert [message.id for message in second.claim_stale(HOUR_MS)] == [entry_id]
    assert third.claim_stale(HOUR_MS) == []


def test_5_6_no_more_than_count_are_claimed(make_queue):
    first, second = make_queue("b-1"), make_queue("b-2")
    sent = [first.enqueue({"n": n}) for n in range(15)]
    first.read(1_000, count=15)
    got = eventually(lambda: second.claim_stale(20, count=4))
    assert [message.id for message in got] == sent[:4]
    eventually(lambda: len(got := second.claim_stale(1)) == 10 and got)


def test_5_6_a_lone_message_can_be_claimed_again_and_again(make_queue):
    queue = make_queue()
    queue.enqueue({"n": 1})
    [message] = queue.read(1_000)
    for _ in range(3):
        assert queue.claim_stale(0, count=1) == [message]


def test_5_6_one_call_looks_at_a_bounded_part_and_the_next_goes_on(make_queue, age, monkeypatch):
    monkeypatch.setattr(queue_module, "_PENDING_PAGE", 10)
    first, second = make_queue("b-1"), make_queue("b-2")
    sent = [first.enqueue({"n": n}) for n in range(25)]
    first.read(1_000, count=25)
    age("b-1", sent[-1])
    assert second.claim_stale(HOUR_MS, count=10) == []
    assert second.claim_stale(HOUR_MS, count=10) == []
    assert [message.id for message in second.claim_stale(HOUR_MS, count=10)] == sent[-1:]


def test_5_6_a_larger_count_looks_at_a_larger_part(make_queue, monkeypatch):
    monkeypatch.setattr(queue_module, "_PENDING_PAGE", 10)
    queue = make_queue()
    sent = [queue.enqueue({"n": n}) for n in range(15)]
    queue.read(1_000, count=15)
    assert [message.id for message in queue.claim_stale(0, count=15)] == sent


def test_5_6_a_call_that_begins_in_the_middle_comes_round_to_the_start(make_queue, age, calls):
    first, second = make_queue("b-1"), make_queue("b-2")
    sent = [first.enqueue({"n": n}) for n in range(4)]
    first.read(1_000, count=4)
    age("b-1", sent[1])
    assert [message.id for message in second.claim_stale(HOUR_MS, count=1)] == [sent[1]]
    age("b-1", sent[0], sent[3])
    got = second.claim_stale(HOUR_MS, count=10)
    assert [message.id for message in got] == [sent[3], sent[0]]
    assert calls("xpending") == 1 + 2
    assert second.claim_stale(HOUR_MS) == []
    assert calls("xpending") == 3 + 1  # after a whole round it begins at the start again


def test_5_6_an_entry_that_was_deleted_meanwhile_does_not_break_it(make_queue, redis_client):
    first, second = make_queue("b-1"), make_queue("b-2")
    sent = [first.enqueue({"n": n}) for n in range(3)]
    first.read(1_000, count=3)
    redis_client.xdel(STREAM, sent[1])
    got = eventually(lambda: second.claim_stale(20))
    assert [message.id for message in got] == [sent[0], sent[2]]


def test_5_6_r12_an_entry_that_was_deleted_while_pending_is_settled(
    make_queue, redis_client, pending
):
    queue = make_queue()
    sent = [queue.enqueue({"n": n}) for n in range(2)]
    queue.read(1_000, count=2)
    redis_client.xdel(STREAM, *sent)
    assert queue.claim_stale(0) == []
    assert pending() == {}


def test_5_6_nothing_pending_is_nothing_claimed(queue, calls):
    assert queue.claim_stale(0) == []
    assert (calls("xpending"), calls("xclaim")) == (1, 0)


@pytest.mark.parametrize("min_idle_ms", [-1, 2**63, True, 1.5, "1", None])
def test_5_6_min_idle_ms_must_be_an_integer(queue, min_idle_ms):
    with pytest.raises(InvalidSettingError, match=f"min_idle_ms={min_idle_ms!r}"):
        queue.claim_stale(min_idle_ms)


@pytest.mark.parametrize("count", NOT_A_COUNT)
def test_5_6_count_must_be_a_positive_integer(queue, count):
    with pytest.raises(InvalidSettingError, match=f"count={count!r}"):
        queue.claim_stale(1, count)


def test_5_7_any_consumer_may_claim_even_one_that_never_read(make_queue):
    first, newcomer = make_queue("b-1"), make_queue("b-2")
    first.enqueue({"n": 1})
    first.read(1_000)
    assert len(eventually(lambda: newcomer.claim_stale(20))) == 1


def test_5_7_nothing_is_claimed_unless_asked(make_queue, calls):
    first, second = make_queue("b-1"), make_queue("b-2", claim_idle_ms=1)
    first.enqueue({"n": 1})
    first.read(1_000)
    assert second.read(50) == []
    assert calls("xclaim") == calls("xpending") == 0


def test_a_stream_name_may_be_any_text(redis_client):
    queue = RedisStreamsQueue(redis_client, QueueConfig("bestellungen grün", "größe", "ü 1"))
    queue.enqueue({"n": 1})
    [message] = queue.read(1_000)
    queue.ack(message)
    assert redis_client.xpending("bestellungen grün", "größe")["pending"] == 0
