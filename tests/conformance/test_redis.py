"""The conformance suite over `conquiet.redis`: transaction, inbox and outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.conformance.on_loop import OnLoop
from tests.faults.proxy import Proxy

from conquiet.message import new_id
from conquiet.redis import Inbox, Outbox, OutboxSource, StreamSource, Transaction, commands
from conquiet.source import Source
from conquiet.testing.contracts import (
    InboxContract,
    OutboxContract,
    PromotionContract,
    TransactionContract,
)

STREAM = "outbox"


class OverRedis:
    """A storage in Redis behind a proxy: effects are counters."""

    @pytest.fixture(autouse=True)
    def _through_a_proxy(self, redis_client: Any) -> Iterator[None]:
        settings = redis_client.connection_pool.connection_kwargs
        self.direct = redis_client
        with Proxy(settings["port"]) as self.proxy:
            self.client = redis.Redis(
                port=self.proxy.port, db=settings.get("db", 0), retry=Retry(NoBackoff(), 0)
            )
            with self.client:
                yield

    def transaction(self) -> Transaction:
        return Transaction(self.client)

    def note(self, key: str) -> None:
        commands(self.client).incr(f"count:{key}")

    def read_note(self, key: str) -> int:
        return int(self.direct.get(f"count:{key}") or 0)

    def handle(self) -> Callable[[], object]:
        kept = commands(self.client)
        return lambda: kept.incr("late")

    def outage(self) -> AbstractContextManager[object]:
        return self.proxy.outage()

    def inbox(self, subscriber: str) -> Inbox:
        return Inbox(subscriber)

    def outbox(self, topic: str) -> Outbox:
        return Outbox(topic, STREAM)

    def relay(self) -> Source:
        # No pause after a nack, and a name of its own for each.
        return StreamSource(self.direct, STREAM, "relay", backoff=0.0, delete=True)


class TestRedisTransaction(OverRedis, TransactionContract):
    pass


class TestRedisInbox(OverRedis, InboxContract):
    pass


class TestRedisOutbox(OverRedis, OutboxContract):
    pass


class TestRedisDelays(OverRedis, PromotionContract):
    def relay(self) -> Source:
        return OutboxSource(self.direct, STREAM, consumer=new_id())

    def cancel(self, id: str) -> bool:
        return Outbox("orders", STREAM).cancel(self.direct, id)


class OverAsyncRedis(OverRedis):
    @pytest.fixture(autouse=True)
    def _through_a_proxy(self, redis_client: Any) -> Iterator[None]:
        settings = redis_client.connection_pool.connection_kwargs
        self.direct = redis_client
        with Proxy(settings["port"]) as self.proxy:
            db = settings.get("db", 0)
            once = AsyncRetry(NoBackoff(), 0)
            self.client = redis.asyncio.Redis(port=self.proxy.port, db=db, retry=once)
            yield


class TestAsyncRedisTransaction(OnLoop, OverAsyncRedis, TransactionContract):
    pass


class TestAsyncRedisInbox(OnLoop, OverAsyncRedis, InboxContract):
    pass


@pytest.mark.slow
class TestAsyncRedisOutbox(OnLoop, OverAsyncRedis, OutboxContract):
    pass


@pytest.mark.slow
class TestAsyncRedisDelays(OnLoop, OverAsyncRedis, TestRedisDelays):
    pass
