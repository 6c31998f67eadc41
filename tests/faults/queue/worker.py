"""A consumer in a process of its own, for the tests to kill: worker.py ROLE URL NAME."""

from __future__ import annotations

import signal
import sys

import redis

from conquiet.queue import QueueConfig, QueueConsumer, RedisStreamsQueue

STREAM, GROUP = "orders", "billing"


def hold(queue, client, name):
    """Take one message, say so, and never ack it."""
    [message] = queue.read(30_000)
    client.set("held", message.id)
    signal.pause()


def claim(queue, client, name):
    """Take over what is stale until there is something, and ack it."""
    while not (messages := queue.claim_stale(100)):
        queue.read(50)
    for message in messages:
        queue.ack(message)
        client.rpush("claimed", message.id)


def share(queue, client, name):
    """Work with others on one group until told to end; leave a trace of every delivery."""
    client.rpush("ready", name)
    while not client.exists("end"):
        messages = queue.read(100, count=20)
        with client.pipeline(transaction=False) as pipe:
            for message in messages:
                pipe.hsetnx("holder", message.id, name)
            taken = pipe.execute()
        for message, alone in zip(messages, taken, strict=True):
            client.rpush("done" if alone else "held by two", message.payload["n"])
            client.hdel("holder", message.id)
            queue.ack(message)


def loop(queue, client, name):
    """A service that ends well on SIGTERM, with one message in its hands."""
    consumer = QueueConsumer(queue)
    for message in consumer.iter_messages():
        client.set("held", message.id)


def main():
    role, url, name = sys.argv[1:]
    with redis.Redis.from_url(url) as client:
        queue = RedisStreamsQueue(client, QueueConfig(STREAM, GROUP, name, block_ms=500))
        {"hold": hold, "claim": claim, "share": share, "loop": loop}[role](queue, client, name)


if __name__ == "__main__":
    main()
