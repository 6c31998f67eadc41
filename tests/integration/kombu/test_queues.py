"""What a channel does with queues and exchanges, as a user of Kombu sees it."""

from __future__ import annotations

import kombu
import kombu.common
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
    unacked,
)

from conquiet.kombu import inspection, scripts
from conquiet.kombu.layout import GROUP, Keys
from conquiet.operations.streams import list_celery_queues, survey

# --- purging and deleting ---------------------------------------------------------------------


def test_purge_takes_the_ready_and_leaves_the_unacked(connection, channel, redis_client):
    put(connection, "orders", *range(10), priority=3)
    put(connection, "orders", *range(10))
    queue = kombu.Queue("orders")(channel)
    held = [queue.get() for _ in range(2)]
    queue.get().requeue()
    assert queue.purge() == 18
    assert (size(connection, "orders"), unacked(redis_client, "orders")) == (0, 2)
    held[0].requeue()
    assert queue.get().payload == held[0].payload


def test_purge_takes_what_was_given_back(connection, channel):
    put(connection, "orders", *range(4))
    queue = kombu.Queue("orders")(channel)
    held = [queue.get() for _ in range(3)]
    channel.give_back([message.delivery_tag for message in held[:2]])
    assert queue.purge() == 3
    assert size(connection, "orders") == 0


def test_purge_does_not_disturb_a_consumer_that_waits(redis_url):
    with connected(redis_url) as waiter, connected(redis_url) as other:
        taken = Taken()
        with waiter.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            assert nothing_comes(waiter)
            kombu.Queue("orders")(other.default_channel).purge()
            put(other, "orders", "a")
            drain(waiter, taken, 1)


def test_an_empty_queue_is_there_and_an_unknown_one_is_not(connection, channel):
    kombu.Queue("orders")(channel).declare()
    assert size(connection, "orders") == 0
    with pytest.raises(ChannelError, match="no queue 'nowhere'"):
        channel.queue_declare("nowhere", passive=True)


def test_a_deleted_queue_is_gone_with_its_messages_and_bindings(connection, channel):
    exchange = kombu.Exchange("shop")
    queue = kombu.Queue("orders", exchange, routing_key="order")(channel)
    queue.declare()
    connection.Producer().publish("a", exchange="shop", routing_key="order")
    queue.delete()
    with pytest.raises(ChannelError):
        channel.queue_declare("orders", passive=True)
    connection.Producer().publish("b", exchange="shop", routing_key="order")
    with pytest.raises(ChannelError):
        channel.queue_declare("orders", passive=True)
    queue.declare()  # on the connection that has bound it before
    connection.Producer().publish("c", exchange="shop", routing_key="order")
    assert queue.get().payload == "c"


def test_delete_if_empty_and_if_unused_keep_what_is_needed(redis_url):
    with connected(redis_url) as connection, connected(redis_url) as other:
        channel = connection.default_channel
        queue = kombu.Queue("orders")(channel)
        queue.declare()
        put(connection, "orders", "a")
        queue.delete(if_empty=True)
        assert size(connection, "orders") == 1
        with other.Consumer(kombu.Queue("orders"), callbacks=[Taken()]):
            drain(other, Taken(), 0)
            other.drain_events(timeout=5)
            queue.delete(if_unused=True)
            assert channel._has_queue("orders")
        queue.delete(if_unused=True)
        assert not channel._has_queue("orders")


def test_a_dead_consumer_does_not_keep_an_unused_queue(connection, channel, redis_client):
    queue = kombu.Queue("orders")(channel)
    queue.declare()
    redis_client.xgroup_createconsumer(Keys().stream("orders", 0), GROUP, "other")
    now_ms = redis_client.time()[0] * 1000
    for ends, is_kept in ((now_ms + 60_000, True), (now_ms - 1000, False)):
        redis_client.zadd(Keys().leases, {"other": ends})
        queue.delete(if_unused=True)
        assert channel._has_queue("orders") is is_kept


def test_a_consumer_outlives_the_deletion_of_its_queue(redis_url):
    with connected(redis_url) as waiter, connected(redis_url) as other:
        taken = Taken()
        with waiter.Consumer(kombu.Queue("orders"), callbacks=[taken]):
            assert nothing_comes(waiter)
            kombu.Queue("orders")(other.default_channel).delete()
            put(other, "orders", "a")
            assert drain(waiter, taken, 1) == ["a"]


def test_an_auto_delete_queue_goes_with_its_last_consumer(redis_url):
    queue = kombu.Queue("control", kombu.Exchange("pidbox", type="fanout"), auto_delete=True)
    with connected(redis_url) as connection, connected(redis_url) as other:
        first = connection.Consumer(queue, callbacks=[Taken()])
        second = other.Consumer(queue, callbacks=[Taken()])
        first.consume()
        second.consume()
        assert nothing_comes(connection, timeout=0.1)
        assert nothing_comes(other, timeout=0.1)
        first.cancel()
        assert other.default_channel._has_queue("control")
        second.cancel()
        assert not other.default_channel._has_queue("control")
        assert other.default_channel.get_table("pidbox") == []


@pytest.mark.parametrize("durable", [True, False])
def test_closing_the_connection_deletes_its_auto_delete_queues(redis_url, redis_client, durable):
    exchange = kombu.Exchange("pidbox", type="fanout")
    queue = kombu.Queue("control", exchange, auto_delete=True, durable=durable)
    with connected(redis_url) as connection:
        connection.Consumer(queue, callbacks=[Taken()]).consume()
        assert nothing_comes(connection, timeout=0.1)
    assert inspection.queues(redis_client) == []


def test_very_many_are_given_back_and_purged_in_slices(
    connection, redis_url, redis_client, recorded, monkeypatch
):
    monkeypatch.setattr(scripts, "AT_ONCE", 100)
    for script in (scripts.leave, scripts.giveback, scripts.purge):
        redis_client.script_load(script.body)
    put(connection, "orders", *range(250))
    held = Taken(ack=False)
    with connected(redis_url) as other:
        other.Consumer(kombu.Queue("orders"), callbacks=[held]).consume()
        drain(other, held, 250)
        seen = recorded(other.default_channel.qos.restore_unacked)
        assert calls(seen, scripts.giveback) == 3
        drain(other, held, 500)
        seen = recorded(other.close)
    assert calls(seen, scripts.leave) >= 3
    assert size(connection, "orders") == 250
    purge = kombu.Queue("orders")(connection.default_channel).purge
    purged = []
    seen = recorded(lambda: purged.append(purge()))
    assert purged == [250]
    assert calls(seen, scripts.purge) >= 3


# --- declared twice ---------------------------------------------------------------------------


def test_a_second_declaration_with_other_arguments_is_refused_and_changes_nothing(redis_url):
    with connected(redis_url) as owner, connected(redis_url) as stranger:
        orders = kombu.Queue("orders", max_length=5)
        orders(owner.default_channel).declare()
        for other, said in ((1, "received 1, but current is 5"), (None, "received none")):
            with pytest.raises(ChannelError, match=f"PRECONDITION_FAILED.*{said}") as refused:
                kombu.Queue("orders", max_length=other)(stranger.default_channel).declare()
            assert refused.value.reply_code == "406"
        orders(stranger.default_channel).declare()
        put(stranger, "orders", *range(6))
        assert size(owner, "orders") == 5


def test_a_queue_that_was_only_used_may_be_declared_with_arguments(redis_url):
    with connected(redis_url) as connection:
        put(connection, "orders", *range(3))
        kombu.Queue("orders", max_length=2)(connection.default_channel).declare()
        put(connection, "orders", 3)
        assert size(connection, "orders") == 2


def test_a_deleted_or_expired_queue_may_be_declared_with_other_arguments(redis_url, redis_client):
    with connected(redis_url) as connection:
        queue = kombu.Queue("orders", expires=60)(connection.default_channel)
        queue.declare()
        queue.delete()
        kombu.Queue("orders", expires=30)(connection.default_channel).declare()
        redis_client.delete(Keys().stream("orders", 0))  # as if the 30 seconds were over
        kombu.Queue("orders", max_length=2)(connection.default_channel).declare()


# --- exchanges and bindings -------------------------------------------------------------------


def test_an_unbound_queue_gets_nothing_more(connection, channel):
    exchange = kombu.Exchange("shop", type="direct")
    queue = kombu.Queue("orders", exchange, routing_key="order")(channel)
    queue.declare()
    queue.unbind_from(exchange, routing_key="order")
    connection.Producer().publish("a", exchange="shop", routing_key="order")
    assert queue.get() is None


def test_a_deleted_exchange_leaves_its_queues(connection, channel):
    exchange = kombu.Exchange("shop")(channel)
    queue = kombu.Queue("orders", exchange, routing_key="order")(channel)
    queue.declare()
    exchange.delete()
    assert size(connection, "orders") == 0
    assert channel.get_table("shop") == []


def test_topic_patterns(connection, channel):
    exchange = kombu.Exchange("shop", type="topic")
    queues = {
        name: kombu.Queue(name, exchange, routing_key=key)(channel)
        for name, key in {
            "all": "#",
            "one": "order.*",
            "deep": "order.#",
            "exact": "order.new",
        }.items()
    }
    for queue in queues.values():
        queue.declare()

    def reached_by(routing_key):
        connection.Producer().publish("a", exchange=exchange, routing_key=routing_key)
        return {name for name, queue in queues.items() if queue.get(no_ack=True)}

    assert reached_by("order.new") == {"all", "one", "deep", "exact"}
    assert reached_by("order.old") == {"all", "one", "deep"}
    assert reached_by("refund.new") == {"all"}


def test_fanout_filters_by_routing_key_where_one_is_bound(connection, channel):
    exchange = kombu.Exchange("events", type="fanout")
    queues = {
        name: kombu.Queue(name, exchange, routing_key=key)(channel)
        for name, key in {"plain": "", "gossip": "worker.#", "every": "#", "task": "task.*"}.items()
    }
    for queue in queues.values():
        queue.declare()
    connection.Producer().publish("a", exchange=exchange, routing_key="worker.heartbeat")
    got = {name for name, queue in queues.items() if queue.get(no_ack=True)}
    assert got == {"plain", "gossip", "every"}
    connection.Producer().publish("b", exchange=exchange)
    assert all(queue.get(no_ack=True) for queue in queues.values())


def test_fanout_without_patterns_goes_to_all(redis_url):
    with connected(redis_url, fanout_patterns=False) as connection:
        exchange = kombu.Exchange("events", type="fanout")
        queue = kombu.Queue("task", exchange, routing_key="task.*")(connection.default_channel)
        queue.declare()
        connection.Producer().publish("a", exchange=exchange, routing_key="worker.heartbeat")
        assert queue.get(no_ack=True)


def test_one_channel_may_read_several_queues_of_one_fanout(connection):
    exchange = kombu.Exchange("events", type="fanout")
    taken = Taken(ack=False)
    queues = [kombu.Queue(name, exchange) for name in ("one", "two")]
    with connection.Consumer(queues, callbacks=[taken]):
        connection.Producer().publish("a", exchange=exchange)
        drain(connection, taken, 2)
        first, second = taken.messages
        assert first.delivery_tag != second.delivery_tag
        first.ack()
        second.requeue()
        drain(connection, taken, 3)


def test_a_queue_bound_later_gets_nothing_of_before(connection, channel):
    exchange = kombu.Exchange("events", type="fanout")(channel)
    exchange.declare()
    connection.Producer().publish("shutdown", exchange=exchange)
    queue = kombu.Queue("fresh", exchange)(channel)
    queue.declare()
    assert queue.get() is None


# --- broadcasts: the transient queues of a fanout exchange --------------------------------------


NEWS = kombu.Exchange("news", type="fanout")


def broadcast(name, key=""):
    return kombu.Queue(name, NEWS, routing_key=key, auto_delete=True, durable=False)


def test_broadcasts_reach_consumers_by_routing_key_and_leave_nothing_in_redis(
    redis_url, redis_client
):
    keys = {"plain": "", "gossip": "worker.#", "every": "#", "task": "task.*", "any": "*.online"}
    with connected(redis_url) as connection, connected(redis_url) as other:
        got = []
        for name, key in keys.items():
            connection.Consumer(
                broadcast(name, key),
                channel=connection.channel(),
                callbacks=[lambda body, message, name=name: got.append((body, name))],
                no_ack=True,
            ).consume()
        NEWS(other.default_channel).declare()
        producer = other.Producer()
        producer.publish("a", exchange=NEWS, routing_key="worker.online")
        producer.publish("b", exchange=NEWS, routing_key="task.sent")
        producer.publish("c", exchange=NEWS)
        drain(connection, got, 12)
        assert nothing_comes(connection, timeout=0.1)
        assert {name for body, name in got if body == "a"} == {"plain", "gossip", "every", "any"}
        assert {name for body, name in got if body == "b"} == {"plain", "every", "task"}
        assert {name for body, name in got if body == "c"} == set(keys)
        assert redis_client.keys("*") == []


def test_a_broadcast_from_before_its_subscription_does_not_reach_a_consumer(redis_url):
    with connected(redis_url) as sender, connected(redis_url) as first:
        NEWS(sender.default_channel).declare()
        first.Consumer(broadcast("control"), callbacks=[Taken()]).consume()  # it hangs
        sender.Producer().publish("shutdown", exchange=NEWS)
        with connected(redis_url) as second:
            taken = Taken()
            with second.Consumer(broadcast("control"), callbacks=[taken]):
                assert nothing_comes(second)
                sender.Producer().publish("ping", exchange=NEWS)
                assert drain(second, taken, 1) == ["ping"]


def test_an_old_control_command_reaches_no_worker_that_starts_later(redis_url):
    # As Celery declares it with control_queue_durable.
    control = kombu.Exchange("celery.pidbox", type="fanout", durable=False)
    queue = kombu.Queue("a@shop.celery.pidbox", control, durable=True, expires=10)
    with connected(redis_url) as sender, connected(redis_url) as first:
        control(sender.default_channel).declare()
        first.Consumer(queue, callbacks=[Taken()]).consume()  # it hangs
        sender.Producer().publish("shutdown", exchange=control)
        with connected(redis_url) as second:
            taken = Taken()
            with second.Consumer(queue, callbacks=[taken]):
                sender.Producer().publish("ping", exchange=control)
                assert drain(second, taken, 1) == ["ping"]


def test_broadcasts_may_be_acked_and_rejected_and_several_queues_share_a_channel(connection):
    taken = Taken(ack=False)
    with connection.Consumer([broadcast("one"), broadcast("two")], callbacks=[taken]) as consumer:
        connection.Producer().publish("a", exchange=NEWS)
        drain(connection, taken, 2)
        taken.messages[0].ack()
        taken.messages[1].requeue()
        consumer.cancel_by_queue("one")
        connection.Producer().publish("b", exchange=NEWS)
        assert drain(connection, taken, 3) == ["a", "a", "b"]
        assert nothing_comes(connection, timeout=0.1)
    topology = connection.default_channel.topology
    assert (topology.broadcasts, topology.declared, topology.transient) == ({}, {}, set())


def test_a_broadcast_of_tasks_waits_for_a_consumer_that_connects_again(redis_url):
    tasks = kombu.common.Broadcast("tasks", queue="of-this-worker")
    with connected(redis_url) as connection:
        tasks(connection.default_channel).declare()
        connection.Producer().publish("a", exchange=tasks.exchange)
        taken = Taken()
        with connection.Consumer(tasks, callbacks=[taken]):
            assert drain(connection, taken, 1) == ["a"]


def test_databases_and_key_prefixes_have_broadcasts_of_their_own(redis_url):
    with (
        connected(redis_url) as connection,
        connected(redis_url, global_keyprefix="shop:") as prefixed,
        connected(redis_url.removesuffix("/0") + "/1") as other,
        connection.Consumer(broadcast("control"), callbacks=[Taken()]),
    ):
        for stranger in (prefixed, other):
            NEWS(stranger.default_channel).declare()
            stranger.Producer().publish("a", exchange=NEWS)
        assert nothing_comes(connection)


def test_a_queue_with_a_second_binding_gets_a_stream(connection, channel):
    queue = broadcast("control")(channel)
    queue.declare()
    queue.bind_to(kombu.Exchange("shop")(channel), routing_key="order")
    connection.Producer().publish("a", exchange=NEWS)
    connection.Producer().publish("b", exchange="shop", routing_key="order")
    assert [queue.get(no_ack=True).payload for _ in range(2)] == ["a", "b"]


@since_5_7
def test_broadcasts_of_a_batch_are_sent_with_it(connection):
    taken = Taken()
    with connection.Consumer(broadcast("control"), callbacks=[taken]):
        with connection.Producer() as producer, producer.batch():
            producer.publish("a", exchange=NEWS)
            assert nothing_comes(connection, timeout=0.1)
        assert drain(connection, taken, 1) == ["a"]


def test_a_message_without_a_route_is_dropped_or_goes_where_it_was_told(redis_url):
    with connected(redis_url, deadletter_queue="lost") as connection:
        exchange = kombu.Exchange("shop")(connection.default_channel)
        exchange.declare()
        with pytest.warns(kombu.transport.virtual.base.UndeliverableWarning):
            connection.Producer().publish("a", exchange=exchange, routing_key="nobody")
        assert kombu.Queue("lost")(connection.default_channel).get().payload == "a"


# --- names ------------------------------------------------------------------------------------


def test_names_of_any_kind(connection, channel):
    for name in ("a:b", "0:x", "ü ñ", "q\x06\x163", "[*]?{x}"):
        exchange = kombu.Exchange(f"ex {name}")
        queue = kombu.Queue(name, exchange, routing_key=name)(channel)
        queue.declare()
        connection.Producer().publish(name, exchange=exchange, routing_key=name)
        assert queue.get().payload == name


def test_a_list_of_the_same_name_does_not_matter(connection, redis_client):
    redis_client.lpush("orders", "left by the list transport")
    put(connection, "orders", "a")
    assert kombu.Queue("orders")(connection.default_channel).get().payload == "a"
    assert redis_client.llen("orders") == 1


def test_one_group_however_the_database_is_written(redis_url, redis_client):
    with connected(redis_url.removesuffix("/0")) as one, connected(redis_url) as other:
        put(one, "orders", "a")
        assert kombu.Queue("orders")(other.default_channel).get(no_ack=True)
        assert kombu.Queue("orders")(one.default_channel).get() is None
    [group] = redis_client.xinfo_groups(Keys().stream("orders", 0))
    assert group["name"].decode() == GROUP


def test_a_survey_of_the_streams_tells_of_each_queue_what_its_inspection_does(
    redis_url, redis_client
):
    with connected(redis_url, global_keyprefix="shop-") as connection:
        put(connection, "orders", *range(5), priority=3)
        put(connection, "orders", *range(5))
        put(connection, "mail:urgent", "a")
        channel = connection.default_channel
        held = [kombu.Queue("orders")(channel).get() for _ in range(4)]
        channel.give_back([message.delivery_tag for message in held[:2]])
        mail, orders = list_celery_queues(survey(redis_client))
        told = {info.name: info for info in inspection.queues(redis_client, "shop-")}
    assert (orders.prefix, orders.name, mail.name) == ("shop-", "orders", "mail:urgent")
    assert (orders.ready, orders.in_flight, orders.alive, orders.dead) == (8, 2, 1, 0)
    assert (told["orders"].ready, told["orders"].pending, told["orders"].alive) == (8, 2, 1)
    assert (mail.ready, mail.in_flight, mail.alive) == (1, 0, 0)
    assert orders.behind_seconds > 0
