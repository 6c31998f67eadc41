"""Every command and option that the queue sends is known to Redis 6.0."""

from __future__ import annotations

import re

import pytest
from tests.integration.queue.names import STREAM

from conquiet.queue import MalformedEntryError, QueueConsumer

ID = r"\d+-\d+"
KNOWN_TO_6_0 = [
    rf"XGROUP CREATE {STREAM} \S+ 0-0 MKSTREAM",
    rf"XADD {STREAM} \* data \S+",
    rf"XREADGROUP GROUP \S+ \S+ COUNT \d+ BLOCK [1-9]\d* STREAMS {STREAM} >",
    rf"XACK {STREAM} \S+( {ID})+",
    # neither IDLE nor a range that excludes its start
    rf"XPENDING {STREAM} \S+ (-|{ID}) (\+|{ID}) \d+",
    rf"XCLAIM {STREAM} \S+ \S+ \d+( {ID})+",
    rf"XRANGE {STREAM} {ID} {ID}",
]
# redis-py greets the server so, and takes no for an answer from an old one
HANDSHAKE = re.compile(r"(HELLO|CLIENT|AUTH|SELECT|PING)\b")


def use_everything(make_queue, client):
    queue, other = make_queue("b-1"), make_queue("b-2")
    sent = [queue.enqueue({"n": n}) for n in range(6)]
    client.xadd(STREAM, {"other": "1"})
    first, *_ = queue.read(1_000, count=7)
    with pytest.raises(MalformedEntryError):
        queue.read(1)
    queue.ack(first)
    client.xdel(STREAM, sent[2])
    for _ in range(3):
        try:
            other.claim_stale(0, count=2)
        except MalformedEntryError:
            pass
    consumer = QueueConsumer(make_queue("b-3"))
    queue.enqueue({"n": 7})
    for message in consumer.iter_messages():
        consumer.ack(message)
        consumer.stop()


@pytest.fixture
def sent_by_queue(recorded, make_queue, redis_client):
    commands = recorded(lambda: use_everything(make_queue, redis_client))
    ours = [f"XADD {STREAM} * other 1", f"XDEL {STREAM}"]  # the test's own
    return [c for c in commands if not HANDSHAKE.match(c) and not c.startswith(tuple(ours))]


def test_every_command_and_option_is_known_to_redis_6_0(sent_by_queue):
    unknown = [c for c in sent_by_queue if not any(re.fullmatch(k, c) for k in KNOWN_TO_6_0)]
    assert unknown == []


def test_the_recording_saw_every_kind_of_call(sent_by_queue):
    names = {command.split()[0] for command in sent_by_queue}
    assert names >= {"XGROUP", "XADD", "XREADGROUP", "XACK", "XPENDING", "XCLAIM"}


def test_1_2_nothing_out_of_scope_is_sent(sent_by_queue):
    # no dead letters, no consumer cleanup, no trimming, no transactions or scripts
    words = {word for command in sent_by_queue for word in command.split()}
    assert words.isdisjoint({"XTRIM", "XDEL", "DELCONSUMER", "MAXLEN", "MULTI", "EVAL", "NOACK"})
    assert {c.split()[1] for c in sent_by_queue if c.startswith("XADD")} == {STREAM}


def test_no_read_blocks_for_ever(sent_by_queue):
    assert not any(" BLOCK 0 " in command for command in sent_by_queue)
