"""Kills, restarts and bad networks on the whole path: no message lost, no effect twice."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests import needs, zygote
from tests.faults.proxy import Proxy
from tests.faults.redis.effects import OUTBOX, STREAM, make_router, make_source
from tests.waiting import eventually

from conquiet import embedded
from conquiet.message import Message
from conquiet.redis import OutboxSource, StreamSink, StreamSource
from conquiet.relay import Relay
from conquiet.worker import Worker

EFFECTS = Path(__file__).with_name("effects.py")
COUNT = 12


def publish(client, count=COUNT, first=0):
    messages = [
        Message(b"%d" % n, {"id": f"m-{n}", "type": "sample", "source": "/test"})
        for n in range(first, first + count)
    ]
    assert not any(StreamSink(client, STREAM).publish_each(messages))


@contextlib.contextmanager
def process(url, point, *options):
    with zygote.Popen([sys.executable, EFFECTS, url, point, *options]) as running:
        try:
            yield running
        finally:
            running.kill()


@contextlib.contextmanager
def working(client, lease=1.0, slow=0.0, threads=1):
    worker = Worker(
        make_source(client, lease),
        make_router(client, lease, slow),
        batch_size=5,
        threads=threads,
    )
    worker.start()
    try:
        yield worker
    finally:
        worker.stop(grace=10)


def all_acked(client):
    try:
        [group] = client.xinfo_groups(STREAM)
        last = client.xrevrange(STREAM, count=1)[0][0]
    except redis.RedisError:  # the server is down just now
        return False
    return group["pending"] == 0 and group["last-delivered-id"] == last


def check_effects(client, count=COUNT):
    """Each message took effect once, and led to one event."""
    assert client.hgetall("effects") == {b"m-%d" % n: b"1" for n in range(count)}
    events = sorted(fields[b"id"].decode() for _, fields in client.xrange(OUTBOX))
    assert events == sorted(f"m-{n}/billed" for n in range(count))


def patient(port, db=0):
    return redis.Redis(port=port, db=db, retry=Retry(NoBackoff(), 0), socket_timeout=1.0)


# --- kill -9 at every boundary ------------------------------------------------------------------


@pytest.mark.parametrize("point", ["after-lease", "before-exec", "after-exec", "before-ack"])
def test_a_worker_killed_at_any_point_loses_nothing_and_repeats_nothing(
    redis_url, redis_client, point
):
    publish(redis_client)
    with process(redis_url, point) as victim:
        assert victim.wait(30) == -signal.SIGKILL
    with process(redis_url, "none"):
        eventually(lambda: all_acked(redis_client), timeout=60)
    check_effects(redis_client)


def test_a_worker_killed_while_it_handles_loses_nothing(redis_url, redis_client):
    publish(redis_client)
    with process(redis_url, "none", "--slow", "0.3") as victim:
        eventually(lambda: redis_client.keys("conquiet:inbox:*"), timeout=30)
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    with process(redis_url, "none"):
        eventually(lambda: all_acked(redis_client), timeout=60)
    check_effects(redis_client)


def test_a_relay_killed_between_publish_and_mark_publishes_again_and_loses_nothing(redis_client):
    publish(redis_client)
    with working(redis_client):
        eventually(lambda: all_acked(redis_client), timeout=30)
    crashed = OutboxSource(redis_client, OUTBOX, consumer="relay-1")
    StreamSink(redis_client).publish(crashed.read(5, 1))  # and dies before it acks
    relay = Relay(OutboxSource(redis_client, OUTBOX, consumer="relay-1"), StreamSink(redis_client))
    while relay.run_once(0.1).published:
        pass
    relay.source.close()
    published = [m.id for m in StreamSource(redis_client, "sales", "all").replay()]
    assert set(published) == {f"m-{n}/billed" for n in range(COUNT)}
    assert len(published) == COUNT + 5  # at least once, with ids that an inbox knows again
    assert redis_client.xlen(OUTBOX) == 0


# --- the server ---------------------------------------------------------------------------------


def test_a_server_killed_and_restarted_loses_nothing_and_repeats_nothing(private_redis):
    with patient(private_redis.port) as client:
        publish(client, 200)
        with working(client, slow=0.005):
            for _ in range(4):
                time.sleep(0.3)
                private_redis.kill()
                private_redis.restart()
            eventually(lambda: all_acked(client), timeout=60)
        check_effects(client, 200)


@pytest.mark.slow
def test_a_failover_to_a_replica_leaves_effects_events_and_acks_in_step(private_redis):
    with (
        needs.found("Redis", lambda: embedded.redis(private=True)) as spare,
        patient(private_redis.port) as client,
        patient(spare.port) as replica,
    ):
        replica.replicaof("127.0.0.1", private_redis.port)
        publish(client, 100)
        eventually(lambda: client.wait(1, 200) == 1, timeout=30)
        with working(client, slow=0.005):
            eventually(lambda: client.hlen("effects") >= 20, timeout=30)
            private_redis.kill()
        # What the master confirmed and had not sent yet is gone. It is gone as a whole: of a
        # transaction the replica has all or nothing, so the message is still pending there.
        replica.replicaof("NO", "ONE")
        with working(replica):
            eventually(lambda: all_acked(replica), timeout=60)
        check_effects(replica, 100)


# --- the network --------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["cut", "delay", "mute", "lose", "refuse"])
def test_a_bad_network_loses_nothing_and_repeats_nothing(redis_client, fault, threads):
    settings = redis_client.connection_pool.connection_kwargs
    publish(redis_client, 150)
    with (
        Proxy(settings["port"]) as proxy,
        patient(proxy.port, settings["db"]) as client,
        working(client, slow=0.003, threads=threads),
    ):
        for _ in range(5):
            time.sleep(0.1)
            if fault == "cut":
                proxy.cut()
            elif fault == "delay":
                proxy.delay(1.5)  # longer than the client waits for an answer
                time.sleep(0.3)
            elif fault == "mute":
                proxy.mute()
                time.sleep(0.3)
            elif fault == "lose":
                proxy.lose_replies(2)
            else:
                proxy.refuse()
                time.sleep(0.2)
            proxy.heal()
            if fault in ("delay", "mute"):
                proxy.cut()
        eventually(lambda: all_acked(redis_client), timeout=60)
    check_effects(redis_client, 150)


# --- leases -------------------------------------------------------------------------------------


def test_a_lease_shorter_than_the_handler_is_renewed(redis_client):
    publish(redis_client, 6)
    with working(redis_client, lease=0.4, slow=0.3), working(redis_client, lease=0.4, slow=0.3):
        eventually(lambda: all_acked(redis_client), timeout=60)
    check_effects(redis_client, 6)


def test_a_process_that_stands_still_longer_than_its_lease_writes_nothing_late(
    redis_url, redis_client
):
    publish(redis_client)
    with process(redis_url, "none", "--slow", "0.1", "--lease", "0.5") as stopped:
        eventually(lambda: redis_client.keys("conquiet:inbox:*"), timeout=30)
        os.kill(stopped.pid, signal.SIGSTOP)
        with working(redis_client, lease=0.5):
            eventually(lambda: all_acked(redis_client), timeout=60)
        os.kill(stopped.pid, signal.SIGCONT)
        time.sleep(1.0)
        check_effects(redis_client)


@pytest.mark.slow
def test_workers_that_come_and_go_under_load_take_each_message_into_effect_once(
    redis_url, redis_client
):
    done = threading.Event()
    sent = [0]

    def produce():
        while not done.is_set():
            publish(redis_client, 20, first=sent[0])
            sent[0] += 20
            time.sleep(0.02)

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        for _ in range(4):
            with process(redis_url, "none", "--slow", "0.002"):
                time.sleep(0.8)  # and killed
    finally:
        done.set()
        producer.join()
    with working(redis_client, threads=2):
        eventually(lambda: all_acked(redis_client), timeout=60)
    check_effects(redis_client, sent[0])
