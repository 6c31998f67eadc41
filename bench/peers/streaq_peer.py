# mypy: ignore-errors
"""streaq: tasks over Redis streams, taken by a worker in this process."""

from __future__ import annotations

import logging
import os
import sys
import time

import anyio
from streaq import Worker


async def main(url: str, count: int) -> None:
    logging.disable()
    worker = Worker(redis_url=url, queue_name="peer-streaq", concurrency=100)
    finished = anyio.Event()
    seen = 0

    @worker.task()
    async def handle(order: dict) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            finished.set()

    order = {"order": 1234567, "customer": "customer-17", "text": "x" * 240}
    async with worker:
        for start in range(0, count, 500):
            await worker.enqueue_many(
                [handle.enqueue(order) for _ in range(min(500, count - start))]
            )
    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run_async)
        await finished.wait()
        print(time.perf_counter() - start, flush=True)
        os._exit(0)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]))
