"""conquiet: a worker with inbox and outbox, and a relay beside it, which is killed with it."""

from __future__ import annotations

import subprocess
import sys

import ground
import msgspec
import redis
from sqlalchemy import text

from conquiet import Message, Router, Worker
from conquiet.redis import StreamSink, StreamSource
from conquiet.sql import Inbox, Outbox, Transaction, connection, engine, schema

EFFECT = text("INSERT INTO effects (command) VALUES (:command)")
RELAY = [sys.executable, "-m", "conquiet", "relay", "run", "--database", ground.DATABASE]
RELAY += ["--sink", ground.REDIS, "--health", "off", "--log-level", "warning"]
LEASE = {"lease": float(ground.RETURN_SECONDS)} if ground.IS_SAFE else {}
client = redis.Redis.from_url(ground.REDIS)
sink = StreamSink(client, "commands")
outbox = Outbox("commands", source="/web")


def work():
    subprocess.Popen(RELAY)
    made = engine(ground.DATABASE)
    router = Router()
    router.use(Transaction(made), Inbox("billing"), Outbox("events"))

    @router.raw(type="handle", source="/peer", name="handle")
    def handle(message: Message[bytes]) -> Message[str]:
        command = msgspec.json.decode(message.data)
        with connection(made) as found:
            found.execute(EFFECT, {"command": command})
        return Message(command, {"type": "handled"})

    Worker(StreamSource(client, "commands", "workers", **LEASE), router).run()


def send(command):
    attributes = {"id": command, "type": "handle", "source": "/web"}
    [error] = sink.publish_each([Message(command, attributes)])
    assert error is None, error


def sell(found, command):
    with found.transaction():
        found.execute(ground.SALE, [command])
        outbox.add(found, [Message(command, {"type": "handle"})])


def prepare():
    schema.init(engine(ground.DATABASE))


def finish():
    subprocess.run([*RELAY, "--until-empty"], check=True)


if __name__ == "__main__":
    ground.main(work=work, send=send, sell=sell, prepare=prepare, finish=finish)
