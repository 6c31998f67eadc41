"""A stream with something in it, and a worker that fails."""

from __future__ import annotations

from typing import Any

import pytest

from conquiet.message import Message
from conquiet.redis import StreamSink, StreamSource


def numbered(count: int, first: int = 0, **attributes: Any) -> list[Message[Any]]:
    return [
        Message(b'{"n": %d}' % n, {"id": f"m-{n}", "type": "sold", "source": "/shop", **attributes})
        for n in range(first, first + count)
    ]


@pytest.fixture
def publish(redis_client):
    def send(count=1, topic="orders", first=0, partitions=1, **attributes):
        sink = StreamSink(redis_client, topic, partitions=partitions)
        answers = sink.publish_each(numbered(count, first, **attributes))
        assert list(answers) == [None] * count

    return send


@pytest.fixture
def source(redis_client):
    opened = []

    def make(streams="orders", group="billing", consumer=None, **settings):
        made = StreamSource(redis_client, streams, group, consumer, backoff=0.0, **settings)
        opened.append(made)
        return made

    yield make
    for item in opened:
        item.close()


@pytest.fixture
def bury(publish, source):
    """Puts messages into the stream `dead`, as a source does with what failed too often."""

    def kill(count=1, topic="orders", error="ValueError: no such customer", **attributes):
        publish(count, topic, **attributes)
        reader = source(topic, "failing", max_attempts=1, dead_letters="dead")
        while reader.dead < count:
            for message in reader.read(100, 1.0):
                message.nack(ValueError(error.partition(": ")[2]))

    return kill
