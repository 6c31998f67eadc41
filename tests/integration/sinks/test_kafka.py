"""Kafka, on the mock cluster of librdkafka."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError
from tests.integration.sinks.kafka_cluster import Cluster

from conquiet.errors import SinkUnavailable
from conquiet.message import Message
from conquiet.relay.sinks import KafkaSink, Refused
from conquiet.testing.contracts import SinkContract
from conquiet.testing.contracts.samples import ids, make_messages

QUIET = {"log_level": 0}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    cluster.create("orders", 1)
    yield cluster
    cluster.close()


@pytest.fixture
def sink(cluster: Cluster) -> Iterator[KafkaSink]:
    sink = KafkaSink(cluster.servers, "orders", timeout=10, settings=QUIET)
    yield sink
    sink.close()


def records(cluster: Cluster, topic: str = "orders") -> list[Any]:
    """All records of a topic: until the ends of its partitions have been reached."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.servers,
            "group.id": "test",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    try:
        found = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        places = [confluent_kafka.TopicPartition(topic, partition, 0) for partition in found]
        left = 0
        for place in places:
            low, high = consumer.get_watermark_offsets(place, timeout=10)
            left += high - low
        consumer.assign(places)
        got: list[Any] = []
        while len(got) < left:
            for record in consumer.consume(left - len(got), timeout=1):
                assert record.error() is None
                got.append(record)
        return got
    finally:
        consumer.close()


def message_of(record: Any) -> Message[bytes]:
    headers = {name: value.decode() for name, value in record.headers()}
    attributes = {
        name.removeprefix("ce_"): value for name, value in headers.items() if name.startswith("ce_")
    }
    if "content-type" in headers:
        attributes["datacontenttype"] = headers["content-type"]
    return Message(record.value() or b"", attributes, topic=record.topic())


def published(cluster: Cluster) -> list[Message[Any]]:
    return [message_of(record) for record in records(cluster)]


class TestKafkaSink(SinkContract):
    @pytest.fixture(autouse=True)
    def _on(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def open(self) -> KafkaSink:
        return KafkaSink(self.cluster.servers, "orders", timeout=3, settings=QUIET)

    def list_published(self) -> Sequence[Message[Any]]:
        return published(self.cluster)

    def outage(self) -> AbstractContextManager[object]:
        return self.cluster.outage()


def test_the_key_of_a_message_picks_its_partition(cluster: Cluster, sink: KafkaSink) -> None:
    messages = [
        message
        for key in ("a", "b", "c", "d")
        for message in make_messages(5, key, partitionkey=key)
    ]
    for message in messages:
        message.topic = "many"
    assert list(sink.publish_each(messages)) == [None] * 20
    partitions: dict[bytes, set[int]] = {}
    for record in records(cluster, "many"):
        partitions.setdefault(record.key(), set()).add(record.partition())
    assert set(partitions) == {b"a", b"b", b"c", b"d"}
    assert all(len(found) == 1 for found in partitions.values())
    assert len(set.union(*partitions.values())) > 1


def test_what_consumers_filter_by_goes_along(cluster: Cluster, sink: KafkaSink) -> None:
    named = {"aggregate_type": "store", "aggregate_id": "7"}
    sink.publish([Message(b"{}", {"id": "1", "type": "sold", "source": "/s", **named})])
    [record] = records(cluster)
    headers = dict(record.headers())
    assert headers["event_id"] == headers["ce_id"] == b"1"
    assert headers["event_type"] == headers["ce_type"] == b"sold"
    assert headers["aggregate_type"] == b"store"
    assert headers["aggregate_id"] == b"7"


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_ENOUGH_REPLICAS,
    ],
)
def test_what_passes_by_itself_is_tried_again_and_arrives_once(
    cluster: Cluster, sink: KafkaSink, code: int
) -> None:
    cluster.answer(code, code)
    messages = make_messages(5)
    assert list(sink.publish_each(messages)) == [None] * 5
    assert ids(published(cluster)) == ids(messages)


def test_what_a_broker_refuses_as_a_whole_is_sent_one_by_one(cluster: Cluster) -> None:
    together = {**QUIET, "linger.ms": 200}
    sink = KafkaSink(cluster.servers, "orders", settings=together)
    assert list(sink.publish_each(make_messages(1, "first"))) == [None]
    # The request with all three; then each alone, of which the second is to blame.
    bad = KafkaError.INVALID_RECORD
    cluster.answer(bad, 0, bad, 0)
    answers = sink.publish_each(make_messages(3))
    sink.close()
    assert [type(answer) for answer in answers] == [type(None), Refused, type(None)]
    assert ids(published(cluster)) == ["first-0", "m-0", "m-2"]


def test_a_message_that_is_too_large_fails_alone(cluster: Cluster, sink: KafkaSink) -> None:
    first, large, last = make_messages(3)
    large.data = bytes(2_000_000)
    answers = sink.publish_each([first, large, last])
    assert [type(answer) for answer in answers] == [type(None), Refused, type(None)]
    assert "too large" in str(answers[1])


def test_no_right_to_write_blames_no_message_and_is_asked_for_again(
    cluster: Cluster, sink: KafkaSink
) -> None:
    cluster.answer(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(SinkUnavailable, match="authorization"):
        sink.publish(make_messages(1))
    assert list(sink.publish_each(make_messages(1))) == [None]


def test_a_producer_that_broke_for_good_is_replaced(cluster: Cluster, sink: KafkaSink) -> None:
    assert list(sink.publish_each(make_messages(2, "first"))) == [None, None]
    cluster.answer(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
    with pytest.raises(SinkUnavailable):
        sink.publish(make_messages(1))
    assert list(sink.publish_each(make_messages(2))) == [None, None]
    assert ids(published(cluster)) == ["first-0", "first-1", "m-0", "m-1"]


def test_brokers_that_do_not_answer_in_time_are_an_outage(cluster: Cluster) -> None:
    sink = KafkaSink(cluster.servers, "orders", timeout=3, settings=QUIET)
    assert list(sink.publish_each(make_messages(1, "first"))) == [None]
    began = time.monotonic()
    with cluster.slow(20_000), pytest.raises(SinkUnavailable):
        sink.publish(make_messages(3))
    assert time.monotonic() - began < 10
    sink.close()


def test_an_outage_writes_nothing_to_stderr_by_itself(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sink = KafkaSink("127.0.0.1:1", "orders", timeout=0.5)
    with pytest.raises(SinkUnavailable):
        sink.publish(make_messages(1))
    sink.close()
    assert capfd.readouterr().err == ""
    assert caplog.records == []


def test_a_check_tells_whether_a_broker_answers(cluster: Cluster) -> None:
    sink = KafkaSink(cluster.servers, "orders", timeout=1, settings=QUIET)
    sink.check()
    with cluster.outage(), pytest.raises(SinkUnavailable):
        sink.check()
    sink.close()


def test_a_server_that_nobody_runs_is_an_outage() -> None:
    sink = KafkaSink("127.0.0.1:1", "orders", timeout=2, settings=QUIET)
    with pytest.raises(SinkUnavailable):
        sink.publish(make_messages(2))
    sink.close()
