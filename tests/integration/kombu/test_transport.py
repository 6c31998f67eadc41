"""The transport as a whole: names, batches, concurrency, what is said about the state of things."""

from __future__ import annotations

import threading

import kombu
import pytest
from kombu.transport import TRANSPORT_ALIASES
from tests.integration.kombu.brokers import Taken, connected, drain, put, since_5_7, size, streams
from tests.waiting import eventually

from conquiet.kombu import Transport, inspection, lease
from conquiet.kombu.layout import Keys
from conquiet.kombu.lease import keeper


def test_importing_registers_the_schemes():
    for scheme in ("redis-streams", "rediss-streams"):
        assert TRANSPORT_ALIASES[scheme] == "conquiet.kombu:Transport"
    assert TRANSPORT_ALIASES["sentinel-streams"] == "conquiet.kombu:SentinelTransport"
    assert TRANSPORT_ALIASES["redis"] == "kombu.transport.redis:Transport"


def test_what_it_says_it_can():
    implements = Transport.implements
    assert implements.asynchronous
    assert implements.exchange_type == {"direct", "topic", "fanout"}


@since_5_7
def test_a_batch_is_sent_as_one_and_routed_as_usual(redis_url, redis_client):
    with connected(redis_url) as connection:
        channel = connection.default_channel
        fanout = kombu.Exchange("news", type="fanout")
        topic = kombu.Exchange("shop", type="topic")
        queues = [
            kombu.Queue("one", fanout),
            kombu.Queue("two", fanout),
            kombu.Queue("orders", topic, routing_key="order.#"),
            kombu.Queue("short", max_length=1),
        ]
        for queue in queues:
            queue(channel).declare()
        producer = connection.Producer(serializer="json")
        with producer.batch():
            producer.publish("all", exchange=fanout)
            producer.publish("order", exchange=topic, routing_key="order.new")
            producer.publish("nowhere", exchange=topic, routing_key="other")
            for number in range(5):
                producer.publish(number, exchange="", routing_key="short")
                producer.publish(number, exchange="", routing_key="plain", priority=number)
            assert redis_client.xlen(Keys().stream("one", 0)) == 0
        sizes = {info.name: info.ready for info in inspection.queues(redis_client)}
        assert sizes == {"one": 1, "two": 1, "orders": 1, "short": 1, "plain": 5}


@since_5_7
def test_a_batch_survives_a_lost_script(redis_url, redis_client):
    with connected(redis_url) as connection:
        producer = connection.Producer()
        redis_client.script_flush()
        with producer.batch():
            producer.publish("a", exchange="", routing_key="orders", expiration=60)
        assert size(connection, "orders") == 1


def test_acks_from_many_threads(redis_url, redis_client):
    with connected(redis_url) as connection:
        put(connection, "orders", *range(200))
        threads = []

        def work(body, message):
            threads.append(threading.Thread(target=message.ack))
            threads[-1].start()

        with connection.Consumer(kombu.Queue("orders"), callbacks=[work], prefetch_count=20):
            while len(threads) < 200:
                connection.drain_events(timeout=10)
            for thread in threads:
                thread.join()
        eventually(lambda: redis_client.xlen(Keys().stream("orders", 0)) == 0)


def test_publishing_from_many_threads_loses_nothing(redis_url):
    with connected(redis_url) as connection:

        def publish(first):
            with connection.clone() as own:
                put(own, "orders", *range(first, first + 50))

        threads = [threading.Thread(target=publish, args=(first,)) for first in range(0, 200, 50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            assert sorted(drain(connection, taken, 200)) == list(range(200))


def test_two_channels_of_one_connection_have_their_own_messages(redis_url):
    with connected(redis_url) as connection:
        put(connection, "orders", *range(6))
        one, other = Taken(ack=False), Taken(ack=False)
        with (
            connection.channel() as first,
            connection.channel() as second,
            kombu.Consumer(first, kombu.Queue("orders"), callbacks=[one], prefetch_count=3),
            kombu.Consumer(second, kombu.Queue("orders"), callbacks=[other], prefetch_count=3),
        ):
            while len(one) + len(other) < 6:
                connection.drain_events(timeout=5)
            assert len(one) == len(other) == 3
            one.messages[0].requeue()
            other.messages[0].requeue()
            assert size(connection, "orders") == 2


def _keepers():
    return [thread for thread in threading.enumerate() if thread.name == keeper.name]


@pytest.fixture
def alone():
    """Forget the leases of earlier tests on servers that are gone."""
    for group in list(lease._groups):
        group._reset()


@pytest.mark.usefixtures("alone")
def test_when_nothing_is_consumed_any_more_the_thread_ends(redis_url):
    with connected(redis_url) as connection:
        put(connection, "orders", "a")
        assert kombu.Queue("orders")(connection.default_channel).get(no_ack=True)
        assert len(_keepers()) == 1
    eventually(lambda: not _keepers())


@pytest.mark.usefixtures("alone")
def test_publishing_alone_needs_no_thread_and_no_lease(redis_url, redis_client):
    eventually(lambda: not _keepers())
    with connected(redis_url) as connection:
        put(connection, "orders", "a")
        assert size(connection, "orders") == 1
        assert not _keepers()
        assert redis_client.zcard(Keys().leases) == 0


def test_closing_leaves_no_consumer_and_no_lease(redis_url, redis_client):
    with connected(redis_url) as connection:
        put(connection, "orders", *range(3))
        taken = Taken(ack=False)
        connection.Consumer(kombu.Queue("orders"), callbacks=[taken]).consume()
        drain(connection, taken, 2)
        [info] = inspection.queues(redis_client)
        assert info.alive == 1
        assert 0 < info.consumers[0].lease_seconds <= 60
    [info] = inspection.queues(redis_client)
    assert (info.ready, info.pending, info.consumers) == (3, 0, ())
    assert redis_client.zcard(Keys().leases) == 0


def test_the_list_transport_in_the_same_process_changes_nothing(redis_url):
    exchange = kombu.Exchange("news", type="fanout")
    with kombu.Connection(redis_url) as lists, connected(redis_url) as connection:
        with lists.Consumer(kombu.Queue("one", exchange), callbacks=[Taken()]):
            pass
        taken = Taken()
        with connection.Consumer(kombu.Queue("one", exchange), callbacks=[taken]):
            connection.Producer().publish("a", exchange=exchange)
            assert drain(connection, taken, 1) == ["a"]


def test_simple_queues(redis_url):
    with connected(redis_url) as connection, connection.SimpleQueue("orders") as queue:
        for number in range(3):
            queue.put(number)
        assert len(queue) == 3
        message = queue.get(timeout=5)
        assert message.payload == 0
        message.ack()
        assert len(queue) == 2
        assert queue.clear() == 2
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.1)


def test_deleting_by_hand_asks_whether_it_may(redis_url, redis_client):
    with connected(redis_url) as connection:
        put(connection, "orders", "a")
        assert not inspection.delete_queue(redis_client, "orders")
        message = kombu.Queue("orders")(connection.default_channel).get(no_ack=True)
        assert message
        assert not inspection.delete_queue(redis_client, "orders")  # a living consumer
    assert inspection.delete_queue(redis_client, "orders")
    with connected(redis_url) as connection:
        put(connection, "orders", "a")
    assert inspection.delete_queue(redis_client, "orders", force=True)
    assert inspection.queues(redis_client) == []


def test_the_url_names_the_server(redis_url):
    with kombu.Connection(streams(redis_url)) as connection:
        assert connection.as_uri().startswith("redis-streams://")
        connection.connect()
        assert connection.connected


def test_a_channel_forgets_the_queues_that_it_has_left(redis_url, redis_client):
    with connected(redis_url) as connection:
        channel = connection.default_channel
        held = Taken(ack=False)
        put(connection, "orders", "a")
        with connection.Consumer(kombu.Queue("orders"), channel=channel, callbacks=[held]):
            drain(connection, held, 1)
            for number in range(20):
                reply = kombu.Queue(f"reply-{number}", auto_delete=True, expires=10)(channel)
                with connection.Consumer(reply, channel=channel, callbacks=[Taken()]):
                    pass
            consumer, topology = channel.consumer, channel.topology
            read = consumer.streams_of(["orders"])
            assert set(consumer.streams) == set(read) == consumer.lease.streams
            assert (topology.declared.keys(), topology.expires_ms) == ({"orders"}, {})
            assert redis_client.hkeys(Keys().queues) == [b"orders"]
