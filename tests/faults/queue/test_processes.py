"""Consumers that are processes: killed, stopped, and many at once."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from tests import zygote
from tests.waiting import eventually

from conquiet.queue import QueueConfig, RedisStreamsQueue

STREAM, GROUP = "orders", "billing"
MESSAGES = 20_000


@pytest.fixture
def start(redis_url):
    """Start a worker in a role; what still runs at the end of the test is killed."""
    processes = []

    def start(role, name):
        script = Path(__file__).with_name("worker.py")
        process = zygote.Popen([sys.executable, str(script), role, redis_url, name])
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def queue(redis_client):
    return RedisStreamsQueue(redis_client, QueueConfig(STREAM, GROUP, "test"))


def owners(client):
    rows = client.xpending_range(STREAM, GROUP, "-", "+", 10)
    return {row["message_id"].decode(): row["consumer"].decode() for row in rows}


def test_2_3_a_consumer_killed_before_its_ack_and_its_message_claimed_by_another_process(
    queue, redis_client, start
):
    sent = queue.enqueue({"n": 1})
    victim = start("hold", "victim")
    eventually(lambda: redis_client.get("held") == sent.encode(), timeout=30)
    victim.kill()
    victim.wait()
    assert owners(redis_client) == {sent: "victim"}
    heir = start("claim", "heir")
    assert heir.wait(30) == 0
    assert redis_client.lrange("claimed", 0, -1) == [sent.encode()]
    assert owners(redis_client) == {}


def test_6_3_sigterm_ends_a_process_well_and_leaves_its_message_pending(queue, redis_client, start):
    sent = queue.enqueue({"n": 1})
    service = start("loop", "service")
    eventually(lambda: redis_client.get("held") == sent.encode(), timeout=30)
    eventually(lambda: redis_client.info("clients")["blocked_clients"] == 1)
    service.send_signal(signal.SIGTERM)
    assert service.wait(10) == 0
    assert owners(redis_client) == {sent: "service"}


@pytest.mark.slow
@pytest.mark.usefixtures("queue")
def test_2_3_four_processes_on_one_group_lose_nothing_and_share_nothing(redis_client, start):
    for name in ("b-1", "b-2", "b-3", "b-4"):
        start("share", name)
    eventually(lambda: redis_client.llen("ready") == 4, timeout=30)
    with redis_client.pipeline(transaction=False) as pipe:
        for n in range(MESSAGES):
            pipe.xadd(STREAM, {"data": f'{{"n": {n}}}'})
        pipe.execute()
    eventually(
        lambda: redis_client.llen("done") + redis_client.llen("held by two") >= MESSAGES,
        timeout=100,
        interval=0.1,
    )
    redis_client.set("end", 1)
    eventually(lambda: redis_client.xpending(STREAM, GROUP)["pending"] == 0)
    assert redis_client.llen("held by two") == 0
    done = sorted(int(n) for n in redis_client.lrange("done", 0, -1))
    assert done == list(range(MESSAGES))
