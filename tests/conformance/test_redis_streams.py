"""Redis streams under the contracts of source, sink and worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from conquiet.message import Message
from conquiet.redis import StreamSink, StreamSource
from conquiet.source import Source
from conquiet.testing.contracts import SinkContract, SourceContract, WorkerContract


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
        assert list(StreamSink(self.client, "orders").publish(messages)) == [None] * len(messages)


class TestStreamSource(OnRedis, SourceContract):
    def open_other_group(self) -> Source:
        return self.open(60.0, "shipping")
