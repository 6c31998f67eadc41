"""A process of a short run that is recorded: actor.py inbox|relay TRACE REDIS [POSTGRESQL].

Runs until it is killed; it says so when its handler runs for the first time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import redis
from tests.models.trace import RecordedSink, record

from conquiet import Message, Router, Worker
from conquiet.redis import Inbox, StreamSink, StreamSource, Transaction, commands
from conquiet.relay import Relay
from conquiet.sql import OutboxSource, engine

LEASE = 0.5
STREAM, GROUP, TOPIC = "commands", "billing", "events"


def consume(url: str) -> None:
    client = redis.Redis.from_url(url)
    router = Router()
    router.use(Transaction(client), Inbox("billing", lease=LEASE))

    @router.raw(type="place.order", name="place")
    def place(message: Message[bytes]) -> None:
        commands(client).hincrby("effects", message.id, 1)
        time.sleep(0.002)

    Worker(StreamSource(client, STREAM, GROUP, lease=LEASE), router, batch_size=5).run()


def relay(url: str, database: str, trace: Path) -> None:
    source = OutboxSource(engine(database), ordered=True, poll=0.02)
    sink = RecordedSink(StreamSink(redis.Redis.from_url(url)), trace)
    Relay(source, sink, batch_size=4, ordered=True).run()


def main(role: str, trace: str, url: str, database: str = "") -> None:
    record(Path(trace))
    if role == "inbox":
        consume(url)
    else:
        relay(url, database, Path(trace))


if __name__ == "__main__":
    main(*sys.argv[1:])
