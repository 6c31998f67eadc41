"""Seed 000, task 5: the outbox stream is forwarded to where each message goes."""

from __future__ import annotations

import inspect
import socket

import pytest
from tests.integration.redis.conftest import numbered
from tests.waiting import eventually

from conquiet.message import Message
from conquiet.redis import Outbox, OutboxSource, StreamSink, StreamSource
from conquiet.redis.entry import TOPIC_FIELD, to_fields
from conquiet.relay import Relay


@pytest.fixture
def outbox(redis_client):
    """Puts messages into the outbox stream, as the Outbox middleware does."""

    def put(count, topic, first=0):
        for message in numbered(count, first):
            fields = [*to_fields(message), TOPIC_FIELD, topic.encode()]
            redis_client.execute_command("XADD", "outbox", "*", *fields)

    return put


def arrived(client, stream):
    return [fields[b"id"].decode() for _, fields in client.xrange(stream)]


def test_messages_go_to_their_topics_and_leave_the_outbox(outbox, redis_client):
    outbox(3, "orders")
    outbox(2, "sales", first=3)
    source = OutboxSource(redis_client, "outbox")
    Relay(source, StreamSink(redis_client)).run_once()
    assert arrived(redis_client, "orders") == ["m-0", "m-1", "m-2"]
    assert arrived(redis_client, "sales") == ["m-3", "m-4"]
    assert redis_client.xlen("outbox") == 0
    source.close()


def test_the_defaults_are_those_of_the_seed(outbox, redis_client):
    outbox(1, "orders")
    source = OutboxSource(redis_client, "outbox")
    assert (source.group, source.consumer) == ("outbox-publisher", socket.gethostname())
    assert source.lease == 60.0
    source.close()
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(OutboxSource).parameters.items()
    }
    assert (defaults["block"], defaults["claim_interval"]) == (1.0, 30.0)
    assert defaults["batch_size"] == 100  # ten times that of the seed: see its documentation


def test_a_batch_is_no_larger_than_asked(outbox, redis_client):
    outbox(5, "orders")
    source = OutboxSource(redis_client, "outbox", batch_size=2)
    assert len(source.read(100, 0.1)) == 2
    source.close()


def test_a_message_that_its_sink_refuses_stays_and_then_goes_to_the_dead_letters(
    outbox, redis_client
):
    redis_client.xadd("orders", {"a": "b"}, id=f"{2**64 - 1}-{2**64 - 1}")  # it is full for ever
    outbox(1, "orders")
    outbox(1, "sales", first=1)
    source = OutboxSource(redis_client, "outbox", max_attempts=2)
    relay = Relay(source, StreamSink(redis_client))
    relay.run_once(0.1)
    assert arrived(redis_client, "sales") == ["m-1"]
    assert arrived(redis_client, "outbox") == ["m-0"]

    def buried():  # alone it would look like an outage, which costs nothing
        outbox(1, "sales", first=2)
        relay.run_once(0.05)
        return source.dead

    eventually(buried)
    assert arrived(redis_client, "outbox:dead") == ["m-0"]
    assert redis_client.xlen("outbox") == 0
    source.close()


def test_what_a_relay_held_when_it_died_is_taken_over(outbox, redis_client):
    outbox(3, "orders")
    dead = OutboxSource(redis_client, "outbox", consumer="dead", lease=0.1)
    assert len(dead.read(10, 0.1)) == 3
    alive = OutboxSource(redis_client, "outbox", consumer="alive", lease=0.1, claim_interval=0.02)
    relay = Relay(alive, StreamSink(redis_client))

    eventually(lambda: relay.run_once(0.05) and redis_client.xlen("outbox") == 0)
    assert arrived(redis_client, "orders") == ["m-0", "m-1", "m-2"]
    alive.close()
    dead.close()


def test_several_streams_may_be_outboxes_of_one_relay(redis_client):
    for stream in ("a", "b"):
        StreamSink(redis_client, stream).publish(numbered(2))
    source = StreamSource(redis_client, ["a", "b"], "relay", delete=True)
    for message in source.read(10, 0.1):
        message.ack()
    assert redis_client.xlen("a") == redis_client.xlen("b") == 0
    source.close()


def to_pairs(message):
    return {"kind": message.type, "n": message.id, "body": message.data}


def from_pairs(fields):
    attributes = {"type": fields["kind"].decode(), "id": fields["n"].decode(), "source": "/test"}
    return Message(fields["body"], attributes)


def test_what_a_marshaller_of_ones_own_wrote_is_relayed_by_its_unmarshaller(redis_client):
    with redis_client.pipeline() as pipe:
        Outbox("orders", "outbox", marshal=to_pairs).add(pipe, numbered(2))
        pipe.execute()
    source = OutboxSource(redis_client, "outbox", unmarshal=from_pairs)
    Relay(source, StreamSink(redis_client)).run_once()
    source.close()
    assert arrived(redis_client, "orders") == ["m-0", "m-1"]
    assert [fields[b"data"] for _, fields in redis_client.xrange("orders")] == [b"0", b"1"]
    assert redis_client.xlen("outbox:dead") == redis_client.xlen("outbox") == 0


def test_the_topic_that_an_unmarshaller_sets_wins(redis_client):
    def unmarshal(fields):
        message = from_pairs(fields)
        message.topic = "sales"
        return message

    redis_client.xadd("outbox", {":topic": "orders", "kind": "sample", "n": "m-0", "body": "x"})
    source = OutboxSource(redis_client, "outbox", unmarshal=unmarshal)
    [message] = source.read(limit=10, timeout=1.0)
    source.close()
    assert message.topic == "sales"


@pytest.mark.parametrize(
    ("unmarshal", "why"),
    [
        (from_pairs, "KeyError: 'kind'"),
        (lambda fields: Message({"typed": 1}, {"id": "1"}), "data of type dict"),
        (lambda fields: None, "AttributeError"),
    ],
)
def test_an_entry_that_cannot_be_unmarshalled_goes_to_the_dead_letters(
    redis_client, unmarshal, why
):
    redis_client.xadd("outbox", {"other": "field"})
    source = OutboxSource(redis_client, "outbox", max_attempts=1, unmarshal=unmarshal)
    assert source.read(limit=10, timeout=0.01) == []
    source.close()
    [(_, letter)] = redis_client.xrange("outbox:dead")
    assert why in letter[b"deadreason"].decode()
    assert letter[b"data"] == b'[["other","field"]]'
