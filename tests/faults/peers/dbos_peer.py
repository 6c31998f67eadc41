"""DBOS: each command is a workflow in PostgreSQL; when safe, its effect is a transaction."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from pathlib import Path

import ground
from dbos import DBOS, DBOSClient, DBOSConfig, SQLAlchemyDatasource
from sqlalchemy import create_engine, make_url, text

# Its statements and ours are in one database, as with the others.
URL = make_url(ground.DATABASE).set(drivername="postgresql+psycopg")
DATABASE = URL.render_as_string(hide_password=False)
EFFECT = text(ground.EFFECT.replace("%s", ":command"))
SALE = text(ground.SALE.replace("%s", ":command"))
config: DBOSConfig = {
    "name": "peer",
    "system_database_url": ground.DATABASE,
    "log_level": "WARNING",
}
effects = functools.cache(ground.connect)


@DBOS.workflow(name="event")
def event(command):
    """Run by no process: the reader of the stores counts it."""


@DBOS.step()
def effect(command):
    effects().execute(ground.EFFECT, [command])


@DBOS.workflow(name="handle")
def handle(command):
    (effect_at_once if ground.IS_SAFE else effect)(command)
    DBOS.enqueue_workflow("events", event, command)


def work():
    global effect_at_once
    datasource = SQLAlchemyDatasource.create(DATABASE)

    @datasource.transaction(name="effect")
    def effect_at_once(command):
        datasource.sql_session().execute(EFFECT, {"command": command})

    DBOS(config=config)
    DBOS.listen_queues(["commands"])
    DBOS.launch()
    for queue in ("commands", "events"):
        DBOS.register_queue(queue)
    threading.Event().wait()


def connect():
    global client, engine
    client = DBOSClient(system_database_url=ground.DATABASE)
    engine = create_engine(DATABASE)


def options(command):
    return {"workflow_name": "handle", "queue_name": "commands", "workflow_id": command}


def send(command):
    client.enqueue(options(command), command)


def sell_at_once(_, command):
    with engine.begin() as connection:
        connection.execute(SALE, {"command": command})
        client.enqueue_in_transaction(connection, options(command), command)


def prepare():
    dbos = Path(sys.executable).with_name("dbos")
    migrate = [dbos, "migrate", "--sys-db-url", ground.DATABASE]
    subprocess.run(migrate, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sell = sell_at_once if ground.IS_SAFE else None
    ground.main(work=work, send=send, sell=sell, prepare=prepare, start=connect)
