"""procrastinate: jobs in PostgreSQL; when safe, an event or a command joins the transaction."""

from __future__ import annotations

import sys

import ground
import psycopg
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

Connector = PsycopgConnector if sys.argv[1] == "work" else SyncPsycopgConnector
app = App(connector=Connector(conninfo=ground.DATABASE))


@app.task(name="event", queue="events")
async def event(command):
    """Run by no process: the reader of the stores counts it."""


@app.task(name="handle", queue="commands")
async def handle(command):
    if not ground.IS_SAFE:
        await effects.execute(ground.EFFECT, [command])
        await event.defer_async(command=command)
        return
    async with effects.transaction():
        await effects.execute(ground.EFFECT, [command])
        await event.configure(connection=effects).defer_async(command=command)


if ground.IS_SAFE:

    @app.periodic(cron=f"* * * * * */{ground.RETURN_SECONDS}")
    @app.task(name="retry_stalled", queue="commands", queueing_lock="retry_stalled")
    async def retry_stalled(timestamp):
        jobs = app.job_manager
        since = ground.RETURN_SECONDS
        for job in await jobs.get_stalled_jobs(task_name="handle", seconds_since_heartbeat=since):
            await jobs.retry_job(job)


async def work():
    global effects
    effects = await psycopg.AsyncConnection.connect(ground.DATABASE, autocommit=True)
    beats = {"update_heartbeat_interval": ground.RETURN_SECONDS / 5} if ground.IS_SAFE else {}
    async with app.open_async():
        await app.run_worker_async(queues=["commands"], **beats)


def prepare():
    with app.open():
        app.schema_manager.apply_schema()


def start():
    app.open()


def send(command):
    handle.defer(command=command)


def sell_at_once(connection, command):
    with connection.transaction():
        connection.execute(ground.SALE, [command])
        handle.configure(connection=connection).defer(command=command)


if __name__ == "__main__":
    sell = sell_at_once if ground.IS_SAFE else None
    ground.main(work=work, send=send, sell=sell, prepare=prepare, start=start)
