"""Connections of the transport's tests, and what they send and take."""

from __future__ import annotations

import contextlib

import kombu
import pytest

import conquiet.kombu  # noqa: F401 - registers redis-streams://

since_5_7 = pytest.mark.skipif(
    not hasattr(kombu.Producer, "batch"), reason="what is tested here came with Kombu 5.7"
)


def streams(url: str) -> str:
    """The same server by our transport."""
    return url.replace("redis://", "redis-streams://", 1)


@contextlib.contextmanager
def connected(url, **options):
    """A connection to the broker with transport options."""
    with kombu.Connection(streams(url), transport_options=options) as connection:
        yield connection


def put(connection, queue, *bodies, **properties):
    """Publish to a queue by its name."""
    producer = connection.Producer(serializer="json")
    for body in bodies:
        producer.publish(body, exchange="", routing_key=queue, **properties)


class Taken(list):
    """The bodies that a consumer was given; its messages are in `messages`."""

    def __init__(self, ack=True):
        self.ack = ack
        self.messages = []

    def __call__(self, body, message):
        self.append(body)
        self.messages.append(message)
        if self.ack:
            message.ack()


def drain(connection, taken, count, timeout=10):
    """Until so many have come, and say which they are."""
    while len(taken) < count:
        connection.drain_events(timeout=timeout)
    return list(taken)


def nothing_comes(connection, timeout=0.3):
    """Whether a consumer that waits gets nothing."""
    try:
        connection.drain_events(timeout=timeout)
    except TimeoutError:
        return True
    return False


def size(connection, queue):
    """How many messages are ready, by a passive declare."""
    return connection.default_channel.queue_declare(queue, passive=True).message_count
