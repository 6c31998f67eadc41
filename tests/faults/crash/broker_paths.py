"""Workers over RabbitMQ, Kafka and SQS, with effects, inbox and outbox in SQLite."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import confluent_kafka
import kombu
import msgspec
from tests.faults import invariants
from tests.faults.crash.scenario import HOPELESS, SENT, Place, answer, until
from tests.faults.crash.sql_paths import EVENTS, UPSERT, OnSql, OnSqlite
from tests.faults.invariants import Facts
from tests.faults.seam import Seam
from tests.integration.sinks.rabbitmq import RabbitMQ
from tests.integration.sinks.sqs_server import REGION, serve_sqs

from conquiet import Message, Router, Worker
from conquiet.sources import AmqpSource, KafkaSource, SqsSource
from conquiet.sql import Inbox, Outbox, Transaction, connection

_SPAWN = multiprocessing.get_context("spawn")
"""Servers with threads are in a process of their own: the harness forks."""


class WorkerOverBroker(OnSqlite, OnSql):
    """Commands of a broker take effect in a table; the hopeless one becomes a dead letter."""

    def prepare(self, place: Place) -> None:
        self.create(place).close()
        self.send([to_event(number, command) for number, command in enumerate(SENT)], place)

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        made = self.engine(place)
        source = self.source(place, seam, made)
        router = Router()
        router.use(Transaction(made), *self.inbox(), Outbox(EVENTS))

        @router.raw(type="place.order", source="/shop", name="place_order")
        def place_order(message: Message[bytes]) -> Message[Any]:
            order = msgspec.json.decode(message.data)
            with connection(made) as found:
                found.execute(UPSERT, {"id": order["command"]})
            return answer(order)

        Worker(source, router, batch_size=2).run()
        made.dispose()

    def inbox(self) -> tuple[Any, ...]:
        return (Inbox("billing"),)

    def facts(self, place: Place) -> Facts:
        facts = Facts(frozenset(SENT), HOPELESS, Counter())
        opened = self.open(place)
        invariants.read_sql(opened, facts)
        opened.close()
        stored = Counter(event.command for event in facts.rows)
        facts.unsettled = [
            f"{command}, which has {stored[command]} events in the outbox,"
            for command in set(SENT) - HOPELESS
            if stored[command] != 1
        ]
        if count := self.left(place):
            facts.unsettled.append(f"{count} messages of the broker, which")
        letters = self.letters(place)
        facts.unsettled += [f"{c}, no dead letter," for c in HOPELESS if c not in letters]
        facts.locked = self.locked(place)
        return facts

    def send(self, events: list[dict[str, Any]], place: Place) -> None:
        raise NotImplementedError

    def source(self, place: Place, seam: Seam, made: Any) -> Any:
        raise NotImplementedError

    def left(self, place: Place) -> int:
        """Count messages that are not acked."""
        raise NotImplementedError

    def letters(self, place: Place) -> str:
        """Return the dead letters, whose texts name their commands."""
        raise NotImplementedError


def to_event(number: int, command: str) -> dict[str, Any]:
    """Return a CloudEvent in structured mode."""
    about = {"specversion": "1.0", "id": command, "type": "place.order", "source": "/web"}
    key = SENT[command]
    return about | {"subject": key, "data": {"command": command, "key": key, "number": number}}


CONTENT_TYPE = "application/cloudevents+json"


def queue_of(place: Place) -> str:
    return f"commands-{place.folder.name}"


class WorkerOverRabbitmq(WorkerOverBroker):
    name = "worker over RabbitMQ"
    lease = 1.0
    """The broker returns messages of a process that died when it sees its connection end."""

    @contextmanager
    def serve(self) -> Iterator[None]:
        with RabbitMQ() as server:
            self._url = server.url
            yield

    def send(self, events: list[dict[str, Any]], place: Place) -> None:
        with kombu.Connection(self._url) as link, link.channel() as channel:
            for name in (queue_of(place), f"{queue_of(place)}.dead"):
                kombu.Queue(name, exchange=kombu.Exchange(name, "topic"), routing_key="#")(
                    channel
                ).declare()
            producer = kombu.Producer(channel)
            for event in events:
                body = json.dumps(event).encode()
                named = {"content_type": CONTENT_TYPE, "content_encoding": "binary"}
                producer.publish(body, routing_key=queue_of(place), **named)

    def source(self, place: Place, seam: Seam, made: Any) -> Any:
        kind = until(AmqpSource, lambda: self.left(place) == 0, seam, 0.1)
        return kind(self._url, queue_of(place), prefetch=10)

    def left(self, place: Place) -> int:
        with kombu.Connection(self._url) as link, link.channel() as channel:
            return int(channel.queue_declare(queue_of(place), passive=True).message_count)

    def letters(self, place: Place) -> str:
        found = []
        with kombu.Connection(self._url) as link, link.channel() as channel:
            while message := channel.basic_get(f"{queue_of(place)}.dead", no_ack=True):
                found.append(bytes(message.body).decode())
        return "\n".join(found)


class WorkerOverSqs(WorkerOverBroker):
    name = "worker over SQS"
    lease = 2.5

    @contextmanager
    def serve(self) -> Iterator[None]:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            os.environ[name] = "test"
        with in_process(_serve_sqs) as pipe:
            self._endpoint = pipe.recv()
            yield

    def _client(self) -> Any:
        return boto3.client("sqs", region_name=REGION, endpoint_url=self._endpoint)

    def send(self, events: list[dict[str, Any]], place: Place) -> None:
        client = self._client()
        client.create_queue(QueueName=f"{queue_of(place)}-dead")
        url = client.create_queue(QueueName=queue_of(place))["QueueUrl"]
        for event in events:
            client.send_message(QueueUrl=url, MessageBody=json.dumps(event))

    def source(self, place: Place, seam: Seam, made: Any) -> Any:
        kind = until(SqsSource, lambda: self.left(place) == 0, seam)
        return kind(queue_of(place), region=REGION, endpoint=self._endpoint, lease=2)

    def left(self, place: Place) -> int:
        return _count_messages(self._client(), queue_of(place))

    def letters(self, place: Place) -> str:
        client, name = self._client(), f"{queue_of(place)}-dead"
        url = client.get_queue_url(QueueName=name)["QueueUrl"]
        answer = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)
        return "\n".join(message["Body"] for message in answer.get("Messages", ()))


def _count_messages(client: Any, queue: str) -> int:
    url = client.get_queue_url(QueueName=queue)["QueueUrl"]
    answer = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
    return sum(int(answer[name]) for name in names)


class WorkerOverKafka(WorkerOverBroker):
    """The I/O of librdkafka is beside the seam; its calls are points instead."""

    name = "worker over Kafka"
    lease = 2.5
    is_audited = False

    @contextmanager
    def serve(self) -> Iterator[None]:
        with in_process(_serve_kafka) as self._pipe:
            self._servers = self._pipe.recv()
            yield

    def _ask(self, *question: Any) -> Any:
        self._pipe.send(question)
        return self._pipe.recv()

    def send(self, events: list[dict[str, Any]], place: Place) -> None:
        self._ask("fill", queue_of(place), [json.dumps(event) for event in events])

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        if attempt == 1:
            wrap_kafka(seam)
        super().run(place, seam, attempt)

    def source(self, place: Place, seam: Seam, made: Any) -> Any:
        source: Any = None
        topic = queue_of(place)

        def is_drained() -> bool:
            return source.lag() == {(topic, 0): 0}

        kind = until(KafkaSource, is_drained, seam)
        settings = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 100, "log_level": 0}
        source = kind(self._servers, topic, topic, settings=settings, **self.mode(made))
        return source

    def mode(self, made: Any) -> dict[str, Any]:
        return {}

    def left(self, place: Place) -> int:
        return len(SENT) - int(self._ask("committed", queue_of(place)))

    def letters(self, place: Place) -> str:
        return str(self._ask("letters", f"{queue_of(place)}.dead"))


class WorkerOverKafkaWithPositions(WorkerOverKafka):
    """The same with the offsets in the database of the effects, in place of an inbox."""

    name = "worker over Kafka, offsets in SQLite"

    def inbox(self) -> tuple[Any, ...]:
        return ()

    def mode(self, made: Any) -> dict[str, Any]:
        return {"positions": made, "exactly_once": "position", "producers_repeat": False}


def wrap_kafka(seam: Seam) -> None:
    """Let a process die at the calls of its consumer and producer.

    How many polls bring nothing depends on the moment: they are no points. A kill before a poll is
    one after the call before it.
    """

    class Consumer(confluent_kafka.Consumer):
        def consume(self, *given: Any) -> Any:
            found = super().consume(*given)
            return seam.passes("kafka consume", lambda: found) if found else found

        def commit(self, **named: Any) -> Any:
            call = super().commit
            return seam.passes("kafka commit", lambda: call(**named))

        def close(self) -> None:
            call = super().close
            seam.passes("kafka close", call)

    class Producer(confluent_kafka.Producer):
        def produce(self, *given: Any, **named: Any) -> None:
            call = super().produce
            seam.passes("kafka produce", lambda: call(*given, **named))

        def flush(self, *given: Any) -> Any:
            call = super().flush
            return seam.passes("kafka flush", lambda: call(*given))

    confluent_kafka.Consumer, confluent_kafka.Producer = Consumer, Producer  # type: ignore[misc]


# --- servers ------------------------------------------------------------------------------------


@contextmanager
def in_process(serve: Any) -> Iterator[Any]:
    ours, theirs = _SPAWN.Pipe()
    server = _SPAWN.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        yield ours
    finally:
        server.kill()
        server.join()


def _serve_sqs(pipe: Any) -> None:
    with serve_sqs() as endpoint:
        pipe.send(endpoint)
        pipe.recv()  # until it is killed


def _serve_kafka(pipe: Any) -> None:
    from tests.integration.sinks.kafka_cluster import Cluster

    cluster = Cluster()
    pipe.send(cluster.servers)
    known = {"bootstrap.servers": cluster.servers, "log_level": 0}
    producer = confluent_kafka.Producer(known)
    reader = confluent_kafka.Consumer(
        {**known, "group.id": "judge", "enable.partition.eof": True, "enable.auto.commit": False}
    )
    while True:
        what, topic, *events = pipe.recv()
        place = confluent_kafka.TopicPartition(topic, 0, 0)
        answer: Any = None
        if what == "fill":
            cluster.create(topic, 1)
            cluster.create(f"{topic}.dead", 1)
            for event in events[0]:
                producer.produce(topic, event, headers={"content-type": CONTENT_TYPE})
            assert producer.flush(30) == 0
        elif what == "committed":
            watch = confluent_kafka.Consumer({**known, "group.id": topic})
            answer = max(0, watch.committed([place], timeout=30)[0].offset)
            watch.close()
        else:
            answer = ""
            reader.assign([place])
            while (record := reader.poll(30)) is not None and record.error() is None:
                answer += record.value().decode()
        pipe.send(answer)
