"""uvicorn compared.emit_procrastinate:web; the job is the event, for one worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
from fastapi import FastAPI
from procrastinate import App, PsycopgConnector

from compared.tables import PlaceOrder

DATABASE = "postgresql://localhost/shop"
jobs = App(connector=PsycopgConnector(conninfo=DATABASE))


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    async with jobs.open_async():
        yield


web = FastAPI(lifespan=lifespan)


@web.post("/orders", status_code=201)
async def place_order(order: PlaceOrder) -> None:
    async with await psycopg.AsyncConnection.connect(DATABASE) as connection:
        await connection.execute("INSERT INTO orders VALUES (%s)", [order.id])
        job = jobs.configure_task("bill", connection=connection)
        await job.defer_async(order=order.id)
