"""AMQP, on a private RabbitMQ."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import kombu
import pytest
from celery import Celery
from tests.faults.proxy import Proxy
from tests.integration.sinks.rabbitmq import MAX_MESSAGE_BYTES, RabbitMQ

from conquiet.errors import InvalidMessage, SinkUnavailable
from conquiet.message import Message
from conquiet.relay.sinks import CelerySink, KombuSink, Refused
from conquiet.task import pack_task
from conquiet.testing import eventually
from conquiet.testing.contracts import SinkContract
from conquiet.testing.contracts.samples import ids, make_messages


@pytest.fixture
def rabbitmq(server: RabbitMQ) -> Iterator[RabbitMQ]:
    """Without the exchanges and queues of other tests."""
    yield server
    with kombu.Connection(server.url) as connection:
        channel = connection.channel()
        for queue in ("events", "sold", "small"):
            channel.queue_delete(queue)
        for exchange in ("orders", "other"):
            channel.exchange_delete(exchange)


@pytest.fixture
def sink(rabbitmq: RabbitMQ) -> Iterator[KombuSink]:
    sink = KombuSink(rabbitmq.url, "orders", queues=["events"])
    yield sink
    sink.close()


def deliveries(rabbitmq: RabbitMQ, queue: str = "events") -> list[Any]:
    """All messages of a queue; they go back to it when the connection ends."""
    with kombu.Connection(rabbitmq.url) as connection:
        channel = connection.channel()
        try:
            found = []
            while (delivery := channel.basic_get(queue)) is not None:
                found.append(delivery)
            return found
        except connection.channel_errors:
            return []  # not declared yet


def message_of(delivery: Any) -> Message[bytes]:
    attributes = {
        name.removeprefix("cloudEvents_"): value
        for name, value in delivery.properties["application_headers"].items()
        if name.startswith("cloudEvents_")
    }
    attributes["datacontenttype"] = delivery.properties["content_type"]
    body = delivery.body.encode() if isinstance(delivery.body, str) else bytes(delivery.body)
    return Message(body, attributes, topic=delivery.delivery_info["exchange"])


def published(rabbitmq: RabbitMQ) -> list[Message[Any]]:
    return [message_of(delivery) for delivery in deliveries(rabbitmq)]


class TestKombuSinkOnRabbitMQ(SinkContract):
    @pytest.fixture(autouse=True)
    def _on(self, rabbitmq: RabbitMQ) -> Iterator[None]:
        self.rabbitmq = rabbitmq
        with Proxy(rabbitmq.port) as self.proxy:
            yield

    def open(self) -> KombuSink:
        url = f"amqp://guest:guest@127.0.0.1:{self.proxy.port}//"
        return KombuSink(url, "orders", queues=["events"], timeout=5)

    def list_published(self) -> Sequence[Message[Any]]:
        return published(self.rabbitmq)

    def outage(self) -> AbstractContextManager[object]:
        return self.proxy.outage()


def test_messages_are_persistent_and_carry_what_consumers_filter_by(
    rabbitmq: RabbitMQ, sink: KombuSink
) -> None:
    named = {"aggregate_type": "store", "aggregate_id": "7"}
    attributes = {"id": "1", "type": "sold", "source": "/s", **named}
    assert list(sink.publish_each([Message(b"{}", attributes)])) == [None]
    [delivery] = deliveries(rabbitmq)
    properties = delivery.properties
    assert properties["delivery_mode"] == 2
    assert properties["message_id"] == "1"
    assert properties["type"] == delivery.delivery_info["routing_key"] == "sold"
    headers = properties["application_headers"]
    assert {name: headers[name] for name in ("event_id", "event_type", *named)} == {
        "event_id": "1",
        "event_type": "sold",
        **named,
    }


def test_a_message_that_no_queue_takes_is_refused_and_not_lost(rabbitmq: RabbitMQ) -> None:
    sink = KombuSink(rabbitmq.url, "orders")
    with kombu.Connection(rabbitmq.url) as connection:
        exchange = kombu.Exchange("orders", "topic", durable=True)
        kombu.Queue("sold", exchange, routing_key="sold")(connection.channel()).declare()
    first, lost, last = make_messages(3, type="sold")
    lost.attributes["type"] = "returned"
    answers = sink.publish_each([first, lost, last])
    assert [type(answer) for answer in answers] == [type(None), Refused, type(None)]
    assert "no queue is bound for it" in str(answers[1])
    assert len(deliveries(rabbitmq, "sold")) == 2
    sink.close()


def test_a_message_that_no_queue_takes_is_dropped_if_so_wished(rabbitmq: RabbitMQ) -> None:
    sink = KombuSink(rabbitmq.url, "orders", mandatory=False)
    assert list(sink.publish_each(make_messages(2))) == [None, None]
    sink.close()


def test_a_message_counts_again_once_a_queue_is_bound(rabbitmq: RabbitMQ) -> None:
    sink = KombuSink(rabbitmq.url, "orders")
    assert [type(answer) for answer in sink.publish_each(make_messages(1))] == [Refused]
    with kombu.Connection(rabbitmq.url) as connection:
        exchange = kombu.Exchange("orders", "topic", durable=True)
        kombu.Queue("sold", exchange, routing_key="#")(connection.channel()).declare()
    assert list(sink.publish_each(make_messages(1))) == [None]
    sink.close()


def test_a_message_that_is_too_large_fails_alone(rabbitmq: RabbitMQ, sink: KombuSink) -> None:
    first, large, last = make_messages(3)
    large.data = bytes(MAX_MESSAGE_BYTES + 1)
    answers = sink.publish_each([first, large, last])
    assert [type(answer) for answer in answers] == [type(None), Refused, type(None)]
    # The broker closes the channel over it, so that those before it may come twice.
    arrived = ids(published(rabbitmq))
    assert set(arrived) == {"m-0", "m-2"}
    assert list(sink.publish_each(make_messages(2))) == [None, None]


def test_a_full_queue_blames_nobody(rabbitmq: RabbitMQ) -> None:
    with kombu.Connection(rabbitmq.url) as connection:
        channel = connection.channel()
        exchange = kombu.Exchange("orders", "topic", durable=True)
        limits = {"x-max-length": 2, "x-overflow": "reject-publish"}
        queue = kombu.Queue("small", exchange, routing_key="#", queue_arguments=limits)
        queue(channel).declare()
    sink = KombuSink(rabbitmq.url, "orders")
    answers = [sink.publish_each([message])[0] for message in make_messages(2)]
    assert answers == [None, None]
    with pytest.raises(SinkUnavailable, match="full"):
        sink.publish(make_messages(3, "more"))
    sink.close()


def test_celery_tasks_are_confirmed_and_a_full_queue_is_an_outage(rabbitmq: RabbitMQ) -> None:
    app = Celery("shop", broker=rabbitmq.url, set_as_current=False)
    limits = {"x-max-length": 2, "x-overflow": "reject-publish"}
    app.conf.task_queues = [kombu.Queue("small", queue_arguments=limits)]
    app.conf.task_default_queue = "small"
    tasks = [pack_task(Message(app.signature("ship", [place])), "/shop") for place in range(3)]
    sink = CelerySink(app)
    assert sink.publish_each(tasks[:2]) == [None, None]
    found = deliveries(rabbitmq, "small")
    assert [each.properties["application_headers"]["id"] for each in found] == [
        task.id for task in tasks[:2]
    ]
    with pytest.raises(SinkUnavailable, match="Nacked"):
        sink.publish_each(tasks[2:])
    sink.close()
    app.close()


def test_names_that_amqp_cannot_hold_fail_alone(sink: KombuSink) -> None:
    first, long, last = make_messages(3)
    long.attributes["type"] = "x" * 256
    answers = sink.publish_each([first, long, last])
    assert [type(answer) for answer in answers] == [type(None), InvalidMessage, type(None)]


def test_an_exchange_of_another_kind_blames_no_message(rabbitmq: RabbitMQ) -> None:
    with kombu.Connection(rabbitmq.url) as connection:
        kombu.Exchange("other", "fanout")(connection.channel()).declare()
    sink = KombuSink(rabbitmq.url, "other")
    with pytest.raises(SinkUnavailable, match="other"):
        sink.publish(make_messages(2))
    sink.close()


def test_an_exchange_that_is_not_there_blames_no_message(rabbitmq: RabbitMQ) -> None:
    sink = KombuSink(rabbitmq.url, "orders", declare=False)
    with pytest.raises(SinkUnavailable, match="orders"):
        sink.publish(make_messages(2))
    sink.close()


def test_an_exchange_that_was_deleted_is_declared_again(
    rabbitmq: RabbitMQ, sink: KombuSink
) -> None:
    assert list(sink.publish_each(make_messages(1, "first"))) == [None]
    with kombu.Connection(rabbitmq.url) as connection:
        connection.channel().exchange_delete("orders")
    assert list(sink.publish_each(make_messages(2))) == [None, None]


def test_wrong_credentials_are_an_outage(rabbitmq: RabbitMQ) -> None:
    sink = KombuSink(rabbitmq.url.replace("guest:guest", "guest:wrong"), "orders")
    with pytest.raises(SinkUnavailable):
        sink.publish(make_messages(1))
    with pytest.raises(SinkUnavailable):
        sink.check()
    sink.close()


def test_a_broker_that_does_not_confirm_in_time_is_an_outage(rabbitmq: RabbitMQ) -> None:
    with Proxy(rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}//"
        sink = KombuSink(url, "orders", queues=["events"], timeout=1)
        assert list(sink.publish_each(make_messages(1))) == [None]
        proxy.mute()
        began = time.monotonic()
        with pytest.raises(SinkUnavailable):
            sink.publish(make_messages(3))
        assert time.monotonic() - began < 10
        sink.close()


def test_a_check_tells_whether_the_broker_answers(rabbitmq: RabbitMQ, sink: KombuSink) -> None:
    sink.check()
    nowhere = KombuSink("amqp://guest:guest@127.0.0.1:1//", "orders", timeout=1)
    with pytest.raises(SinkUnavailable):
        nowhere.check()


@pytest.mark.slow
def test_what_was_confirmed_outlives_the_crash_of_the_broker() -> None:
    with RabbitMQ() as rabbitmq:
        sink = KombuSink(rabbitmq.url, "orders", queues=["events"], timeout=5)
        messages = make_messages(50)
        assert list(sink.publish_each(messages)) == [None] * 50
        rabbitmq.kill()
        with pytest.raises(SinkUnavailable):
            sink.publish(make_messages(1, "lost"))
        rabbitmq.start()

        def again() -> bool:
            try:
                return list(sink.publish_each(make_messages(1, "again"))) == [None]
            except SinkUnavailable:
                return False

        eventually(again, timeout=30, interval=0.1)
        assert ids(published(rabbitmq)) == [*ids(messages), "again-0"]
        sink.close()
