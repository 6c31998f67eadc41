"""What waits in a store has no place in a micro-batch: refused with a reason, before any effect."""

from __future__ import annotations

from datetime import timedelta

import pyarrow as pa
import pytest

from conquiet.errors import ConfigError
from conquiet.memory import Log
from conquiet.message import Message
from conquiet.middleware.retry import Retry
from conquiet.router import Router
from conquiet.spark.worker import Work


def work(router: Router, sink: object) -> Work:
    def make_sink() -> object:
        return sink

    return Work(
        token=f"{id(router)}",
        make_router=lambda: router,
        make_sink=make_sink,  # type: ignore[arg-type]
        make_dead_letters=None,
        batch_size=10,
        max_attempts=1,
        patience=0.0,
        ordered=False,
    )


def test_a_later_try_is_refused_at_the_start() -> None:
    router = Router()
    router.use(Retry(delays=[60]))
    with pytest.raises(ConfigError, match=r"Retry\(delays=…\): on Spark a batch is done when"):
        list(work(router, Log().sink("orders"))(iter([])))


def test_a_delayed_output_without_an_outbox_is_refused_by_the_sink() -> None:
    log, router = Log(), Router()

    @router.raw(type="ask", source="/shop")
    def ask(message: Message[bytes]) -> list[Message[bytes]]:
        return [Message(b"{}", {"type": "t", "id": "1"}, notbefore=timedelta(hours=1))]

    row = pa.RecordBatch.from_pylist([{"id": "1", "type": "ask", "source": "/shop", "data": b"{}"}])
    with pytest.raises(Exception, match=r"put it into an outbox"):
        list(work(router, log.sink("orders"))(iter([row])))
    assert log.source("all").read(10, 0) == []
