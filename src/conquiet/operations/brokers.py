"""Queues and topics of RabbitMQ, Kafka and SQS: how much waits there, and their dead letters.

A broker has no way to look at messages without receiving them. A list of dead letters is read by a
source, which returns them unacked when it is closed; what is replayed or dropped is acked. On Kafka
that is an offset of the group `dead-letters`: records stay until the retention of the topic ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from conquiet.acking import Error
from conquiet.codec import to_json
from conquiet.config import Url, require
from conquiet.errors import ConfigError, ConquietError, NotFound, StoreError
from conquiet.message import Message
from conquiet.middleware import dead_letter
from conquiet.operations.dead_letters import Filter, Letter, letter_of
from conquiet.sink import Sink

SCHEMES = ("amqp", "amqps", "kafka", "sqs")
LETTERS_GROUP = "dead-letters"
"""The group that reads dead letter topics of Kafka, unless the URL names another."""
_PAGE = 200
_NOT_FOUND = 404
_SECONDS = 10.0
_MAX_PREFETCH = 65_535
"""How many letters of RabbitMQ a list can hold: the limit of the protocol."""
_MAX_LETTERS = 1_000_000
_JOIN_SECONDS = 20.0
"""How long a group of Kafka may take to give us its partitions."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Describes how much waits in a queue, or in a partition for a group."""

    place: str
    group: str
    waiting: int
    pending: int | None
    """How many are delivered and not acked; None if the broker does not say."""
    is_exact: bool = True


class _Kind(Protocol):
    """The queues or topics of a URL, on one kind of broker."""

    word: str
    suffix: str
    """Of the names of dead letter queues."""
    idle_seconds: float
    """How long nothing may come before a list is at its end."""
    names: list[str]

    def open_source(self) -> Any: ...

    def survey(self) -> list[Backlog]: ...

    def send(self, message: Message[Any], to: str) -> None: ...


def is_broker(place: str) -> bool:
    """Return whether a place is the URL of a broker."""
    scheme, colon, _ = place.partition("://")
    return bool(colon) and scheme in SCHEMES


def survey(url: str) -> list[Backlog]:
    """Return how much waits, by queue or partition; raise `NotFound` if one does not exist."""
    kind = _KINDS[url.partition("://")[0]](url)
    if isinstance(kind, _Kafka) and not kind.group:
        raise ConfigError("kafka://…: say which group, as in ?topic=orders&group=billing")
    return kind.survey()


class BrokerLetters:
    """The dead letters of one queue or topic, by the URL of its source."""

    def __init__(self, url: str) -> None:
        self._kind = _KINDS[url.partition("://")[0]](url)
        if len(self._kind.names) > 1:
            raise ConfigError("dead letters are listed of one queue or topic; name one")
        self.name = f"{self._kind.word} {self._kind.names[0]!r}"

    def exists(self) -> bool:
        try:
            return bool(self._kind.survey())
        except NotFound:
            return False

    def scan(self, filter_: Filter, *, brief: bool = False) -> Iterator[tuple[Letter, Any]]:
        left = sum(backlog.waiting for backlog in self._kind.survey())
        if not left:
            return
        source = self._kind.open_source()
        number, until = 0, time.monotonic() + _JOIN_SECONDS
        try:
            while number < left and time.monotonic() < until:
                for message in source.read(min(_PAGE, left - number), 0.5):
                    number += 1
                    until = time.monotonic() + self._kind.idle_seconds
                    yield letter_of(str(number), message.attributes, message.data), message
            if not number:
                raise StoreError(f"{self.name}: {left} messages wait; do others consume them?")
        finally:
            source.close()

    def send(self, letter: Letter, raw: Any, to: str | None) -> bool:
        is_ours = dead_letter.REASON in raw.attributes  # else the broker itself put it there
        message = dead_letter.replay(raw) if is_ours else Message(raw.data, raw.attributes)
        self._kind.send(message, to or self._origin(letter))
        return self.remove(letter, raw)

    def _origin(self, letter: Letter) -> str:
        name, suffix = self._kind.names[0], self._kind.suffix
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
        raise ConquietError(
            f"letter {letter.id}: {self.name} does not end with {suffix}, so that its origin is not"
            " known; name it with --to"
        )

    def remove(self, letter: Letter, raw: Any) -> bool:
        raw.ack()
        return True


def _forget(given: Url, *names: str) -> None:
    """Remove what is for workers alone, so that their URL can be used here."""
    for name in (*names, "dead_letters", "timeout"):
        given.text(name)


class _Nowhere(Sink):
    """Keeps a message that is no letter where it is."""

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        raise StoreError("it cannot be decoded, and is left where it is")

    def close(self) -> None:
        return


_KEEPING: dict[str, Any] = {"max_attempts": None, "dead_letters": _Nowhere()}
"""The settings of a source that makes no dead letters of its own."""


# --- RabbitMQ -------------------------------------------------------------------------------


class _Amqp:
    word, suffix, idle_seconds = "queue", ".dead", 2.0

    def __init__(self, url: str) -> None:
        given = Url(url, "the place")
        self.names = given.names("queue")
        if not self.names:
            raise ConfigError("amqp://…: say which queue, as in ?queue=orders")
        _forget(given, "topic", "prefetch", "declare", "queue_type", "heartbeat")
        given.end()
        self._url = given.rest

    def open_source(self) -> Any:
        room = require("conquiet.sources.amqp", "kombu")
        settings = {"declare": False, "prefetch": _MAX_PREFETCH, **_KEEPING}
        return room.AmqpSource(self._url, self.names, **settings)

    def survey(self) -> list[Backlog]:
        with self._channel() as open_channel:
            found = [_declared(open_channel(), name) for name in self.names]
        return [Backlog(name, "", count, None) for name, count in found]

    def send(self, message: Message[Any], to: str) -> None:
        """Publish to a queue, and to no other that is bound where the message came from."""
        envelope = require("conquiet.relay.sinks.envelope", "kombu").pack(message)
        with self._channel() as open_channel:
            channel = open_channel()
            _declared(channel, to)
            channel.confirm_select()
            require("kombu", "kombu").Producer(channel, auto_declare=False).publish(
                envelope.body,
                routing_key=to,
                delivery_mode=2,
                content_type=envelope.content_type or "application/json",
                content_encoding="binary",
                headers=envelope.headers("cloudEvents_"),
                message_id=message.id,
                type=message.type,
            )

    @contextmanager
    def _channel(self) -> Iterator[Callable[[], Any]]:
        room = require("conquiet.relay.sinks.kombu", "kombu")
        connection = room.open_connection(self._url, _SECONDS)
        connection.transport_options["confirm_publish"] = True
        unreachable = require("kombu", "kombu").exceptions.OperationalError
        troubles = (OSError, unreachable, *connection.connection_errors, *connection.channel_errors)
        try:
            room.connect(connection)
            yield connection.channel
        except troubles as error:
            raise StoreError(f"RabbitMQ: {error!r:.300}") from error
        finally:
            connection.release()


def _declared(channel: Any, queue: str) -> tuple[str, int]:
    """Return a queue and how many of its messages no consumer holds."""
    try:
        return queue, int(channel.queue_declare(queue, passive=True).message_count)
    except channel.connection.channel_errors as error:
        if getattr(error, "reply_code", 0) == _NOT_FOUND:
            raise NotFound(f"RabbitMQ has no queue {queue!r:.100}") from None
        raise


# --- Kafka ----------------------------------------------------------------------------------


class _Kafka:
    word, suffix, idle_seconds = "topic", ".dead", 2.0

    def __init__(self, url: str) -> None:
        given = Url(url, "the place")
        self.names = given.names("topic") or [name for name in [given.path] if name]
        if not self.names:
            raise ConfigError("kafka://…: say which topic, as in ?topic=orders&group=billing")
        self._servers = given.place
        self.group = given.text("group")
        self._reader = self.group or LETTERS_GROUP
        _forget(given, "start", "max_in_flight", "positions", "exactly_once", "producers_repeat")
        self._settings = given.others()

    def open_source(self) -> Any:
        room = require("conquiet.sources.kafka", "kafka")
        settings = {"max_in_flight": _MAX_LETTERS, "settings": self._settings, **_KEEPING}
        return room.KafkaSource(self._servers, self.names, self._reader, **settings)

    def survey(self) -> list[Backlog]:
        kafka, room = (
            require("confluent_kafka", "kafka"),
            require("conquiet.sources.kafka", "kafka"),
        )
        own = {"bootstrap.servers": self._servers, "group.id": self._reader}
        try:
            consumer = kafka.Consumer({**self._settings, **own}, logger=room.quiet)
        except (kafka.KafkaException, TypeError, ValueError) as error:
            raise ConfigError(f"kafka://…: {room.explain_kafka(error)}") from error
        try:
            return [backlog for name in self.names for backlog in self._topic(consumer, name)]
        except kafka.KafkaException as error:
            raise StoreError(f"Kafka: {error}") from error
        finally:
            consumer.close()

    def _topic(self, consumer: Any, name: str) -> Iterator[Backlog]:
        kafka, room = (
            require("confluent_kafka", "kafka"),
            require("conquiet.sources.kafka", "kafka"),
        )
        topic = consumer.list_topics(name, timeout=_SECONDS).topics[name]
        if topic.error is not None:
            raise NotFound(f"Kafka has no topic {name!r:.100}: {topic.error}")
        places = [kafka.TopicPartition(name, number) for number in sorted(topic.partitions)]
        for each in consumer.committed(places, timeout=_SECONDS):
            low, high = consumer.get_watermark_offsets(each, timeout=_SECONDS)
            begin = max(low, each.offset)
            done = {at for at in room.decode_acked(each.offset, each.metadata) if at >= begin}
            waiting = max(0, high - begin - len(done))
            yield Backlog(f"{name}[{each.partition}]", self._reader, waiting, None)

    def send(self, message: Message[Any], to: str) -> None:
        room = require("conquiet.relay.sinks.kafka", "kafka")
        message.topic = to
        sink = room.KafkaSink(self._servers, settings=self._settings)
        try:
            sink.publish([message])
        finally:
            sink.close()


# --- SQS ------------------------------------------------------------------------------------


class _Sqs:
    word, suffix, idle_seconds = "queue", "-dead", 2.0

    def __init__(self, url: str) -> None:
        given = Url(url, "the place")
        if not given.path:
            raise ConfigError("sqs://…: say which queue, as in sqs://eu-central-1/orders")
        self.names = [given.path]
        self._region = given.place or None
        self._endpoint = given.text("endpoint")
        _forget(given, "lease", "max_in_flight")
        given.end()
        self._room = require("conquiet.sources.sqs", "sqs")

    def open_source(self) -> Any:
        where = {"region": self._region, "endpoint": self._endpoint, "lease": 300}
        settings = {"max_in_flight": _MAX_LETTERS, **where, **_KEEPING}
        return self._room.SqsSource(self.names[0], **settings)

    def survey(self) -> list[Backlog]:
        counts = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
        with self._client(self.names[0]) as (client, url):
            found = client.get_queue_attributes(QueueUrl=url, AttributeNames=list(counts))
        waiting, pending = (int(found["Attributes"][name]) for name in counts)
        return [Backlog(self.names[0], "", waiting, pending, is_exact=False)]

    def send(self, message: Message[Any], to: str) -> None:
        with self._client(to) as (client, url):
            client.send_message(QueueUrl=url, MessageBody=to_json(message).decode())

    @contextmanager
    def _client(self, queue: str) -> Iterator[tuple[Any, str]]:
        client = self._room.open_client(self._region, self._endpoint, _SECONDS)
        try:
            yield client, client.get_queue_url(QueueName=queue)["QueueUrl"]
        except client.exceptions.QueueDoesNotExist:
            raise NotFound(f"SQS has no queue {queue!r:.100}") from None
        except self._room.errors() as error:
            raise StoreError(f"queue {queue!r} of SQS: {error!s:.300}") from error
        finally:
            client.close()


_KINDS: dict[str, Callable[[str], _Kind]] = {
    "amqp": _Amqp,
    "amqps": _Amqp,
    "kafka": _Kafka,
    "sqs": _Sqs,
}
