"""Section 3 of the seed: the entry in the stream, and entries that are no messages."""

from __future__ import annotations

import json

import pytest
import redis
from tests.integration.queue.names import STREAM

from conquiet.queue import InvalidPayloadError, MalformedEntryError, QueueConsumer

MALFORMED = {
    "another field": {"body": "{}"},
    "one field too many": {"data": "{}", "more": "1"},
    "not JSON": {"data": "{"},
    "NaN": {"data": '{"a": NaN}'},
    "not an object": {"data": "[1]"},
    "not UTF-8": {"data": b'{"a": "\xff"}'},
    "empty": {"data": ""},
}


@pytest.fixture(params=MALFORMED.values(), ids=MALFORMED)
def malformed(request, redis_client):
    """Add an entry that is no message, and return its id."""
    return lambda: redis_client.xadd(STREAM, request.param).decode()


def test_3_1_an_entry_is_one_field_data_with_utf_8_json(queue, redis_client):
    entry_id = queue.enqueue({"name": "Grüße", "n": 1})
    [(stored_id, fields)] = redis_client.xrange(STREAM)
    assert stored_id.decode() == entry_id
    assert list(fields) == [b"data"]
    assert json.loads(fields[b"data"].decode("utf-8")) == {"name": "Grüße", "n": 1}


def test_3_1_an_entry_written_by_hand_is_a_message(queue, redis_client):
    redis_client.xadd(STREAM, {"data": '{"n": 1}'})
    assert [message.payload for message in queue.read(1_000)] == [{"n": 1}]


@pytest.mark.parametrize("payload", [[1], {1: 2}, {"a": float("nan")}, {"a": b"b"}, {"a": {1}}])
def test_3_2_enqueue_refuses_what_is_no_json_object(queue, redis_client, payload):
    with pytest.raises(InvalidPayloadError):
        queue.enqueue(payload)
    assert redis_client.xlen(STREAM) == 0


def test_3_1_a_malformed_entry_alone_is_reported_at_once_and_stays_pending(
    queue, malformed, pending
):
    entry_id = malformed()
    with pytest.raises(MalformedEntryError) as caught:
        queue.read(1_000)
    assert caught.value.entry_id == entry_id
    assert caught.value.stream == STREAM
    assert entry_id in str(caught.value)
    assert pending() == {entry_id: "b-1"}
    assert queue.read(1) == []


def test_3_1_a_malformed_entry_does_not_hide_the_messages_read_with_it(queue, malformed, pending):
    before = queue.enqueue({"n": 1})
    bad = [malformed(), malformed()]
    after = queue.enqueue({"n": 2})
    assert [message.id for message in queue.read(1_000, count=10)] == [before, after]
    for entry_id in bad:
        with pytest.raises(MalformedEntryError, match=entry_id):
            queue.read(1_000, count=10)
    assert queue.read(1) == []
    assert set(pending()) == {before, *bad, after}


def test_3_1_a_report_costs_no_message(queue, malformed):
    queue.enqueue({"n": 1})
    malformed()
    queue.read(1_000, count=2)
    next_id = queue.enqueue({"n": 2})
    with pytest.raises(MalformedEntryError):
        queue.read(1_000)
    assert [message.id for message in queue.read(1_000)] == [next_id]


def test_3_1_claim_stale_reports_what_a_read_has_found(queue, malformed, calls):
    queue.enqueue({"n": 1})
    entry_id = malformed()
    queue.read(1_000, count=2)
    with pytest.raises(MalformedEntryError, match=entry_id):
        queue.claim_stale(60_000)
    assert calls("xpending") == 0
    assert queue.claim_stale(60_000) == []


def test_3_1_a_report_is_logged_at_once(queue, malformed, caplog):
    queue.enqueue({"n": 1})
    entry_id = malformed()
    queue.read(1_000, count=2)
    assert entry_id in caplog.text


def test_3_1_a_client_that_decodes_does_not_fail_on_other_bytes(redis_url, make_queue, malformed):
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        queue = make_queue(client=client)
        malformed()
        sent = queue.enqueue({"n": 1})
        assert [message.id for message in queue.read(1_000, count=2)] == [sent]


def test_3_1_malformed_entries_cannot_stop_the_loop(queue, malformed):
    consumer = QueueConsumer(queue)
    bad = [malformed() for _ in range(3)]
    sent = queue.enqueue({"n": 1})
    reported, got, messages = [], [], consumer.iter_messages()
    while not consumer.stopped:
        try:
            for message in messages:
                got.append(message.id)
                consumer.stop()
        except MalformedEntryError as error:
            reported.append(error.entry_id)
    assert (reported, got) == (bad, [sent])


def test_3_1_malformed_entries_cannot_stop_claiming(make_queue, malformed, pending):
    first, second = make_queue("b-1"), make_queue("b-2")
    bad = [malformed() for _ in range(3)]
    sent = first.enqueue({"n": 1})
    first.read(1_000, count=10)
    reported, got = [], []
    while not got:  # min_idle_ms=0: what was claimed just now is stale again
        try:
            got = second.claim_stale(0, count=2)
        except MalformedEntryError as error:
            reported.append(error.entry_id)
        assert len(reported) < 10
    assert [message.id for message in got] == [sent]
    assert set(bad) >= set(reported)
    assert pending() == dict.fromkeys([*bad, sent], "b-2")
