"""StreamSink: publishes messages as stream entries, a batch in one round trip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis

from conquiet.acking import Error
from conquiet.errors import ConfigError, ConquietError, GivenBack, Refused, SinkUnavailable
from conquiet.message import Message, describe
from conquiet.redis.entry import Mode, encoder
from conquiet.redis.topic import Topic
from conquiet.redis.wire import TROUBLE, Command, Wire, is_unwilling
from conquiet.sink import Sink


class _FailedKeys:
    """The keys of which a message of the batch failed."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def check(self, message: Message[Any]) -> None:
        """Raise if an earlier message of the same key failed."""
        if self._keys and message.key in self._keys:
            raise GivenBack(f"{describe(message.attributes)}: an earlier one of its key failed")

    def add(self, message: Message[Any]) -> None:
        key = message.attributes.get("partitionkey") or message.attributes.get("subject")
        if isinstance(key, str):
            self._keys.add(key)


class StreamSink(Sink):
    """Adds each message to the stream of its topic; never trims (see `trim_stream`).

    >>> sink = StreamSink(client, "orders")
    >>> sink.publish([Message(b"{}", {"id": "1", "type": "sold", "source": "/shop"})])

    A topic is a stream of the same name, unless `streams` maps it to another name or to a
    partitioned `Topic`; `partitions` applies to every topic that is not mapped. `topic` is the
    default for messages without one. Order holds within a stream; with `ordered` also when a
    message fails: later ones of its key, or of its stream if Redis refused it, fail too.

    A client of `redis.asyncio` is for the sink of an async worker.

    `mode` is `binary`, a field per attribute, or `structured`, JSON in one field.
    """

    def __init__(
        self,
        client: Any,
        topic: str | None = None,
        *,
        streams: Mapping[str, str | Topic] | None = None,
        partitions: int = 1,
        mode: Mode = "binary",
        ordered: bool = False,
    ) -> None:
        Topic("any", partitions)  # raises for an invalid number of partitions
        self.keeps_order = ordered
        self._wire = Wire(client, allows_async=True)
        self.is_async = self._wire.is_async
        self._topic = topic
        self._partitions = partitions
        self._encode = encoder(mode)
        self._topics: dict[str, Topic] = {
            name: to if isinstance(to, Topic) else Topic(to) for name, to in (streams or {}).items()
        }

    @property
    def client(self) -> Any:
        """Return the client that was given."""
        return self._wire.given

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        """Add messages; return None or an error for each, in order.

        Raises `SinkUnavailable` if Redis answered none of them.
        """
        answers: list[Error] = [None] * len(messages)
        commands: list[tuple[bytes, Command]] = []
        places: list[int] = []
        encode, stream_of = self._encode, self._stream
        failed = _FailedKeys() if self.keeps_order else None
        for index, message in enumerate(messages):
            try:
                if failed is not None:
                    failed.check(message)
                key = stream_of(message)
                commands.append((key, (b"XADD", key, b"*", *encode(message))))
                places.append(index)
            except ConquietError as error:
                answers[index] = error
                if failed is not None:
                    failed.add(message)
        if not commands:
            return answers
        try:
            replies = (self._send_whole if self.keeps_order else self._wire.send)(commands)
        except TROUBLE as error:
            raise SinkUnavailable(f"Redis cannot be reached: {error}") from error
        for index, reply in zip(places, replies, strict=True):
            if type(reply) is not bytes:
                answers[index] = _answer(messages[index], reply)
        return answers

    def _send_whole(self, commands: Sequence[tuple[bytes, Command]]) -> list[Any]:
        """Add the entries of each stream in one MULTI, so that none overtakes one that failed."""
        replies: list[Any] = [None] * len(commands)
        streams: dict[bytes, list[int]] = {}
        for index, (key, _) in enumerate(commands):
            streams.setdefault(key, []).append(index)
        for key, indexes in streams.items():
            try:
                got = self._wire.atomically(key, [commands[index][1] for index in indexes])
            except (redis.RedisError, OSError) as error:
                got = [error] * len(indexes)
            for index, reply in zip(indexes, got, strict=True):
                replies[index] = reply
        if all(isinstance(reply, TROUBLE) for reply in replies):
            raise replies[0]
        return replies

    def _stream(self, message: Message[Any]) -> bytes:
        name = message.topic or self._topic
        if not name:
            raise ConfigError(
                f"{describe(message.attributes)}: no topic, so no stream to add it to; give the"
                " message a topic or the sink a default: StreamSink(client, 'orders')"
            )
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = Topic(name, self._partitions)
        if topic.partitions == 1:
            return topic.name.encode()
        return topic.stream(message.key or message.id).encode()

    def close(self) -> None:
        """Close connections that were opened here; the client stays open. Nothing is buffered."""
        self._wire.close()


def _answer(message: Message[Any], reply: object) -> Exception:
    name = describe(message.attributes)
    if isinstance(reply, TROUBLE):
        return SinkUnavailable(f"{name}: the answer of Redis was lost: {reply}")
    if is_unwilling(reply):
        return SinkUnavailable(f"{name}: Redis takes nothing now: {reply}")
    if isinstance(reply, redis.exceptions.NoPermissionError):
        return SinkUnavailable(f"{name}: Redis takes nothing from us: {reply}; fix its ACL")
    if str(reply).startswith("WRONGTYPE"):
        return SinkUnavailable(
            f"{name}: its topic is not a stream: {reply}; delete or rename that key"
        )
    return Refused(f"{name}: Redis refused it: {reply}")
