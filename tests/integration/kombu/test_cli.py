"""`conquiet kombu inspect|clean` on queues that a connection has left behind."""

from __future__ import annotations

import json
import os
import sys

import pytest
from kombu import Connection, Producer, Queue
from tests import zygote
from tests.waiting import eventually

import conquiet.kombu  # noqa: F401 - registers the scheme
from conquiet.cli import main
from conquiet.kombu import inspection

PREFIX = "shop:"
DIES = """
import os, sys
import kombu, conquiet.kombu
connection = kombu.Connection(sys.argv[1], transport_options={"lease": 1})
assert kombu.Queue("orders")(connection.default_channel).get() is not None
os._exit(9)
"""


@pytest.fixture
def broker(redis_url):
    return redis_url.replace("redis://", "redis-streams://", 1)


def publish(broker, count, queue="orders", **options):
    with Connection(broker, transport_options=options) as connection:
        channel = connection.default_channel
        queue = queue if isinstance(queue, Queue) else Queue(queue)
        queue(channel).declare()
        for number in range(count):
            Producer(channel).publish(number, routing_key=queue.name)


def read_json(capsys, *arguments, code=0):
    assert main(["kombu", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_inspect_shows_what_waits_and_what_is_worked_on(broker, capsys):
    publish(broker, 3)
    with Connection(broker) as connection:
        Queue("orders")(connection.default_channel).get()
        [queue] = read_json(capsys, "inspect", "--broker", broker)["queues"]
        assert (queue["ready"], queue["pending"], queue["alive"]) == (2, 1, 1)
        assert main(["kombu", "inspect", "orders", "--broker", broker]) == 0
        head, line = capsys.readouterr().out.splitlines()
        assert head.split()[:2] == ["queue", "ready"]
        assert line.split() == ["orders", "2", "1", "1", "0", "0"]


def test_a_prefix_tells_applications_apart(broker, capsys):
    publish(broker, 1, global_keyprefix=PREFIX)
    assert read_json(capsys, "inspect", "--broker", broker) == {"ok": True, "queues": []}
    assert main(["kombu", "inspect", "--broker", broker]) == 0
    assert capsys.readouterr().out == "no queues\n"
    [queue] = read_json(capsys, "inspect", "--broker", broker, "--prefix", PREFIX)["queues"]
    assert queue["name"] == "orders"


def test_a_queue_that_is_not_there_is_named(broker, capsys):
    for arguments in (["inspect", "nowhere"], ["clean", "--delete-queue", "nowhere", "--yes"]):
        assert main(["kombu", *arguments, "--broker", broker]) == 1
        captured = capsys.readouterr()
        assert "no queue 'nowhere'" in captured.err
        assert "deleted" not in captured.out


def test_the_messages_of_a_dead_consumer_are_told_and_given_back(broker, redis_client, capsys):
    publish(broker, 2)
    died = zygote.run([sys.executable, "-c", DIES, broker], env=os.environ, timeout=60)
    assert died.returncode == 9
    eventually(lambda: inspection.queues(redis_client)[0].expired == 1)
    assert main(["kombu", "inspect", "--broker", broker]) == 1
    captured = capsys.readouterr()
    assert "conquiet kombu clean" in captured.err
    assert main(["kombu", "clean", "--broker", broker]) == 0
    assert "removed 1 dead consumers, gave back 1 messages" in capsys.readouterr().out
    [queue] = read_json(capsys, "inspect", "--broker", broker)["queues"]
    assert (queue["ready"], queue["pending"], queue["expired"]) == (2, 0, 0)


def test_a_queue_is_deleted_when_it_is_empty_or_by_force(broker, capsys, redis_client):
    publish(broker, 1)
    delete = ("clean", "--broker", broker, "--delete-queue", "orders", "--yes")
    assert read_json(capsys, *delete, code=1)["kept_queues"] == ["orders"]
    assert main(["kombu", *delete]) == 1
    assert "kept orders: it is not empty" in capsys.readouterr().out
    assert read_json(capsys, *delete, "--force")["deleted_queues"] == ["orders"]
    assert inspection.queues(redis_client) == []


def test_dead_letters_are_told_with_their_reason_and_deleted(broker, capsys, redis_client):
    publish(broker, 1)
    with Connection(broker, transport_options={"delivery_limit": 1}) as connection:
        Queue("orders")(connection.default_channel).get().requeue()
    eventually(lambda: inspection.queues(redis_client)[0].dead_letters == 1)
    found = read_json(capsys, "inspect", "--broker", broker, "--dead-letters", code=1)
    [letter] = found["queues"][0]["letters"]
    assert letter["reason"]
    assert main(["kombu", "inspect", "--dead-letters", "--broker", broker]) == 1
    assert letter["reason"] in capsys.readouterr().out
    delete = ("clean", "--broker", broker, "--delete-dead-letters", "orders", "--yes")
    assert read_json(capsys, *delete)["deleted_dead_letters"] == {"orders": 1}
    assert read_json(capsys, "inspect", "--broker", broker)["ok"]


def test_the_names_of_expired_queues_are_forgotten(broker, capsys, redis_client):
    publish(broker, 1, Queue("brief", expires=0.2))
    eventually(lambda: not inspection.queues(redis_client)[0].exists)
    assert main(["kombu", "inspect", "--broker", broker]) == 0
    assert "brief (expired)" in capsys.readouterr().out
    assert read_json(capsys, "clean", "--broker", broker)["expired_queues"] == ["brief"]
    assert inspection.queues(redis_client) == []


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, 1), ("y", 0, 0)])
def test_somebody_is_asked_before_anything_is_deleted(
    answer, code, left, broker, redis_client, monkeypatch
):
    publish(broker, 0)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert main(["kombu", "clean", "--broker", broker, "--delete-queue", "orders"]) == code
    assert len(inspection.queues(redis_client)) == left
