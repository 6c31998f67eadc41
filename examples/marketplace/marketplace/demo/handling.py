"""Handling: two worker processes that take commands, each from a partition of its own.

    market-commands:{0} ──▶ worker 1 ─┐  BEGIN · inbox · business tables · outbox_events · COMMIT
    market-commands:{1} ──▶ worker 2 ─┘

An order's commands lie in one partition, and one process at a time reads it: so they take effect
in their order. Who reads a partition holds an advisory lock of the database. When it is killed,
the lock is free at once, and the process that the supervisor starts in its place takes over: first
what was read and not acked, then what is new.
"""

from __future__ import annotations

import os
import time
from typing import Any

import psycopg
import redis

from conquiet.redis import StreamSink, StreamSource, Topic
from conquiet.sql import engine
from conquiet.worker import Worker
from marketplace.demo.settings import (
    BATCH,
    COMMANDS,
    DEAD_LETTERS,
    GROUP,
    PROCESSES,
    WORKERS,
)
from marketplace.service import marketplace_router

_LOOK_SECONDS = 0.05
_LOCK = "SELECT pg_try_advisory_lock(hashtext('conquiet demo ' || current_schema()), %s)"

_held: list[Any] = []
"""Connections that hold the locks of this process, for as long as it lives."""


def make_worker(database: str, broker: str) -> Worker:
    """The worker of one process."""
    slot = _take_partition(database)
    client: Any = redis.Redis.from_url(broker)
    client.rpush(PROCESSES, f"{slot} {os.getpid()} {time.time_ns() // 1_000_000}")
    router = marketplace_router(engine(database), dead_letters=StreamSink(client, DEAD_LETTERS))
    source = StreamSource(
        client,
        [Topic(COMMANDS, WORKERS).streams[slot]],
        group=GROUP,
        consumer=f"worker-{slot + 1}",  # stable: what a killed process held is read again at once
    )
    return Worker(source, router, batch_size=BATCH)


def _take_partition(database: str) -> int:
    """The number of a partition that nobody reads; waits until there is one."""
    connection = psycopg.connect(database, autocommit=True)
    _held.append(connection)
    while True:
        for slot in range(WORKERS):
            found = connection.execute(_LOCK, (slot,)).fetchone()
            if found is not None and found[0]:
                return slot
        time.sleep(_LOOK_SECONDS)
