"""A web service that stores an order and its event in one transaction, and bills what it hears of.

The service has its own asyncio engine and session. `outbox.add` stores the event in the session's
transaction, and the commit of the request makes order and event visible together. A relay publishes
the event from there: conquiet relay run

With a broker, a worker runs beside the requests, on their event loop and by their engine: for each
order that was placed it stores an invoice, once.

    DATABASE_URL=postgresql://… BROKER_URL=redis://… uvicorn examples.fastapi_outbox:app
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated

import msgspec
import redis
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy import make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from conquiet import Router, Worker
from conquiet.redis import StreamSource
from conquiet.sql import Inbox, Outbox, Transaction, async_session, schema

outbox = Outbox("orders", source="/orders")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int]


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str]
    amount: Mapped[int]


class OrderPlaced(msgspec.Struct):
    order: str
    amount: int


class PlaceOrder(BaseModel):
    id: str
    amount: int


def billing(engine: AsyncEngine, broker: str) -> Worker:
    """Return a worker that stores an invoice for each order; `async with` runs it."""
    sessions = async_sessionmaker(engine)
    router = Router()
    router.use(Transaction(engine), Inbox("billing"))

    @router.event()
    async def bill(placed: OrderPlaced) -> None:
        async with async_session(sessions) as session:  # in the transaction of the inbox
            session.add(Invoice(order=placed.order, amount=placed.amount))

    source = StreamSource(redis.Redis.from_url(broker), "orders", group="billing")
    return Worker(source, router, concurrency=5)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    url = make_url(os.environ["DATABASE_URL"])
    schema.init(url)  # a service with migrations of its own runs `conquiet outbox schema` instead
    engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    app.state.sessions = async_sessionmaker(engine)
    async with AsyncExitStack() as running:
        if "BROKER_URL" in os.environ:
            await running.enter_async_context(billing(engine, os.environ["BROKER_URL"]))
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


async def transaction(request: Request) -> AsyncIterator[AsyncSession]:
    """One transaction per request: committed if the request succeeds, else rolled back."""
    sessions: async_sessionmaker[AsyncSession] = request.app.state.sessions
    async with sessions.begin() as session:
        yield session


Session = Annotated[AsyncSession, Depends(transaction, scope="function")]


@app.post("/orders", status_code=201)
async def place_order(order: PlaceOrder, session: Session) -> dict[str, str]:
    session.add(Order(id=order.id, amount=order.amount))
    try:
        await session.flush()
    except IntegrityError:
        raise HTTPException(409, f"order {order.id} exists") from None
    await outbox.add(session, [OrderPlaced(order.id, order.amount)])
    if order.amount < 0:
        raise HTTPException(422, "the amount is negative")  # order and event are both undone
    return {"id": order.id}
