# mypy: ignore-errors
"""FastStream: a subscriber of a Redis stream in a group, by batches, one by one, or 100 at once."""

from __future__ import annotations

import asyncio
import sys
import time

from faststream.redis import RedisBroker, StreamSub
from redis.asyncio import Redis

STREAM, GROUP = "peer:faststream", "readers"


async def main(url: str, count: int, mode: str) -> float:
    broker = RedisBroker(url, logger=None)
    done = asyncio.Event()
    seen = 0

    def note(number: int) -> None:
        nonlocal seen
        seen += number
        if seen >= count:
            done.set()

    sub = StreamSub(STREAM, group=GROUP, consumer="c", batch=mode == "batch", max_records=100)
    if mode == "batch":

        @broker.subscriber(stream=sub)
        async def handle_batch(orders: list[dict]) -> None:
            note(len(orders))
    elif mode == "wait":

        @broker.subscriber(stream=sub, max_workers=100)
        async def handle_slowly(order: dict) -> None:
            await asyncio.sleep(0.05)
            note(1)
    else:

        @broker.subscriber(stream=sub)
        async def handle(order: dict) -> None:
            note(1)

    async with Redis.from_url(url) as client:
        await client.delete(STREAM)
        await client.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    await broker.connect()
    order = {"order": 1234567, "customer": "customer-17", "text": "x" * 240}
    for _ in range(count):
        await broker.publish(order, stream=STREAM)
    start = time.perf_counter()
    await broker.start()
    await done.wait()
    seconds = time.perf_counter() - start
    await broker.stop()
    return seconds


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
