"""A service on an event loop, with 100 messages in flight: async_service.py STORE DATABASE REDIS.

Commands come from a Redis stream; effects and events go into a store in one transaction each. It
works until SIGTERM, and exits with 1 if something in flight was not finished.
"""

from __future__ import annotations

import asyncio
import random
import sys
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


def over_database(engine: Any) -> tuple[Router, Any]:
    router = Router()
    router.use(sql.Transaction(engine), sql.Inbox("billing"), sql.Outbox("orders"))

    async def count(id_: str) -> None:
        async with sql.async_connection(engine) as found:
            await found.execute(text(UPSERT), {"id": id_})

    return router, count


def over_redis(client: Any) -> tuple[Router, Any]:
    router = Router()
    router.use(
        streams.Transaction(client),
        streams.Inbox("billing", lease=LEASE),
        streams.Outbox("orders", OUTBOX),
    )

    async def count(id_: str) -> None:
        await streams.commands(client).hincrby(EFFECTS, id_, 1)

    return router, count


async def main(store: str, database: str, redis_url: str) -> bool:
    client = redis.asyncio.Redis.from_url(redis_url, max_connections=3 * IN_FLIGHT)
    if store == "redis":
        size = 1
        router, count = over_redis(client)
    else:
        size = 2  # in half as many transactions
        url = make_url(database).set(drivername=DRIVERS[store])
        connections = IN_FLIGHT // size + 1  # one is left to others
        engine = create_async_engine(url, pool_size=connections, max_overflow=0)
        router, count = over_database(engine)

    @router.raw(type="place.order", source="/shop", name="place_order")
    async def place_order(message: Message[bytes]) -> Message[OrderPlaced]:
        order = msgspec.json.decode(message.data, type=PlaceOrder)
        await asyncio.sleep(random.random() * 0.1)
        await count(order.id)
        await asyncio.sleep(random.random() * 0.1)
        return Message(OrderPlaced(order.id), {"type": "order.placed"})

    source = streams.StreamSource(client, COMMANDS, GROUP, lease=LEASE, claim_interval=0.1)
    worker = Worker(source, router, batch_size=size, concurrency=IN_FLIGHT)
    finished = await worker.run_async()
    if store != "redis":
        await engine.dispose()
    await client.aclose()
    return finished


if __name__ == "__main__":
    sys.exit(not asyncio.run(main(*sys.argv[1:])))
