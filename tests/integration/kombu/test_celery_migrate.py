"""`celery migrate` carries tasks from lists to streams, and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kombu import Connection, Producer, Queue

from conquiet.kombu import inspection

ROOT = Path(__file__).resolve().parents[3]
TASK = "tests.integration.kombu.celery_app.note"


@pytest.fixture
def migrate(redis_url, tmp_path):
    def run(source, destination):
        celery = str(Path(sys.executable).with_name("celery"))
        command = [sys.executable, celery, "-A", "tests.integration.kombu.celery_app", "migrate"]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        subprocess.run(
            [*command, source, destination, "--ack-messages", "--timeout", "1"],
            cwd=tmp_path,
            env={**os.environ, "REDIS_URL": redis_url, "PYTHONPATH": paths},
            check=True,
            timeout=60,
        )

    return run


def send(url, count):
    with Connection(url) as connection:
        producer = Producer(connection.default_channel, serializer="json")
        for number in range(count):
            producer.publish(
                [[f"{number}"], {}, {}],
                routing_key="work",
                declare=[Queue("work")],
                headers={"task": TASK, "id": f"id-{number}", "lang": "py"},
                priority=3 * (number % 2),
            )


def test_tasks_move_to_streams_and_back(redis_url, redis_client, migrate):
    lists = redis_url
    streams = redis_url.replace("redis://", "redis-streams://", 1)
    send(lists, 6)
    migrate(lists, streams)
    [queue] = inspection.queues(redis_client)
    assert (queue.name, queue.ready, queue.pending) == ("work", 6, 0)
    assert not redis_client.exists("work", "work\x06\x163", "unacked")
    migrate(streams, lists)
    [queue] = inspection.queues(redis_client)
    assert (queue.ready, queue.pending) == (0, 0)
    assert redis_client.llen("work") + redis_client.llen("work\x06\x163") == 6
