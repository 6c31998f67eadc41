"""Section 8 of the seed: every error of Redis is a QueueError, and nothing is tried again."""

from __future__ import annotations

import signal
import socket
import threading

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.integration.queue.names import GROUP, STREAM
from tests.waiting import eventually

from conquiet.queue import QueueConfig, QueueError, QueueMessage, RedisStreamsQueue

CONFIG = QueueConfig(STREAM, GROUP, "b-1")


def calls_of(queue):
    return {
        "enqueue": lambda: queue.enqueue({"n": 1}),
        "read": lambda: queue.read(50),
        "ack": lambda: queue.ack(QueueMessage("1-0", {})),
        "claim_stale": lambda: queue.claim_stale(0),
    }


@pytest.mark.parametrize("call", ["enqueue", "read", "ack", "claim_stale"])
def test_8_1_an_error_of_redis_is_a_queue_error_with_its_cause(queue, redis_client, call):
    redis_client.delete(STREAM)
    redis_client.set(STREAM, "not a stream")
    with pytest.raises(QueueError, match=r"^X[A-Z]+ failed: ") as caught:
        calls_of(queue)[call]()
    assert isinstance(caught.value.__cause__, redis.ResponseError)


def test_8_1_nobody_there_is_a_queue_error():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        client = redis.Redis(port=unused.getsockname()[1], retry=Retry(NoBackoff(), 0))
        with pytest.raises(QueueError) as caught:
            RedisStreamsQueue(client, CONFIG)
    assert isinstance(caught.value.__cause__, redis.ConnectionError)


def test_8_1_a_login_that_fails_is_a_queue_error(redis_url):
    client = redis.Redis.from_url(redis_url, username="nobody", password="wrong")
    with pytest.raises(QueueError) as caught:
        RedisStreamsQueue(client, CONFIG)
    assert isinstance(caught.value.__cause__, redis.RedisError)


def test_8_1_an_exhausted_pool_is_a_queue_error(redis_url):
    client = redis.Redis.from_url(redis_url, max_connections=1)
    queue = RedisStreamsQueue(client, CONFIG)
    connection = client.connection_pool.get_connection()
    with pytest.raises(QueueError) as caught:
        queue.read(1)
    assert isinstance(caught.value.__cause__, redis.ConnectionError)
    client.connection_pool.release(connection)
    client.close()


def test_8_1_an_error_below_redis_py_is_a_queue_error(queue, redis_client, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no more files")

    monkeypatch.setattr(redis_client.connection_pool, "get_connection", refuse)
    with pytest.raises(QueueError, match="no more files") as caught:
        queue.read(1)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.fixture
def deaf_server():
    """Answers the handshake and XGROUP, then takes commands and hangs up without an answer."""
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                while data := peer.recv(65536):
                    received.append(data)
                    if not data.startswith(b"*6\r\n$6\r\nXGROUP") and b"XADD" in data:
                        break
                    peer.sendall(b"+OK\r\n" * data.count(b"*"))

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1], received
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_8_1_a_command_is_sent_once_even_if_redis_py_would_send_it_again(deaf_server):
    port, received = deaf_server
    client = redis.Redis(port=port, protocol=2, retry=Retry(NoBackoff(), 5))
    queue = RedisStreamsQueue(client, CONFIG)
    with pytest.raises(QueueError) as caught:
        queue.enqueue({"n": 1})
    assert isinstance(caught.value.__cause__, redis.ConnectionError)
    assert sum(data.count(b"XADD") for data in received) == 1
    client.close()


def test_8_2_retriable_and_fatal_errors_are_not_told_apart(queue, redis_client):
    with pytest.raises(QueueError) as fatal:
        queue.ack(QueueMessage("no id", {}))
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueError) as passing:
            queue.enqueue({"n": 1})
    finally:
        redis_client.config_set("maxmemory", 0)
    assert type(fatal.value) is type(passing.value) is QueueError


@pytest.fixture
def _sigint_interrupts():
    """SIGINT is ignored where a shell has started the tests in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint_interrupts")
def test_an_interrupted_read_leaves_no_reply_behind_for_the_next_command(
    queue, redis_client, blocked_clients
):
    def interrupt():
        eventually(lambda: blocked_clients() == 1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        queue.read(10_000)
    interrupter.join()
    sent = queue.enqueue({"n": 1})
    assert redis_client.xlen(STREAM) == 1
    eventually(lambda: blocked_clients() == 0)
    assert [message.id for message in queue.read(1_000) or queue.claim_stale(0)] == [sent]
