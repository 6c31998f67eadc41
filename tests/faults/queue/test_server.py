"""The server goes away, or what the queue needs of it."""

from __future__ import annotations

import threading

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.waiting import eventually

from conquiet.queue import QueueConfig, QueueConsumer, QueueError, RedisStreamsQueue

STREAM, GROUP = "orders", "billing"
CONFIG = QueueConfig(STREAM, GROUP, "b-1")


@pytest.fixture
def client(private_redis):
    # redis-py tries to connect again by itself for a while; here it is to say so at once
    with redis.Redis.from_url(private_redis.url, retry=Retry(NoBackoff(), 0)) as client:
        yield client


@pytest.fixture
def during_a_read(client):
    """Do something while a blocking read waits, and return how the read ended."""

    def do(queue, action):
        outcome = []

        def read():
            try:
                outcome.append(queue.read(60_000))
            except BaseException as error:
                outcome.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        with redis.Redis(connection_pool=client.connection_pool) as observer:
            eventually(lambda: observer.info("clients")["blocked_clients"] == 1)
        action()
        reader.join(30)
        assert outcome, "the read still waits"
        return outcome[0]

    return do


def test_8_1_the_server_is_killed_during_a_blocking_read(private_redis, client, during_a_read):
    queue = RedisStreamsQueue(client, CONFIG)
    error = during_a_read(queue, private_redis.kill)
    assert isinstance(error, QueueError)
    assert isinstance(error.__cause__, redis.ConnectionError)


def test_8_1_after_a_restart_the_same_queue_works_again(private_redis, client, during_a_read):
    queue = RedisStreamsQueue(client, CONFIG)
    entry_id = queue.enqueue({"n": 1})
    [message] = queue.read(1_000)
    during_a_read(queue, private_redis.kill)
    with pytest.raises(QueueError):
        queue.enqueue({"n": 2})
    private_redis.restart()
    assert [again.id for again in queue.claim_stale(0)] == [entry_id]
    queue.ack(message)
    sent = queue.enqueue({"n": 2})
    assert [message.id for message in queue.read(1_000)] == [sent]


def test_8_1_the_loop_of_a_consumer_goes_on_after_a_restart(private_redis, client):
    queue = RedisStreamsQueue(client, CONFIG)
    messages = QueueConsumer(queue).iter_messages()
    queue.enqueue({"n": 1})
    next(messages)
    private_redis.kill()
    with pytest.raises(QueueError):
        next(messages)
    private_redis.restart()
    sent = queue.enqueue({"n": 2})
    assert next(messages).id == sent


def test_8_1_a_server_that_hangs_is_found_out(private_redis, client):
    with redis.Redis.from_url(private_redis.url, socket_timeout=0.5) as impatient:
        queue = RedisStreamsQueue(impatient, CONFIG)
        queue.read(1)
        client.client_pause(20_000)
        with pytest.raises(QueueError) as caught:
            queue.read(100)
    assert isinstance(caught.value.__cause__, redis.TimeoutError)


def test_5_2_the_group_is_deleted_during_a_blocking_read(client, during_a_read):
    queue = RedisStreamsQueue(client, CONFIG)

    def destroy_and_wake():
        client.xgroup_destroy(STREAM, GROUP)
        client.xadd(STREAM, {"data": "{}"})  # before Redis 7.0 this is what wakes the reader

    error = during_a_read(queue, destroy_and_wake)
    assert isinstance(error, QueueError)
    assert isinstance(error.__cause__, redis.ResponseError)


def test_5_2_the_stream_is_deleted_and_nothing_is_made_again(client):
    queue = RedisStreamsQueue(client, CONFIG)
    queue.enqueue({"n": 1})
    [message] = queue.read(1_000)
    client.delete(STREAM)
    for call in (lambda: queue.read(50), lambda: queue.claim_stale(0)):
        with pytest.raises(QueueError, match="NOGROUP"):
            call()
    queue.ack(message)  # nothing is pending any more, and that is allowed
    assert client.exists(STREAM) == 0
    queue.enqueue({"n": 2})
    with pytest.raises(QueueError, match="NOGROUP"):
        queue.read(50)


def test_5_2_the_stream_is_deleted_during_a_blocking_read(client, during_a_read):
    queue = RedisStreamsQueue(client, CONFIG)

    def delete_and_wake():
        client.delete(STREAM)
        client.xadd(STREAM, {"data": "{}"})

    error = during_a_read(queue, delete_and_wake)
    assert isinstance(error, QueueError)
    assert isinstance(error.__cause__, redis.ResponseError)


def test_5_2_a_new_queue_makes_the_group_again(client):
    queue = RedisStreamsQueue(client, CONFIG)
    client.delete(STREAM)
    queue.enqueue({"n": 1})
    assert [message.payload for message in RedisStreamsQueue(client, CONFIG).read(1_000)] == [
        {"n": 1}
    ]
    assert queue.read(1) == []
