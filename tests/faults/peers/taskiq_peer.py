"""taskiq-redis: tasks over a `list` or a `stream`, by its own worker command."""

from __future__ import annotations

import sys

import ground
import psycopg
from taskiq import TaskiqEvents
from taskiq.__main__ import main as command_line
from taskiq_redis import ListQueueBroker, RedisStreamBroker

CLAIMS = {"idle_timeout": ground.RETURN_SECONDS * 1000}
CLAIMS["unacknowledged_lock_timeout"] = ground.RETURN_SECONDS
if ground.KIND == "list":
    broker = ListQueueBroker(ground.REDIS)
else:
    broker = RedisStreamBroker(ground.REDIS, **(CLAIMS if ground.IS_SAFE else {}))


@broker.on_event(TaskiqEvents.WORKER_STARTUP)
async def connect(state):
    state.effects = await psycopg.AsyncConnection.connect(ground.DATABASE, autocommit=True)


@broker.task("event")
async def event(command: str):
    """Run by no process: the reader of the stores counts it."""


@broker.task("handle")
async def handle(command: str):
    await broker.state.effects.execute(ground.EFFECT, [command])
    await event.kicker().with_labels(queue_name="events").kiq(command)


async def send(command):
    await handle.kiq(command)


def work():
    sys.argv[1:] = ["worker", "taskiq_peer:broker", "--log-level", "WARNING"]
    command_line()


if __name__ == "__main__":
    ground.main(work=work, send=send, start=broker.startup)
