"""A service of an event loop, 100 messages in flight: async_service.py STORE DATABASE REDIS FILE.

Commands come from a Redis stream; effects and events go into a store in one transaction each. It
works until SIGTERM, and exits with 1 if something in flight was not finished. The file holds how
many messages are inside the chain, also after a kill.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from tests.faults.sql.service import COMMANDS, GROUP, UPSERT, OrderPlaced, PlaceOrder

from conquiet import Message, Router, Worker, sql
from conquiet import redis as streams

DRIVERS = {"asyncpg": "postgresql+asyncpg", "psycopg": "postgresql+psycopg_async"}
EFFECTS, OUTBOX = "effects", "outbox"
LEASE = 1.0
IN_FLIGHT = 100


def in_chain(path: str) -> Any:
    """Return a middleware that counts the messages inside the chain, in a byte of a file."""
    with Path(path).open("r+b") as file:
        count = mmap.mmap(file.fileno(), 1)
    count[0] = 0

    def middleware(next: Any) -> Any:
        def process(batch: Any) -> Any:
            count[0] += len(batch)
            try:
                return next(batch)
            finally:
                count[0] -= len(batch)

        return process

    return middleware


def over_database(engine: Any, counted: Any) -> tuple[Router, Any]:
    router = Router()
    router.use(counted, sql.Transaction(engine), sql.Inbox("billing"), sql.Outbox("orders"))

    async def count(id_: str) -> None:
        async with sql.async_connection(engine) as found:
            await found.execute(text(UPSERT), {"id": id_})

    return router, count


def over_redis(client: Any, counted: Any) -> tuple[Router, Any]:
    router = Router()
    router.use(
        counted,
        streams.Transaction(client),
        streams.Inbox("billing", lease=LEASE),
        streams.Outbox("orders", OUTBOX),
    )

    async def count(id_: str) -> None:
        await streams.commands(client).hincrby(EFFECTS, id_, 1)

    return router, count


async def main(store: str, database: str, redis_url: str, path: str) -> bool:
    client = redis.asyncio.Redis.from_url(redis_url, max_connections=3 * IN_FLIGHT)
    counted = in_chain(path)
    if store == "redis":
        router, count = over_redis(client, counted)
    else:
        url = make_url(database).set(drivername=DRIVERS[store])
        connections = IN_FLIGHT + 1  # one is left to others
        engine = create_async_engine(url, pool_size=connections, max_overflow=0)
        router, count = over_database(engine, counted)

    @router.raw(type="place.order", source="/shop", name="place_order")
    async def place_order(message: Message[bytes]) -> Message[OrderPlaced]:
        order = msgspec.json.decode(message.data, type=PlaceOrder)
        await asyncio.sleep(random.random() * 0.2)
        await count(order.id)
        await asyncio.sleep(random.random() * 0.2)
        return Message(OrderPlaced(order.id), {"type": "order.placed"})

    source = streams.StreamSource(client, COMMANDS, GROUP, lease=LEASE, claim_interval=0.1)
    worker = Worker(source, router, concurrency=IN_FLIGHT)
    finished = await worker.run_async()
    if store != "redis":
        await engine.dispose()
    await client.aclose()
    return finished


if __name__ == "__main__":
    sys.exit(not asyncio.run(main(*sys.argv[1:])))
