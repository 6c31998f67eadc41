"""Sources and sinks on the worker's Redis, and what the tests ask the server behind their back."""

from __future__ import annotations

import threading

import pytest
import redis

from conquiet.message import Message
from conquiet.redis import StreamSink, StreamSource

STREAM, GROUP = "orders", "billing"


@pytest.fixture
def source(redis_client):
    """Opens sources of one stream and group; any setting may differ. All are closed at the end."""
    opened = []

    def make(streams=STREAM, consumer=None, *, group=GROUP, client=None, **settings):
        settings = {"backoff": 0.0, "claim_interval": 0.02, **settings}
        made = StreamSource(client or redis_client, streams, group, consumer, **settings)
        opened.append(made)
        return made

    yield make
    for item in opened:
        item.close()


def numbered(count, first=0, **attributes):
    return [
        Message(b"%d" % n, {"id": f"m-{n}", "type": "sample", "source": "/test", **attributes})
        for n in range(first, first + count)
    ]


@pytest.fixture
def publish(redis_client):
    def send(count=1, first=0, topic=STREAM, partitions=1, **attributes):
        messages = numbered(count, first, **attributes)
        sink = StreamSink(redis_client, topic, partitions=partitions)
        assert list(sink.publish(messages)) == [None] * count

    return send


@pytest.fixture
def pending(redis_client):
    """The pending entries of a group: (consumer, deliveries) each, in order."""

    def ask(stream=STREAM, group=GROUP):
        rows = redis_client.xpending_range(stream, group, "-", "+", 10_000)
        return [(row["consumer"].decode(), row["times_delivered"]) for row in rows]

    return ask


@pytest.fixture
def recorded(redis_url):
    """Run a function, and return every command that the server got meanwhile, by MONITOR."""

    def record(run):
        commands: list[str] = []
        with redis.Redis.from_url(redis_url) as client, client.monitor() as monitor:

            def listen():
                for seen in monitor.listen():
                    if seen["command"] == "ECHO recorded":
                        return
                    commands.append(seen["command"])

            listener = threading.Thread(target=listen)
            listener.start()
            try:
                run()
            finally:
                client.echo("recorded")
                listener.join()
        return commands

    return record


def ids(messages):
    return [message.id for message in messages]
