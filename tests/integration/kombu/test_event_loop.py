"""Consumers on Kombu's event loop: all of a fetch, in turn, whatever happens on the way."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import kombu
import pytest
import redis
from kombu.asynchronous.hub import Hub
from tests.faults.proxy import Proxy
from tests.integration.kombu.brokers import (
    Taken,
    connected,
    drain,
    nothing_comes,
    put,
    since_5_7,
)
from tests.waiting import eventually

from conquiet.kombu import inspection
from conquiet.kombu.lease import Pulse


class Loop:
    """Kombu's event loop with a consumer on it."""

    def __init__(self, connection, prefetch_count=10, ack=True, queue="orders"):
        self.taken = Taken(ack=ack)
        self.hub = Hub()
        self.connection = connection
        self.consumer = connection.Consumer(
            kombu.Queue(queue), callbacks=[self.taken], prefetch_count=prefetch_count
        )
        self.consumer.consume()
        connection.register_with_event_loop(self.hub)
        self.hub.call_repeatedly(0.05, lambda: None)  # so that a turn of the loop is short

    def run(self, until, timeout=20):
        deadline = time.monotonic() + timeout
        while not until():
            assert time.monotonic() < deadline
            self.hub.run_once()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.hub.close()


def test_the_event_loop_hands_over_all_of_a_fetch(redis_url):
    with connected(redis_url) as connection, Loop(connection) as loop:
        put(connection, "orders", *range(200))
        loop.run(lambda: len(loop.taken) == 200)
        assert loop.taken == list(range(200))


def test_the_event_loop_keeps_to_the_prefetch_count(redis_url):
    with connected(redis_url) as connection, Loop(connection, 3, ack=False) as loop:
        put(connection, "orders", *range(10))
        loop.run(lambda: len(loop.taken) == 3)
        for _ in range(5):
            loop.hub.run_once()
        assert loop.taken == [0, 1, 2]
        loop.taken.messages[0].ack()
        loop.run(lambda: len(loop.taken) == 4)
        loop.consumer.qos(prefetch_count=0)
        loop.run(lambda: len(loop.taken) == 10)


def test_an_error_of_a_callback_in_the_loop_loses_nothing(redis_url):
    with connected(redis_url) as connection, Loop(connection) as loop:

        def fails(body, message):
            loop.taken(body, message)
            if body % 3 == 0:
                raise ValueError(body)

        loop.consumer.callbacks = [fails]
        put(connection, "orders", *range(10))
        while len(loop.taken) < 10:
            with contextlib.suppress(ValueError):  # the loop passes them on
                loop.run(lambda: len(loop.taken) == 10)
        assert loop.taken == list(range(10))


def test_between_two_long_callbacks_the_loop_gets_its_turn(redis_url):
    with connected(redis_url) as connection, Loop(connection, 10) as loop:
        seen = []

        def work(body, message):
            time.sleep(0.05)  # as a task on Celery's solo pool
            seen.append(body)
            message.ack()

        loop.consumer.callbacks = [work]
        control = Taken()
        with connection.channel() as channel:
            other = kombu.Consumer(channel, kombu.Queue("control"), callbacks=[control])
            other.register_callback(lambda body, message: seen.append(body))
            other.consume()
            put(connection, "orders", *range(16))
            loop.run(lambda: seen)
            put(connection, "control", "ping")
            loop.run(lambda: len(seen) == 17)
        assert [body for body in seen if body != "ping"] == list(range(16))
        assert seen.index("ping") < 12  # after few of them alone, and a busy machine has some more


def test_acks_of_an_idle_loop_are_sent(redis_url, redis_client):
    with connected(redis_url) as connection, Loop(connection, 10, ack=False) as loop:
        put(connection, "orders", 1)
        loop.run(lambda: loop.taken)
        for _ in range(3):
            loop.hub.run_once()  # a read that blocks is under way
        threading.Thread(target=loop.taken.messages[0].ack).start()
        eventually(lambda: inspection.queues(redis_client)[0].pending == 0)


@since_5_7  # before, an error ends the loop, as Celery expects
@pytest.mark.slow
def test_a_half_open_connection_is_dropped_and_the_loop_goes_on(redis_server, redis_url, caplog):
    caplog.set_level(logging.WARNING)
    options = {"health_check_interval": 1, "polling_interval": 1, "socket_timeout": 5}
    with (
        Proxy(redis_server.port) as proxy,
        connected(proxy.url, **options) as connection,
        Loop(connection) as loop,
    ):
        put(connection, "orders", 1)
        loop.run(lambda: loop.taken)
        proxy.mute()
        with contextlib.suppress(redis.TimeoutError):  # of connecting again, still mute
            loop.run(lambda: "dropping" in caplog.text, timeout=30)
        assert "dropping" in caplog.text
        proxy.cut()
        proxy.heal()
        with connected(redis_url) as other:
            put(other, "orders", 2)

        def comes():
            with contextlib.suppress(*connection.connection_errors):
                loop.hub.run_once()
            return 2 in loop.taken

        eventually(comes, timeout=30)


# --- a loop that is blocked -------------------------------------------------------------------


def test_a_loop_that_is_blocked_loses_its_messages_to_others(redis_url, monkeypatch, caplog):
    monkeypatch.setattr("conquiet.kombu.lease.LEAST_PATIENCE", 0.5)
    with connected(redis_url, lease=1) as hung, connected(redis_url, lease=1) as other:
        put(other, "orders", "a")
        with Loop(hung, ack=False) as loop:
            loop.run(lambda: loop.taken == ["a"])
            taken = Taken()
            with other.Consumer(kombu.Queue("orders"), callbacks=[taken]):
                assert drain(other, taken, 1) == ["a"]
            assert "the event loop has been blocked" in caplog.text
            with pytest.raises(redis.ConnectionError, match="got 1 of its messages"):
                loop.run(lambda: False)


@pytest.mark.slow
def test_a_loop_in_which_a_callback_works_keeps_its_messages(redis_url, monkeypatch):
    monkeypatch.setattr("conquiet.kombu.lease.LEAST_PATIENCE", 0.1)
    with connected(redis_url, lease=1) as busy, connected(redis_url, lease=1) as other:
        put(other, "orders", "a")
        others = Taken()

        def work(body, message):
            with other.Consumer(kombu.Queue("orders"), callbacks=[others]):
                assert nothing_comes(other, timeout=3)
            loop.taken(body, message)

        with Loop(busy) as loop:
            loop.consumer.callbacks = [work]
            loop.run(lambda: loop.taken == ["a"])


def test_a_task_in_the_thread_of_the_loop_does_not_block_it():
    from celery.signals import task_postrun, task_prerun

    pulse, hub = Pulse(), Hub()
    pulse.watch(hub)
    eventually(lambda: pulse.blocked_seconds() > 0.01)
    task_prerun.send(sender=None)  # a task with an ETA on the solo pool, say
    assert pulse.blocked_seconds() == 0
    elsewhere = threading.Thread(target=lambda: task_postrun.send(sender=None))
    elsewhere.start()
    elsewhere.join()
    assert pulse.blocked_seconds() == 0
    task_postrun.send(sender=None)
    eventually(lambda: pulse.blocked_seconds() > 0.01)
    hub.close()
    assert pulse.blocked_seconds() == 0
