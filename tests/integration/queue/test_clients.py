"""The queue works with any client that it is given, and says so if one cannot serve."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests import needs
from tests.integration.queue.names import GROUP, STREAM

from conquiet import embedded
from conquiet.queue import QueueConfig, QueueError, RedisStreamsQueue

OPTIONS = {
    "default": {},
    "decode_responses": {"decode_responses": True},
    "RESP2": {"protocol": 2},
    "RESP3": {"protocol": 3},
    "RESP2 decoded": {"protocol": 2, "decode_responses": True},
    "RESP3 decoded": {"protocol": 3, "decode_responses": True},
    "one connection": {"single_connection_client": True},
    "no timeout": {"socket_timeout": None},
    "short timeout": {"socket_timeout": 0.25},
    "latin-1": {"encoding": "latin-1", "decode_responses": True},
    "health checks": {"health_check_interval": 1},
    "no retries": {"retry": Retry(NoBackoff(), 0)},
}


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def client(request, redis_url):
    with redis.Redis.from_url(redis_url, **request.param) as client:
        yield client


@pytest.fixture
def config():
    return QueueConfig(STREAM, GROUP, "b-1")


def test_every_client_gets_and_settles_messages(client, config, redis_client):
    queue = RedisStreamsQueue(client, config)
    sent = [queue.enqueue({"text": "Grüße ✓", "n": n}) for n in range(2)]
    assert all(isinstance(entry_id, str) for entry_id in sent)
    [first, second] = queue.read(1_000, count=2)
    assert [first.id, second.id] == sent
    assert first.payload == {"text": "Grüße ✓", "n": 0}
    queue.ack(first)
    assert queue.claim_stale(0) == [second]
    queue.ack(second)
    assert redis_client.xpending(STREAM, GROUP)["pending"] == 0


def test_every_client_waits_for_block_ms_and_then_gets_an_empty_list(client, config, calls):
    queue = RedisStreamsQueue(client, config)
    started = time.monotonic()
    assert queue.read(300) == []
    assert time.monotonic() - started >= 0.3
    assert calls("xreadgroup") == 1


@pytest.mark.parametrize(
    ("protocol", "parser"), [(2, redis._parsers._RESP2Parser), (3, redis._parsers._RESP3Parser)]
)
def test_a_client_without_hiredis_does_as_well(redis_url, config, protocol, parser):
    pool = redis.ConnectionPool.from_url(
        redis_url, protocol=protocol, parser_class=parser, decode_responses=True
    )
    queue = RedisStreamsQueue(redis.Redis(connection_pool=pool), config)
    sent = queue.enqueue({"n": 1})
    assert [message.id for message in queue.read(1_000)] == [sent]
    assert queue.read(150) == []
    pool.disconnect()


def test_a_pool_of_one_connection_is_enough(redis_url, config):
    pool = redis.BlockingConnectionPool.from_url(redis_url, max_connections=1, timeout=1)
    queue = RedisStreamsQueue(redis.Redis(connection_pool=pool), config)
    queue.enqueue({"n": 1})
    queue.ack(queue.read(1_000)[0])
    assert queue.read(1) == []
    pool.disconnect()


def test_a_single_connection_is_shared_by_threads_and_no_other_is_opened(redis_url, config):
    options = {"single_connection_client": True, "max_connections": 1}
    with redis.Redis.from_url(redis_url, **options) as client:
        queue = RedisStreamsQueue(client, config)
        with ThreadPoolExecutor(8) as threads:
            sent = dict(enumerate(threads.map(lambda n: queue.enqueue({"n": n}), range(400))))
        got = {message.payload["n"]: message.id for message in queue.read(1_000, count=400)}
    assert got == sent


def test_a_unix_socket_is_as_good(tmp_path, config):
    path = str(tmp_path / "redis.sock")
    server = needs.found(
        "Redis", lambda: embedded.redis(options=("--unixsocket", path), private=True)
    )
    with server, redis.Redis(unix_socket_path=path) as client:
        queue = RedisStreamsQueue(client, config)
        queue.enqueue({"n": 1})
        queue.ack(queue.read(1_000)[0])
        assert queue.read(50) == []


@pytest.mark.slow
def test_a_read_may_block_for_longer_than_the_socket_timeout_of_redis_py_8(
    redis_client, config, calls
):
    queue = RedisStreamsQueue(redis_client, config)
    started = time.monotonic()
    assert queue.read(6_500) == []
    assert time.monotonic() - started >= 6.5
    assert calls("xreadgroup") == 1


def test_the_clients_own_timeout_is_as_before_after_a_read(redis_url, config):
    with redis.Redis.from_url(redis_url, socket_timeout=3.0) as client:
        RedisStreamsQueue(client, config).read(1)
        connection = client.connection_pool.get_connection()
        assert connection.socket_timeout == 3.0
        assert connection._sock.gettimeout() == 3.0
        client.connection_pool.release(connection)


def test_the_client_can_be_used_by_others_meanwhile(redis_client, config):
    queue = RedisStreamsQueue(redis_client, config)
    redis_client.set("other", "value")
    queue.read(1)
    assert redis_client.get("other") == b"value"


def test_a_pipeline_cannot_serve(redis_client, config):
    with pytest.raises(QueueError, match=r"Pipeline cannot serve .* a pipeline queues commands"):
        RedisStreamsQueue(redis_client.pipeline(), config)


def test_an_asyncio_client_cannot_serve(redis_url, config):
    with pytest.raises(QueueError, match=r"redis\.asyncio.* cannot serve .* asyncio client"):
        RedisStreamsQueue(redis.asyncio.Redis.from_url(redis_url), config)


def test_a_cluster_client_cannot_serve(config):
    cluster = redis.RedisCluster.__new__(redis.RedisCluster)  # no cluster needed to be refused
    with pytest.raises(QueueError, match="cluster client"):
        RedisStreamsQueue(cluster, config)


def test_what_is_no_client_cannot_serve(config):
    with pytest.raises(QueueError, match=r"builtins\.str cannot serve .* not a client of redis-py"):
        RedisStreamsQueue("redis://localhost", config)
