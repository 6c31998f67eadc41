"""The ways to a server: prefix, databases, unix socket, ACL, TLS, Sentinel, failover; and back."""

from __future__ import annotations

import contextlib
import ssl
import threading

import kombu
import pytest
import redis
from redis.sentinel import Sentinel
from tests import needs
from tests.faults.proxy import Proxy
from tests.integration.kombu.brokers import (
    Taken,
    connected,
    drain,
    put,
    since_5_7,
    size,
    tls_in_front_of,
)
from tests.integration.redis.servers import sentinel
from tests.waiting import eventually

from conquiet import embedded
from conquiet.kombu import (
    AlternateError,
    ClusterUnsupported,
    ServerTooOld,
    Transport,
    inspection,
)
from conquiet.kombu.lease import Lease


def round_trip(connection):
    """Publish, consume, requeue, get, count, purge and delete, by every kind of exchange."""
    channel = connection.default_channel
    for kind in ("direct", "topic", "fanout"):
        exchange = kombu.Exchange(f"shop-{kind}", type=kind)
        queue = kombu.Queue(f"orders-{kind}", exchange, routing_key="order", expires=60)
        taken = Taken()
        with connection.Consumer(queue, callbacks=[taken], prefetch_count=2):
            producer = connection.Producer(serializer="json")
            for number in range(3):
                producer.publish(number, exchange=exchange, routing_key="order", priority=3)
            assert drain(connection, taken, 3) == [0, 1, 2]
            producer.publish("again", exchange=exchange, routing_key="order", expiration=60)
            taken.ack = False
            drain(connection, taken, 4)
            taken.messages[-1].requeue()
            taken.ack = True
            drain(connection, taken, 5)
        bound = queue(channel)
        producer.publish("last", exchange=exchange, routing_key="order")
        assert bound.get(no_ack=True).payload == "last"
        producer.publish("ready", exchange=exchange, routing_key="order")
        assert size(connection, queue.name) == 1
        assert bound.purge() == 1
        bound.delete()
    news, taken = kombu.Exchange("shop-news", type="fanout"), Taken(ack=False)
    queue = kombu.Queue("news", news, auto_delete=True, durable=False)
    with connection.Consumer(queue, callbacks=[taken], no_ack=True):
        for _ in range(10):
            # Over a proxy, a broadcast may overtake the subscription, which was sent before it.
            producer.publish("hello", exchange=news)
            with contextlib.suppress(TimeoutError):
                drain(connection, taken, 1, timeout=1)
                break
        assert taken == ["hello"]


def test_a_key_prefix_stands_before_every_key(redis_url, redis_client):
    with connected(redis_url, global_keyprefix="shop:") as connection:
        round_trip(connection)
        put(connection, "orders", "a")
        put(connection, "orders", "b", expiration=60)
        kombu.Queue("orders")(connection.default_channel).get()
        keys = redis_client.keys("*")
        assert keys
        assert all(key.startswith(b"shop:") for key in keys)
        [info] = inspection.queues(redis_client, "shop:")
        assert (info.name, info.ready, info.pending, info.alive) == ("orders", 1, 1, 1)
    with connected(redis_url) as connection:
        assert not connection.default_channel._has_queue("orders")


@since_5_7
def test_a_key_prefix_stands_before_the_keys_of_a_batch(redis_url, redis_client):
    with connected(redis_url, global_keyprefix="shop:") as connection:
        with connection.Producer() as producer, producer.batch():
            producer.publish("a", exchange="", routing_key="orders")
            producer.publish("b", exchange="", routing_key="orders", expiration=60)
        assert size(connection, "orders") == 2
        assert all(key.startswith(b"shop:") for key in redis_client.keys("*"))


def test_databases_are_apart(redis_url):
    other = redis_url.removesuffix("/0") + "/1"
    with connected(redis_url) as zero, connected(other) as one:
        put(zero, "orders", "a")
        assert not one.default_channel._has_queue("orders")
        put(one, "orders", "b")
        assert kombu.Queue("orders")(one.default_channel).get(no_ack=True).payload == "b"
        kombu.Queue("orders")(one.default_channel).delete()


def test_an_ack_after_the_close_leaves_no_connection_open(redis_server, redis_url):
    with Proxy(redis_server.port) as proxy:
        with connected(proxy.url) as connection:
            put(connection, "orders", "a")
            message = kombu.Queue("orders")(connection.default_channel).get()
        eventually(lambda: proxy.connections == 0)
        before = proxy.accepted
        message.ack()
        assert proxy.accepted > before
        eventually(lambda: proxy.connections == 0)


def test_a_renewal_that_ends_after_the_close_leaves_no_connection_open(
    redis_server, redis_url, monkeypatch
):
    renew, begun, closed = Lease.renew, threading.Event(), threading.Event()

    def slow(lease, client=None):
        begun.set()
        closed.wait(20)
        renew(lease, client)

    monkeypatch.setattr(Lease, "renew", slow)
    with Proxy(redis_server.port) as proxy:
        with connected(proxy.url) as connection:
            connection.default_channel.consumer.subscribe("orders")
            assert begun.wait(20)
        eventually(lambda: proxy.connections == 0)
        before = proxy.accepted
        closed.set()
        eventually(lambda: proxy.accepted > before)
        eventually(lambda: proxy.connections == 0)


def test_a_unix_socket(tmp_path):
    path = tmp_path / "redis.sock"
    options = ("--unixsocket", str(path))
    with (
        needs.found("Redis", lambda: embedded.redis(options=options, private=True)),
        kombu.Connection(f"redis-streams+socket://{path}") as connection,
    ):
        round_trip(connection)


ALLOWED = [
    *("ping", "client|id", "client|unblock", "client|setname", "hello"),
    *("eval", "evalsha", "script|load", "multi", "exec", "exists", "time", "info"),
    *("xadd", "xread", "xreadgroup", "xack", "xdel", "xlen", "xrange", "xclaim", "xpending"),
    *("xtrim", "xinfo|groups", "xinfo|consumers", "xgroup|create", "xgroup|createconsumer"),
    *("xgroup|delconsumer", "hset", "hsetnx", "hget", "hdel", "hgetall", "hkeys", "hscan"),
    *("publish", "subscribe", "unsubscribe"),
    *("zadd", "zrem", "zscore", "zremrangebyscore", "sadd", "srem", "smembers", "sscan"),
    *("del", "pexpire", "persist", "pttl"),
]


@pytest.fixture
def user(redis_client, redis_url):
    """Make an ACL user, and say its URL."""

    def make(*commands):
        redis_client.acl_setuser(
            "worker",
            enabled=True,
            reset=True,
            reset_channels=True,  # before Redis 7 a new user may use all of them
            passwords=["+secret"],
            keys=["conquiet:kombu:*"],
            channels=["conquiet:kombu:*"],
            commands=[f"+{name}" for name in commands],
        )
        return redis_url.replace("redis://", "redis://worker:secret@")

    yield make
    redis_client.acl_deluser("worker")


def test_an_acl_user_needs_no_more_than_the_documented_rights(user):
    with connected(user(*ALLOWED), lease=1) as connection:
        round_trip(connection)
        lease = connection.default_channel.consumer.subscribe("orders")
        for work in (lease.renew, lease.reap, lease.sweep):
            work()  # in the background, a missing right would only be logged


def test_a_user_who_may_not_unblock_waits_a_little_and_loses_nothing(user, redis_url):
    allowed = [name for name in ALLOWED if not name.startswith("client|") and name != "info"]
    with connected(user(*allowed), lease=1) as connection:
        round_trip(connection)


def test_a_wrong_password_is_an_error_of_the_connection(user, redis_url):
    url = user("ping").replace("secret", "wrong")
    with connected(url) as connection, pytest.raises(redis.AuthenticationError):
        connection.connect()


def test_tls_is_on_and_verifies_by_default(redis_server, redis_url, tmp_path):
    with tls_in_front_of(redis_server.port, tmp_path) as (port, certificate):
        with (
            kombu.Connection(f"rediss-streams://127.0.0.1:{port}/0") as connection,
            pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            connection.connect()
        settings = {"ssl_ca_certs": str(certificate), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        with kombu.Connection(f"rediss-streams://127.0.0.1:{port}/0", ssl=settings) as connection:
            round_trip(connection)
        by_url = f"rediss-streams://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        with kombu.Connection(by_url) as connection:
            round_trip(connection)
        unverified = (
            f"rediss-streams://127.0.0.1:{port}/0?ssl_cert_reqs=none&ssl_check_hostname=false"
        )
        with kombu.Connection(unverified) as connection:
            round_trip(connection)


def test_tls_is_never_left_out_silently(redis_url):
    url = redis_url.replace("redis://", "redis-streams://")
    options = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}
    with (
        kombu.Connection(url, ssl=True, transport_options=options) as connection,
        pytest.raises((redis.ConnectionError, redis.TimeoutError)),
    ):
        connection.connect()


def test_failover_to_the_next_url(redis_url):
    dead = "redis-streams://127.0.0.1:1/0"
    live = redis_url.replace("redis://", "redis-streams://")
    with kombu.Connection(f"{dead};{live}") as connection:
        connection.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
        round_trip(connection)


@pytest.mark.parametrize(
    "urls",
    ["redis://localhost:1;redis://localhost:2", "redis-streams://localhost:1;redis://localhost:2"],
)
def test_an_alternate_that_would_leave_the_transport_is_refused(urls):
    with (
        kombu.Connection(urls, transport="conquiet.kombu:Transport") as connection,
        pytest.raises(AlternateError, match="write every URL with redis-streams://"),
    ):
        connection.connect()


def test_the_class_by_its_name_with_one_redis_url(redis_url):
    with kombu.Connection(redis_url, transport="conquiet.kombu:Transport") as connection:
        assert isinstance(connection.transport, Transport)
        round_trip(connection)


def test_celery_sees_a_redis():
    assert Transport.driver_type == Transport.driver_name == "redis"


def test_an_old_server_is_refused_and_told_what_to_do(redis_url, monkeypatch):
    # There is no 6.1 to install beside the others, so the limit is moved above this server.
    monkeypatch.setattr("conquiet.kombu.connection.OLDEST_SERVER", (99, 0))
    with (
        connected(redis_url) as connection,
        pytest.raises(ServerTooOld, match=r"needs 6\.2 or newer .* upgrade the server"),
    ):
        connection.connect()


def test_a_node_of_a_cluster_is_refused_in_words():
    options = ("--cluster-enabled", "yes")
    with (
        needs.found("Redis", lambda: embedded.redis(options=options, private=True)) as node,
        connected(node.url) as connection,
        pytest.raises(ClusterUnsupported, match=r"a node of a Redis Cluster, .* Sentinel"),
    ):
        connection.connect()


@pytest.fixture
def watched(tmp_path):
    """A master, its replica, and the port of a sentinel that watches them."""
    with needs.found("Redis", lambda: embedded.redis(private=True)) as master:
        options = ("--replicaof", "127.0.0.1", str(master.port))
        with (
            embedded.redis(options=options, private=True) as replica,
            sentinel(master._binary, tmp_path, master.port) as port,
        ):
            watcher = Sentinel([("127.0.0.1", port)], socket_timeout=5)
            eventually(lambda: _known(watcher), timeout=30, interval=0.1)
            yield port, watcher, replica
            for item in watcher.sentinels:
                item.close()


def _known(watcher):
    try:
        return watcher.discover_slaves("shop")
    except redis.RedisError:
        return []


def test_sentinel_and_its_alternates(watched):
    port, _, _ = watched
    options = {"master_name": "shop"}
    with Proxy(port) as proxy:
        urls = f"sentinel-streams://127.0.0.1:{proxy.port};sentinel-streams://127.0.0.1:1"
        with kombu.Connection(urls, transport_options=options) as connection:
            round_trip(connection)
            assert proxy.connections
        eventually(lambda: proxy.connections == 0)


def test_sentinel_without_the_name_of_its_master_is_refused():
    with (
        kombu.Connection("sentinel-streams://127.0.0.1:1") as connection,
        pytest.raises(ValueError, match="master_name is missing"),
    ):
        connection.connect()


@pytest.mark.slow
def test_a_failover_of_sentinel(watched):
    port, watcher, replica = watched
    options = {"master_name": "shop", "socket_timeout": 5, "lease": 2}
    url = f"sentinel-streams://127.0.0.1:{port}"
    with kombu.Connection(url, transport_options=options) as connection:
        put(connection, "orders", *range(3))
        with contextlib.closing(watcher.master_for("shop", socket_timeout=2)) as client:
            eventually(lambda: client.wait(1, 500) == 1, timeout=30)
        eventually(lambda: _fail_over(watcher), timeout=60, interval=0.2)
        eventually(lambda: _master(watcher) == replica.port, timeout=60, interval=0.1)
        taken = Taken()

        def consume():
            try:
                connection.ensure_connection(max_retries=5, timeout=30)
                with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
                    while set(taken) != {0, 1, 2}:  # an ack may be lost with the old master
                        connection.drain_events(timeout=2)
                    return True
            except (*connection.connection_errors, redis.ResponseError):
                connection.close()
                return False

        eventually(consume, timeout=60, interval=0.2)


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
