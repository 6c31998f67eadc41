"""Section 7 of the seed: metrics, only after calls that succeeded."""

from __future__ import annotations

import prometheus_client
import pytest
from tests.integration.queue.names import STREAM, find_stale
from tests.waiting import eventually

from conquiet.queue import (
    MalformedEntryError,
    QueueConfig,
    QueueError,
    QueueMessage,
    RedisStreamsQueue,
)
from conquiet.queue import metrics as metrics_module


def now(name):
    return prometheus_client.REGISTRY.get_sample_value(name, {"stream": STREAM}) or 0


@pytest.fixture
def grown():
    """How much a metric has grown since the test began."""
    names = [
        "conquiet_queue_messages_read_total",
        "conquiet_queue_messages_ack_total",
        "conquiet_queue_messages_claimed_total",
        "conquiet_queue_read_latency_seconds_count",
        "conquiet_queue_read_latency_seconds_sum",
    ]
    before = {name: now(name) for name in names}
    return lambda name: now(f"conquiet_queue_{name}") - before[f"conquiet_queue_{name}"]


def test_7_reads_acks_and_claims_are_counted(queue, grown):
    for n in range(3):
        queue.enqueue({"n": n})
    messages = queue.read(1_000, count=3)
    queue.ack(messages[0])
    eventually(lambda: queue.claim_stale(1))
    assert grown("messages_read_total") == 3
    assert grown("messages_ack_total") == 1
    assert grown("messages_claimed_total") == 2


def test_7_read_latency_includes_the_wait(queue, grown):
    queue.read(200)
    assert grown("read_latency_seconds_count") == 1
    assert 0.2 <= grown("read_latency_seconds_sum") < 20


def test_7_an_ack_that_settles_nothing_counts_nothing(queue, grown):
    queue.ack(QueueMessage("1-0", {}))
    assert grown("messages_ack_total") == 0


def test_7_an_entry_that_xclaim_left_where_it_is_does_not_count(make_queue, grown, monkeypatch):
    first, second = make_queue("b-1"), make_queue("b-2")
    entry_id = first.enqueue({"n": 1})
    first.read(1_000)
    monkeypatch.setattr(second._protocol, "_stale_ids", find_stale(entry_id.encode()))
    assert second.claim_stale(60_000) == []
    assert grown("messages_claimed_total") == 0


def test_7_a_malformed_entry_was_read_too(queue, redis_client, grown):
    redis_client.xadd(STREAM, {"other": "1"})
    with pytest.raises(MalformedEntryError):
        queue.read(1_000)
    assert grown("messages_read_total") == 1


def test_7_nothing_is_emitted_if_redis_refuses(queue, redis_client, grown):
    redis_client.set(STREAM, "not a stream")
    with pytest.raises(QueueError):
        queue.read(1)
    with pytest.raises(QueueError):
        queue.claim_stale(1)
    with pytest.raises(QueueError):
        queue.ack(QueueMessage("1-0", {}))
    for name in ("messages_read_total", "messages_ack_total", "messages_claimed_total"):
        assert grown(name) == 0
    assert grown("read_latency_seconds_count") == 0


def test_7_a_stream_that_redis_refused_has_no_metrics(redis_client):
    redis_client.set("refused", "not a stream")
    with pytest.raises(QueueError):
        RedisStreamsQueue(redis_client, QueueConfig("refused", "billing", "b-1"))
    label = {"stream": "refused"}
    value = prometheus_client.REGISTRY.get_sample_value("conquiet_queue_messages_read_total", label)
    assert value is None


def test_7_a_broken_metric_costs_no_message(make_queue, monkeypatch):
    class Broken:
        def labels(self, **_):
            raise OSError("disk full")

    for name in ("_READ", "_ACKED", "_CLAIMED", "_LATENCY"):
        monkeypatch.setattr(metrics_module, name, Broken())
    queue = make_queue()
    queue.enqueue({"n": 1})
    [message] = queue.read(1_000)
    assert queue.claim_stale(0) == [message]
    queue.ack(message)
