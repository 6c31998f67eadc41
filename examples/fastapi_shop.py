"""A web service that stores an order and its event in one transaction, and bills each order once.

The worker runs beside the requests, on their event loop and by their engine. Without a broker the
outbox is the log; with one, a relay runs as well.

    DATABASE_URL=postgresql+asyncpg://… uvicorn examples.fastapi_shop:api
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from conquiet import App
from conquiet.fastapi import health_router, lifespan, transaction


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


class PlaceOrder(BaseModel):
    id: str
    amount: int


class OrderPlaced(BaseModel):
    order: str
    amount: int


shop = App(
    "shop",
    database=os.environ["DATABASE_URL"],
    broker=os.environ.get("BROKER_URL"),
    metadata=Base.metadata,
)


@asynccontextmanager
async def prepare(api: FastAPI) -> AsyncIterator[None]:
    """Begin before the worker and end after it."""
    await asyncio.to_thread(shop.create_tables)  # or by migrations
    yield


api = FastAPI(lifespan=lifespan(shop, prepare, concurrency=5))
api.include_router(health_router(shop))

Session = Annotated[AsyncSession, transaction(shop)]


@api.post("/orders", status_code=201)
async def place_order(order: PlaceOrder, session: Session) -> dict[str, str]:
    session.add(Order(id=order.id, amount=order.amount))
    try:
        await session.flush()
    except IntegrityError:
        raise HTTPException(409, f"order {order.id} exists") from None
    await shop.emit(session, OrderPlaced(order=order.id, amount=order.amount))
    if order.amount < 0:
        raise HTTPException(422, "the amount is negative")  # order and event are both undone
    return {"id": order.id}


@shop.on
async def bill(placed: OrderPlaced, session: Session) -> None:
    session.add(Invoice(order=placed.order, amount=placed.amount))
