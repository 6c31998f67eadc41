"""Consumers of brokers are killed and replaced: each message takes effect once, to the row.

CONQUIET_SOURCE_MESSAGES=1000000 sets how many messages the long test sends.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import pytest
from sqlalchemy import Engine, text
from tests.integration.sinks.kafka_cluster import Cluster
from tests.integration.sinks.rabbitmq import RabbitMQ
from tests.integration.sinks.sqs_server import REGION, serve_sqs

from conquiet.relay.sinks import KafkaSink, KombuSink
from conquiet.sink import Sink
from conquiet.sources.sqs import _QueueSink
from conquiet.sql import engine, schema
from conquiet.testing import eventually
from conquiet.testing.contracts.samples import make_messages

pytestmark = pytest.mark.slow

MESSAGES = int(os.environ.get("CONQUIET_SOURCE_MESSAGES", "20000"))
CONSUMERS = 2
SEED = 7
KILLS = 8
AHEAD = 20_000
"""How many messages wait at most: the mock cluster of Kafka keeps 5 MB of a partition."""


class Ground:
    """A broker, the URL of the source on it, and a sink that fills it."""

    def __init__(
        self, source: str, sink: Sink, stop: Callable[[], object], messages: int = MESSAGES
    ) -> None:
        self.source = source
        self.sink = sink
        self.stop = stop
        self.messages = messages


def on_rabbitmq(_: str) -> Ground:
    server = RabbitMQ()
    server.start()
    sink = KombuSink(server.url, "orders", queues=["events"], timeout=60)
    return Ground(f"{server.url}?queue=events&prefetch=1000", sink, server.stop)


def on_kafka(_: str) -> Ground:
    cluster = Cluster()
    cluster.create("orders", 4)
    sink = KafkaSink(cluster.servers, "orders", timeout=60, settings={"log_level": 0})
    quick = "session.timeout.ms=3000&heartbeat.interval.ms=200&log_level=0"
    url = f"kafka://{cluster.servers}?topic=orders&group=billing&{quick}"
    return Ground(url, sink, cluster.close)


def on_kafka_with_positions(database_url: str) -> Ground:
    ground = on_kafka(database_url)
    how = "exactly_once=position&producers_repeat=false"
    ground.source += f"&positions={quote(database_url, safe='')}&{how}"
    return ground


def on_sqs(_: str) -> Ground:
    serving = serve_sqs()
    endpoint = serving.__enter__()
    client = boto3.client("sqs", region_name=REGION, endpoint_url=endpoint)
    client.create_queue(QueueName="orders")
    url = f"sqs://{REGION}/orders?lease=10&endpoint={endpoint}"
    stop: Callable[[], object] = lambda: serving.__exit__(None, None, None)  # noqa: E731
    return Ground(url, _QueueSink(client, "orders"), stop, min(MESSAGES, 300))  # moto is slow


@pytest.fixture(
    params=[on_rabbitmq, on_kafka, on_kafka_with_positions, on_sqs],
    ids=["rabbitmq", "kafka", "kafka-positions", "sqs"],
)
def ground(request: Any, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    ground: Ground = request.param(database_url)
    yield ground
    ground.sink.close()
    ground.stop()


@pytest.fixture
def database(database_url: str) -> Iterator[tuple[str, Engine]]:
    made = engine(database_url)
    schema.init(made)
    with made.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id TEXT PRIMARY KEY, times INT NOT NULL)"))
    yield database_url, made
    made.dispose()


@pytest.fixture
def start(ground: Ground, database: tuple[str, Engine]) -> Iterator[Callable[..., Any]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start_(*batches: int) -> subprocess.Popen[bytes]:
        script = Path(__file__).with_name("consumer.py")
        command = [sys.executable, str(script), ground.source, database[0], *map(str, batches)]
        processes.append(subprocess.Popen(command))
        return processes[-1]

    yield start_
    for process in processes:
        process.kill()
        process.wait()


def count(made: Engine) -> tuple[int, int]:
    """How many messages took effect, and how often in all."""
    with made.connect() as connection:
        row = connection.execute(text("SELECT count(*), coalesce(sum(times), 0) FROM effects"))
        rows, times = row.one()
        return int(rows), int(times)


def fill(sink: Sink, begin: int, end: int) -> None:
    for first in range(begin, end, 1_000):
        sink.publish(make_messages(min(1_000, end - first), f"b{first}"))


@pytest.mark.timeout(400)
def test_a_batch_that_was_committed_and_not_acked_takes_effect_once(
    ground: Ground, database: tuple[str, Engine], start: Callable[..., Any]
) -> None:
    messages = min(1_000, ground.messages)
    fill(ground.sink, 0, messages)
    for batches in (1, 2):
        assert start(batches).wait(120) == -9
    before = count(database[1])
    assert before[0] >= 2  # committed, and its acks are lost
    start()
    eventually(lambda: count(database[1])[0] == messages, timeout=120)
    assert count(database[1]) == (messages, messages)


@pytest.mark.timeout(600 + MESSAGES / 50)
def test_consumers_killed_at_random_are_replaced_and_each_message_takes_effect_once(
    ground: Ground, database: tuple[str, Engine], start: Callable[..., Any]
) -> None:
    chance = random.Random(SEED)
    messages = ground.messages
    consumers = [start() for _ in range(CONSUMERS)]
    sent = done = kills = 0
    while done < messages:
        room = min(messages, done + AHEAD)
        if sent < room:
            fill(ground.sink, sent, room)
            sent = room
        # A consumer that is killed before it has begun would only slow the test down.
        if done > kills * messages / KILLS:
            time.sleep(chance.uniform(0.0, 0.5))
            victim = chance.randrange(CONSUMERS)
            consumers[victim].kill()
            consumers[victim].wait()
            consumers[victim] = start()
            kills += 1
        more = min(
            messages, done + messages // KILLS, sent - AHEAD // 2 if sent < messages else sent
        )
        eventually(lambda more=more: count(database[1])[0] >= more, timeout=300, interval=0.2)
        done = count(database[1])[0]
    assert kills >= 3
    assert count(database[1]) == (messages, messages)
