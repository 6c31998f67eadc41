"""Consumers are killed, frozen and replaced, brokers restarted: each message takes effect once.

CONQUIET_SOURCE_MESSAGES=1000000 sets how many messages the long test sends.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import pytest
from sqlalchemy import Engine, text
from tests import zygote
from tests.faults.proxy import Proxy
from tests.integration.sinks.kafka_broker import SETTINGS, KafkaBroker, PlainSink
from tests.integration.sinks.kafka_cluster import Cluster
from tests.integration.sinks.rabbitmq import RabbitMQ
from tests.integration.sinks.sqs_server import REGION, serve_sqs

from conquiet import Message
from conquiet.message import Error
from conquiet.relay.sinks import KafkaSink, KombuSink
from conquiet.sink import Sink
from conquiet.sources.sqs import _QueueSink
from conquiet.sql import Outbox, engine, schema
from conquiet.testing import eventually
from conquiet.testing.contracts.samples import make_messages

pytestmark = pytest.mark.slow

MESSAGES = int(os.environ.get("CONQUIET_SOURCE_MESSAGES", "20000"))
CONSUMERS = 2
SEED = 7
QUICK = "session.timeout.ms=3000&heartbeat.interval.ms=200"
POSITION = "exactly_once=position&producers_repeat=false"
KILLS = 8
SQS_MESSAGES = 300
"""Moto is slow, and the slower the more messages wait: 3,000 took more than five minutes."""
LOOK_SECONDS = max(0.2, MESSAGES / 500_000)
"""How often the effects are counted: that reads the whole table."""
AHEAD = 20_000
"""How many messages wait at most: the mock cluster of Kafka keeps 5 MB of a partition."""


class Ground:
    """A broker, the URL of the source on it, and a sink that fills it."""

    def __init__(
        self,
        source: str,
        sink: Sink,
        stop: Callable[[], object],
        messages: int = MESSAGES,
        restart: Callable[[], object] | None = None,
    ) -> None:
        self.source = source
        self.sink = sink
        self.stop = stop
        self.messages = messages
        self.restart = restart


def on_rabbitmq(_: str) -> Ground:
    server = RabbitMQ()
    server.start()

    def restart() -> None:
        server.kill()
        server.start()

    sink = KombuSink(server.url, "orders", queues=["events"], timeout=60)
    url = f"{server.url}?queue=events&prefetch=1000&heartbeat=2"
    return Ground(url, sink, server.stop, restart=restart)


def on_kafka(_: str) -> Ground:
    cluster = Cluster()
    cluster.create("orders", 4)
    sink = KafkaSink(cluster.servers, "orders", timeout=60, settings={"log_level": 0})

    def restart() -> None:
        with cluster.outage():
            time.sleep(1.0)  # no condition: a broker that is away for a while

    url = f"kafka://{cluster.servers}?topic=orders&group=billing&log_level=0&{QUICK}"
    return Ground(url, sink, cluster.close, restart=restart)


def on_kafka_broker(_: str) -> Ground:
    broker = KafkaBroker()
    broker.start()

    def restart() -> None:
        broker.kill()
        broker.start()

    known = "&".join(f"{name}={value}" for name, value in SETTINGS.items())
    url = f"kafka://{broker.servers}?topic=orders&group=billing&{QUICK}&{known}"
    return Ground(url, PlainSink(broker.servers, "orders"), broker.stop, restart=restart)


def on_kafka_with_positions(database_url: str) -> Ground:
    return with_positions(on_kafka(database_url), database_url)


def on_kafka_broker_with_positions(database_url: str) -> Ground:
    return with_positions(on_kafka_broker(database_url), database_url)


def with_positions(ground: Ground, database_url: str) -> Ground:
    ground.source += f"&positions={quote(database_url, safe='')}&{POSITION}"
    return ground


def on_sql_log(database_url: str) -> Ground:
    made = engine(database_url)
    schema.init(made)
    separator = "&" if "?" in database_url else "?"
    url = f"{database_url}{separator}topic=orders&group=billing&lease=2&{POSITION}"
    return Ground(url, OutboxSink(made), made.dispose)


class OutboxSink(Sink):
    """Writes to the log of a database, as a handler's transaction does."""

    def __init__(self, made: Engine) -> None:
        self._engine = made

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        with self._engine.begin() as opened:
            Outbox("orders").add(opened, messages)
        return [None] * len(messages)

    def close(self) -> None:
        pass


def on_sqs(_: str) -> Ground:
    serving = serve_sqs()
    endpoint = serving.__enter__()
    client = boto3.client("sqs", region_name=REGION, endpoint_url=endpoint)
    queue = client.create_queue(QueueName="orders")["QueueUrl"]
    # Moto keeps its queues in memory: a service that is away for a while, with requests cut off.
    proxy = Proxy(urlsplit(endpoint).port or 0)

    def stop() -> None:
        client.delete_queue(QueueUrl=queue)  # another server of this process would have it, too
        proxy.close()
        serving.__exit__(None, None, None)

    def restart() -> None:
        with proxy.outage():
            time.sleep(1.0)  # no condition: as above

    url = f"sqs://{REGION}/orders?lease=10&timeout=2&endpoint=http://127.0.0.1:{proxy.port}"
    sink, messages = _QueueSink(client, "orders"), min(MESSAGES, SQS_MESSAGES)
    return Ground(url, sink, stop, messages, restart)


GROUNDS = {
    "rabbitmq": on_rabbitmq,
    "kafka": on_kafka,
    "kafka-positions": on_kafka_with_positions,
    "kafka-broker": on_kafka_broker,
    "kafka-broker-positions": on_kafka_broker_with_positions,
    "sqs": on_sqs,
    "sql-log": on_sql_log,
}


@pytest.fixture(params=GROUNDS.values(), ids=list(GROUNDS))
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
        processes.append(zygote.Popen(command))
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
    eventually(lambda: count(database[1])[0] == messages, timeout=120, interval=0.2)
    assert count(database[1]) == (messages, messages)


@pytest.mark.timeout(600 + MESSAGES / 50)
def test_consumers_killed_at_random_are_replaced_and_each_message_takes_effect_once(
    ground: Ground, database: tuple[str, Engine], start: Callable[..., Any]
) -> None:
    chance = random.Random(SEED)
    messages = ground.messages
    ahead = min(AHEAD, messages // 5)  # else few of them could be done between two kills
    consumers = [start() for _ in range(CONSUMERS)]
    sent = done = kills = 0
    while done < messages:
        room = min(messages, done + ahead)
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
        enough = sent if sent == messages else sent - ahead // 2
        more = min(done + messages // KILLS, enough)
        eventually(
            lambda more=more: count(database[1])[0] >= more, timeout=300, interval=LOOK_SECONDS
        )
        done = count(database[1])[0]
    assert kills >= 3
    assert count(database[1]) == (messages, messages)


def wait_for(made: Engine, messages: int) -> None:
    eventually(lambda: count(made)[0] >= messages, timeout=240, interval=0.2)


@pytest.fixture
def idle_limit(database: tuple[str, Engine]) -> Iterator[None]:
    """Let the server end a frozen transaction, for whose locks the others would wait."""
    name = database[1].url.database
    limit = "idle_in_transaction_session_timeout"
    with database[1].begin() as connection:
        connection.execute(text(f"ALTER DATABASE \"{name}\" SET {limit} = '5s'"))
    yield
    with database[1].begin() as connection:
        connection.execute(text(f'ALTER DATABASE "{name}" RESET {limit}'))


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("idle_limit")
def test_a_consumer_that_is_frozen_beyond_its_lease_repeats_nothing_when_it_goes_on(
    ground: Ground, database: tuple[str, Engine], start: Callable[..., Any]
) -> None:
    made, messages = database[1], min(1_000, ground.messages // 3)
    consumers = [start() for _ in range(CONSUMERS)]
    fill(ground.sink, 0, messages)
    for number, frozen in enumerate(consumers, start=1):
        wait_for(made, 1)
        frozen.send_signal(signal.SIGSTOP)
        fill(ground.sink, number * messages, (number + 1) * messages)
        wait_for(made, (number + 1) * messages)
        frozen.send_signal(signal.SIGCONT)
    for consumer in consumers:
        consumer.terminate()
        assert consumer.wait(60) == 0
    assert count(made) == (messages * (CONSUMERS + 1), messages * (CONSUMERS + 1))


@pytest.mark.timeout(400)
def test_consumers_that_are_replaced_one_by_one_handle_each_message_once(
    ground: Ground, database: tuple[str, Engine], start: Callable[..., Any]
) -> None:
    made, messages = database[1], min(6_000, ground.messages)
    consumers = [start() for _ in range(CONSUMERS)]
    for number in range(3):
        fill(ground.sink, number * messages // 3, (number + 1) * messages // 3)
        wait_for(made, number * messages // 3 + 1)
        consumers.append(start())  # as a rolling deploy does: first a new one
        old = consumers.pop(0)
        old.terminate()
        assert old.wait(60) == 0
    wait_for(made, messages)
    assert count(made) == (messages, messages)


@pytest.mark.timeout(400)
def test_a_broker_that_is_restarted_amid_batches_loses_and_repeats_no_effect(
    ground: Ground, database: tuple[str, Engine], start: Callable[..., Any]
) -> None:
    if ground.restart is None:
        pytest.skip("a database restarts in tests/faults/sql/test_log.py")
    made, messages = database[1], min(10_000, ground.messages)
    fill(ground.sink, 0, messages)
    for _ in range(CONSUMERS):
        start()
    for part in (10, 3):
        wait_for(made, messages // part)
        ground.restart()
    wait_for(made, messages)
    assert count(made) == (messages, messages)
