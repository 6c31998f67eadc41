"""Writing entries into the event log itself: Redis Streams, with the ids that they were given."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from conquiet.errors import ConquietError
from conquiet.redis.topic import Topic
from conquiet.redis.wire import Command, Wire
from marketplace.generator.entry import Entry, Numbers

_BATCH = 500


class LogRefused(ConquietError):
    """The log holds later entries than those to be written, or is no stream."""


def write_log(client: Any, entries: Iterable[Entry], *, partitions: int = 1) -> int:
    """Add entries to the streams of their topics, many in one round trip; how many they were.

    >>> from marketplace.generator import Generator
    >>> count = write_log(client, Generator(orders=3).entries())
    >>> client.xlen("pf-domain-events") + client.xlen("pf-ad-telemetry") == count
    True

    Their ids are the times of their publication, so the streams must be empty or older.
    """
    wire, numbers = Wire(client), Numbers()
    topics: dict[str, Topic] = {}
    iterator = iter(entries)
    count = 0
    try:
        while chunk := list(islice(iterator, _BATCH)):
            commands = [_command(entry, topics, partitions, numbers) for entry in chunk]
            for entry, reply in zip(chunk, wire.send(commands), strict=True):
                if isinstance(reply, Exception):
                    raise LogRefused(
                        f"{entry.type} {entry.event_id}: Redis refused it: {reply}; write into"
                        f" an empty log: DEL {entry.topic}"
                    )
            count += len(chunk)
    finally:
        wire.close()
    return count


def _command(
    entry: Entry, topics: dict[str, Topic], partitions: int, numbers: Numbers
) -> tuple[bytes, Command]:
    topic = topics.get(entry.topic)
    if topic is None:
        topic = topics[entry.topic] = Topic(entry.topic, partitions)
    stream = topic.stream(entry.aggregate_id)
    fields: list[str | bytes] = []
    for name, value in entry.attributes().items():
        fields += (name, value)
    key = stream.encode()
    return key, (b"XADD", key, numbers.next(stream, entry.ms), *fields, b"data", entry.data)
