"""Publish to Google Cloud Pub/Sub.

Pub/Sub confirms or refuses a request as a whole. The messages of a refused request are sent again
one by one, so that an invalid message fails alone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from itertools import chain
from typing import Any, Self

from conquiet.acking import Error
from conquiet.config import Url, check_timeout, require
from conquiet.errors import ConfigError, GivenBack, InvalidMessage, Refused, SinkUnavailable
from conquiet.message import Message, describe
from conquiet.relay.sinks.answers import Answers, not_tried
from conquiet.relay.sinks.envelope import Envelope, topic_of
from conquiet.sink import Sink

_MAX_MESSAGES = 1000
_MAX_BYTES = 9_000_000
_MAX_ATTRIBUTES = 100
_MAX_NAME_BYTES = 256
_MAX_VALUE_BYTES = 1024
_GRACE_SECONDS = 1.0
_SENDERS = 8

# By default, after a long outage, gRPC waits two minutes before it reconnects.
_CHANNEL = (("grpc.max_reconnect_backoff_ms", 5_000),)

_topic_path = re.compile(r"projects/[^/]+/topics/[^/]+")

_Place = tuple[int, Envelope]


class PubSubSink(Sink):
    """Publishes each message to its Pub/Sub topic, `orders` or `projects/shop/topics/orders`.

    `ordered` sends `partitionkey` or `subject` as the ordering key; when a message of a key fails,
    later ones of the key are given back. Credentials are Google's defaults, unless a `client` (a
    `google.pubsub_v1.PublisherClient`) is given; with PUBSUB_EMULATOR_HOST, an emulator's.

    `project` is Google's; `topic` is the default for messages without one. A message that is not
    confirmed within `timeout` seconds counts as not published.
    """

    def __init__(
        self,
        project: str,
        topic: str | None = None,
        *,
        ordered: bool = False,
        timeout: float = 10.0,
        client: Any = None,
    ) -> None:
        self._pubsub = require("google.pubsub_v1", "pubsub")
        self._errors = require("google.api_core.exceptions", "pubsub")
        self._auth_errors = require("google.auth.exceptions", "pubsub")
        if not project:
            raise ConfigError("a Pub/Sub sink needs a project, as in pubsub://my-project")
        self.keeps_order = ordered
        self._project = project
        self._topic = topic
        self._timeout = check_timeout(timeout)
        self._given = client
        self._client: Any = client
        self._senders: ThreadPoolExecutor | None = None

    @classmethod
    def from_url(cls, url: str, topic: str | None = None, timeout: float = 10.0) -> Self:
        """Create a sink by `pubsub://PROJECT/TOPIC?ordered=true&timeout=5`."""
        given = Url(url)
        ordered, seconds = given.flag("ordered", default=False), given.seconds(timeout)
        given.end()
        return cls(given.place, given.path or topic, ordered=ordered, timeout=seconds)

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        """Return an answer per message; raise `SinkUnavailable` if there is none at all."""
        return _PubSubBatch(self, messages).publish()

    def check(self) -> None:
        """Raise `SinkUnavailable` if Pub/Sub does not answer for the topic of this sink."""
        try:
            path = self._path(self._topic or "any")
            self._connect().get_topic(topic=path, retry=None, timeout=self._timeout)
        except self._errors.NotFound as error:
            if self._topic:
                raise SinkUnavailable(f"{path} does not exist: {error}") from error
        except (self._errors.GoogleAPIError, self._auth_errors.GoogleAuthError) as error:
            raise SinkUnavailable(f"Pub/Sub cannot be reached: {error}") from error

    def close(self) -> None:
        """Close the connection; the next message opens another."""
        senders, self._senders = self._senders, None
        if senders is not None:
            senders.shutdown(wait=False, cancel_futures=True)
        if self._client is not None and self._given is None:
            self._client.transport.close()
            self._client = None

    def _connect(self) -> Any:
        if self._client is None:
            try:
                self._client = self._pubsub.PublisherClient(transport=self._transport())
            except self._auth_errors.GoogleAuthError as error:
                raise SinkUnavailable(
                    f"no credentials for Pub/Sub: {error}; set GOOGLE_APPLICATION_CREDENTIALS, or"
                    " PUBSUB_EMULATOR_HOST for an emulator"
                ) from error
        return self._client

    def _transport(self) -> Any:
        kind = self._pubsub.PublisherClient.get_transport_class("grpc")
        emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
        if emulator:
            return kind(channel=require("grpc", "pubsub").insecure_channel(emulator, _CHANNEL))

        def channel(host: str, *, options: Sequence[Any], **settings: Any) -> Any:
            return kind.create_channel(host, options=[*options, *_CHANNEL], **settings)

        return partial(kind, channel=channel)

    def _path(self, topic: str) -> str:
        if _topic_path.fullmatch(topic):
            return topic
        if not topic or "/" in topic:
            raise ConfigError(
                f"{topic!r:.100} is not a topic of Pub/Sub: use NAME or projects/P/topics/T"
            )
        return f"projects/{self._project}/topics/{topic}"

    def _start(self, topic: str, key: str, envelopes: Sequence[Envelope]) -> Future[Any]:
        """Send one request; the future raises Pub/Sub's error."""
        client = self._connect()
        request = self._pubsub.PublishRequest(
            topic=topic,
            messages=[
                self._pubsub.PubsubMessage(
                    data=envelope.body, attributes=_attributes(envelope), ordering_key=key
                )
                for envelope in envelopes
            ],
        )
        if self._senders is None:
            self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="conquiet-pubsub")
        # No retry here: the relay retries, with growing pauses.
        return self._senders.submit(
            client.publish, request=request, retry=None, timeout=self._timeout
        )

    def _failure(self, message: Message[Any], error: BaseException) -> Exception:
        name = describe(message.attributes)
        of_this_message = (
            self._errors.InvalidArgument,
            self._errors.FailedPrecondition,
            self._errors.OutOfRange,
            self._errors.NotFound,
        )
        if isinstance(error, of_this_message):
            return Refused(f"{name}: Pub/Sub refused it: {error}")
        return SinkUnavailable(f"{name}: Pub/Sub did not confirm it: {error!r:.300}")


class _PubSubBatch:
    """Publishes one batch: all requests at once, then the refused messages one by one."""

    def __init__(self, sink: PubSubSink, messages: Sequence[Message[Any]]) -> None:
        self._sink = sink
        self._messages = messages
        self._answers = Answers(messages, sink._timeout)
        self._deadline = 0.0
        self._lost: set[str] = set()
        """Keys with a failed message; their later messages must wait."""

    def publish(self) -> Sequence[Error]:
        packed = self._answers.pack_all(self._check)
        if self._sink.keeps_order:
            packed = self._without_followers(packed)
        groups = list(self._groups(packed))
        while groups:
            # One request of each topic and key at a time keeps their order.
            sent = [(topic, key, chunks[0]) for topic, key, chunks in groups]
            futures = [self._send(*request) for request in sent]
            self._deadline = time.monotonic() + self._sink._timeout + _GRACE_SECONDS
            for request, future in zip(sent, futures, strict=True):
                self._settle_all(*request, future)
            groups = [(topic, key, chunks[1:]) for topic, key, chunks in groups if chunks[1:]]
            if self._answers.are_late:
                self._give_back(groups)
                break
        return self._answers.conclude()

    def _give_back(self, groups: Sequence[tuple[str, str, list[list[_Place]]]]) -> None:
        for _, _, chunks in groups:
            for place, _ in chain.from_iterable(chunks):
                self._answers.set(place, not_tried())

    def _check(self, message: Message[Any], envelope: Envelope) -> None:
        self._sink._path(topic_of(message, self._sink._topic))
        _check_limits(message, envelope)

    def _without_followers(self, packed: Sequence[_Place]) -> list[_Place]:
        """Drop messages behind one of the same key that could not be packed."""
        good = dict(packed)
        lost: set[str] = set()
        for place, message in enumerate(self._messages):
            key = message.attributes.get("partitionkey") or message.attributes.get("subject")
            if not isinstance(key, str):
                continue
            if place not in good:
                lost.add(key)
            elif key in lost:
                del good[place]
                self._answers.set(place, _given_back(message))
        return list(good.items())

    def _groups(self, packed: Sequence[_Place]) -> Iterator[tuple[str, str, list[list[_Place]]]]:
        """Group by topic and key, since a request has one ordering key, within Pub/Sub's limits."""
        groups: dict[tuple[str, str], list[_Place]] = {}
        for place, envelope in packed:
            message = self._messages[place]
            topic = self._sink._path(topic_of(message, self._sink._topic))
            key = message.key if self._sink.keeps_order else ""
            groups.setdefault((topic, key), []).append((place, envelope))
        for (topic, key), places in groups.items():
            yield topic, key, _chunks(places)

    def _send(self, topic: str, key: str, places: Sequence[_Place]) -> Future[Any] | None:
        if key in self._lost:
            return None
        return self._sink._start(topic, key, [envelope for _, envelope in places])

    def _settle_all(
        self, topic: str, key: str, places: Sequence[_Place], future: Future[Any] | None
    ) -> None:
        refused = self._settle(key, places, future)
        if not refused or len(places) == 1:
            return
        self._lost.discard(key)

        def send(place: _Place) -> None:
            future = self._send(topic, key, [place])
            self._deadline = time.monotonic() + self._sink._timeout + _GRACE_SECONDS
            self._settle(key, [place], future)

        self._answers.one_by_one(places, send)

    def _settle(self, key: str, places: Sequence[_Place], future: Future[Any] | None) -> bool:
        """Set the answers of a request; return whether Pub/Sub refused it."""
        error = None if future is None else _error_of(future, self._deadline)
        answer: Error = None
        for place, _ in places:
            message = self._messages[place]
            if future is None:
                answer = _given_back(message)
            elif error is not None:
                answer = self._sink._failure(message, error)
            self._answers.set(place, answer)
        if answer is not None and key:
            self._lost.add(key)
        return isinstance(answer, Refused)


def _error_of(future: Future[Any], deadline: float) -> BaseException | None:
    try:
        return future.exception(max(0.0, deadline - time.monotonic()))
    except FutureTimeout as late:
        future.cancel()  # if it has not begun yet
        return late


def _chunks(places: Sequence[_Place]) -> list[list[_Place]]:
    chunks: list[list[_Place]] = []
    size = 0
    for place, envelope in places:
        more = _size(envelope)
        if not chunks or len(chunks[-1]) >= _MAX_MESSAGES or size + more > _MAX_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append((place, envelope))
        size += more
    return chunks


def _given_back(message: Message[Any]) -> GivenBack:
    return GivenBack(f"{describe(message.attributes)}: an earlier one of its key failed")


def _attributes(envelope: Envelope) -> dict[str, str]:
    attributes = envelope.headers("ce-")
    if envelope.content_type is not None:
        attributes["Content-Type"] = envelope.content_type
    return attributes


def _size(envelope: Envelope) -> int:
    attributes = _attributes(envelope).items()
    return len(envelope.body) + sum(len(f"{name}{value}".encode()) for name, value in attributes)


def _check_limits(message: Message[Any], envelope: Envelope) -> None:
    attributes = _attributes(envelope)
    subject = describe(message.attributes)
    if len(attributes) > _MAX_ATTRIBUTES:
        raise InvalidMessage(f"{subject}: Pub/Sub takes {_MAX_ATTRIBUTES} attributes at most")
    for name, value in attributes.items():
        if len(name.encode()) > _MAX_NAME_BYTES or len(value.encode()) > _MAX_VALUE_BYTES:
            raise InvalidMessage(
                f"{subject}: attribute {name!r:.60} is too long for Pub/Sub, which takes"
                f" {_MAX_NAME_BYTES} bytes for a name and {_MAX_VALUE_BYTES} for a value"
            )
