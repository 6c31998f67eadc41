"""Kills, restarts and bad networks: no message is lost, and none that was acked comes back."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests import zygote
from tests.faults.proxy import Proxy
from tests.waiting import eventually

from conquiet.errors import ConquietError, SinkUnavailable, StoreError
from conquiet.message import Message
from conquiet.redis import StreamSink, StreamSource
from conquiet.router import Router
from conquiet.worker import Worker

CONSUMER = Path(__file__).with_name("consumer.py")
STREAM, GROUP = "orders", "billing"


def numbered(count, first=0, **attributes):
    return [
        Message(b"%d" % n, {"id": f"m-{n}", "type": "sample", "source": "/test", **attributes})
        for n in range(first, first + count)
    ]


def publish(client, count, first=0):
    answers = StreamSink(client, STREAM).publish_each(numbered(count, first))
    assert list(answers) == [None] * count


@contextlib.contextmanager
def process(url, mode, *name):
    with zygote.Popen(
        [sys.executable, CONSUMER, url, mode, *name], stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def all_acked(client):
    [group] = client.xinfo_groups(STREAM)  # one answer: what is read in between would be missed
    return group["pending"] == 0 and group["last-delivered-id"] == client.xrevrange(STREAM)[0][0]


# --- kill -9 ----------------------------------------------------------------------------------


def test_a_consumer_killed_between_read_and_ack_loses_nothing(redis_url, redis_client):
    publish(redis_client, 12)
    with process(redis_url, "hold") as victim:
        assert victim.stdout.readline() == "holding 5\n"
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    with process(redis_url, "work"):
        eventually(lambda: redis_client.llen("handled") >= 12, timeout=30)
        eventually(lambda: all_acked(redis_client))
    handled = [name.decode() for name in redis_client.lrange("handled", 0, -1)]
    assert sorted(handled) == sorted(f"m-{n}" for n in range(12))


def test_a_consumer_killed_and_started_again_under_its_name_goes_on_at_once(
    redis_url, redis_client
):
    publish(redis_client, 5)
    with process(redis_url, "hold", "pod-0") as victim:
        assert victim.stdout.readline() == "holding 5\n"
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    source = StreamSource(redis_client, STREAM, GROUP, "pod-0", lease=600.0)
    assert [message.deliveries for message in source.read(10, 1.0)] == [2] * 5
    source.close()


def test_workers_killed_again_and_again_lose_nothing(redis_url, redis_client):
    publish(redis_client, 300)
    for _ in range(4):
        with process(redis_url, "work") as victim:
            before = redis_client.llen("handled")
            eventually(lambda least=before: redis_client.llen("handled") > least + 10, timeout=30)
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait()
    with process(redis_url, "work"):
        eventually(lambda: all_acked(redis_client), timeout=60)
    handled = Counter(name.decode() for name in redis_client.lrange("handled", 0, -1))
    assert set(handled) == {f"m-{n}" for n in range(300)}


def test_a_frozen_consumer_does_not_take_back_what_others_claimed(redis_url, redis_client):
    """SIGSTOP beyond the lease: what it held is another's, and stays so when it wakes."""
    publish(redis_client, 5)
    with process(redis_url, "hold") as frozen:
        assert frozen.stdout.readline() == "holding 5\n"
        os.kill(frozen.pid, signal.SIGSTOP)
        with process(redis_url, "work"):
            eventually(lambda: redis_client.llen("handled") == 5, timeout=30)
            os.kill(frozen.pid, signal.SIGCONT)
            eventually(lambda: all_acked(redis_client))
    assert redis_client.llen("handled") == 5


# --- the server -------------------------------------------------------------------------------


def test_a_server_killed_during_reads_loses_nothing(private_redis):
    with redis.Redis.from_url(private_redis.url) as client:
        publish(client, 400)
        handled: Counter[str] = Counter()
        router = Router()

        @router.raw()
        def handle(message: Message[bytes]) -> None:
            handled[message.id] += 1
            time.sleep(0.001)

        source = StreamSource(client, STREAM, GROUP, lease=1.0, claim_interval=0.1)
        worker = Worker(source, router, batch_size=10)
        worker.start()
        for least in (100, 200):
            eventually(lambda least=least: len(handled) >= least, timeout=30)
            private_redis.kill()
            private_redis.restart()
        eventually(lambda: len(handled) == 400, timeout=60)

        def settled():
            with contextlib.suppress(redis.RedisError):
                return all_acked(client)

        eventually(settled, timeout=30)
        assert worker.stop()
    # Only what was in flight at a kill may run twice: a batch each time.
    assert sum(handled.values()) <= 400 + 2 * 10


def test_acks_that_found_no_server_are_sent_when_it_is_back(private_redis):
    with redis.Redis.from_url(private_redis.url, retry=Retry(NoBackoff(), 0)) as client:
        publish(client, 3)
        source = StreamSource(client, STREAM, GROUP, lease=60.0)
        messages = source.read(10, 1.0)
        private_redis.kill()
        for message in messages:
            message.ack()  # does not raise: it is remembered
        with pytest.raises(StoreError):
            source.read(1, 0.1)
        private_redis.restart()
        eventually(lambda: list(source.read(10, 0.1)) == [])
        assert client.xpending(STREAM, GROUP)["pending"] == 0
        source.close()


# --- the network ------------------------------------------------------------------------------


@pytest.fixture
def proxy(redis_client):
    with Proxy(redis_client.connection_pool.connection_kwargs["port"]) as proxy:
        yield proxy


@pytest.fixture
def through(proxy):
    with redis.Redis.from_url(
        proxy.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0), protocol=2
    ) as client:
        yield client


def test_connections_cut_at_random_lose_nothing(proxy, through, redis_client):
    publish(redis_client, 500)
    handled: Counter[str] = Counter()
    router = Router()

    @router.raw()
    def handle(message: Message[bytes]) -> None:
        handled[message.id] += 1

    source = StreamSource(through, STREAM, GROUP, lease=1.0, claim_interval=0.1)
    worker = Worker(source, router, batch_size=5, threads=2)
    worker.start()
    for _ in range(20):
        time.sleep(0.02)
        proxy.cut()
    eventually(lambda: len(handled) == 500, timeout=60)
    eventually(lambda: all_acked(redis_client), timeout=30)
    assert worker.stop()


def test_a_reply_that_was_lost_is_found_again_before_the_lease_ends(
    proxy, through, redis_client, monkeypatch
):
    # The next command is to be the read itself, not the count of trimmed entries before it.
    monkeypatch.setattr("conquiet.redis.consumer._UNREAD_SECONDS", math.inf)
    source = StreamSource(through, STREAM, GROUP, lease=60.0, claim_interval=30.0)
    assert list(source.read(1, 0.01)) == []
    publish(redis_client, 3)
    proxy.lose_replies(1)
    with pytest.raises(StoreError):
        source.read(10, 0.5)
    assert redis_client.xpending(STREAM, GROUP)["pending"] == 3  # Redis believes we have them
    messages = source.read(10, 1.0)
    assert [message.id for message in messages] == ["m-0", "m-1", "m-2"]
    assert {message.deliveries for message in messages} == {1}  # nobody has seen them before
    source.close()


def test_a_lost_reply_to_an_ack_is_no_harm(proxy, through, redis_client):
    publish(redis_client, 2)
    source = StreamSource(through, STREAM, GROUP)
    first, second = source.read(10, 1.0)
    proxy.lose_replies(1)
    first.ack()
    second.ack()
    assert list(source.read(10, 0.05)) == []
    assert redis_client.xpending(STREAM, GROUP)["pending"] == 0
    source.close()


def test_a_slow_network_only_takes_longer(proxy, through, redis_client):
    publish(redis_client, 10)
    proxy.delay(0.05)
    source = StreamSource(through, STREAM, GROUP)
    messages = source.read(10, 1.0)
    for message in messages:
        message.ack()
    assert len(messages) == 10
    source.close()
    assert redis_client.xpending(STREAM, GROUP)["pending"] == 0


@pytest.mark.parametrize("socket_timeout", [0.3, None])
def test_a_half_closed_connection_does_not_hang(proxy, redis_client, socket_timeout, monkeypatch):
    monkeypatch.setattr("conquiet.redis.wire.REPLY_SECONDS", 0.3)
    publish(redis_client, 1)
    with redis.Redis.from_url(
        proxy.url, socket_timeout=socket_timeout, retry=Retry(NoBackoff(), 0)
    ) as client:
        source = StreamSource(client, STREAM, GROUP)
        [message] = source.read(1, 1.0)
        proxy.mute()
        began = time.monotonic()
        message.ack()  # bounded, and remembered
        with pytest.raises(StoreError):
            source.read(1, 0.1)
        with pytest.raises(SinkUnavailable):
            StreamSink(client, STREAM).publish(numbered(1))
        assert time.monotonic() - began < 20
        proxy.heal()
        proxy.cut()
        eventually(lambda: list(_quietly(source)) == [] and _acked(redis_client))
        source.close()


def _quietly(source):
    try:
        return source.read(10, 0.05)
    except ConquietError:
        return ["failed"]


def _acked(client):
    return client.xpending(STREAM, GROUP)["pending"] == 0


def test_closing_while_the_server_is_away_is_bounded(proxy, through, redis_client, caplog):
    publish(redis_client, 2)
    source = StreamSource(through, STREAM, GROUP)
    first, _ = source.read(10, 1.0)
    with proxy.outage():
        first.ack()
        began = time.monotonic()
        source.close()
        assert time.monotonic() - began < 10
    assert "acks could not be sent" in caplog.text
    assert redis_client.xpending(STREAM, GROUP)["pending"] == 2


def test_a_publish_cut_in_the_middle_answers_for_each(proxy, through, redis_client):
    sink = StreamSink(through, STREAM)
    sink.publish(numbered(1))
    proxy.lose_replies(1)
    with pytest.raises(SinkUnavailable):
        sink.publish(numbered(3, 1))
    assert list(sink.publish_each(numbered(3, 1))) == [None] * 3  # again: at least once, never less


# --- time -------------------------------------------------------------------------------------


def test_a_lease_shorter_than_the_handler_is_renewed(redis_client):
    publish(redis_client, 3)
    calls: Counter[str] = Counter()

    def slow(message: Message[bytes]) -> None:
        calls[message.id] += 1
        time.sleep(0.6)

    workers = []
    for _ in range(2):
        router = Router()
        router.raw(name="slow")(slow)
        source = StreamSource(redis_client, STREAM, GROUP, lease=0.3, claim_interval=0.05)
        workers.append(Worker(source, router))
        workers[-1].start()
    eventually(lambda: len(calls) == 3 and all_acked(redis_client), timeout=30)
    for worker in workers:
        assert worker.stop()
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("jump", [1e6, -1e6])
def test_a_jump_of_the_calendar_clock_does_not_matter(redis_client, monkeypatch, jump):
    publish(redis_client, 3)
    first = StreamSource(redis_client, STREAM, GROUP, lease=60.0, claim_interval=0.01)
    held = first.read(2, 1.0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    monkeypatch.setattr(time, "time_ns", lambda: int((now + jump) * 1e9))
    other = StreamSource(redis_client, STREAM, GROUP, lease=60.0, claim_interval=0.01)
    assert [message.id for message in other.read(10, 0.1)] == ["m-2"]  # and nothing that is held
    first.renew(held)
    assert list(other.read(10, 0.05)) == []
    for message in held:
        message.ack()
    other.close()
    assert [message.id for message in first.read(10, 1.0)] == ["m-2"]
    first.close()


def test_settling_from_many_threads_while_connections_break(proxy, through, redis_client):
    publish(redis_client, 200)
    source = StreamSource(through, STREAM, GROUP, lease=60.0)
    messages = source.read(200, 1.0)

    def settle(some):
        for message in some:
            message.ack()

    threads = [threading.Thread(target=settle, args=(messages[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        proxy.cut()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    eventually(lambda: list(_quietly(source)) == [] and _acked(redis_client), timeout=20)
    source.close()
