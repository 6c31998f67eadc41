"""A real cluster of three nodes: partitions on all of them, order within each."""

from __future__ import annotations

import pytest
import redis
from tests.integration.redis.conftest import ids, numbered
from tests.waiting import eventually

from conquiet.errors import StoreError, TryLater
from conquiet.message import Message
from conquiet.redis import (
    OutboxSource,
    Readers,
    StreamSink,
    StreamSource,
    Topic,
    remove_idle_consumers,
    trim_stream,
)
from conquiet.redis.wire import Wire
from conquiet.registry import join_cluster, open_redis
from conquiet.router import Router
from conquiet.worker import Worker

TOPIC = Topic("orders", partitions=8)


@pytest.fixture
def client(cluster_client):
    return cluster_client


def test_a_url_with_several_hosts_opens_the_cluster(client, cluster_ports):
    client.set("k", 1)
    nodes = ",".join(f"127.0.0.1:{port}" for port in cluster_ports)
    with open_redis(f"redis+cluster://{nodes}", answer_seconds=5.0) as opened:
        assert opened.get("k") == b"1"
        assert join_cluster(opened, "") is opened


def test_a_cluster_that_is_out_of_reach_is_no_wrong_url():
    with pytest.raises(StoreError, match="cannot be reached") as raised:
        open_redis("redis+cluster://app:pa55@127.0.0.1:1", connect_seconds=1.0)
    assert "pa55" not in str(raised.value)


def publish(client, count, first=0, topic="orders", partitions=8):
    messages = [
        m for n in range(first, first + count) for m in numbered(1, n, subject=f"k-{n % 7}")
    ]
    sink = StreamSink(client, topic, partitions=partitions)
    assert list(sink.publish_each(messages)) == [None] * count


def drain(source, count):
    got = []

    def enough():
        got.extend(source.read(10, 0.05))
        return len(got) >= count

    eventually(enough)
    return got


def test_a_topic_is_spread_over_the_nodes_and_read_as_one(client):
    publish(client, 70)
    nodes = {client.get_node_from_key(stream).name for stream in TOPIC.streams}
    assert len(nodes) > 1
    source = StreamSource(client, TOPIC, "billing")
    got = drain(source, 70)
    for key in range(7):
        mine = [int(m.data) for m in got if m.subject == f"k-{key}"]
        assert mine == sorted(mine)
        assert len(mine) == 10
    for message in got:
        message.ack()
    assert list(source.read(10, 0.05)) == []
    source.close()
    assert sum(trim_stream(client, stream, exact=True).removed for stream in TOPIC.streams) == 70


def test_claims_nacks_and_replay(client):
    publish(client, 20)
    dead = StreamSource(client, TOPIC, "billing", lease=0.1)
    drain(dead, 20)
    alive = StreamSource(client, TOPIC, "billing", lease=0.1, claim_interval=0.02, backoff=0.0)
    got = drain(alive, 20)
    assert {message.deliveries for message in got} == {2}
    alive.renew(got)
    for message in got:
        message.nack(None)
    again = drain(alive, 20)
    assert {message.deliveries for message in again} == {3}
    assert len(list(alive.replay())) == 20
    for message in again:
        message.ack()
    alive.close()
    dead.close()


def test_one_stream_blocks_on_its_node(client):
    publish(client, 3, topic="single", partitions=1)
    source = StreamSource(client, "single", "billing")
    assert ids(source.read(10, 1.0)) == ["m-0", "m-1", "m-2"]
    assert list(source.read(10, 0.1)) == []
    source.close()


def test_dead_letters_and_maintenance(client):
    client.xadd("single", {"not": "a CloudEvent"})
    source = StreamSource(client, "single", "billing", backoff=0.0)
    eventually(lambda: list(source.read(10, 0.02)) == [] and source.dead == 1)
    Readers(client, "single").register("spark")
    assert Readers(client, "single").advance("spark", "1-0")
    StreamSource(client, "single", "billing", "gone").read(1, 0.01)
    assert "gone" in remove_idle_consumers(client, "single", "billing", idle=0)
    source.close()


def test_an_outbox(client):
    publish(client, 3, topic="outbox", partitions=1)
    relay = OutboxSource(client, "outbox", consumer="relay")
    for message in relay.read(10, 1.0):
        message.ack()
    assert client.xlen("outbox") == 0
    relay.close()


def test_a_worker_on_a_partitioned_topic(client):
    router, seen = Router(), []

    @router.raw()
    def handle(message: Message[bytes]) -> None:
        seen.append(int(message.data))

    worker = Worker(StreamSource(client, TOPIC, "billing"), router, threads=2, ordered=True)
    worker.start()
    publish(client, 100)
    eventually(lambda: len(seen) >= 100)
    assert worker.stop()
    assert sorted(seen) == list(range(100))


def test_a_slot_that_moves_takes_its_stream_along(client, cluster_ports):
    """MOVED and ASK while a slot goes from one node to another."""
    publish(client, 3, topic="moving", partitions=1)
    source = StreamSource(client, "moving", "billing", backoff=0.0)
    [first, *_] = source.read(1, 1.0)
    slot = client.keyslot("moving")
    owner = client.get_node_from_key("moving")
    port = next(port for port in cluster_ports if port != owner.port)
    with redis.Redis(port=owner.port) as old, redis.Redis(port=port) as new:
        old_id, new_id = (c.execute_command("CLUSTER", "MYID").decode() for c in (old, new))
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
        keys = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        old.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
        first.ack()  # the stream is there already, the slot is not: ASK
        for node in (old, new):
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
    publish(client, 1, first=3, topic="moving", partitions=1)  # MOVED
    assert ids(drain(source, 3)) == ["m-1", "m-2", "m-3"]
    assert Wire(client).call(b"moving", b"XPENDING", b"moving", b"billing")[0] == 3
    source.close()
    eventually(lambda: client.cluster_info(target_nodes="random")["cluster_state"] == "ok")


def test_entries_wait_for_a_later_try_on_the_node_of_their_stream(client):
    StreamSink(client, "orders", partitions=8).publish(numbered(16))
    source = StreamSource(client, TOPIC, "billing")
    source.allow_delays(2, ordered=False)
    seen = []

    def take():
        for message in source.read(100, 0.1):
            seen.append((message.id, message.deliveries))
            if message.deliveries == 1:
                message.nack(TryLater(0.1, ValueError("not yet")))
            else:
                message.ack()
        return len(seen) == 32

    eventually(take, timeout=60)
    assert len(set(seen)) == 32
    source.close()
