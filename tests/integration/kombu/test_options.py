"""Options that a running transport honours."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import kombu
import pytest
from celery.worker import state
from tests.faults.proxy import Proxy
from tests.integration.kombu.brokers import Taken, connected, drain, nothing_comes, put, size
from tests.waiting import eventually

from conquiet.kombu import OptionError, inspection
from conquiet.kombu.layout import Keys


def test_options_are_checked_when_the_transport_is_made(redis_url):
    with (
        connected(redis_url, stream_maxlen=1000) as connection,
        pytest.raises(OptionError, match="stream_maxlen"),
    ):
        connection.connect()


def test_consumer_id_is_part_of_a_name_that_is_still_unique(redis_url, redis_client):
    with (
        connected(redis_url, consumer_id="billing") as one,
        connected(redis_url, consumer_id="billing") as other,
    ):
        put(one, "orders", 1, 2)
        for connection in (one, other):
            assert kombu.Queue("orders")(connection.default_channel).get()
        [info] = inspection.queues(redis_client)
        names = [consumer.name for consumer in info.consumers]
        assert len(set(names)) == 2
        assert all(name.startswith("billing:") for name in names)


def test_prefetch_count_holds_until_a_channel_sets_its_own(redis_url):
    with connected(redis_url, prefetch_count=2) as connection:
        put(connection, "orders", *range(10))
        taken = Taken(ack=False)
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]) as consumer:
            drain(connection, taken, 2)
            assert nothing_comes(connection)
            assert size(connection, "orders") == 8
            consumer.qos(prefetch_count=3)
            drain(connection, taken, 3)


def test_priority_steps(redis_url):
    with connected(redis_url, priority_steps=list(range(10))) as connection:
        for priority in (5, 4, 9, 0):
            put(connection, "orders", priority, priority=priority)
        queue = kombu.Queue("orders")(connection.default_channel)
        assert [queue.get(no_ack=True).payload for _ in range(4)] == [0, 4, 5, 9]


@pytest.mark.parametrize(
    ("strategy", "order"), [("sorted", ["a", "a", "b", "b"]), ("priority", ["b", "b", "a", "a"])]
)
def test_queue_order_strategy(redis_url, strategy, order):
    with connected(redis_url, queue_order_strategy=strategy) as connection:
        put(connection, "a", "a", "a")
        put(connection, "b", "b", "b")
        taken = Taken()
        queues = [kombu.Queue("b"), kombu.Queue("a")]
        with connection.Consumer(queues, callbacks=[taken], prefetch_count=1):
            assert drain(connection, taken, 4) == order


def test_a_polling_interval_does_not_delay_messages(redis_url, redis_client):
    with connected(redis_url, polling_interval=60) as connection, connected(redis_url) as other:
        taken = Taken()

        def put_later():
            eventually(lambda: redis_client.info("clients")["blocked_clients"])
            put(other, "orders", "a")

        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            thread = threading.Thread(target=put_later)
            thread.start()
            assert drain(connection, taken, 1) == ["a"]
            thread.join()


def test_a_visibility_timeout_is_answered_with_what_to_set_instead(redis_url):
    with (
        connected(redis_url, visibility_timeout=3600) as connection,
        pytest.warns(UserWarning, match="visibility_timeout means nothing .* set lease"),
    ):
        connection.connect()


def test_confirmed_acks_have_reached_redis_when_they_return(redis_url, redis_client):
    with connected(redis_url, confirm_acks=True) as connection:
        put(connection, "orders", "a")
        taken = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            drain(connection, taken, 1)
            assert redis_client.xlen(Keys().stream("orders", 0)) == 0


def test_the_ack_of_a_celery_task_that_has_not_run_is_confirmed(redis_url, redis_client):
    task = SimpleNamespace(acks_late=False)
    with connected(redis_url) as connection:
        put(connection, "orders", "a", headers={"id": "the task's"})
        message = kombu.Queue("orders")(connection.default_channel).get()
        state.requests["the task's"] = SimpleNamespace(task=task)  # as a worker does
        message.ack()
        assert redis_client.xlen(Keys().stream("orders", 0)) == 0
        del state.requests["the task's"]


def test_an_ack_that_was_not_confirmed_raises_and_is_sent_later(redis_server, redis_client):
    with (
        Proxy(redis_server.port) as proxy,
        connected(proxy.url, confirm_acks=True, lease=1) as connection,
    ):
        put(connection, "orders", "a")
        message = kombu.Queue("orders")(connection.default_channel).get()
        proxy.refuse()
        with pytest.raises(connection.connection_errors):
            message.ack()
        proxy.heal()
        eventually(lambda: redis_client.xlen(Keys().stream("orders", 0)) == 0)


def test_options_without_meaning_change_nothing(redis_url):
    options = {
        "ack_emulation": False,
        "unacked_key": "mine",
        "unacked_restore_limit": 1,
        "fanout_prefix": False,
        "sep": ":",
    }
    with connected(redis_url, **options) as connection:
        put(connection, "orders", "a")
        queue = kombu.Queue("orders")(connection.default_channel)
        message = queue.get()
        assert queue.get() is None
        message.requeue()
        assert queue.get(no_ack=True).payload == "a"
