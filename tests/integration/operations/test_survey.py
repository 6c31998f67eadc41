"""Streams, groups, consumers and readers, as an operator sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import redis
from redis.cluster import ClusterNode
from tests.integration.operations.conftest import numbered
from tests.integration.redis.servers import cluster

from conquiet.cli import main
from conquiet.errors import NotFound
from conquiet.operations import streams
from conquiet.operations.dead_letters import Filter, list_streams, open_letters, replay
from conquiet.operations.streams import describe, peek, survey
from conquiet.redis import Readers, StreamSink
from conquiet.redis.wire import server_of
from conquiet.web.stores import Stores


def test_a_stream_tells_its_length_its_ends_and_its_size(redis_client, publish) -> None:
    publish(3)
    publish(1, "payments")
    [orders, payments] = survey(redis_client)
    ids = [entry_id.decode() for entry_id, _ in redis_client.xrange("orders")]
    assert (orders.name, orders.length, payments.name) == ("orders", 3, "payments")
    assert (orders.first_id, orders.last_id) == (ids[0], ids[-1])
    assert orders.last_time.endswith("Z")
    assert orders.bytes > 0
    assert [found.name for found in survey(redis_client, "pay*")] == ["payments"]


def test_a_group_tells_who_has_what_and_how_far_it_is_behind(redis_client, publish, source) -> None:
    publish(10)
    reader = source(consumer="worker-1")
    for message in reader.read(4, 1.0)[:1]:
        message.ack()
    [group] = describe(redis_client, "orders").groups
    assert (group.name, group.pending, group.lag, group.lag_is_exact) == ("billing", 3, 6, True)
    assert group.behind_seconds >= 0
    assert group.oldest_pending == redis_client.xrange("orders")[1][0].decode()
    [consumer] = group.consumers
    assert (consumer.name, consumer.pending, consumer.alive) == ("worker-1", 3, True)
    assert (group.alive, consumer.lease_seconds) == (1, 60.0)


def test_a_consumer_that_was_not_heard_of_within_its_lease_is_not_alive(
    redis_client, publish, source
) -> None:
    publish(1)
    source(consumer="worker-1", lease=0.001).read(1, 1.0)
    redis_client.xgroup_createconsumer("orders", "billing", "~back")  # of kombu, and nobody
    [group] = describe(redis_client, "orders").groups
    assert [consumer.alive for consumer in group.consumers] == [False]


@pytest.mark.parametrize("told", [True, False], ids=["told by the server", "counted"])
def test_a_lag_is_counted_where_the_server_does_not_know_it(
    redis_client, publish, source, monkeypatch, told
) -> None:
    publish(10)
    source().read(4, 1.0)
    if not told:  # a hole makes Redis 7 forget it, as Redis 6 always does
        redis_client.xdel("orders", redis_client.xrange("orders")[6][0])
    [group] = describe(redis_client, "orders").groups
    assert (group.lag, group.lag_is_exact) == (6 if told else 5, True)
    told = told and server_of(redis_client).at_least("7.0")
    monkeypatch.setattr(streams, "COUNTED", 2)
    monkeypatch.setattr(streams, "_PAGE", 2)
    [group] = describe(redis_client, "orders").groups
    assert (group.lag, group.lag_is_exact) == ((6, True) if told else (2, False))


def test_a_group_that_has_read_nothing_or_all(redis_client, publish, source) -> None:
    publish(3)
    source(group="new")
    for message in source(group="done").read(3, 1.0):
        message.ack()
    found = {group.name: group for group in describe(redis_client, "orders").groups}
    assert (found["new"].lag, found["done"].lag, found["done"].behind_seconds) == (3, 0, 0.0)
    assert found["done"].oldest_pending is None


def test_readers_without_a_group_have_a_position_and_a_lag(redis_client, publish) -> None:
    publish(5)
    ids = [entry_id.decode() for entry_id, _ in redis_client.xrange("orders")]
    Readers(redis_client, "orders").register("spark/new")
    Readers(redis_client, "orders").register("spark/shop")
    Readers(redis_client, "orders").advance("spark/shop", ids[2])
    new, shop = describe(redis_client, "orders").readers
    assert (new.name, new.position, new.lag) == ("spark/new", "0-0", 5)
    assert (shop.position, shop.lag) == (ids[2], 2)


def test_what_is_no_stream_is_told(redis_client) -> None:
    redis_client.set("orders", "text")
    with pytest.raises(NotFound, match="does not hold a stream"):
        describe(redis_client, "orders")
    with pytest.raises(NotFound, match="does not exist"):
        describe(redis_client, "nowhere")
    assert survey(redis_client) == []


def test_a_survey_can_be_written_as_json(redis_client, publish, source) -> None:
    import msgspec

    publish(1)
    source()
    text = msgspec.json.encode([asdict(found) for found in survey(redis_client)])
    assert b'"lag":1' in text


def test_a_cluster_is_asked_node_by_node(capsys) -> None:
    with cluster() as ports:
        nodes = [ClusterNode("127.0.0.1", port) for port in ports]
        with redis.RedisCluster(startup_nodes=nodes) as client:
            StreamSink(client, "orders", partitions=6).publish(
                [item for n in range(30) for item in numbered(1, n, partitionkey=f"c-{n}")]
            )
            found = survey(client)
            assert sum(item.length for item in found) == 30
            assert len(found) == 6
            # Letters in another slot than their stream: published, then deleted.
            about = {"deadreason": "no", "deadstream": "orders:{1}", "deadtopic": "orders"}
            StreamSink(client, "dead").publish(numbered(2, 90, **about))
            assert len(replay(open_letters("dead", client), Filter(("m-90",))).done) == 1
            assert peek(client, "orders:{1}", limit=1, newest=True)[0].event_id == "m-90"
            assert list_streams(client) == {"dead": 1}
        for port in ports:  # whichever node is named, all of them are meant
            assert main(["streams", "list", "--json", "--broker", f"redis://127.0.0.1:{port}"]) == 0
            assert len(json.loads(capsys.readouterr().out)) == 7
            stores = Stores(None, f"redis://127.0.0.1:{port}")
            assert len(survey(stores.client)) == 7
            stores.close()


def test_the_room_is_imported_without_packages() -> None:
    code = "import sys, conquiet.operations.dead_letters; assert 'redis' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
