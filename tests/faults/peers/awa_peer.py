"""awa: jobs in PostgreSQL, run by its Rust runtime; when safe, inserts join the transaction."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import ground
import psycopg
from awa import AsyncClient
from awa.bridge import insert_job, insert_job_sync

HANDLE = {"kind": "handle", "queue": "commands"}
EVENT = {"kind": "event", "queue": "events"}
SECOND = 1_000
# As its documentation advises for workers whose death is to be noticed within five seconds.
RESCUE = {
    "heartbeat_interval_ms": SECOND,
    "heartbeat_staleness_ms": (ground.RETURN_SECONDS - 1) * SECOND,
    "heartbeat_rescue_interval_ms": SECOND,
    "leader_election_interval_ms": SECOND,
}


def connect():
    global client
    client = AsyncClient(ground.DATABASE)  # its threads do not outlive a fork


async def handle(job):
    if not ground.IS_SAFE:
        await effects.execute(ground.EFFECT, [job.args["command"]])
        await client.insert(job.args, **EVENT)
        return
    # Handlers run side by side, and a transaction needs a connection to itself.
    async with await psycopg.AsyncConnection.connect(ground.DATABASE) as connection:
        await connection.execute(ground.EFFECT, [job.args["command"]])
        await insert_job(connection, job.args, **EVENT)


async def work():
    global effects
    effects = await psycopg.AsyncConnection.connect(ground.DATABASE, autocommit=True)
    connect()
    client.task(dict, **HANDLE)(handle)
    await client.start(**(RESCUE if ground.IS_SAFE else {}))
    await asyncio.Event().wait()


async def send(command):
    await client.insert({"command": command}, **HANDLE)


def sell_at_once(connection, command):
    with connection.transaction():
        connection.execute(ground.SALE, [command])
        insert_job_sync(connection, {"command": command}, **HANDLE)


def prepare():
    migrate = [sys.executable, "-m", "awa", "--database-url", ground.DATABASE, "migrate"]
    subprocess.run(migrate, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sell = sell_at_once if ground.IS_SAFE else None
    ground.main(work=work, send=send, sell=sell, prepare=prepare, start=connect)
