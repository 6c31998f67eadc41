"""Publish to Kafka, and wait for the delivery report of every message."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from conquiet.acking import Error
from conquiet.config import Url, check_timeout, require
from conquiet.errors import ConfigError, Refused, SinkUnavailable
from conquiet.message import Message, describe
from conquiet.relay.sinks.answers import Answers
from conquiet.relay.sinks.envelope import Envelope, topic_of
from conquiet.sink import Sink

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.0
_OURS = frozenset(("enable.idempotence", "acks", "message.timeout.ms", "error_cb", "on_delivery"))

_Place = tuple[int, Envelope]


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """Logs librdkafka's lines at DEBUG; the answers of a batch report its failures."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(logging.DEBUG, msg, *args, **kwargs)


quiet = _Quiet(logging.getLogger("conquiet.relay.kafka"))


def explain_kafka(error: Exception) -> str:
    """Return the words of librdkafka alone, without its codes."""
    found: Any = error.args[0] if error.args else None
    return f"{found.str() if hasattr(found, 'str') else error:.300}"


class KafkaSink(Sink):
    """Publishes each message to its Kafka topic, keyed by `partitionkey` or `subject`.

    The producer is idempotent: its own retries arrive once, in order. A message that no broker has
    confirmed within `timeout` seconds counts as not published; it may still arrive. `settings` are
    librdkafka's, such as `{"security.protocol": "SASL_SSL"}`.

    `servers` are librdkafka's bootstrap servers; `topic` is the default for messages without one.
    """

    def __init__(
        self,
        servers: str,
        topic: str | None = None,
        *,
        timeout: float = 10.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._kafka = require("confluent_kafka", "kafka")
        if not servers:
            raise ConfigError("a Kafka sink needs servers, such as 'localhost:9092'")
        given = dict(settings or {})
        taken = sorted(_OURS & given.keys())
        if taken:
            raise ConfigError(f"the setting {taken[0]!r} is the Kafka sink's own; leave it out")
        self._timeout = check_timeout(timeout)
        self._topic = topic
        self._settings = {
            "linger.ms": 0,
            **given,
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": max(1, int(self._timeout * 1000)),
            "error_cb": self._on_error,
        }
        self._producer: Any = None
        self._down: str | None = None
        self._unlike: str | None = None
        """The last error about a broker's certificate, or about our credentials."""
        self._broken = False
        self._waiting = 0
        self._connect()  # raises for a wrong setting now, not at the first message

    @classmethod
    def from_url(cls, url: str, topic: str | None = None, timeout: float = 10.0) -> Self:
        """Create one by `kafka://HOST:PORT,HOST:PORT/TOPIC?timeout=5`; others are librdkafka's."""
        given = Url(url)
        seconds = given.seconds(timeout)
        return cls(given.place, given.path or topic, timeout=seconds, settings=given.others())

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        """Return an answer per message; raise `SinkUnavailable` if there is none at all."""
        answers = Answers(messages, self._timeout)
        packed = answers.pack_all(lambda message, _: topic_of(message, self._topic))
        if not packed:
            return answers.conclude()
        refused = self._send(messages, packed, answers)
        if len(packed) > 1:
            # A broker refuses a request as a whole.
            answers.one_by_one(refused, lambda one: self._send(messages, [one], answers))
        return answers.conclude()

    def check(self) -> None:
        """Raise `SinkUnavailable` if no broker answers."""
        try:
            self._connect().list_topics(timeout=self._timeout)
        except self._kafka.KafkaException as error:
            self._connect().poll(0)  # calls _on_error with the cause
            raise SinkUnavailable(f"Kafka cannot be reached: {self._unlike or error}") from error

    def close(self) -> None:
        """Close the connections; nothing is buffered between two calls."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(self._kafka.KafkaException):  # a fatal error, reported before
                producer.purge()
                producer.flush(0)

    def _connect(self) -> Any:
        if self._producer is None:
            try:
                # By default librdkafka logs to stderr, ten lines a second in an outage.
                self._producer = self._kafka.Producer(self._settings, logger=quiet)
            except (self._kafka.KafkaException, TypeError, ValueError) as error:
                raise ConfigError(
                    f"the settings of the Kafka sink: {explain_kafka(error)}"
                ) from error
            self._broken = False
        return self._producer

    def _send(
        self, messages: Sequence[Message[Any]], packed: Sequence[_Place], answers: Answers
    ) -> list[_Place]:
        """Send messages and wait for reports; return those that a broker refused."""
        producer = self._connect()
        refused: list[_Place] = []
        self._reset(producer)
        for place, envelope in packed:
            message = messages[place]

            def on_delivery(
                error: Any,
                _: object,
                message: Message[Any] = message,
                place: int = place,
                envelope: Envelope = envelope,
            ) -> None:
                self._waiting -= 1
                answer = None if error is None else self._failure(message, error)
                answers.set(place, answer)
                if isinstance(answer, Refused):
                    refused.append((place, envelope))

            try:
                self._produce(producer, message, envelope, on_delivery)
            except BufferError as error:
                answers.set(place, SinkUnavailable(f"{describe(message.attributes)}: {error}"))
            except self._kafka.KafkaException as error:
                answers.set(place, self._failure(message, error.args[0]))
        try:
            self._await(producer)
        except self._kafka.KafkaException as error:  # fatal: this producer cannot be used again
            self._broken = True
            answers.interrupt(SinkUnavailable(f"Kafka did not confirm it: {error}"))
        if self._broken:
            self.close()
        return refused

    def _reset(self, producer: Any) -> None:
        """Drop earlier errors: a broker that closed an idle connection is no outage."""
        with suppress(self._kafka.KafkaException):  # a fatal error will be raised again
            producer.poll(0)
        self._down, self._unlike, self._waiting = None, None, 0

    def _produce(
        self, producer: Any, message: Message[Any], envelope: Envelope, on_delivery: Any
    ) -> None:
        headers = list(envelope.headers("ce_").items())
        if envelope.content_type is not None:
            headers.append(("content-type", envelope.content_type))
        producer.produce(
            topic_of(message, self._topic),
            None if message.data is None else envelope.body,
            key=message.key or None,
            headers=headers,
            on_delivery=on_delivery,
        )
        self._waiting += 1

    def _await(self, producer: Any) -> None:
        """Wait for all delivery reports; purge the queue if all brokers are down."""
        deadline = time.monotonic() + self._timeout + _GRACE_SECONDS
        while self._waiting and time.monotonic() < deadline:
            producer.poll(_POLL_SECONDS)
            if self._down is not None or self._broken:
                producer.purge()
                producer.poll(_POLL_SECONDS)
                break
        if self._waiting:
            # Late reports must not reach the next batch.
            self._broken = True

    def _failure(self, message: Message[Any], error: Any) -> Exception:
        name, codes = describe(message.attributes), self._kafka.KafkaError
        if error.fatal() or error.code() in (
            codes._FATAL,
            codes.INVALID_PRODUCER_EPOCH,
            codes.UNKNOWN_PRODUCER_ID,
            codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
            codes._AUTHENTICATION,
            codes.SASL_AUTHENTICATION_FAILED,
            codes.CLUSTER_AUTHORIZATION_FAILED,
            codes.TOPIC_AUTHORIZATION_FAILED,
        ):
            # A new producer retries at once; this one would cache the error for minutes.
            self._broken = True
            return SinkUnavailable(f"{name}: Kafka refuses this producer: {error}")
        if error.retriable() or error.code() in (
            codes._TRANSPORT,
            codes._ALL_BROKERS_DOWN,
            codes._MSG_TIMED_OUT,
            codes._TIMED_OUT,
            codes._PURGE_QUEUE,
            codes._PURGE_INFLIGHT,
        ):
            return SinkUnavailable(
                f"{name}: Kafka did not confirm it: {self._unlike or self._down or error}"
            )
        return Refused(f"{name}: Kafka refused it: {error}")

    def _on_error(self, error: Any) -> None:
        if error.code() == self._kafka.KafkaError._ALL_BROKERS_DOWN:
            self._down = str(error)
        elif error.code() in (self._kafka.KafkaError._SSL, self._kafka.KafkaError._AUTHENTICATION):
            self._unlike = f"{error.str():.300}"
        elif error.fatal():
            self._broken = True
