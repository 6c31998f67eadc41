"""FastStream on Redis: a subscriber of a `list`, or of a `stream` in a group."""

from __future__ import annotations

import ground
import psycopg
from faststream import AckPolicy, FastStream
from faststream.redis import RedisBroker, StreamSub

broker = RedisBroker(ground.REDIS, logger=None)
app = FastStream(broker, logger=None)
GROUP = {"group": "workers", "consumer": "worker"}


@app.on_startup
async def connect():
    global effects
    effects = await psycopg.AsyncConnection.connect(ground.DATABASE, autocommit=True)


async def handle(command: str):
    await effects.execute(ground.EFFECT, [command])
    await broker.publish(command, **{ground.KIND: "events"})


async def send(command):
    await broker.publish(command, **{ground.KIND: "commands"})


async def work():
    if ground.KIND == "list":
        broker.subscriber(list="commands")(handle)
    elif not ground.IS_SAFE:
        broker.subscriber(stream=StreamSub("commands", **GROUP))(handle)
    else:
        # One reads what is new, the other claims what was left; it would also claim what the
        # first has read and not begun, so that one reads no more than it handles in the time.
        new = StreamSub("commands", **GROUP, max_records=100)
        left = StreamSub("commands", **GROUP, min_idle_time=ground.RETURN_SECONDS * 1000)
        for stream in (new, left):
            broker.subscriber(stream=stream, ack_policy=AckPolicy.NACK_ON_ERROR)(handle)
    await app.run()


if __name__ == "__main__":
    ground.main(work=work, send=send, start=broker.connect)
