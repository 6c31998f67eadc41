"""Sources, sinks and routers on the worker's Redis, and what is asked behind their back."""

from __future__ import annotations

import pytest
import redis
from redis.cluster import ClusterNode
from tests.integration.redis.servers import cluster

from conquiet.message import Message
from conquiet.redis import Inbox, StreamSink, StreamSource, Transaction, commands
from conquiet.router import Router

STREAM, GROUP = "orders", "billing"


@pytest.fixture
def source(redis_client):
    """Opens sources of one stream and group; any setting may differ. All are closed at the end."""
    opened = []

    def make(streams=STREAM, consumer=None, *, group=GROUP, client=None, **settings):
        settings = {"backoff": 0.0, "claim_interval": 0.02, **settings}
        made = StreamSource(client or redis_client, streams, group, consumer, **settings)
        opened.append(made)
        return made

    yield make
    for item in opened:
        item.close()


def numbered(count, first=0, **attributes):
    return [
        Message(b"%d" % n, {"id": f"m-{n}", "type": "sample", "source": "/test", **attributes})
        for n in range(first, first + count)
    ]


@pytest.fixture
def publish(redis_client):
    def send(count=1, first=0, topic=STREAM, partitions=1, **attributes):
        messages = numbered(count, first, **attributes)
        sink = StreamSink(redis_client, topic, partitions=partitions)
        assert list(sink.publish_each(messages)) == [None] * count

    return send


@pytest.fixture
def pending(redis_client):
    """The pending entries of a group: (consumer, deliveries) each, in order."""

    def ask(stream=STREAM, group=GROUP):
        rows = redis_client.xpending_range(stream, group, "-", "+", 10_000)
        return [(row["consumer"].decode(), row["times_delivered"]) for row in rows]

    return ask


@pytest.fixture
def router(redis_client):
    """A router that counts effects; its inbox takes any setting."""

    def make(run=lambda item: None, *, inbox=None, client=None, **settings):
        used = client or redis_client
        made = Router()
        made.use(Transaction(used), inbox or Inbox("billing", **settings))

        @made.raw(name="handler")
        def handle(item: Message[bytes]) -> None:
            commands(used).incr(f"effect-{item.id}")
            run(item)

        return made

    return make


@pytest.fixture
def effects(redis_client):
    """How often each of some messages took effect."""
    return lambda *names: [int(redis_client.get(f"effect-{name}") or 0) for name in names]


@pytest.fixture(scope="module")
def cluster_ports():
    """A real cluster of three nodes; a module may move its slots."""
    with cluster() as ports:
        yield ports


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
def cluster_client(cluster_ports, request):
    nodes = [ClusterNode("127.0.0.1", port) for port in cluster_ports]
    client = redis.RedisCluster(startup_nodes=nodes, protocol=request.param)
    yield client
    client.flushall(target_nodes=redis.RedisCluster.PRIMARIES)
    client.close()


def ids(messages):
    return [message.id for message in messages]
