"""A FastStream consumer whose effects happen once, by conquiet's inbox in its own transaction.

It reads the events that a relay publishes to the Redis stream `orders`, charges each order, and
adds an event of its own to the outbox: inbox, effect and event are committed together, then
FastStream acks.

    DATABASE_URL=postgresql://… REDIS_URL=redis://… python -m examples.faststream_inbox
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import msgspec
from faststream import AckPolicy, FastStream
from faststream.redis import RedisBroker, StreamSub
from faststream.redis.annotations import RedisStreamMessage
from pydantic import BaseModel
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from conquiet.sql import Inbox, Outbox, schema

inbox = Inbox("billing")
outbox = Outbox("payments", source="/billing")


class Base(DeclarativeBase):
    pass


class Charge(Base):
    __tablename__ = "charges"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str]
    amount: Mapped[int]


class OrderPlaced(BaseModel):
    order: str
    amount: int


class OrderCharged(msgspec.Struct):
    order: str


async def read_event(raw: Any, parse: Any) -> Any:
    """Read an entry of a relay: a CloudEvent with one field per attribute."""
    event = raw["data"]
    message = await parse({**raw, "data": {b"__data__": event[b"data"]}})
    message.body, message.content_type = event[b"data"], "application/json"
    message.message_id = f"{event[b'source'].decode()} {event[b'id'].decode()}"
    return message


def make_broker(
    url: str, sessions: async_sessionmaker[AsyncSession], *, idle_ms: int = 60_000
) -> RedisBroker:
    broker = RedisBroker(url)

    async def charge(order: OrderPlaced, message: RedisStreamMessage) -> None:
        async with sessions.begin() as session:
            if not await inbox.fresh(session, message.message_id):
                return  # it took effect before, and only its ack was lost
            session.add(Charge(order=order.order, amount=order.amount))
            await outbox.add(session, [OrderCharged(order.order)])

    name = socket.gethostname()
    new = StreamSub("orders", group="billing", consumer=name)
    left = StreamSub("orders", group="billing", consumer=name, min_idle_time=idle_ms)
    for stream in (new, left):
        broker.subscriber(stream=stream, parser=read_event, ack_policy=AckPolicy.NACK_ON_ERROR)(
            charge
        )
    return broker


async def main() -> None:
    url = make_url(os.environ["DATABASE_URL"])
    schema.init(url)
    engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    broker = make_broker(os.environ["REDIS_URL"], async_sessionmaker(engine))
    await FastStream(broker).run()
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
