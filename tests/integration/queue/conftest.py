"""A queue on the worker's Redis, and what the tests ask of the server behind its back."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from tests.integration.queue.names import GROUP, STREAM

from conquiet.queue import AsyncRedisStreamsQueue, QueueConfig, RedisStreamsQueue


class FromSync:
    """An AsyncRedisStreamsQueue whose methods a test calls as those of a RedisStreamsQueue."""

    def __init__(self, runner, client, config):
        self._queue = AsyncRedisStreamsQueue(client, config)
        self._protocol = self._queue._protocol
        self._runner = runner
        self.config = config
        runner.run(self._queue._send(self._protocol.create_group()))

    def __getattr__(self, name):
        method = getattr(self._queue, name)
        return lambda *arguments, **named: self._runner.run(method(*arguments, **named))


@pytest.fixture
def shell():
    """Tests of what both queues do are run with "sync" and "async"."""
    return "sync"


@pytest.fixture
def make_queue(redis_client, redis_url, shell):
    """Queues of one stream and group; the consumer's name and any setting may differ."""
    with asyncio.Runner() as runner:
        on_loop = redis.asyncio.Redis.from_url(redis_url)

        def make(consumer="b-1", client=None, **settings):
            config = QueueConfig(STREAM, GROUP, consumer, **settings)
            if shell == "async":
                return FromSync(runner, on_loop, config)
            return RedisStreamsQueue(client or redis_client, config)

        yield make
        runner.run(on_loop.aclose())


@pytest.fixture
def queue(make_queue):
    return make_queue()


@pytest.fixture
def pending(redis_client):
    """The pending entries of the group: id → consumer."""

    def ask():
        rows = redis_client.xpending_range(STREAM, GROUP, "-", "+", 1000)
        return {row["message_id"].decode(): row["consumer"].decode() for row in rows}

    return ask


@pytest.fixture
def blocked_clients(redis_client):
    """How many clients wait in a blocking command."""
    return lambda: redis_client.info("clients")["blocked_clients"]


@pytest.fixture
def calls(redis_client):
    """How often the server has run a command since the test began."""
    redis_client.config_resetstat()

    def count(command):
        stats = redis_client.info("commandstats")
        return stats.get(f"cmdstat_{command}", {"calls": 0})["calls"]

    return count
