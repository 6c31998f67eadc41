"""Redis streams under the contracts of source, sink and worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.conformance.on_loop import OnLoop
from tests.faults.proxy import Proxy

from conquiet.message import Message
from conquiet.redis import StreamSink, StreamSource
from conquiet.source import Source
from conquiet.testing.contracts import (
    DelayContract,
    SinkContract,
    SourceContract,
    WorkerContract,
)


class OnRedis:
    """One stream `orders`; no pause after a nack, so that what failed comes back in its place."""

    lease = 0.5

    @pytest.fixture(autouse=True)
    def _connect(self, redis_client: Any) -> None:
        self.client = redis_client

    def open(self, lease: float, group: str = "billing") -> Source:
        settings: dict[str, Any] = {"lease": lease, "claim_interval": 0.05, "backoff": 0.0}
        return StreamSource(self.client, "orders", group, **settings)

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        StreamSink(self.client, "orders").publish(messages)


class TestStreamSource(OnRedis, SourceContract):
    def open_other_group(self) -> Source:
        return self.open(60.0, "shipping")


class TestStreamSourceUnderWorker(OnRedis, WorkerContract):
    pass


class TestStreamSourceDelays(OnRedis, DelayContract):
    pass


class TestStreamSink(SinkContract):
    settings: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _through_a_proxy(self, redis_client: Any) -> Iterator[None]:
        settings = redis_client.connection_pool.connection_kwargs
        self.direct = redis_client
        with Proxy(settings["port"]) as self.proxy:
            once = Retry(NoBackoff(), 0)
            db = settings.get("db", 0)
            with redis.Redis(port=self.proxy.port, db=db, retry=once) as self.client:
                yield

    def open(self) -> StreamSink:
        return StreamSink(self.client, "orders", **self.settings)

    def list_published(self) -> Sequence[Message[Any]]:
        source = StreamSource(self.direct, "orders", "published")
        try:
            return list(source.replay())
        finally:
            source.close()

    def outage(self) -> AbstractContextManager[object]:
        return self.proxy.outage()


class TestStructuredStreamSink(TestStreamSink):
    settings: ClassVar[dict[str, Any]] = {"mode": "structured"}


class TestOrderedStreamSink(TestStreamSink):
    settings: ClassVar[dict[str, Any]] = {"ordered": True}


@pytest.mark.slow
class TestAsyncStreamSource(OnLoop, TestStreamSource):
    @pytest.fixture(autouse=True)
    def _connect(self, redis_url: str) -> None:
        self.client = redis.asyncio.Redis.from_url(redis_url)


class OnAsyncRedis(OnRedis):
    """A client that the loop of the workers owns; messages are sent by another one."""

    @pytest.fixture(autouse=True)
    def _connect(self, redis_client: Any, redis_url: str) -> None:
        self.direct = redis_client
        self.client = redis.asyncio.Redis.from_url(redis_url)

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        StreamSink(self.direct, "orders").publish(messages)


@pytest.mark.slow
class TestAsyncStreamSourceUnderWorker(OnLoop, OnAsyncRedis, WorkerContract):
    pass


@pytest.mark.slow
class TestAsyncStreamSourceDelays(OnLoop, OnAsyncRedis, DelayContract):
    pass


@pytest.mark.slow
class TestAsyncStreamSink(OnLoop, TestStreamSink):
    @pytest.fixture(autouse=True)
    def _through_a_proxy(self, redis_client: Any) -> Iterator[None]:
        settings = redis_client.connection_pool.connection_kwargs
        self.direct = redis_client
        with Proxy(settings["port"]) as self.proxy:
            once = AsyncRetry(NoBackoff(), 0)
            db = settings.get("db", 0)
            self.client = redis.asyncio.Redis(port=self.proxy.port, db=db, retry=once)
            yield
