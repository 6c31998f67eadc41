"""Section 2 of the seed: what is delivered, to whom, and how often."""

from __future__ import annotations

import pytest
from tests.waiting import eventually


@pytest.fixture(params=["sync", "async"])
def shell(request):
    return request.param


def test_2_1_a_message_that_is_not_acked_is_delivered_again(make_queue):
    first, second = make_queue("b-1"), make_queue("b-2")
    first.enqueue({"n": 1})
    [delivered] = first.read(1_000)
    assert eventually(lambda: second.claim_stale(20)) == [delivered]


def test_2_1_a_message_that_is_acked_is_not_delivered_again(queue):
    queue.enqueue({"n": 1})
    [message] = queue.read(1_000)
    queue.ack(message)
    assert queue.claim_stale(0) == []
    assert queue.read(1) == []


def test_2_2_one_consumer_reads_in_the_order_of_the_ids(queue):
    sent = [queue.enqueue({"n": n}) for n in range(20)]
    assert [message.id for message in queue.read(1_000, count=20)] == sent


def test_2_2_claiming_breaks_the_order(make_queue):
    first, second = make_queue("b-1"), make_queue("b-2")
    older, newer = first.enqueue({"n": 1}), first.enqueue({"n": 2})
    first.read(1_000)
    assert [message.id for message in second.read(1_000)] == [newer]
    assert eventually(lambda: second.claim_stale(1))[0].id == older


def test_2_3_two_consumers_do_not_get_the_same_message(make_queue):
    consumers = [make_queue("b-1"), make_queue("b-2")]
    sent = {consumers[0].enqueue({"n": n}) for n in range(20)}
    got = [message.id for n in range(20) for message in consumers[n % 2].read(1_000)]
    assert len(got) == 20
    assert set(got) == sent


def test_2_3_a_claimed_message_has_one_owner_at_a_time(make_queue, pending):
    first, second, third = make_queue("b-1"), make_queue("b-2"), make_queue("b-3")
    entry_id = first.enqueue({"n": 1})
    first.read(1_000)
    eventually(lambda: second.claim_stale(50))
    assert third.claim_stale(60_000) == []
    assert pending() == {entry_id: "b-2"}
