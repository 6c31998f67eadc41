"""Relays that die by SIGKILL while they move delayed events: each enters the outbox once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import redis
from sqlalchemy import text
from tests.waiting import eventually

from conquiet.message import Message
from conquiet.redis import Outbox as RedisOutbox
from conquiet.sql import Outbox, engine, schema

COUNT, STEP = 1_000, 150
SPREAD_SECONDS = 6.0

RELAY = """
import sys
kind, url = sys.argv[1:]
if kind == "sql":
    from conquiet.sql import OutboxSource, engine
    source = OutboxSource(engine(url))
else:
    import redis
    from conquiet.redis import OutboxSource
    source = OutboxSource(redis.Redis.from_url(url), "outbox", consumer="relay")
while True:
    for message in source.read(20, 0.2):
        message.ack()
"""


def delays() -> list[tuple[Message[bytes], float]]:
    attributes = {"type": "t", "source": "/s"}
    return [
        (Message(b"{}", {**attributes, "id": f"e-{n}"}), 0.001 + n * SPREAD_SECONDS / COUNT)
        for n in range(COUNT)
    ]


def kill_until_none_waits(kind: str, url: str, waiting: Callable[[], int]) -> None:
    """Kill a relay whenever it has moved some more, and start the next one."""
    while left := waiting():
        relay = subprocess.Popen([sys.executable, "-c", RELAY, kind, url])
        try:
            eventually(lambda left=left: waiting() <= max(left - STEP, 0), timeout=60)
        finally:
            relay.send_signal(signal.SIGKILL)
            relay.wait()


@pytest.mark.slow
def test_over_postgresql(database_url: str) -> None:
    made = engine(database_url)
    schema.init(made)
    with made.begin() as connection:
        for message, seconds in delays():
            Outbox("orders").add(connection, [message], after=seconds)

    def ask(statement: str) -> int:
        with made.connect() as connection:
            return int(connection.execute(text(statement)).scalar_one())

    kill_until_none_waits("sql", database_url, lambda: ask("SELECT count(*) FROM outbox_delayed"))
    assert ask("SELECT count(*) FROM outbox") == COUNT
    assert ask("SELECT count(DISTINCT event_id) FROM outbox") == COUNT
    made.dispose()


@pytest.mark.slow
def test_over_redis(redis_client: redis.Redis, redis_url: str) -> None:
    outbox = RedisOutbox("orders", "outbox")
    with redis_client.pipeline() as pipeline:
        for message, seconds in delays():
            outbox.add(pipeline, [message], after=seconds)
        pipeline.execute()
    kill_until_none_waits("redis", redis_url, lambda: redis_client.zcard(outbox.delayed.times))
    assert redis_client.xinfo_stream("outbox")["entries-added"] == COUNT
    assert not redis_client.exists(outbox.delayed.entries)
