"""Whatever the client is set to: replies as text, RESP2 or RESP3, timeouts, ACL, TLS, Sentinel."""

from __future__ import annotations

import gc
import time

import pytest
import redis
from redis.sentinel import Sentinel
from tests import needs
from tests.integration.redis.conftest import ids, numbered
from tests.integration.redis.servers import sentinel, tls_in_front_of
from tests.waiting import eventually

from conquiet import embedded
from conquiet.message import Message
from conquiet.redis import (
    Inbox,
    Outbox,
    StreamSink,
    StreamSource,
    Transaction,
    commands,
    trim_stream,
)
from conquiet.registry import open_redis
from conquiet.router import Router

BINARY = bytes(range(256))


def round_trip(client, stream="orders"):
    """Publish, read, nack, read again, ack, replay, trim."""
    sent = Message(BINARY, {"id": "ü-1", "type": "t", "source": "/s"}, topic=stream)
    assert list(StreamSink(client).publish_each([sent])) == [None]
    source = StreamSource(client, stream, "billing", backoff=0.0)
    [message] = source.read(10, 1.0)
    message.nack(ValueError("failed"))
    [message] = source.read(10, 1.0)
    assert (message.data, message.id, message.deliveries) == (BINARY, "ü-1", 2)
    source.renew([message])
    message.ack()
    assert ids(source.replay()) == ["ü-1"]
    source.close()
    assert trim_stream(client, stream, exact=True).removed == 1


def take_effect(client, name="shop"):
    """Deliver a message twice by a stream: one effect, one event, nothing pending."""
    router = Router()
    router.use(Transaction(client), Inbox(name), Outbox("placed", f"{name}:outbox"))

    @router.raw(name="handler", source="/shop")
    def handle(item: Message[bytes]) -> list[Message[bytes]]:
        commands(client).incr(f"{name}:effect")
        return [Message(b"{}", {"type": "placed"})]

    StreamSink(client, f"{name}:in").publish(numbered(1) + numbered(1))
    source = StreamSource(client, f"{name}:in", "billing")
    assert len(router.process(source.read(10, 1.0))) == 2
    source.close()
    assert int(client.get(f"{name}:effect")) == client.xlen(f"{name}:outbox") == 1
    assert client.xpending(f"{name}:in", "billing")["pending"] == 0


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode_responses", [False, True])
@pytest.mark.parametrize("single_connection_client", [False, True])
def test_any_way_to_answer_will_do(redis_url, protocol, decode_responses, single_connection_client):
    with redis.Redis.from_url(
        redis_url,
        protocol=protocol,
        decode_responses=decode_responses,
        single_connection_client=single_connection_client,
    ) as client:
        round_trip(client)


def test_a_blocking_pool_will_do(redis_url):
    pool = redis.BlockingConnectionPool.from_url(redis_url, max_connections=1, timeout=5)
    with redis.Redis.from_pool(pool) as client:
        round_trip(client)


@pytest.mark.parametrize("socket_timeout", [0.1, None])
def test_a_read_may_block_longer_than_the_socket_timeout(redis_url, socket_timeout):
    with redis.Redis.from_url(redis_url, socket_timeout=socket_timeout) as client:
        source = StreamSource(client, "orders", "billing")
        began = time.monotonic()
        assert list(source.read(1, 0.6)) == []
        assert time.monotonic() - began >= 0.5
        source.close()


def test_a_sink_that_nobody_closed_leaves_no_connection(redis_url, redis_client):
    named = f"{redis_url}?client_name=forgotten"
    with redis.Redis.from_url(named, socket_timeout=None) as client:
        sink = StreamSink(client, "orders")
        assert sink.publish_each(numbered(1)) == [None]
        assert any(one["name"] == "forgotten" for one in redis_client.client_list())
        kept = sink._wire.client  # so that redis-py's own last words do not close it
        del sink
        gc.collect()
        eventually(lambda: all(one["name"] != "forgotten" for one in redis_client.client_list()))
        kept.close()


def test_an_acl_user_needs_no_more_than_the_documented_rights(redis_client):
    streams = ["xadd", "xreadgroup", "xgroup|create", "xack", "xpending", "xclaim", "xrange"]
    leases = ["hset", "hgetall", "hdel", "eval", "xgroup|delconsumer"]
    trimming = ["xtrim", "xinfo|groups", "info"]
    redis_client.acl_setuser(
        "worker",
        enabled=True,
        reset=True,
        passwords=["+secret"],
        keys=["orders", "orders:dead", "conquiet:*"],
        commands=[f"+{name}" for name in [*streams, *leases, *trimming]],
    )
    settings = redis_client.connection_pool.connection_kwargs
    try:
        with redis.Redis(port=settings["port"], username="worker", password="secret") as client:
            round_trip(client)
    finally:
        redis_client.acl_deluser("worker")


def test_without_rights_to_our_own_keys_a_source_still_works(redis_client, caplog):
    redis_client.acl_setuser(
        "worker",
        enabled=True,
        reset=True,
        nopass=True,
        keys=["orders"],
        commands=["+xadd", "+xreadgroup", "+xgroup|create", "+xack", "+xpending", "+xclaim"],
    )
    settings = redis_client.connection_pool.connection_kwargs
    try:
        with redis.Redis(port=settings["port"], username="worker", password="x") as client:
            StreamSink(client, "orders").publish(numbered(2))
            first = StreamSource(client, "orders", "g", lease=0.1)
            assert len(first.read(2, 1.0)) == 2
            second = StreamSource(client, "orders", "g", lease=0.1, claim_interval=0.02)
            got = []
            eventually(lambda: got.extend(second.read(2, 0.05)) or len(got) == 2)
            first.close()
            second.close()
    finally:
        redis_client.acl_deluser("worker")
    assert "could not store our lease" in caplog.text


def test_tls(redis_client, tmp_path):
    settings = redis_client.connection_pool.connection_kwargs
    with (
        tls_in_front_of(settings["port"], tmp_path) as (port, certificate),
        redis.Redis(port=port, host="127.0.0.1", ssl=True, ssl_ca_certs=str(certificate)) as client,
    ):
        round_trip(client)
        take_effect(client)


@pytest.fixture
def watched(tmp_path):
    """A master, its replica, and a sentinel that watches them."""
    server = needs.found("Redis", lambda: embedded.redis(private=True))
    with server as master:
        options = ("--replicaof", "127.0.0.1", str(master.port))
        with (
            embedded.redis(options=options, private=True) as replica,
            sentinel(master._binary, tmp_path, master.port) as port,
        ):
            watcher = Sentinel([("127.0.0.1", port)], socket_timeout=5)
            ready = eventually(lambda: _known(watcher), timeout=30, interval=0.1)
            assert ready
            yield watcher, replica
            for item in watcher.sentinels:
                item.close()


def _known(watcher):
    try:
        return watcher.discover_slaves("shop")
    except redis.RedisError:
        return []


def _fail_over(watcher):
    try:
        return watcher.sentinels[0].execute_command("SENTINEL", "FAILOVER", "shop")
    except redis.ResponseError:  # it does not know its replica well enough yet
        return None


def _master(watcher):
    try:
        return watcher.discover_master("shop")[1]
    except redis.RedisError:  # none at the moment
        return None


def test_a_url_with_sentinels_opens_the_master_and_joins_its_transaction(watched):
    watcher, _ = watched
    port = watcher.sentinels[0].connection_pool.connection_kwargs["port"]
    with (
        open_redis(f"redis+sentinel://127.0.0.1:{port}/shop/0", answer_seconds=5.0) as client,
        redis.Redis(port=_master(watcher)) as plain,
    ):
        with Transaction(plain).scope(()):
            commands(client).set("k", 1)
            assert plain.get("k") is None
        assert client.get("k") == b"1"


@pytest.mark.slow
def test_sentinel_and_a_failover(watched):
    watcher, replica = watched
    with watcher.master_for("shop", socket_timeout=2) as client:
        round_trip(client, "before")
        take_effect(client, "before-failover")
        StreamSink(client, "orders").publish(numbered(5))
        # What has not reached the replica by then, Redis itself loses.
        eventually(lambda: client.wait(1, 500) == 1, timeout=30)
        source = StreamSource(client, "orders", "billing", "pod-0", backoff=0.0)
        first, *_ = source.read(2, 1.0)
        first.ack()
        eventually(lambda: client.wait(1, 500) == 1, timeout=30)
        eventually(lambda: _fail_over(watcher), timeout=60, interval=0.2)
        eventually(lambda: _master(watcher) == replica.port, timeout=60, interval=0.1)
        client.connection_pool.disconnect()
        got = []

        def the_rest():
            try:
                got.extend(ids(source.read(10, 0.1)))
            except Exception:
                return False
            return len(got) >= 3

        eventually(the_rest, timeout=60)
        assert got == ["m-2", "m-3", "m-4"]
        source.close()
        again = StreamSource(client, "orders", "billing", "pod-0")
        assert ids(again.read(10, 1.0)) == ["m-1", "m-2", "m-3", "m-4"]
        again.close()
        take_effect(client, "after-failover")
