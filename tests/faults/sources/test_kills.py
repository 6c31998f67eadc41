"""Consumers of brokers are killed and replaced: each message takes effect once, to the row.

CONQUIET_TEST_MESSAGES=1000000 sets how many messages the long test sends.
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

import pytest
from sqlalchemy import Engine, text
from tests.integration.sinks.kafka_cluster import Cluster
from tests.integration.sinks.rabbitmq import RabbitMQ

from conquiet.relay.sinks import KafkaSink, KombuSink
from conquiet.sink import Sink
from conquiet.sql import engine, schema
from conquiet.testing import eventually
from conquiet.testing.contracts.samples import make_messages

pytestmark = pytest.mark.slow

MESSAGES = int(os.environ.get("CONQUIET_TEST_MESSAGES", "20000"))
CONSUMERS = 2
SEED = 7
STEP = MESSAGES // 8
"""How many messages take effect between two kills."""


class Ground:
    """A broker, the URL of the source on it, and a sink that fills it."""

    def __init__(self, source: str, sink: Sink, stop: Callable[[], object]) -> None:
        self.source = source
        self.sink = sink
        self.stop = stop


def on_rabbitmq() -> Ground:
    server = RabbitMQ()
    server.start()
    sink = KombuSink(server.url, "orders", queues=["events"], timeout=60)
    return Ground(f"{server.url}?queue=events&prefetch=1000", sink, server.stop)


def on_kafka() -> Ground:
    cluster = Cluster()
    cluster.create("orders", 4)
    sink = KafkaSink(cluster.servers, "orders", timeout=60, settings={"log_level": 0})
    quick = "session.timeout.ms=3000&heartbeat.interval.ms=200&log_level=0"
    url = f"kafka://{cluster.servers}?topic=orders&group=billing&{quick}"
    return Ground(url, sink, cluster.close)


@pytest.fixture(params=[on_rabbitmq, on_kafka], ids=["rabbitmq", "kafka"])
def ground(request: Any) -> Iterator[Ground]:
    ground: Ground = request.param()
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


def fill(sink: Sink, messages: int) -> None:
    for begin in range(0, messages, 1_000):
        sink.publish(make_messages(min(1_000, messages - begin), f"b{begin}"))


def test_a_batch_that_was_committed_and_not_acked_takes_effect_once(
    ground: Ground, database: tuple[str, Engine], start: Callable[..., Any]
) -> None:
    fill(ground.sink, 1_000)
    for batches in (1, 2):
        assert start(batches).wait(60) == -9
    before = count(database[1])
    assert before[0] >= 2  # committed, and its acks are lost
    start()
    eventually(lambda: count(database[1])[0] == 1_000, timeout=60)
    assert count(database[1]) == (1_000, 1_000)


@pytest.mark.timeout(180 + MESSAGES / 200)
def test_consumers_killed_at_random_are_replaced_and_each_message_takes_effect_once(
    ground: Ground, database: tuple[str, Engine], start: Callable[..., Any]
) -> None:
    fill(ground.sink, MESSAGES)
    chance = random.Random(SEED)
    consumers = [start() for _ in range(CONSUMERS)]
    kills = 0
    while (done := count(database[1])[0]) < MESSAGES:
        # A consumer that is killed before it has begun would only slow the test down.
        more = min(MESSAGES, done + STEP)
        eventually(lambda more=more: count(database[1])[0] >= more, timeout=120)
        time.sleep(chance.uniform(0.0, 0.5))
        victim = chance.randrange(CONSUMERS)
        consumers[victim].kill()
        consumers[victim].wait()
        consumers[victim] = start()
        kills += 1
    assert kills >= 3
    assert count(database[1]) == (MESSAGES, MESSAGES)
