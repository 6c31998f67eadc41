"""uvicorn compared.emit_faststream:web; an outbox and its relay are written by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from faststream.redis import RedisBroker
from sqlalchemy import select
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Mapped, mapped_column

from compared.tables import DATABASE, Base, Order, OrderPlaced, PlaceOrder

broker = RedisBroker("redis://localhost")
sessions = async_sessionmaker(create_async_engine(DATABASE))


class Event(Base):
    __tablename__ = "outbox_by_hand"
    id: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[str]


async def publish() -> None:
    oldest = select(Event).order_by(Event.id).limit(100).with_for_update(skip_locked=True)
    while True:
        async with sessions.begin() as session:
            events = (await session.scalars(oldest)).all()
            for event in events:
                await broker.publish(event.data, stream="orders", correlation_id=str(event.id))
                await session.delete(event)
        if not events:
            await asyncio.sleep(0.5)


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    async with broker:
        task = asyncio.create_task(publish())
        yield
        task.cancel()


web = FastAPI(lifespan=lifespan)


@web.post("/orders", status_code=201)
async def place_order(order: PlaceOrder) -> None:
    async with sessions.begin() as session:
        session.add(Order(id=order.id))
        session.add(Event(data=OrderPlaced(id=order.id).model_dump_json()))
