"""Connections of the transport's tests, and what they send and take."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading

import kombu
import pytest
from tests.integration.redis.servers import _certificate

import conquiet.kombu  # noqa: F401 - registers redis-streams://
from conquiet.kombu import inspection

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


def unacked(redis_client, queue):
    """How many messages of a queue are handed over and not settled."""
    [info] = [info for info in inspection.queues(redis_client) if info.name == queue]
    return info.pending


def calls(seen, script):
    """How often a script was called, among the commands that were seen."""
    return sum(command.startswith(f"EVALSHA {script.sha} ") for command in seen)


@contextlib.contextmanager
def tls_in_front_of(port, directory):
    """The port of a TLS terminator, and its certificate; it closes whatever it has opened."""
    certificate, key = _certificate(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    ended, threads = threading.Event(), []

    def serve(plain):
        with (
            contextlib.suppress(OSError),
            plain,
            context.wrap_socket(plain, server_side=True) as outer,
            socket.create_connection(("127.0.0.1", port)) as inner,
        ):
            while not ended.is_set():
                ready = (
                    [outer] if outer.pending() else select.select([outer, inner], [], [], 0.1)[0]
                )
                for source in ready:
                    data = source.recv(65_536)
                    if not data:
                        return
                    (inner if source is outer else outer).sendall(data)

    def accept():
        while not ended.is_set():
            if select.select([server], [], [], 0.1)[0]:
                plain, _ = server.accept()
                plain.settimeout(10)
                threads.append(threading.Thread(target=serve, args=(plain,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield server.getsockname()[1], certificate
        finally:
            ended.set()
            for thread in [acceptor, *threads]:
                thread.join()
