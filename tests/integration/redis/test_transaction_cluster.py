"""Transactions in a real cluster of three nodes: one slot each, or refused."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis
from tests.integration.redis.conftest import ids, numbered
from tests.waiting import eventually

from conquiet.errors import ConfigError
from conquiet.message import Message
from conquiet.redis import (
    CrossSlot,
    Inbox,
    Outbox,
    OutboxSource,
    StreamSink,
    StreamSource,
    Transaction,
    commands,
)
from conquiet.router import Router
from conquiet.testing import deliver


@pytest.fixture
def client(cluster_client):
    return cluster_client


@pytest.fixture
def router(client):
    def make(write, *middlewares):
        made = Router()
        made.use(Transaction(client), *(middlewares or [Inbox("billing")]))

        @made.raw(name="handler", source="/billing")
        def handle(item: Message[bytes]) -> list[Message[bytes]]:
            write(item)
            return [Message(b"", {"type": "billed", "id": f"{item.id}/billed"})]

        return made

    return make


def everything(client):
    return set(client.keys("*", target_nodes=redis.RedisCluster.PRIMARIES))


def test_keys_with_the_tag_of_the_inbox_commit_together(client, router):
    made = router(
        lambda item: commands(client).hset(f"order:{{billing}}:{item.id}", "status", "billed"),
        Inbox("billing"),
        Outbox("sales", "outbox:{billing}"),
    )
    for _ in range(2):
        assert len(deliver(made, *numbered(5)).acked) == 5
    assert client.xlen("outbox:{billing}") == 5
    assert client.hget("order:{billing}:m-3", "status") == b"billed"


def test_events_are_added_in_a_transaction_of_the_caller(client):
    outbox, event = (
        Outbox("sales", "outbox:{billing}", source="/billing"),
        Message(b"", {"type": "sold"}),
    )
    with client.pipeline(transaction=True) as pipeline:
        pipeline.set("order:{billing}:1", "paid")
        assert len(outbox.add(pipeline, [event])) == 1
        outbox.add(pipeline, [Message(b"", {"type": "late"})], after=3600)
        pipeline.execute()
    assert client.xlen("outbox:{billing}") == client.zcard(outbox.delayed.times) == 1
    with client.pipeline(transaction=True) as pipeline:
        pipeline.watch("order:{billing}:1")
        with pytest.raises(ConfigError, match="call its multi"):
            outbox.add(pipeline, [event])
        pipeline.multi()
        outbox.add(pipeline, [event])
        client.set("order:{billing}:1", "refunded")
        with pytest.raises(redis.WatchError):
            pipeline.execute()
    with client.pipeline() as pipeline, pytest.raises(ConfigError, match="transaction=True"):
        outbox.add(pipeline, [event])
    assert client.xlen("outbox:{billing}") == 1


def test_delayed_events_wait_on_the_node_of_their_outbox(client):
    outbox, made = Outbox("sales", "outbox:{billing}"), Router()
    made.use(Transaction(client), Inbox("billing"), outbox)
    delays = {"m-0": 0.2, "m-1": 0.1, "m-2": 3600}

    @made.raw(name="handler", source="/billing")
    def handle(item: Message[bytes]) -> list[Message[bytes]]:
        later = timedelta(seconds=delays[item.id])
        return [Message(b"", {"type": "billed", "id": f"{item.id}/billed"}, notbefore=later)]

    for _ in range(2):
        assert len(deliver(made, *numbered(3)).acked) == 3
    assert outbox.cancel(client, "m-2/billed") is True
    assert outbox.cancel(client, "m-2/billed") is False
    relay, published = OutboxSource(client, "outbox:{billing}", consumer="relay"), []

    def publish():
        for message in relay.read(10, 0.1):
            published.append(message.id)
            message.ack()
        return len(published) == 2

    eventually(publish, timeout=60)
    assert published == ["m-1/billed", "m-0/billed"]
    assert client.exists(outbox.delayed.times) == client.exists(outbox.delayed.entries) == 0
    relay.close()


def test_a_second_client_of_the_same_cluster_joins_the_transaction(client, cluster_ports):
    with redis.RedisCluster("localhost", cluster_ports[1]) as other, Transaction(client).scope(()):
        commands(other).set("k", 1)
        assert client.get("k") is None
    assert client.get("k") == b"1"


def test_two_slots_in_one_transaction_are_refused_before_anything_is_sent(client, router):
    made = router(
        lambda item: commands(client).set(f"order:{item.id}", 1), Inbox("billing"), Outbox("sales")
    )
    [error] = deliver(made, *numbered(1)).errors
    assert isinstance(error, CrossSlot)
    assert "{billing}" in str(error)
    assert everything(client) == set()


def test_one_command_over_two_slots_is_refused_too(client):
    with pytest.raises(CrossSlot), Transaction(client).scope(()):
        commands(client).execute_command("MSET", "a", 1, "b", 2)
    assert everything(client) == set()


def test_an_outbox_stream_in_another_slot_is_refused(client, router):
    made = router(lambda item: None, Inbox("billing"), Outbox("sales", "outbox:{elsewhere}"))
    [error] = deliver(made, *numbered(1)).errors
    assert isinstance(error, CrossSlot)
    assert everything(client) == set()


def test_a_batch_over_several_slots_runs_one_by_one(client, router):
    made = router(
        lambda item: commands(client).incr(f"effect:{{{item.id}}}"),
        Inbox("billing", tag=lambda item: item.id),
        Outbox("sales", "outbox"),
    )
    delivered = deliver(made, *numbered(4))
    assert len(delivered.nacked) == 4  # the outbox lies in one slot only
    made = Router()
    made.use(Transaction(client), Inbox("billing", tag=lambda item: item.id))

    @made.raw(name="handler")
    def handle(item: Message[bytes]) -> None:
        commands(client).incr(f"effect:{{{item.id}}}")

    for _ in range(2):
        assert ids(deliver(made, *numbered(4)).acked) == ["m-0", "m-1", "m-2", "m-3"]
    assert [client.get(f"effect:{{m-{n}}}") for n in range(4)] == [b"1"] * 4


def test_the_ack_rides_in_the_exec_where_the_stream_shares_the_slot(client, router):
    for stream in ("orders:{billing}", "orders"):
        StreamSink(client, stream).publish(numbered(3, subject=stream))
        source = StreamSource(client, stream, "billing")
        made = Router()
        made.use(Transaction(client), Inbox("billing"))

        @made.raw(name=f"handler-{stream}")
        def handle(item: Message[bytes]) -> None:
            commands(client).incr("effects:{billing}")

        batch = source.read(10, 1)
        handled = made.run(batch)
        rides = stream == "orders:{billing}"
        assert [message.acking.token.is_acked for message in batch] == [rides] * 3
        assert client.xpending(stream, "billing")["pending"] == (0 if rides else 3)
        made.settle(handled)
        assert client.xpending(stream, "billing")["pending"] == 0
        source.close()
    assert client.get("effects:{billing}") == b"6"


def test_a_message_published_in_a_transaction_needs_no_slot(client):
    with Transaction(client).scope(()):
        commands(client).set("k", 1)
        commands(client).publish("channel", "hello")
    assert client.get("k") == b"1"


def test_a_command_without_a_key_has_no_place_in_a_cluster(client):
    with pytest.raises(CrossSlot), Transaction(client).scope(()):
        commands(client).flushdb()
