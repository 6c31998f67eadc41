"""What a channel does with messages, as a user of Kombu sees it."""

from __future__ import annotations

import kombu
import pytest
from tests.integration.kombu.brokers import (
    Taken,
    calls,
    connected,
    drain,
    nothing_comes,
    put,
    size,
    unacked,
)
from tests.waiting import eventually

from conquiet.kombu import scripts
from conquiet.kombu.layout import Keys

# --- handing over -----------------------------------------------------------------------------


def test_messages_come_in_the_order_of_publishing(connection):
    put(connection, "orders", *range(250))
    taken = Taken()
    with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
        assert drain(connection, taken, 250) == list(range(250))


def test_drain_events_hands_over_one_message_at_a_time(connection):
    put(connection, "orders", 1, 2, 3)
    taken = Taken()
    with connection.Consumer(kombu.Queue("orders"), callbacks=[taken]):
        for number in (1, 2, 3):
            connection.drain_events(timeout=5)
            assert taken[-1] == number
            assert len(taken) == number


def test_priority_0_comes_first_and_the_budget_is_one_for_all(connection):
    for priority in (9, 6, 3, 0):
        put(connection, "orders", *[f"{priority}-{n}" for n in range(3)], priority=priority)
    taken = Taken(ack=False)
    with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=4):
        assert drain(connection, taken, 4) == ["0-0", "0-1", "0-2", "3-0"]
        assert nothing_comes(connection)
        # Nothing was taken beyond the credit, so another consumer could have the rest.
        assert size(connection, "orders") == 8


def test_prefetch_can_be_raised_and_lowered_at_run_time(connection):
    put(connection, "orders", *range(10))
    taken = Taken(ack=False)
    with connection.Consumer(
        kombu.Queue("orders"), callbacks=[taken], prefetch_count=2
    ) as consumer:
        drain(connection, taken, 2)
        assert nothing_comes(connection)
        consumer.qos(prefetch_count=5)
        drain(connection, taken, 5)
        assert nothing_comes(connection)
        consumer.qos(prefetch_count=1)
        for message in taken.messages[:4]:
            message.ack()
        assert nothing_comes(connection)
        taken.messages[4].ack()
        drain(connection, taken, 6)
        assert nothing_comes(connection)


def test_two_consumers_share_a_queue(redis_url):
    with connected(redis_url) as first, connected(redis_url) as second:
        put(first, "orders", *range(20))
        one, other = Taken(ack=False), Taken(ack=False)
        with (
            first.Consumer(kombu.Queue("orders"), callbacks=[one], prefetch_count=10),
            second.Consumer(kombu.Queue("orders"), callbacks=[other], prefetch_count=10),
        ):
            drain(first, one, 10)
            drain(second, other, 10)
            assert sorted(one + other) == list(range(20))


def test_a_busy_queue_does_not_starve_another(connection):
    put(connection, "busy", *range(300))
    put(connection, "calm", "calm")
    taken = Taken()
    queues = [kombu.Queue("busy"), kombu.Queue("calm")]
    with connection.Consumer(queues, callbacks=[taken], prefetch_count=10):
        drain(connection, taken, 30)
    assert "calm" in taken


def test_get_takes_one_and_says_when_there_is_none(connection, channel):
    put(connection, "orders", "a")
    queue = kombu.Queue("orders")(channel)
    message = queue.get()
    assert message.payload == "a"
    assert queue.get() is None
    message.ack()
    assert size(connection, "orders") == 0


def test_a_consumer_that_may_take_no_more_asks_for_nothing(connection, recorded):
    put(connection, "orders", "a", "b")
    held = Taken(ack=False)
    with connection.Consumer(kombu.Queue("orders"), callbacks=[held], prefetch_count=1):
        drain(connection, held, 1)
        seen = recorded(lambda: nothing_comes(connection))
    assert calls(seen, scripts.fetch) == 0
    assert not [command for command in seen if command.startswith("XREADGROUP")]


def test_an_error_of_a_callback_loses_none_of_the_messages_behind_it(connection):
    put(connection, "orders", *range(5))
    taken = Taken()

    def fails(body, message):
        taken(body, message)
        if body == 1:
            raise ValueError(body)

    with connection.Consumer(kombu.Queue("orders"), callbacks=[fails], prefetch_count=5):
        drain(connection, taken, 1)
        with pytest.raises(ValueError, match="1"):
            connection.drain_events(timeout=5)
        assert drain(connection, taken, 5) == list(range(5))


# --- acks -------------------------------------------------------------------------------------


def test_an_ack_reaches_redis_although_nothing_is_fetched_after_it(
    connection, channel, redis_client
):
    put(connection, "orders", "a")
    message = kombu.Queue("orders")(channel).get()
    assert unacked(redis_client, "orders") == 1
    message.ack()
    eventually(lambda: unacked(redis_client, "orders") == 0)
    assert redis_client.xlen(Keys().stream("orders", 0)) == 0


def test_acks_travel_with_the_next_fetch(connection, recorded):
    put(connection, "orders", *range(100))
    taken = Taken()
    with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=10):
        seen = recorded(lambda: drain(connection, taken, 100))
    # 10 fetches of 10, one that finds nothing more at most, and the scripts of a slow machine's
    # keeper: not one command for each of the 100 messages.
    assert len([command for command in seen if command.startswith("EVALSHA ")]) < 50


def test_no_ack_needs_none(connection, channel, redis_client):
    put(connection, "orders", 1, 2, 3)
    taken = Taken(ack=False)
    with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], no_ack=True):
        drain(connection, taken, 3)
        eventually(lambda: unacked(redis_client, "orders") == 0)
    put(connection, "orders", 4)
    assert kombu.Queue("orders")(channel).get(no_ack=True).payload == 4
    eventually(lambda: unacked(redis_client, "orders") == 0)
    assert size(connection, "orders") == 0


def test_rejecting_drops_the_message(connection, channel):
    put(connection, "orders", "a")
    kombu.Queue("orders")(channel).get().reject()
    channel.close()
    assert connection.channel().queue_declare("orders", passive=True).message_count == 0


def test_an_ack_may_come_after_the_channel_is_closed(redis_url, redis_client):
    with connected(redis_url) as connection:
        put(connection, "orders", "a")
        message = kombu.Queue("orders")(connection.default_channel).get()
    message.ack()  # the work is done, also if another consumer has the message by now
    assert redis_client.xlen(Keys().stream("orders", 0)) == 0


# --- what comes back --------------------------------------------------------------------------


def test_a_requeued_message_goes_to_the_end_and_is_marked_twice(connection, channel):
    put(connection, "orders", "a", "b")
    queue = kombu.Queue("orders")(channel)
    first = queue.get()
    assert "redelivered" not in first.headers
    first.requeue()
    assert queue.get(no_ack=True).payload == "b"
    again = queue.get()
    assert again.payload == "a"
    assert again.headers["redelivered"] is True
    assert again.delivery_info["redelivered"] is True


def test_a_requeue_wakes_a_consumer_that_waits(redis_url):
    with connected(redis_url) as holder, connected(redis_url, polling_interval=10) as waiter:
        put(holder, "orders", "a")
        message = kombu.Queue("orders")(holder.default_channel).get()
        taken = Taken()
        with waiter.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            assert nothing_comes(waiter)
            message.requeue()
            waiter.drain_events(timeout=5)
        assert taken == ["a"]


def test_requeue_goes_to_its_own_queue_only(connection, channel):
    exchange = kombu.Exchange("news", type="fanout")
    queues = [kombu.Queue(name, exchange)(channel) for name in ("one", "two")]
    for queue in queues:
        queue.declare()
    connection.Producer().publish("a", exchange=exchange)
    queues[0].get().requeue()
    assert [size(connection, name) for name in ("one", "two")] == [1, 1]


def test_recover_gives_back_in_place(connection, channel):
    put(connection, "orders", "a", "b", "c")
    queue = kombu.Queue("orders")(channel)
    assert [queue.get().payload for _ in range(2)] == ["a", "b"]
    channel.basic_recover(requeue=True)
    assert [queue.get(no_ack=True).payload for _ in range(3)] == ["a", "b", "c"]


def test_closing_gives_back_in_place_what_was_handed_over_and_what_was_not(redis_url):
    with connected(redis_url) as connection:
        put(connection, "orders", *range(20))
        taken = Taken(ack=False)
        connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=10).consume()
        drain(connection, taken, 3)
        taken.messages[0].ack()
    with connected(redis_url) as connection:
        assert size(connection, "orders") == 19
        again = Taken()
        with connection.Consumer(kombu.Queue("orders"), callbacks=[again]):
            assert drain(connection, again, 19) == list(range(1, 20))
        assert again.messages[0].headers["redelivered"] is True
        assert "redelivered" not in again.messages[-1].headers


def test_a_reply_still_in_the_socket_is_given_back_by_close(redis_url, redis_client):
    with connected(redis_url, polling_interval=5) as connection:
        taken = Taken()
        connection.Consumer(kombu.Queue("orders"), callbacks=[taken]).consume()
        assert nothing_comes(connection)  # a read that blocks is under way
        with connected(redis_url) as other:
            put(other, "orders", "a")
        eventually(lambda: unacked(redis_client, "orders") == 1)
    assert taken == []
    with connected(redis_url) as connection:
        assert kombu.Queue("orders")(connection.default_channel).get().payload == "a"


def test_a_cancelled_consumer_gives_back_what_it_has_not_handed_over(connection, channel):
    put(connection, "orders", *range(10))
    taken = Taken()
    with connection.Consumer(kombu.Queue("orders"), callbacks=[taken], prefetch_count=10):
        drain(connection, taken, 1)
    assert size(connection, "orders") == 9
    assert kombu.Queue("orders")(channel).get(no_ack=True).payload == 1


def test_a_message_that_comes_after_the_cancel_is_nobodys(redis_url):
    with connected(redis_url, polling_interval=5) as connection:
        with connection.Consumer(kombu.Queue("orders"), callbacks=[Taken()]):
            assert nothing_comes(connection)
        put(connection, "orders", "a")
        assert size(connection, "orders") == 1


def test_a_consumer_may_cancel_itself_between_two_that_came_together(connection):
    put(connection, "orders", "a", "b", "c")
    taken = Taken()

    def take(body, message):
        taken(body, message)
        if body == "b":
            consumer.cancel()

    consumer = connection.Consumer(kombu.Queue("orders"), callbacks=[take], prefetch_count=3)
    consumer.consume()
    drain(connection, taken, 2)
    assert nothing_comes(connection)
    assert size(connection, "orders") == 1
