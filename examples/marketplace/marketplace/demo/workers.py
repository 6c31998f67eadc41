"""The worker processes: each handles the commands of one partition.

    market-commands:{0} ──▶ worker 1 ─┐  BEGIN · inbox · business tables · outbox_events · COMMIT
    market-commands:{1} ──▶ worker 2 ─┘

All commands of an order are in one partition, and one process at a time reads a partition, so they
take effect in their order. A process holds an advisory lock of the database for its partition. When
it is killed, the database frees the lock at once, and the process that the supervisor starts in its
place takes over: first the entries that were read and not acked, then the new ones.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

from conquiet import Worker
from conquiet.processes import run_processes
from marketplace.demo.process import read_settings, when_orphaned
from marketplace.demo.settings import (
    BATCH_SIZE,
    COMMANDS,
    DEAD_LETTERS,
    GROUP,
    PROCESSES,
    WORKERS,
)

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LOCK = "SELECT pg_try_advisory_lock(hashtext('conquiet demo ' || current_schema()), %s)"

_locks: list[Any] = []
"""Connections that hold the locks of this process, for as long as it lives."""


def make_worker(database: str, broker: str) -> Worker:
    """Build the worker of one process, for the first partition that has none."""
    # Not above: the supervisor needs none of it, and starts the workers a second earlier.
    import redis

    from conquiet.redis import StreamSink, StreamSource, Topic
    from conquiet.sql import engine
    from marketplace.service import marketplace_router

    slot = _lock_partition(database)
    client: Any = redis.Redis.from_url(broker)
    client.rpush(PROCESSES, f"{slot} {os.getpid()} {time.time_ns() // 1_000_000}")
    router = marketplace_router(engine(database), dead_letters=StreamSink(client, DEAD_LETTERS))
    source = StreamSource(
        client,
        [Topic(COMMANDS, WORKERS).streams[slot]],
        group=GROUP,
        consumer=f"worker-{slot + 1}",  # a stable name: its pending entries are read again at once
    )
    return Worker(source, router, batch_size=BATCH_SIZE)


def _lock_partition(database: str) -> int:
    """Return the number of a partition that no process reads; wait until there is one."""
    import psycopg

    connection = psycopg.connect(database, autocommit=True)
    _locks.append(connection)
    while True:
        for slot in range(WORKERS):
            found = connection.execute(_LOCK, (slot,)).fetchone()
            if found is not None and found[0]:
                return slot
        time.sleep(_POLL_SECONDS)


def main() -> int:
    """Supervise the workers: start them, replace one that dies, stop them when the demo ends."""
    settings = read_settings()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    when_orphaned(lambda: os.kill(os.getpid(), signal.SIGTERM))
    target = "marketplace.demo.workers:make_worker"
    return run_processes(target, WORKERS, _GRACE_SECONDS, arguments=settings)


if __name__ == "__main__":
    raise SystemExit(main())
