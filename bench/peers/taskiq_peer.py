# mypy: ignore-errors
"""taskiq-redis: tasks over a Redis stream, taken by a receiver in this process."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from redis.asyncio import Redis
from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

STREAM = "peer:taskiq"


async def main(url: str, count: int, mode: str) -> None:
    broker = RedisStreamBroker(url, queue_name=STREAM, consumer_id="0")
    done = asyncio.Event()
    seen = 0

    @broker.task
    async def handle(order: dict) -> None:
        nonlocal seen
        if mode == "wait":
            await asyncio.sleep(0.05)
        seen += 1
        if seen == count:
            done.set()

    async with Redis.from_url(url) as client:
        await client.delete(STREAM)
    await broker.startup()
    order = {"order": 1234567, "customer": "customer-17", "text": "x" * 240}
    for _ in range(count):
        await handle.kiq(order)
    start = time.perf_counter()
    receiver = asyncio.create_task(run_receiver_task(broker))
    await done.wait()
    print(time.perf_counter() - start, flush=True)
    os._exit(0 if not receiver.done() else 1)  # it waits for more, whatever one says to it


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
