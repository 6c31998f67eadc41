"""One process of the world: service.py ROLE CONFIG, where ROLE is worker-N, relay-N or consumer-N.

    commands:{0}, commands:{1} ──worker-0, worker-1──▶ orders, outbox ──relays──▶ events
                                                         events ──consumers──▶ the hash `consumed`

What a person would do to the process from outside (slow it down, move its clock) is read from
files. How many messages it has handled, and what it takes of memory and files, it writes to one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import redis
from sqlalchemy import text
from tests.models.trace import RecordedSink, record

from conquiet import Message, Router, Worker, registry
from conquiet.cli import main as command_line
from conquiet.errors import PermanentError
from conquiet.middleware import DeadLetter
from conquiet.redis import Inbox as RedisInbox
from conquiet.redis import StreamSink, StreamSource, commands
from conquiet.redis import Transaction as RedisTransaction
from conquiet.sql import Inbox, Outbox, Transaction, connection, engine

EVENTS, DEAD = "events", "dead"
GROUP, CONSUMERS = "billing", "shipping"
LEASE = 2.0
BATCH = 100
TELL_SECONDS = 0.05

TABLES = """
CREATE TABLE orders (id TEXT PRIMARY KEY, amount INTEGER NOT NULL);
CREATE TABLE keys (id TEXT PRIMARY KEY, events INTEGER NOT NULL);
"""
UPSERT = text(
    "INSERT INTO orders (id, amount) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET amount = orders.amount + 1"
)
# Who emits for a key waits for the others who do: then the order of its events is promised.
NEXT = text(
    "INSERT INTO keys (id, events) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET events = keys.events + 1 RETURNING events"
)


def commands_of(partition: str) -> str:
    return f"commands:{{{partition}}}"


class Outside:
    """What the world does to this process, and what it tells the world."""

    def __init__(self, role: str, folder: Path) -> None:
        self._folder = folder
        self._told = folder / f"{role}.{os.getpid()}"
        self.handled = 0
        real_time, real_time_ns = time.time, time.time_ns
        self._offset = 0.0
        time.time = lambda: real_time() + self._offset
        time.time_ns = lambda: real_time_ns() + int(self._offset * 1e9)
        threading.Thread(target=self._keep_in_touch, daemon=True).start()

    def pause(self) -> None:
        """As a handler that is slow."""
        time.sleep(self._number("slow"))

    def _number(self, name: str) -> float:
        try:
            return float((self._folder / name).read_text())
        except (OSError, ValueError):
            return 0.0

    def _keep_in_touch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE") / 1e6
        while True:
            self._offset = self._number("clock")
            memory = int(Path("/proc/self/statm").read_text().split()[1]) * page
            files = len(os.listdir("/proc/self/fd"))
            told = self._told.with_suffix(".new")
            told.write_text(f"{self.handled} {memory:.1f} {files}")
            told.rename(self._told)
            time.sleep(TELL_SECONDS)


class Counting:
    """A sink that counts what was confirmed."""

    def __init__(self, sink: Any, outside: Outside) -> None:
        self._sink = sink
        self._outside = outside
        self.keeps_order = sink.keeps_order

    def publish_each(self, messages: Any) -> Any:
        answers = self._sink.publish_each(messages)
        self._outside.handled += sum(answer is None for answer in answers)
        return answers

    def close(self) -> None:
        self._sink.close()


def client_of(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=3.0)


def work(partition: str, config: dict[str, str], outside: Outside) -> bool:
    made = engine(config["postgres"], pool_timeout=2.0, connect_args={"connect_timeout": 3})
    client = client_of(config["redis"])
    router = Router()
    router.use(DeadLetter(StreamSink(client), topic=DEAD))
    router.use(Transaction(made), Inbox("billing"), Outbox(EVENTS))

    @router.raw(type="place.order", source="/shop", name="place_order")
    def place_order(message: Message[bytes]) -> Message[Any]:
        order = msgspec.json.decode(message.data)
        with connection(made) as found:
            number = found.execute(NEXT, {"id": order["key"]}).scalar_one()
            found.execute(UPSERT, {"id": order["command"]})
        outside.pause()
        if order["hopeless"]:
            raise PermanentError("it never works")
        outside.handled += 1
        data = {"command": order["command"], "number": number}
        return Message(data, {"type": "order.placed", "subject": order["key"]})

    source = StreamSource(client, commands_of(partition), GROUP, lease=LEASE)
    finished = Worker(source, router, batch_size=BATCH).run()
    made.dispose()
    return finished


def consume(config: dict[str, str], outside: Outside) -> bool:
    client = client_of(config["redis"])
    router = Router()
    router.use(RedisTransaction(client), RedisInbox("shipping", lease=LEASE))

    @router.raw(type="order.placed", name="ship")
    def ship(message: Message[bytes]) -> None:
        commands(client).hincrby("consumed", message.id, 1)
        outside.pause()
        outside.handled += 1

    source = StreamSource(client, EVENTS, CONSUMERS, lease=LEASE)
    return Worker(source, router, batch_size=BATCH).run()


def relay(config: dict[str, str], outside: Outside) -> bool:
    open_redis = registry.SINKS["redis"]

    def open_counting(url: str, settings: Any) -> Any:
        opened = open_redis(url, settings)
        sink = Counting(opened.sink, outside)
        trace = config.get("trace")
        return replace(opened, sink=RecordedSink(sink, Path(trace)) if trace else sink)

    registry.SINKS["redis"] = open_counting
    return not command_line(
        [
            *("relay", "run", "--database", config["postgres"], "--sink", config["redis"]),
            *("--ordered", "--batch-size", str(BATCH), "--health", "off", "--from", config["from"]),
            *(
                "--publish-timeout-seconds",
                "3",
                "--poll-ms",
                "100",
                "--longest-pause-seconds",
                "0.5",
            ),
            *("--stuck-after-seconds", "20", "--grace-seconds", "10", "--log-level", "warning"),
        ]
    )


def main(role: str, config_file: str) -> int:
    config = json.loads(Path(config_file).read_text())
    if config.get("trace"):
        record(Path(config["trace"]))
    outside = Outside(role, Path(config["folder"]))
    kind, _, number = role.partition("-")
    if kind == "worker":
        return 0 if work(number, config, outside) else 1
    return 0 if {"relay": relay, "consumer": consume}[kind](config, outside) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
