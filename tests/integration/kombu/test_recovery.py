"""What comes back, when, and to whom: after kills, forks, too many deliveries, poison."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import kombu
import pytest
from tests import zygote
from tests.integration.kombu.brokers import (
    Taken,
    connected,
    drain,
    nothing_comes,
    put,
    size,
    streams,
)
from tests.waiting import eventually

from conquiet.kombu import inspection, lease
from conquiet.kombu.layout import Keys

HOLDING = Path(__file__).with_name("holding.py")


@pytest.fixture
def holder(redis_url):
    """Start processes that hold messages; they are gone when the test ends."""
    started = []

    def start(count=1, *how, **options):
        process = zygote.Popen(
            [sys.executable, HOLDING, streams(redis_url), str(count), json.dumps(options), *how],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "holding\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(20)
        process.stdout.close()


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)


# --- processes that end, or are suspended -----------------------------------------------------


def test_the_messages_of_a_killed_process_are_back_within_its_lease_and_in_place(redis_url, holder):
    seconds = 2.0
    with connected(redis_url, lease=seconds) as connection:
        put(connection, "orders", *range(5))
        process = holder(3, lease=seconds)
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            assert drain(connection, taken, 2) == [3, 4]
            assert nothing_comes(connection)
            kill(process)
            began = time.monotonic()
            assert drain(connection, taken, 5) == [3, 4, 0, 1, 2]
            waited = time.monotonic() - began
        assert all(message.headers["redelivered"] for message in taken.messages[2:])
        assert waited < seconds + 2.0  # the rest is the machine's


def test_a_living_process_keeps_its_message_however_long_it_takes(redis_url):
    with connected(redis_url, lease=2) as slow, connected(redis_url, lease=2) as other:
        put(slow, "orders", "long")
        taken = Taken()

        def work(body, message):
            time.sleep(3)  # blocks the loop for longer than the lease
            taken(body, message)

        others = Taken()
        stop = threading.Event()

        def wait():
            with other.Consumer(kombu.Queue("orders"), callbacks=[others]):
                while not stop.is_set():
                    nothing_comes(other, timeout=0.1)

        with slow.Consumer(kombu.Queue("orders"), callbacks=[work]):
            thread = threading.Thread(target=wait)
            thread.start()
            while not taken:
                # Either consumer may get it, but only one of them.
                if others:
                    break
                nothing_comes(slow, timeout=0.1)
            stop.set()
            thread.join()
        assert len(taken) + len(others) == 1


def test_a_suspended_process_loses_its_messages_and_harms_nobody_when_it_wakes(redis_url, holder):
    with connected(redis_url, lease=1) as connection:
        put(connection, "orders", "a")
        process = holder(1, lease=1)
        os.kill(process.pid, signal.SIGSTOP)
        taken = Taken(ack=False)
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            drain(connection, taken, 1)
            os.kill(process.pid, signal.SIGCONT)
            kill(process)
            assert nothing_comes(connection)  # it did not take it back
            taken.messages[0].ack()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["busy"], id="threads", marks=pytest.mark.slow),
        pytest.param(["busy", "gevent"], id="gevent"),
    ],
)
def test_a_callback_that_computes_for_longer_than_the_lease_keeps_its_message(
    redis_url, holder, how
):
    with connected(redis_url, lease=1) as connection:
        put(connection, "orders", "a")
        process = holder(1, *how, lease=1)
        with connection.Consumer(kombu.Queue("orders"), callbacks=[Taken()]):
            while process.poll() is None:
                assert nothing_comes(connection)
        assert process.returncode == 0
        assert size(connection, "orders") == 0


def test_after_a_pause_longer_than_the_lease_a_consumer_drops_what_others_got(redis_url, caplog):
    with connected(redis_url, lease=1) as paused, connected(redis_url, lease=1) as other:
        put(other, "orders", *range(4))
        first, others = Taken(ack=False), Taken()
        consumer = paused.Consumer(kombu.Queue("orders"), callbacks=[first], prefetch_count=3)
        consumer.consume()
        drain(paused, first, 1)  # and two are buffered
        lease.keeper.remove(paused.transport.leases)  # as if the process were suspended
        with other.Consumer(kombu.Queue("orders"), callbacks=[others]):
            assert sorted(drain(other, others, 4)) == [0, 1, 2, 3]
        with pytest.raises(paused.connection_errors, match="got 1 of its messages"):
            drain(paused, first, 2)
        assert first == [0]
        assert "got 2 that were buffered" in caplog.text
        put(other, "orders", "new")
        assert drain(paused, first, 2) == [0, "new"]


def test_after_a_pause_a_consumer_keeps_what_was_not_taken(redis_url):
    with connected(redis_url, lease=1) as paused:
        put(paused, "orders", *range(3))
        taken = Taken(ack=False)
        with paused.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=3):
            drain(paused, taken, 1)
            lease.keeper.remove(paused.transport.leases)
            found = paused.default_channel.consumer.lease
            eventually(lambda: found.is_in_doubt)
            assert drain(paused, taken, 3) == [0, 1, 2]


def test_dead_consumers_are_removed_and_nothing_pending_with_them(redis_url, redis_client, holder):
    with connected(redis_url, lease=1) as connection:
        put(connection, "orders", "a", "b")
        kill(holder(2, lease=1))
        eventually(lambda: inspection.queues(redis_client)[0].expired == 1, timeout=10)
        removed = inspection.remove_dead_consumers(redis_client)
        assert removed == inspection.Removed(consumers=1, given_back=2)
        [info] = inspection.queues(redis_client)
        assert (info.ready, info.pending, info.consumers) == (2, 0, ())
        assert inspection.remove_dead_consumers(redis_client) == inspection.Removed(0, 0)


def test_a_forked_child_leaves_the_parents_messages_alone_and_has_its_own(redis_url):
    with connected(redis_url) as connection:
        put(connection, "orders", *range(4))
        taken = Taken(ack=False)
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=2):
            drain(connection, taken, 2)
            pid = os.fork()
            if not pid:  # pragma: no cover - the child
                code = 1
                try:
                    taken.clear()
                    assert drain(connection, taken, 2) == [2, 3]
                    taken.messages[-1].ack()
                    put(connection, "orders", "from the child")
                    connection.release()
                    code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert taken == [0, 1]
            for message in taken.messages:
                message.ack()
            drain(connection, taken, 4)
            assert taken == [0, 1, 2, "from the child"]
            for message in taken.messages:
                if not message.acknowledged:
                    message.ack()
        eventually(lambda: size(connection, "orders") == 0)


def test_a_process_that_just_ends_gives_back(redis_url):
    code = (
        "import kombu, conquiet.kombu, sys\n"
        "connection = kombu.Connection(sys.argv[1])\n"
        "connection.Producer().publish('a', exchange='', routing_key='orders')\n"
        "assert kombu.Queue('orders')(connection.default_channel).get()\n"
    )
    zygote.run([sys.executable, "-c", code, streams(redis_url)], check=True, timeout=60)
    with connected(redis_url) as connection:
        assert size(connection, "orders") == 1


def test_a_process_that_ends_right_after_an_ack_does_not_get_the_message_again(redis_url):
    code = (
        "import kombu, conquiet.kombu, sys\n"
        "connection = kombu.Connection(sys.argv[1])\n"
        "connection.Producer().publish('a', exchange='', routing_key='orders')\n"
        "kombu.Queue('orders')(connection.default_channel).get().ack()\n"
    )
    zygote.run([sys.executable, "-c", code, streams(redis_url)], check=True, timeout=60)
    with connected(redis_url) as connection:
        assert size(connection, "orders") == 0


def test_an_ack_by_a_channel_that_reads_nothing_reaches_redis(redis_url, redis_client):
    with connected(redis_url) as reader, connected(redis_url) as other:
        put(reader, "orders", "a")
        message = kombu.Queue("orders")(reader.default_channel).get()
        other.default_channel.basic_ack(message.delivery_tag)
        assert redis_client.xlen(Keys().stream("orders", 0)) == 0


def test_leases_of_the_long_dead_are_forgotten(redis_url, redis_client):
    now_ms, day_ms = redis_client.time()[0] * 1000, 86_400_000
    dead = {"yesterday's": now_ms - day_ms - 1000, "today's": now_ms - 1000}
    redis_client.zadd(Keys().leases, dead)
    with connected(redis_url) as connection:
        ours = connection.default_channel.consumer.subscribe("orders")
        ours.renew()
        left = {name.decode() for name in redis_client.zrange(Keys().leases, 0, -1)}
        assert left == {"today's", ours.consumer}


# --- the delivery limit -----------------------------------------------------------------------


def test_a_message_that_kills_its_consumers_becomes_a_dead_letter(redis_url, redis_client, holder):
    options = {"lease": 1, "delivery_limit": 2}
    with connected(redis_url, **options) as connection:
        put(connection, "orders", "poison")
        for _ in range(2):
            kill(holder(1, **options))
            eventually(
                lambda: inspection.remove_dead_consumers(redis_client).given_back, timeout=10
            )
        assert kombu.Queue("orders")(connection.default_channel).get() is None
        [letter] = inspection.dead_letters(redis_client, "orders")
        assert letter.deliveries == 2
        assert letter.reason == "it was delivered 2 times, and never acked"
        assert json.loads(letter.message)["properties"]["delivery_info"]["routing_key"] == "orders"
        assert inspection.delete_dead_letters(redis_client, "orders") == 1


def test_requeues_count_towards_the_delivery_limit_and_closing_does_not(redis_url, redis_client):
    for _ in range(3):
        with connected(redis_url, delivery_limit=2) as connection:
            put(connection, "orders", *["a"][: not size_or_none(connection)])
            assert kombu.Queue("orders")(connection.default_channel).get()
    with connected(redis_url, delivery_limit=2) as connection:
        queue = kombu.Queue("orders")(connection.default_channel)
        queue.get().requeue()
        queue.get().requeue()
        assert queue.get() is None
        [letter] = inspection.dead_letters(redis_client, "orders")
        assert letter.reason == "it was rejected in its delivery 2, the last one allowed"


def size_or_none(connection):
    try:
        return size(connection, "orders")
    except kombu.exceptions.ChannelError:
        return 0


def test_without_a_limit_a_message_is_delivered_for_ever(redis_url, redis_client):
    with connected(redis_url) as connection:
        put(connection, "orders", "a")
        queue = kombu.Queue("orders")(connection.default_channel)
        for _ in range(50):
            queue.get().requeue()
        assert inspection.dead_letters(redis_client, "orders") == []


def test_what_is_given_back_does_not_count_towards_the_delivery_limit(redis_url):
    with connected(redis_url, delivery_limit=2) as connection:
        channel = connection.default_channel
        queue = kombu.Queue("orders")(channel)
        put(connection, "orders", "a")
        for _ in range(4):
            assert queue.get().payload == "a"
            channel.basic_recover(requeue=True)
        assert queue.get().payload == "a"


# --- poison -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"m": "no json"}, "it cannot be decoded"),
        ({"m": '{"body": "x"}'}, "it cannot be decoded"),
        ({"m": '{"body": "%%", "properties": {"body_encoding": "nothing"}}'}, "cannot be decoded"),
        ({"other": "field"}, "it has no field m"),
    ],
)
def test_poison_among_messages_harms_none_of_them(redis_url, redis_client, fields, reason, caplog):
    with connected(redis_url) as connection:
        put(connection, "orders", 1)
        redis_client.xadd(Keys().stream("orders", 0), fields)
        put(connection, "orders", 2)
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=10):
            assert drain(connection, taken, 2) == [1, 2]
        letters = eventually(lambda: inspection.dead_letters(redis_client, "orders"))
        assert reason in letters[0].reason
        assert size(connection, "orders") == 0


def test_poison_that_wakes_a_waiting_consumer_harms_nothing(redis_url, redis_client, caplog):
    with connected(redis_url) as connection:
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            assert nothing_comes(connection)
            redis_client.xadd(Keys().stream("orders", 0), {"other": "field"})
            put(connection, "orders", 1)
            assert drain(connection, taken, 1) == [1]
        eventually(lambda: inspection.dead_letters(redis_client, "orders"))
