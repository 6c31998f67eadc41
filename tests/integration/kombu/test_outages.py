"""A server that forgets, refuses, falls silent or goes away, and comes back: what it costs."""

from __future__ import annotations

import threading
import time
from base64 import b64encode

import kombu
import pytest
import redis
from tests.faults.proxy import Proxy
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

from conquiet.kombu import inspection
from conquiet.kombu.layout import GROUP, Keys

# --- it has forgotten -------------------------------------------------------------------------


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
            assert nothing_comes(connection)  # or its ack meets a new entry of the same millisecond
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


# --- it takes no writes now -------------------------------------------------------------------


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
        assert channel.reader.retry_at > time.monotonic()
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
            eventually(lambda: connection.default_channel.consumer.lease.is_in_doubt)
            drain(connection, taken, 100)
            client.config_set("maxmemory", 0)


# --- it goes away -----------------------------------------------------------------------------


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
    with redis.Redis.from_url(private_redis.url) as client:
        eventually(lambda: client.xlen(Keys().stream("orders", 0)) == 0)


def test_messages_that_could_not_be_given_back_come_back_as_soon_as_redis_answers(private_redis):
    with connected(private_redis.url, lease=600) as consumer:
        put(consumer, "orders", "a", "b")
        taken = Taken(ack=False)
        with consumer.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=2):
            drain(consumer, taken, 2)
            private_redis.kill()
    private_redis.restart()
    with redis.Redis.from_url(private_redis.url) as client:
        eventually(lambda: inspection.queues(client)[0].ready == 2, timeout=10)


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


# --- it falls silent, and the connection stays open -------------------------------------------


def test_a_silent_server_delays_the_end_of_a_connection_by_seconds_at_most(redis_server):
    with Proxy(redis_server.port) as proxy:
        connection = kombu.Connection(streams(proxy.url), transport_options={"lease": 5})
        for number in range(4):
            queue = kombu.Queue(f"orders-{number}", auto_delete=True)
            connection.Consumer(queue, channel=connection.channel(), callbacks=[Taken()]).consume()
        assert nothing_comes(connection)  # reads that block are under way
        proxy.mute()
        ends = threading.Thread(target=connection.release, daemon=True)
        ends.start()
        ends.join(10)
        assert not ends.is_alive()


def test_a_command_waits_for_a_silent_server_for_a_limited_time(redis_server, monkeypatch):
    monkeypatch.setattr("conquiet.kombu.connection.REPLY_TIMEOUT", 0.3)
    with Proxy(redis_server.port) as proxy, connected(proxy.url) as connection:
        put(connection, "orders", "a")
        proxy.mute()
        with pytest.raises(redis.TimeoutError):
            put(connection, "orders", "b")
        proxy.cut()
        proxy.heal()


@pytest.mark.parametrize("fault", ["mute", "refuse"])
def test_a_consumer_of_broadcasts_may_end_while_the_server_is_away(redis_server, fault):
    news = kombu.Exchange("news", type="fanout")
    queue = kombu.Queue("news", news, auto_delete=True, durable=False)
    with Proxy(redis_server.port) as proxy, connected(proxy.url, lease=5) as connection:
        connection.Consumer(queue, callbacks=[Taken()]).consume()
        assert nothing_comes(connection, timeout=0.1)
        getattr(proxy, fault)()


def test_a_consumer_of_broadcasts_that_lost_its_connection_subscribes_again(
    redis_server, redis_url
):
    news = kombu.Exchange("news", type="fanout")
    queue = kombu.Queue("news", news, auto_delete=True, durable=False)
    with (
        Proxy(redis_server.port) as proxy,
        connected(proxy.url) as connection,
        connected(redis_url) as other,
    ):
        taken = Taken()
        with connection.Consumer(queue, callbacks=[taken]):
            assert nothing_comes(connection, timeout=0.1)
            proxy.cut()
            with pytest.raises(connection.connection_errors):
                drain(connection, taken, 1)
            assert nothing_comes(connection, timeout=0.1)
            news(other.default_channel).declare()
            other.Producer().publish("a", exchange=news)
            assert drain(connection, taken, 1) == ["a"]


# --- what it answers is lost ------------------------------------------------------------------


def test_a_channel_that_could_not_give_back_is_helped_by_its_lease(redis_server, redis_url, caplog):
    with Proxy(redis_server.port) as proxy:
        with connected(proxy.url, lease=1) as connection:
            put(connection, "orders", "a")
            kombu.Queue("orders")(connection.default_channel).get()
            proxy.refuse()
        assert "at the latest when its lease ends" in caplog.text
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
