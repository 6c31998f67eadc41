"""A queue on the worker's Redis, and what the tests ask of the server behind its back."""

from __future__ import annotations

import pytest
from tests.integration.queue.names import GROUP, STREAM

from conquiet.queue import QueueConfig, RedisStreamsQueue


@pytest.fixture
def make_queue(redis_client):
    """Queues of one stream and group; the consumer's name and any setting may differ."""

    def make(consumer="b-1", client=None, **settings):
        config = QueueConfig(STREAM, GROUP, consumer, **settings)
        return RedisStreamsQueue(client or redis_client, config)

    return make


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
