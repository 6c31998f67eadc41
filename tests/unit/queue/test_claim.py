"""Section 5.6 of the seed, where servers differ: what Redis before 7.0 says of deleted entries."""

from __future__ import annotations

import pytest

from conquiet.queue import QueueConfig, QueueError, RedisStreamsQueue
from conquiet.queue import queue as queue_module
from conquiet.queue.queue import _id_after


class OldRedis:
    """Answers as Redis 6 does: nil for an entry that was deleted while it was pending."""

    def __init__(self, client):
        self.entries = client
        self.sent = []

    def call(self, name, *arguments, wait_s=0.0):
        self.sent.append((name, *arguments))
        if name == b"XPENDING":
            return [[entry_id, b"other", 500, 1] for entry_id in self.entries]
        if name == b"XCLAIM":
            claimed = arguments[4:]
            return [self._entry(i) if self.entries[i] else None for i in claimed if i != b"3-0"]
        if name == b"XRANGE":
            if self.entries[arguments[1]] == "unreachable":
                raise QueueError("XRANGE failed")
            return [self._entry(arguments[1])] if self.entries[arguments[1]] else []
        return 1

    def _entry(self, entry_id):
        return [entry_id, [b"data", b'{"n": 1}']]


@pytest.fixture
def queue_on(monkeypatch):
    monkeypatch.setattr(queue_module, "Wire", OldRedis)
    return lambda entries: RedisStreamsQueue(entries, QueueConfig("orders", "billing", "b-1"))


def test_5_6_r12_only_what_was_deleted_is_acked_and_it_is_logged(queue_on, caplog):
    # 1-0 is there, 2-0 was deleted, 3-0 was taken by another consumer meanwhile
    queue = queue_on({b"1-0": True, b"2-0": None, b"3-0": True})
    assert [message.id for message in queue.claim_stale(100)] == ["1-0"]
    assert queue._wire.sent[-1] == (b"XACK", b"orders", b"billing", b"2-0")
    assert "1 pending entries of stream 'orders' were deleted before they were acked: 2-0" in (
        caplog.text
    )


def test_5_6_r12_a_failure_to_settle_costs_no_message(queue_on, caplog):
    queue = queue_on({b"1-0": True, b"2-0": None, b"3-0": "unreachable"})
    assert [message.id for message in queue.claim_stale(100)] == ["1-0"]
    assert "could not ack deleted entries" in caplog.text


@pytest.mark.parametrize(
    ("entry_id", "after"),
    [(b"5-0", b"5-1"), (b"0-1", b"0-2"), (b"5-18446744073709551615", b"6-0")],
)
def test_5_6_r3_the_next_start_is_computed(entry_id, after):
    assert _id_after(entry_id) == after
