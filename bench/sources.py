"""Sources of brokers beside the same client by hand, in one run: consume, decode, ack in batches.

python bench/sources.py [--quick] [--json FILE]

rabbitmq    AmqpSource beside py-amqp: headers to attributes, one ack (`multiple`) per 100 messages.
kafka       KafkaSource beside confluent-kafka: headers to attributes, one commit per 100 messages;
            on the mock cluster of librdkafka, in a process of its own.

The clock starts with the first message, so that connecting and joining a group are left out.
Messages are CloudEvents in binary mode with 7 attributes.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bench.harness import Case, Seconds, arguments, compare, report
from conquiet.acking import settle
from conquiet.message import Message, new_id
from conquiet.relay.sinks import KafkaSink, KombuSink
from conquiet.sink import Sink
from conquiet.source import Source
from conquiet.sources import AmqpSource, KafkaSource

BATCH = 100
QUIET = {"log_level": 0}
PREFETCH = 1_000
ATTRIBUTES = {
    "type": "order.placed",
    "source": "/shop",
    "subject": "order-17",
    "time": "2026-01-31T12:00:00Z",
    "datacontenttype": "application/json",
}
DATA = b'{"order": 1234567, "customer": "customer-17", "amount": 4200}'

Consume = Callable[[int], float]
"""Consumes so many messages; returns the seconds after the first."""


class Size(NamedTuple):
    """How much is measured."""

    messages: int
    rounds: int


def main() -> None:
    options = arguments(__doc__)
    size = Size(10_000, 3) if options.quick else Size(30_000, 5)
    report([*rabbitmq(size), *kafka(size)], options)


def rabbitmq(size: Size) -> Iterator[Case]:
    """Compare on one queue that holds enough for all rounds; what a round leaves is requeued."""
    from tests.integration.sinks.rabbitmq import RabbitMQ

    with RabbitMQ() as server:
        sink = KombuSink(server.url, "orders", queues=["bench"], timeout=60)
        _fill(sink, size.messages * 2 * (size.rounds + 1) + PREFETCH)
        seconds = _measure(
            {
                "conquiet": lambda count: _by_source(
                    AmqpSource(server.url, "bench", prefetch=PREFETCH), count
                ),
                "py-amqp": lambda count: _by_amqp(server.url, count),
            },
            size,
        )
    about = {"batch": BATCH, "prefetch": PREFETCH}
    yield compare("rabbitmq: consume", size.messages, seconds, "conquiet", "py-amqp", **about)


def _by_source(source: Source, count: int) -> float:
    clock, done = _Clock(), 0
    while done < count:
        batch = source.read(BATCH, 10.0)
        clock.start()
        settle([message.acking for message in batch if message.acking is not None])
        done += len(batch)
    seconds = clock.stop()
    source.close()
    return seconds


def kafka(size: Size) -> Iterator[Case]:
    """Compare on one topic, which each contestant reads from its beginning, in a new group."""
    size = size._replace(messages=10_000)  # the mock cluster keeps 5 MB of a partition
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    broker = context.Process(target=_serve_kafka, args=(theirs,))
    broker.start()
    try:
        servers: str = ours.recv()
        _fill(KafkaSink(servers, "bench", timeout=60, settings=QUIET), size.messages)
        seconds = _measure(
            {
                "conquiet": lambda count: _by_source(
                    KafkaSource(servers, "bench", new_id(), settings=QUIET), count
                ),
                "confluent-kafka": lambda count: _by_confluent(servers, count),
            },
            size,
        )
    finally:
        ours.send("end")
        broker.join()
    name, floor = "kafka: consume", "confluent-kafka"
    yield compare(name, size.messages, seconds, "conquiet", floor, batch=BATCH)


def _serve_kafka(pipe: Any) -> None:
    from tests.integration.sinks.kafka_cluster import Cluster

    cluster = Cluster()
    cluster.create("bench", 1)
    pipe.send(cluster.servers)
    pipe.recv()
    cluster.close()


def _by_confluent(servers: str, count: int) -> float:
    from confluent_kafka import Consumer, TopicPartition

    clock, done = _Clock(), 0
    settings = {"enable.auto.commit": False, "auto.offset.reset": "earliest", **QUIET}
    consumer: Any = Consumer({"bootstrap.servers": servers, "group.id": new_id(), **settings})
    consumer.subscribe(["bench"])
    while done < count:
        records = consumer.consume(BATCH, 10.0)
        for record in records:
            clock.start()
            names = [name.removeprefix("ce_") for name, _ in record.headers()]
            values = [value.decode() for _, value in record.headers()]
            dict(zip(names, values, strict=True))
            record.value()
        if records:
            last = TopicPartition("bench", records[-1].partition(), records[-1].offset() + 1)
            consumer.commit(offsets=[last], asynchronous=True)
            done += len(records)
    seconds = clock.stop()
    consumer.close()
    return seconds


def _by_amqp(url: str, count: int) -> float:
    from kombu import Connection

    clock, done = _Clock(), 0
    with Connection(url) as connection:
        channel = connection.channel()
        channel.auto_decode = False
        channel.basic_qos(0, PREFETCH, False)

        def receive(message: Any) -> None:
            nonlocal done
            clock.start()
            done += 1
            _attributes(message.properties["application_headers"], "cloudEvents_")
            if done % BATCH == 0:
                channel.basic_ack(message.delivery_tag, multiple=True)

        channel.basic_consume("bench", callback=receive)
        while done < count:
            connection.drain_events(timeout=10)
        return clock.stop()


def _attributes(headers: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in headers.items()}


class _Clock:
    """Runs from the first message on."""

    def __init__(self) -> None:
        self._started: float | None = None

    def start(self) -> None:
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self) -> float:
        assert self._started is not None
        return time.perf_counter() - self._started


def _fill(sink: Sink, count: int) -> None:
    for start in range(0, count, 1_000):
        sink.publish(
            [
                Message(DATA, {**ATTRIBUTES, "id": f"e-{number}"})
                for number in range(start, min(start + 1_000, count))
            ]
        )
    sink.close()


def _measure(contestants: Mapping[str, Consume], size: Size) -> dict[str, Seconds]:
    """Let the contestants consume in turn; the first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(size.rounds + 1):
        for name, consume in contestants.items():
            seconds = consume(size.messages)
            if number:
                taken[name].append(seconds)
    return {name: Seconds(min(all_), statistics.median(all_)) for name, all_ in taken.items()}


if __name__ == "__main__":
    main()
