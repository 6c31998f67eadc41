"""Messages and queues that live for a while, and queues that hold only so many."""

from __future__ import annotations

import time

import kombu
import pytest
from kombu.exceptions import ChannelError
from tests.integration.kombu.brokers import (
    Taken,
    calls,
    connected,
    drain,
    nothing_comes,
    put,
    since_5_7,
    size,
)
from tests.waiting import eventually

from conquiet.kombu import inspection, lease, scripts
from conquiet.kombu.layout import Keys


def until_expired(redis_client, milliseconds):
    """Wait by the server's clock, which decides."""

    def clock():
        seconds, microseconds = redis_client.time()
        return seconds * 1000 + microseconds / 1000

    end = clock() + milliseconds
    eventually(lambda: clock() > end)


def test_an_expired_message_is_never_delivered(connection, channel, redis_client):
    put(connection, "orders", "short", expiration=0.2)
    put(connection, "orders", "long", expiration=60)
    put(connection, "orders", "ever")
    until_expired(redis_client, 200)
    queue = kombu.Queue("orders")(channel)
    assert [queue.get().payload, queue.get().payload] == ["long", "ever"]
    assert queue.get() is None
    assert inspection.dead_letters(redis_client, "orders") == []


def test_many_expired_messages_do_not_hide_the_ones_behind_them(connection, redis_client):
    put(connection, "orders", *range(1500), expiration=0.2)
    put(connection, "orders", "behind")
    until_expired(redis_client, 200)
    taken = Taken()
    with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=1):
        assert drain(connection, taken, 1) == ["behind"]
    assert redis_client.xlen(Keys().stream("orders", 0)) == 0


def test_a_requeued_message_keeps_its_deadline(connection, channel, redis_client):
    put(connection, "orders", "a", expiration=0.3)
    queue = kombu.Queue("orders")(channel)
    queue.get().requeue()
    until_expired(redis_client, 300)
    assert queue.get() is None


def test_a_message_given_back_keeps_its_deadline(redis_url, redis_client):
    with connected(redis_url) as connection:
        put(connection, "orders", "a", expiration=0.3)
        assert kombu.Queue("orders")(connection.default_channel).get()
    until_expired(redis_client, 300)
    with connected(redis_url) as connection:
        assert kombu.Queue("orders")(connection.default_channel).get() is None


def test_the_ttl_of_a_queue_holds_for_whoever_publishes(redis_url, redis_client):
    with connected(redis_url) as owner, connected(redis_url) as other:
        queue = kombu.Queue("orders", message_ttl=0.2)(owner.default_channel)
        queue.declare()
        put(other, "orders", "a")
        put(other, "orders", "b", expiration=60)
        until_expired(redis_client, 200)
        assert queue.get() is None


def test_a_queue_with_a_ttl_and_no_consumer_does_not_grow(connection, channel, redis_client):
    kombu.Queue("events", message_ttl=0.1)(channel).declare()
    for number in range(5):
        put(connection, "events", *range(5))
        until_expired(redis_client, 100)
        assert redis_client.xlen(Keys().stream("events", 0)) <= 10, number


def test_a_queue_that_nobody_uses_expires_and_is_not_brought_back(
    connection, channel, redis_client
):
    exchange = kombu.Exchange("replies")
    queue = kombu.Queue("reply", exchange, routing_key="ticket", expires=0.3)(channel)
    queue.declare()
    put(connection, "reply", "a", priority=9)
    assert size(connection, "reply") == 1
    eventually(lambda: not channel._has_queue("reply"))
    connection.Producer().publish("late", exchange=exchange, routing_key="ticket")
    put(connection, "reply", "later")
    assert not channel._has_queue("reply")
    assert channel.get_table("replies") == []
    assert redis_client.keys("*q:*") == []


def test_a_queue_does_not_expire_while_it_is_consumed(redis_url):
    with connected(redis_url) as owner, connected(redis_url) as other:
        kombu.Queue("control", expires=0.3)(owner.default_channel).declare()
        taken = Taken()
        with other.Consumer(
            kombu.Queue("control", no_declare=True), callbacks=[taken], prefetch_count=1
        ):
            put(owner, "control", "a")
            drain(other, taken, 1)
            time.sleep(1)  # the consumer is busy, three times as long as the queue may be unused
            assert owner.default_channel._has_queue("control")
            put(owner, "control", "b")
            drain(other, taken, 2)
        eventually(lambda: not owner.default_channel._has_queue("control"))


def test_expired_queues_can_be_forgotten(connection, channel, redis_client):
    exchange = kombu.Exchange("replies")
    kombu.Queue("reply", exchange, routing_key="ticket", expires=0.1)(channel).declare()
    eventually(lambda: not channel._has_queue("reply"))
    [info] = inspection.queues(redis_client)
    assert (info.exists, info.expires_ms) == (False, 100)
    assert inspection.forget_expired_queues(redis_client) == ["reply"]
    assert inspection.queues(redis_client) == []
    assert channel.get_table("replies") == []


def test_expired_queues_are_looked_for_in_slices(connection, channel, redis_client, recorded):
    exchange = kombu.Exchange("replies")
    for number in range(600):  # more than Redis keeps in one piece
        name = f"reply-{number}"
        kombu.Queue(name, exchange, routing_key=name, expires=0.01)(channel).declare()
    kombu.Queue("kept", exchange, routing_key="kept")(channel).declare()
    eventually(lambda: not channel._has_queue("reply-599"))
    for script in (scripts.sweep, scripts.unbind):
        redis_client.script_load(script.body)
    found = []
    seen = recorded(lambda: found.extend(inspection.forget_expired_queues(redis_client)))
    assert len(found) == 600
    assert calls(seen, scripts.sweep) >= 3
    assert calls(seen, scripts.unbind) >= 3
    assert [queue for _, _, queue in channel.get_table("replies")] == ["kept"]


def test_max_length_drops_the_oldest_ready_of_the_lowest_priority(redis_url):
    with connected(redis_url) as owner, connected(redis_url) as other:
        queue = kombu.Queue("orders", max_length=3)(owner.default_channel)
        queue.declare()
        put(other, "orders", "l1", "l2", "l3", priority=9)
        put(other, "orders", "h1", priority=0)
        assert size(owner, "orders") == 3
        got = [queue.get(no_ack=True).payload for _ in range(3)]
        assert got == ["h1", "l2", "l3"]


def test_max_length_never_touches_what_is_being_worked_on(connection, channel):
    queue = kombu.Queue("orders", max_length=2)(channel)
    queue.declare()
    put(connection, "orders", "a", "b")
    held = queue.get()
    put(connection, "orders", "c", "d", "e")
    assert size(connection, "orders") == 2
    held.requeue()
    assert {queue.get().payload for _ in range(3)} == {"a", "d", "e"}


@since_5_7
def test_without_max_length_nothing_is_ever_dropped(connection, channel, redis_client):
    with connection.Producer() as producer, producer.batch(max_size=5000):
        for number in range(12_000):
            producer.publish(number, exchange="", routing_key="orders", serializer="json")
    assert size(connection, "orders") == 12_000


def test_an_expiration_that_is_no_number_is_none(connection, channel):
    connection.Producer().publish("a", exchange="", routing_key="orders", properties={})
    message = channel.prepare_message("b", properties={"expiration": "soon"})
    channel.basic_publish(message, exchange="", routing_key="orders")
    assert size(connection, "orders") == 2
    assert not nothing_comes_of(connection)


def nothing_comes_of(connection):
    with connection.Consumer(kombu.Queue("orders"), callbacks=[Taken()]):
        return nothing_comes(connection, timeout=2)


def test_a_queue_that_was_only_looked_into_expires(connection, channel):
    queue = kombu.Queue("reply", expires=0.3)(channel)
    queue.declare()
    assert queue.get() is None
    eventually(lambda: not channel._has_queue("reply"))


@pytest.mark.parametrize(
    "limits",
    [
        {"expires": 0},
        {"expires": -1},
        {"message_ttl": -1},
        {"max_length": -1},
        {"queue_arguments": {"x-max-length": "few"}},
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(channel, redis_client, limits):
    queue = kombu.Queue("orders", **limits)(channel)
    with pytest.raises(ChannelError, match=r"PRECONDITION_FAILED - x-.* of queue 'orders' is"):
        queue.declare()
    assert redis_client.keys("*orders*") == []  # a channel keeps a lease, too


def test_expired_queues_are_forgotten_by_whoever_consumes(
    connection, channel, redis_url, redis_client, monkeypatch
):
    keys, exchange = Keys(), kombu.Exchange("replies")
    for name in ("old", "reply"):
        kombu.Queue(name, exchange, routing_key=name, expires=0.1)(channel).declare()
    with connected(redis_url, lease=1) as other:
        other.Consumer(kombu.Queue("orders"), callbacks=[Taken()]).consume()
        eventually(lambda: channel.get_table("replies") == [])
        put(connection, "old", "late")  # its name is still known, so it does not come back
        assert redis_client.keys("*q:*:old") == []
        assert set(redis_client.hkeys(keys.queues)) == {b"old", b"orders", b"reply"}
        kombu.Queue("reply", exchange, routing_key="reply", expires=60)(channel).declare()
        redis_client.zadd(keys.gone, {"deleted since": 1})
        monkeypatch.setattr(lease, "NAMES_KEPT", 0)
        eventually(lambda: set(redis_client.hkeys(keys.queues)) == {b"orders", b"reply"})
        assert [queue for _, _, queue in channel.get_table("replies")] == ["reply"]
        assert redis_client.zrange(keys.gone, 0, -1) == [b""]
