"""Kombu's broker-neutral suites, bound to our transport: plain, and with a key prefix."""

from __future__ import annotations

import os

import kombu
import pytest

from . import common, test_redis

SCHEME = os.environ["SUITE_SCHEME"]


def url() -> str:
    return f"{SCHEME}://{os.environ['REDIS_HOST']}:{os.environ['REDIS_6379_TCP']}"


@pytest.fixture(params=["", "_prefixed_"], ids=["plain", "prefixed"])
def options(request):
    return {"global_keyprefix": request.param} if request.param else {}


@pytest.fixture
def connection(options):
    return kombu.Connection(url(), transport_options=options)


@pytest.fixture
def invalid_connection(options):
    return kombu.Connection(f"{SCHEME}://127.0.0.1:12345", transport_options=options)


@pytest.fixture
def failover_connection(options):
    # Kombu takes the options of a transport for all the alternates.
    return kombu.Connection(f"{SCHEME}://127.0.0.1:12345;{url()}", transport_options=options)


class test_BasicFunctionality(common.BasicFunctionality):
    pass


class test_ExchangeTypes(common.BaseExchangeTypes):
    pass


class test_Message(common.BaseMessage):
    pass


class test_Failover(common.BaseFailover):
    pass


class test_TimeToLive(common.BaseTimeToLive):
    pass


class test_Priority(test_redis.test_RedisPriority):
    """The suite as the Redis files have it: 0 is the highest, and an event is one message."""


if hasattr(common, "BaseEventLoop"):  # Kombu 5.7

    class test_EventLoop(common.BaseEventLoop):
        pass


if hasattr(test_redis, "test_RedisPublishBatch"):  # Kombu 5.7

    class test_PublishBatch(test_redis.test_RedisPublishBatch):
        test_fanout_is_deferred_until_flush = None  # listens by PUB/SUB
