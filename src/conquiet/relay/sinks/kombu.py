"""Publish through Kombu: to RabbitMQ with confirms, and to Kombu's other transports.

A topic is a durable exchange of that name; the message type is the routing key, so that consumers
bind their queues by type, or with `#` for all.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

from conquiet.acking import Error
from conquiet.config import Url, check_timeout, explain, require
from conquiet.errors import ConfigError, InvalidMessage, Refused, SinkUnavailable
from conquiet.message import Message, describe
from conquiet.relay.sinks.answers import Answers, not_tried
from conquiet.relay.sinks.envelope import Envelope, topic_of
from conquiet.sink import Sink

_PERSISTENT = 2
_MAX_SHORT_STRING_BYTES = 255
_NOT_FOUND = 404
_NOT_OF_A_MESSAGE = (403, _NOT_FOUND)
"""Reply codes of AMQP: access refused, exchange not found."""

_Place = tuple[int, Envelope]


class KombuSink(Sink):
    """Publishes persistent messages to the exchange of their topic.

    On AMQP a message counts as published when the broker has confirmed it, and a message without a
    bound queue is refused rather than lost (`mandatory`). `queues` are declared and bound to every
    topic, so that messages wait there for later consumers; transports without `mandatory` need at
    least one. Without `declare`, exchanges and queues must exist. Certificates are verified on
    amqps; `tls` takes the settings of Python's ssl, `{"ca_certs": "ca.pem"}` for a private
    authority.

    `url` is Kombu's. `topic` is the default for messages without one. A batch that is not confirmed
    within `timeout` seconds counts as not published.
    """

    def __init__(
        self,
        url: str,
        topic: str | None = None,
        *,
        queues: Sequence[str] = (),
        mandatory: bool = True,
        declare: bool = True,
        timeout: float = 10.0,
        tls: Mapping[str, Any] | None = None,
    ) -> None:
        self._kombu = require("kombu", "amqp")
        self._url = url
        self._topic = topic
        self._queues = tuple(queues)
        self._mandatory = mandatory
        self._declare = declare
        self._timeout = check_timeout(timeout)
        self._tls = dict(tls or {})
        try:
            connection = self._connection()
            self._confirms = connection.transport.driver_type == "amqp"
        except (KeyError, ValueError, TypeError, ImportError) as error:
            raise ConfigError(
                f"Kombu does not understand the URL of the sink: {explain(error, url)}"
            ) from None
        if not self._confirms and not self._queues:
            raise ConfigError(
                "this transport of Kombu drops messages without a bound queue; name one:"
                " ?queues=events in its URL, or KombuSink(…, queues=['events'])"
            )
        self._refusals: tuple[type[Exception], ...] = tuple(connection.channel_errors)
        unreachable = self._kombu.exceptions.OperationalError
        self._troubles = (OSError, unreachable, *connection.connection_errors, *self._refusals)
        self._link: _Link | None = None

    @classmethod
    def from_url(cls, url: str, topic: str | None = None, timeout: float = 10.0) -> Self:
        """Create one by `amqp://USER:PASSWORD@HOST/VHOST?queues=a,b&mandatory=true&timeout=5`.

        `declare=false` leaves exchanges and queues alone. Prefix the URL of any other transport of
        Kombu with `kombu+`.
        """
        given = Url(url.removeprefix("kombu+"))
        queues, seconds = given.names("queues"), given.seconds(timeout)
        mandatory = given.flag("mandatory", default=True)
        declare = given.flag("declare", default=True)
        settings: dict[str, Any] = {"mandatory": mandatory, "declare": declare}
        return cls(given.rest, topic, queues=queues, timeout=seconds, **settings)

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        """Return an answer per message; raise `SinkUnavailable` if there is none at all."""
        batch = _KombuBatch(messages, self._timeout)
        packed = batch.answers.pack_all(self._check)
        refused = self._send(batch, packed)
        if refused is not None:
            # The broker closed the channel because of one message, without naming it.
            left = [one for one in packed if batch.answers.is_open(one[0])]
            batch.answers.one_by_one(left, lambda one: self._send_alone(batch, one))
        return batch.answers.conclude()

    def check(self) -> None:
        """Raise `SinkUnavailable` if the broker does not answer."""
        connection = self._connection()
        try:
            connect(connection)
        except self._troubles as error:
            raise SinkUnavailable(f"the broker cannot be reached: {error!r:.200}") from error
        finally:
            connection.release()

    def close(self) -> None:
        """Close the connection; the next message opens another."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _connection(self) -> Any:
        return open_connection(self._url, self._timeout, self._tls)

    def _check(self, message: Message[Any], envelope: Envelope) -> None:
        topic = topic_of(message, self._topic)
        short = (topic, message.type, message.id, envelope.content_type or "")
        if max(len(text.encode()) for text in short) > _MAX_SHORT_STRING_BYTES:
            raise InvalidMessage(
                f"{describe(message.attributes)}: AMQP takes at most"
                f" {_MAX_SHORT_STRING_BYTES} bytes for each of topic, type, id and datacontenttype"
            )

    def _send_alone(self, batch: _KombuBatch, one: _Place) -> None:
        refused = self._send(batch, [one])
        if refused is not None and getattr(refused, "reply_code", 0) not in _NOT_OF_A_MESSAGE:
            name = describe(batch.messages[one[0]].attributes)
            batch.answers.set(one[0], Refused(f"{name}: the broker refused it: {refused}"))

    def _send(self, batch: _KombuBatch, packed: Sequence[_Place]) -> Exception | None:
        """Send messages; return the error if the broker closed the channel because of one."""
        if not packed:
            return None
        link = self._link
        try:
            if link is None:
                link = self._link = _Link(self._kombu, self._connection(), self._confirms)
            if self._declare:
                for place, _ in packed:
                    link.declare(topic_of(batch.messages[place], self._topic), self._queues)
        except self._troubles as error:
            self._interrupt(batch, error)
            return None
        try:
            for place, envelope in packed:
                if batch.answers.are_late:  # without confirms, each send may take long
                    batch.answers.set(place, not_tried())
                    continue
                self._publish(link, batch.messages[place], envelope, batch.setter(place))
            link.wait(batch.deadline)
        except self._troubles as error:
            self._interrupt(batch, error)
            if isinstance(error, self._refusals) and not isinstance(error, OSError):
                return error
        return None

    def _interrupt(self, batch: _KombuBatch, error: Exception) -> None:
        self.close()
        batch.answers.interrupt(SinkUnavailable(f"the broker cannot be used: {error!r:.300}"))

    def _publish(
        self,
        link: _Link,
        message: Message[Any],
        envelope: Envelope,
        answer: Callable[[Error], None],
    ) -> None:
        name = describe(message.attributes)

        def report(outcome: str | None) -> None:
            if outcome is None:
                answer(None)
            elif outcome == "nack":
                answer(SinkUnavailable(f"{name}: the broker did not accept it: its queue is full"))
            else:
                answer(
                    Refused(
                        f"{name}: no queue is bound for it: {outcome}; start its consumer, which"
                        " declares one, bind one yourself, or name `queues`"
                    )
                )

        link.publish(
            report,
            envelope.body,
            exchange=topic_of(message, self._topic),
            routing_key=message.type,
            delivery_mode=_PERSISTENT,
            mandatory=self._mandatory and self._confirms,
            content_type=envelope.content_type or "application/json",
            content_encoding="binary",
            headers=envelope.headers("cloudEvents_"),
            timeout=self._timeout if self._confirms else None,
            message_id=message.id,
            type=message.type,
        )


def open_connection(
    url: str, timeout: float, tls: Mapping[str, Any] | None = None, **settings: Any
) -> Any:
    """Return a connection of Kombu that verifies certificates; `connect` connects it."""
    scheme = url.partition(":")[0]
    if scheme in ("amqp", "amqps", "pyamqp"):
        settings["transport_options"] = {"read_timeout": timeout, "write_timeout": timeout}
    if scheme == "amqps":
        # By default the client does not verify the host name of a certificate.
        own = {"server_hostname": urlsplit(url).hostname, "cert_reqs": ssl.CERT_REQUIRED}
        settings["ssl"] = {**own, **(tls or {})}
    return require("kombu", "amqp").Connection(url, connect_timeout=timeout, **settings)


def connect(connection: Any) -> None:
    """Connect, with one immediate retry; Kombu's own `connect` would sleep in between."""
    connection.ensure_connection(max_retries=1, interval_start=0, interval_max=0.1)


def look_for_queue(connection: Any, name: str) -> Exception | None:
    """Return what RabbitMQ answers if a queue does not exist; None if it does, of any type."""
    channel = connection.channel()  # its own, since a refusal closes it
    try:
        channel.queue_declare(name, passive=True)
    except connection.channel_errors as error:
        if getattr(error, "reply_code", 0) != _NOT_FOUND:
            raise
        return error  # type: ignore[no-any-return]
    channel.close()
    return None


class _KombuBatch:
    """Holds one call of `publish`."""

    def __init__(self, messages: Sequence[Message[Any]], seconds: float) -> None:
        self.messages = messages
        self.answers = Answers(messages, seconds)
        self.deadline = time.monotonic() + seconds

    def setter(self, place: int) -> Callable[[Error], None]:
        return lambda answer: self.answers.set(place, answer)


class _Link:
    """Holds a connection with one channel, and the messages not yet confirmed on it."""

    def __init__(self, kombu: Any, connection: Any, confirms: bool) -> None:
        self._kombu = kombu
        self._connection = connection
        self._confirms = confirms
        self._declared: set[str] = set()
        self._waiting: dict[int, Callable[[str | None], None]] = {}
        self._returned: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._tag = 0
        try:
            connect(connection)
            self._channel = connection.channel()
            self._producer = kombu.Producer(self._channel, auto_declare=False)
            if confirms:
                self._confirm()
        except BaseException:
            self.close()
            raise

    def _confirm(self) -> None:
        self._channel.confirm_select()
        self._channel.events["basic_ack"].add(self._on_ack)
        self._channel.events["basic_nack"].add(self._on_nack)
        self._channel.events["basic_return"].add(self._on_return)

    def declare(self, topic: str, queues: Sequence[str]) -> None:
        if topic in self._declared:
            return
        exchange = self._kombu.Exchange(topic, type="topic", durable=True)
        exchange(self._channel).declare()
        for name in queues:
            if self._confirms and look_for_queue(self._connection, name) is None:
                self._channel.queue_bind(name, topic, "#")  # it may be of another type
                continue
            queue = self._kombu.Queue(name, exchange, routing_key="#", durable=True)
            queue(self._channel).declare()
        self._declared.add(topic)

    def publish(self, answer: Callable[[str | None], None], body: bytes, **settings: Any) -> None:
        if self._confirms:
            self._tag += 1
            self._waiting[self._tag] = answer
            self._names[self._tag] = f"{settings['exchange']} {settings['routing_key']}"
        self._producer.publish(body, **settings)
        if not self._confirms:
            answer(None)

    def wait(self, deadline: float) -> None:
        """Wait until all is confirmed; raise `TimeoutError` after the deadline."""
        while self._waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{len(self._waiting)} confirms did not come in time")
            self._connection.drain_events(timeout=left)
        self._returned.clear()

    def close(self) -> None:
        with suppress(Exception):  # it may be broken, which is why it is closed
            self._connection.release()

    def _on_ack(self, tag: int, multiple: bool) -> None:
        for each in self._tags_until(tag, multiple):
            # The broker returns a message without a queue, and then acks it.
            self._waiting.pop(each)(self._returned.get(self._names.pop(each)))

    def _on_nack(self, tag: int, multiple: bool) -> None:
        for each in self._tags_until(tag, multiple):
            self._names.pop(each)
            self._waiting.pop(each)("nack")

    def _tags_until(self, tag: int, multiple: bool) -> list[int]:
        if not multiple:
            return [tag] if tag in self._waiting else []
        return [each for each in self._waiting if each <= tag]

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        self._returned[f"{exchange} {routing_key}"] = str(error)
