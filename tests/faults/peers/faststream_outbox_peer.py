"""faststream-outbox: a table of PostgreSQL is the queue; when safe, rows join the transaction."""

from __future__ import annotations

import ground
from faststream import FastStream
from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import MetaData, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

metadata = MetaData()
table = make_outbox_table(metadata)
url = make_url(ground.DATABASE)
engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
broker = OutboxBroker(engine, outbox_table=table, logger=None)
# The longest pause between two looks at the table has to be shorter than a lease.
LEASE = {"lease_ttl_seconds": ground.RETURN_SECONDS, "max_fetch_interval": 1.0}


async def handle(command: str):
    if ground.IS_SAFE:
        await write_and_publish(ground.EFFECT, command, "events")
    else:
        await write(ground.EFFECT, command)
        await publish(command, "events")


async def write(statement, command):
    async with engine.begin() as connection:
        await connection.execute(text(statement.replace("%s", ":command")), {"command": command})


async def publish(command, queue):
    async with engine.begin() as connection:
        await broker.publish(command, queue=queue, session=connection)


async def write_and_publish(statement, command, queue):
    async with engine.begin() as connection:
        await connection.execute(text(statement.replace("%s", ":command")), {"command": command})
        await broker.publish(command, queue=queue, session=connection)


async def work():
    broker.subscriber("commands", **(LEASE if ground.IS_SAFE else {}))(handle)
    await FastStream(broker, logger=None).run()


async def send(command):
    await publish(command, "commands")


async def sell(_, command):
    if ground.IS_SAFE:
        await write_and_publish(ground.SALE, command, "commands")
    else:
        await write(ground.SALE, command)
        await publish(command, "commands")


def prepare():
    metadata.create_all(create_engine(url.set(drivername="postgresql+psycopg")))


if __name__ == "__main__":
    ground.main(work=work, send=send, sell=sell, prepare=prepare, start=broker.connect)
