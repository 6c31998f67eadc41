"""A Litestar service that stores an order and its event in one transaction, and bills it once.

The app's worker runs beside the requests, on their event loop and by their engine. Without a broker
the outbox is the log; with one, a relay runs as well.

    DATABASE_URL=postgresql+asyncpg://… uvicorn examples.litestar_shop:api
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from litestar import Litestar, get, post
from litestar.di import NamedDependency, Provide
from litestar.exceptions import ClientException, ServiceUnavailableException
from litestar.params import JSONBody
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from conquiet import App


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


class PlaceOrder(msgspec.Struct):
    id: str
    amount: int


class OrderPlaced(msgspec.Struct):
    order: str
    amount: int


shop = App(
    "shop",
    database=os.environ["DATABASE_URL"],
    broker=os.environ.get("BROKER_URL"),
    metadata=Base.metadata,
)


@asynccontextmanager
async def work(api: Litestar) -> AsyncIterator[None]:
    await asyncio.to_thread(shop.create_tables)  # or by migrations
    await shop.start_async(concurrency=5)
    try:
        yield
    finally:
        await shop.stop_async()


async def transaction() -> AsyncIterator[AsyncSession]:
    async with shop.sessions.begin() as session:
        yield session


@post("/orders", dependencies={"session": Provide(transaction)})
async def place_order(
    data: JSONBody[PlaceOrder], session: NamedDependency[AsyncSession]
) -> dict[str, str]:
    session.add(Order(id=data.id, amount=data.amount))
    try:
        await session.flush()
    except IntegrityError:
        raise ClientException(f"order {data.id} exists", status_code=409) from None
    await shop.emit(session, OrderPlaced(order=data.id, amount=data.amount))
    if data.amount < 0:
        raise ClientException("the amount is negative")  # order and event are both undone
    return {"id": data.id}


@get("/healthz")
async def healthz() -> dict[str, str]:
    trouble = "not started" if shop.running is None else shop.running.find_trouble()
    if trouble:
        raise ServiceUnavailableException(trouble)
    return {"status": "ok"}


@shop.on
async def bill(placed: OrderPlaced, session: AsyncSession) -> None:
    session.add(Invoice(order=placed.order, amount=placed.amount))


api = Litestar([place_order, healthz], lifespan=[work])
