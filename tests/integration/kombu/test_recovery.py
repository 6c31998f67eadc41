"""What comes back, when, and to whom: after kills, restarts, lost scripts, groups and streams."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from pathlib import Path

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
    size,
    streams,
)
from tests.waiting import eventually

from conquiet.kombu import inspection
from conquiet.kombu.keys import GROUP, Keys

HOLDING = Path(__file__).with_name("holding.py")


@pytest.fixture
def holder(redis_url):
    """Start processes that hold messages; they are gone when the test ends."""
    started = []

    def start(count=1, **options):
        process = subprocess.Popen(
            [sys.executable, HOLDING, streams(redis_url), str(count), json.dumps(options)],
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


def test_the_messages_of_a_killed_process_are_back_within_its_lease_and_in_place(redis_url, holder):
    lease = 2.0
    with connected(redis_url, lease=lease) as connection:
        put(connection, "orders", *range(5))
        process = holder(3, lease=lease)
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            assert drain(connection, taken, 2) == [3, 4]
            assert nothing_comes(connection)
            kill(process)
            began = time.monotonic()
            assert drain(connection, taken, 5) == [3, 4, 0, 1, 2]
            waited = time.monotonic() - began
        assert all(message.headers["redelivered"] for message in taken.messages[2:])
        assert waited < lease + 2.0  # the rest is the machine's


def test_a_living_process_keeps_its_message_however_long_it_takes(redis_url):
    with connected(redis_url, lease=2) as slow, connected(redis_url, lease=2) as other:
        put(slow, "orders", "long")
        taken = Taken()

        def work(body, message):
            time.sleep(3)  # the loop stands still for longer than the lease
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
                # Either of them may get it; whoever has it must stay the only one.
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


def test_lost_scripts_are_sent_again(redis_url, redis_client):
    with connected(redis_url) as connection:
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            for number in range(3):
                redis_client.script_flush()
                put(connection, "orders", number)
                drain(connection, taken, number + 1)


def test_lost_streams_and_groups_are_made_again(redis_url, redis_client):
    key = Keys().stream("orders", 0)
    with connected(redis_url) as connection:
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            assert nothing_comes(connection)
            redis_client.delete(key)  # UNBLOCKED
            put(connection, "orders", 1)
            drain(connection, taken, 1)
            assert nothing_comes(connection)
            redis_client.xgroup_destroy(key, GROUP)  # NOGROUP
            put(connection, "orders", 2)
            drain(connection, taken, 2)
            redis_client.flushall()
            put(connection, "orders", 3)
            assert drain(connection, taken, 3) == [1, 2, 3]


def test_a_consumer_of_a_fanout_outlives_an_emptied_database(redis_url, redis_client):
    exchange = kombu.Exchange("pidbox", type="fanout")
    queue = kombu.Queue("control", exchange, expires=60, message_ttl=60)
    with connected(redis_url) as connection, connected(redis_url) as other:
        exchange(other.default_channel).declare()
        taken = Taken()
        with connection.Consumer(queue, callbacks=[taken]):
            assert nothing_comes(connection)
            redis_client.flushall()
            put(other, "unrelated", "a")

            def bound_again():
                assert nothing_comes(connection, timeout=0.1)
                return other.default_channel.get_table("pidbox")

            eventually(bound_again)
            other.Producer().publish("ping", exchange=exchange)
            assert drain(connection, taken, 1) == ["ping"]
        [info] = [item for item in inspection.queues(redis_client) if item.name == "control"]
        assert (info.expires_ms, info.message_ttl_ms) == (60_000, 60_000)


@pytest.mark.parametrize(
    "error",
    [
        redis.ResponseError("MISCONF Redis is configured to save RDB snapshots, but it cannot"),
        redis.ResponseError("NOREPLICAS Not enough good replicas to write."),
        redis.ResponseError("BUSY Redis is busy running a script."),
        redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'"),
    ],
    ids=lambda error: str(error).split()[0],
)
def test_what_passes_by_itself_does_not_end_a_worker(redis_url, error):
    with connected(redis_url) as connection:
        channel = connection.default_channel
        channel._recover(error)
        assert channel._retry_at > time.monotonic()
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            channel._recover(redis.ResponseError("WRONGTYPE a key of another kind"))


def test_a_master_that_became_a_replica_is_an_error_of_the_connection(private_redis):
    with (
        redis.Redis.from_url(private_redis.url) as client,
        connected(private_redis.url) as connection,
    ):
        put(connection, "orders", 1, 2)
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=1):
            drain(connection, taken, 1)
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(redis.ConnectionError):
                drain(connection, taken, 2)
            client.replicaof("no", "one")
            assert drain(connection, taken, 2) == [1, 2]


def test_a_full_server_can_still_be_emptied(private_redis):
    with (
        redis.Redis.from_url(private_redis.url) as client,
        connected(private_redis.url, lease=1) as connection,
    ):
        put(connection, "orders", *range(100))
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=10):
            drain(connection, taken, 1)
            client.config_set("maxmemory", 1)
            drain(connection, taken, 100)
            client.config_set("maxmemory", 0)


def test_a_restart_of_the_server_loses_nothing(private_redis):
    with connected(private_redis.url) as connection:
        put(connection, "orders", *range(10))
        taken = Taken()
        consumer = connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=5)
        consumer.consume()
        drain(connection, taken, 3)
        private_redis.kill()
        private_redis.restart()
        with pytest.raises(connection.connection_errors):
            drain(connection, taken, 100, timeout=5)
    seen = set(taken)
    with connected(private_redis.url) as connection:
        again = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[again]):
            while not nothing_comes(connection, timeout=1.5):
                pass
        assert seen | set(again) == set(range(10))


def test_a_channel_that_could_not_give_back_is_helped_by_its_lease(redis_server, redis_url, caplog):
    with Proxy(redis_server.port) as proxy:
        with connected(proxy.url, lease=1) as connection:
            put(connection, "orders", "a")
            kombu.Queue("orders")(connection.default_channel).get()
            proxy.refuse()
        assert "come back when its lease ends" in caplog.text
    with connected(redis_url, lease=1) as connection:
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            assert drain(connection, taken, 1) == ["a"]


def test_what_a_lost_reply_held_is_given_back_by_the_next_read(
    redis_server, redis_url, redis_client
):
    with Proxy(redis_server.port) as proxy, connected(proxy.url) as connection:
        taken = Taken(ack=False)
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=3):
            put(connection, "orders", 1)
            drain(connection, taken, 1)
            assert nothing_comes(connection)  # a read that blocks is under way
            proxy.mute()
            with connected(redis_url) as other:
                put(other, "orders", 2, 3)
            eventually(lambda: inspection.queues(redis_client)[0].pending == 2)
            proxy.cut()
            proxy.heal()
            with pytest.raises(connection.connection_errors):
                drain(connection, taken, 2)
            assert drain(connection, taken, 3) == [1, 2, 3]


def test_what_a_lost_reply_held_is_given_back_by_the_next_get(redis_server, redis_url):
    with Proxy(redis_server.port) as proxy, connected(proxy.url) as connection:
        put(connection, "orders", "first", "second", "third")
        queue = kombu.Queue("orders")(connection.default_channel)
        assert queue.get().payload == "first"
        proxy.lose_replies(1, holding=b64encode(b'"second"'))  # not one to the thread of leases
        with pytest.raises(connection.connection_errors):
            queue.get()
        assert [queue.get().payload, queue.get().payload] == ["second", "third"]


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
    subprocess.run([sys.executable, "-c", code, streams(redis_url)], check=True, timeout=60)
    with connected(redis_url) as connection:
        assert size(connection, "orders") == 1


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
            put(connection, "orders", *range(8))
            loop.run(lambda: seen)
            put(connection, "control", "ping")
            loop.run(lambda: len(seen) == 9)
        assert [body for body in seen if body != "ping"] == list(range(8))
        assert seen.index("ping") < 6


def test_acks_of_an_idle_loop_are_sent(redis_url, redis_client):
    with connected(redis_url) as connection, Loop(connection, 10, ack=False) as loop:
        put(connection, "orders", 1)
        loop.run(lambda: loop.taken)
        for _ in range(3):
            loop.hub.run_once()  # a read that blocks is under way
        threading.Thread(target=loop.taken.messages[0].ack).start()
        eventually(lambda: inspection.queues(redis_client)[0].pending == 0)


@since_5_7  # before, the loop is told by an error, as Celery expects
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


def test_an_ack_that_redis_did_not_hear_outlives_its_channel(private_redis):
    with connected(private_redis.url) as producer:
        put(producer, "orders", "a", "b")
    with connected(private_redis.url, lease=1) as consumer:
        early, late = Taken(ack=False), Taken(ack=False)
        with consumer.Consumer(kombu.Queue("orders"), callbacks=[early], prefetch_count=1):
            drain(consumer, early, 1)
            other = consumer.channel()
            late.messages.append(kombu.Queue("orders")(other).get())
            private_redis.kill()
            early.messages[0].ack()
    late.messages[0].ack()
    private_redis.restart()
    client = redis.Redis.from_url(private_redis.url)
    eventually(lambda: client.xlen(Keys().stream("orders", 0)) == 0)


@pytest.mark.slow
def test_after_an_outage_the_living_are_not_taken_for_dead(private_redis, caplog):
    with (
        connected(private_redis.url) as producer,
        connected(private_redis.url, lease=2) as busy,
        connected(private_redis.url, lease=2) as new,
    ):
        put(producer, "orders", "long")
        held = Taken(ack=False)
        with busy.Consumer(kombu.Queue("orders"), callbacks=[held], prefetch_count=1):
            drain(busy, held, 1)
            private_redis.kill()
            time.sleep(2)  # longer than the lease lasts
            private_redis.restart()
            with new.Consumer(kombu.Queue("orders"), callbacks=[Taken()]):
                assert nothing_comes(new, 1.5)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [sum(text in one for one in said) for text in ("no answer", "answers again")] == [1, 1]


def test_a_lost_reply_of_a_queue_that_was_cancelled_meanwhile_is_given_back(redis_url):
    with connected(redis_url) as producer, connected(redis_url) as consumer:
        channel = consumer.channel()
        left = consumer.Consumer(kombu.Queue("left"), channel=channel, callbacks=[Taken()])
        consumer.Consumer(kombu.Queue("kept"), channel=channel, callbacks=[Taken()]).consume()
        left.consume()
        assert nothing_comes(consumer)  # a read that blocks is under way, also for what is left
        left.cancel()
        put(producer, "left", "a")
        assert size(producer, "left") == 0
        channel._in_poll.disconnect()
        assert nothing_comes(consumer)
        assert size(producer, "left") == 1


@pytest.mark.slow
def test_a_server_that_does_not_answer_costs_nobody_elses_lease(
    redis_server, redis_url, redis_client
):
    with (
        Proxy(redis_server.port) as proxy,
        connected(redis_url, lease=4) as healthy,
        connected(proxy.url, lease=4, socket_timeout=60) as mute,
    ):
        for number in range(6):
            queue = kombu.Queue(f"mute-{number}")
            mute.Consumer(queue, channel=mute.channel(), callbacks=[Taken()]).consume()
        healthy.Consumer(kombu.Queue("orders"), callbacks=[Taken()]).consume()
        proxy.mute()
        end = time.monotonic() + 5
        while time.monotonic() < end:
            found = {info.name: info for info in inspection.queues(redis_client)}
            assert found["orders"].alive == 1
            time.sleep(0.1)
        proxy.cut()
        proxy.heal()


def test_what_is_given_back_does_not_count_towards_the_delivery_limit(redis_url):
    with connected(redis_url, delivery_limit=2) as connection:
        channel = connection.default_channel
        queue = kombu.Queue("orders")(channel)
        put(connection, "orders", "a")
        for _ in range(4):
            assert queue.get().payload == "a"
            channel.basic_recover(requeue=True)
        assert queue.get().payload == "a"


def test_leases_of_the_long_dead_are_forgotten(redis_url, redis_client):
    now_ms, day_ms = redis_client.time()[0] * 1000, 86_400_000
    dead = {"yesterday's": now_ms - day_ms - 1000, "today's": now_ms - 1000}
    redis_client.zadd(Keys().leases, dead)
    with connected(redis_url) as connection:
        lease = connection.default_channel.join("orders")
        lease.renew()
        left = {name.decode() for name in redis_client.zrange(Keys().leases, 0, -1)}
        assert left == {"today's", lease.consumer}
