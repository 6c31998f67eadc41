"""Google Pub/Sub, over gRPC against a server that fails, delays and drops."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import google.auth.credentials
import grpc
import pytest
from tests.integration.sinks.pubsub_server import DROP, PubSubServer

from conquiet.errors import ConfigError, GivenBack, InvalidMessage, SinkUnavailable
from conquiet.message import Message
from conquiet.relay.sinks import PubSubSink, Refused
from conquiet.testing.contracts import SinkContract
from conquiet.testing.contracts.samples import ids, make_messages

BAD = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PubSubServer]:
    server = PubSubServer()
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.address)
    yield server
    server.stop()


@pytest.fixture
def sink(server: PubSubServer) -> Iterator[PubSubSink]:
    sink = PubSubSink("shop", "orders", timeout=10)
    yield sink
    sink.close()


@pytest.fixture
def ordered(server: PubSubServer) -> Iterator[PubSubSink]:
    sink = PubSubSink("shop", "orders", timeout=10, ordered=True)
    yield sink
    sink.close()


def kinds(answers: Sequence[Exception | None]) -> list[type]:
    return [type(answer) for answer in answers]


NONE = type(None)


class TestPubSubSink(SinkContract):
    @pytest.fixture(autouse=True)
    def _on(self, server: PubSubServer) -> None:
        self.server = server

    def open(self) -> PubSubSink:
        return PubSubSink("shop", "orders", timeout=5)

    def list_published(self) -> Sequence[Message[Any]]:
        return self.server.messages

    def outage(self) -> AbstractContextManager[object]:
        return self.server.outage()


class TestOrderedPubSubSink(TestPubSubSink):
    def open(self) -> PubSubSink:
        return PubSubSink("shop", "orders", timeout=5, ordered=True)


def test_a_batch_is_one_request_for_each_topic(server: PubSubServer, sink: PubSubSink) -> None:
    messages = make_messages(100)
    messages[50].topic = "projects/shop/topics/other"
    assert list(sink.publish_each(messages)) == [None] * 100
    assert sorted(len(request.messages) for request in server.requests) == [1, 99]


def test_what_consumers_filter_by_goes_along(server: PubSubServer, sink: PubSubSink) -> None:
    named = {"aggregate_type": "store", "aggregate_id": "7", "created_at": "2026-01-31T12:00:00Z"}
    sink.publish([Message(b"{}", {"id": "1", "type": "sold", "source": "/s", **named})])
    [(_, message)] = server.arrived
    expected = {"event_id": "1", "event_type": "sold", **named}
    assert {name: message.attributes[name] for name in expected} == expected
    assert message.ordering_key == ""


@pytest.mark.parametrize("code", [BAD, grpc.StatusCode.FAILED_PRECONDITION])
def test_a_message_that_pubsub_refuses_fails_alone(
    server: PubSubServer, sink: PubSubSink, code: grpc.StatusCode
) -> None:
    server.faults["m-1"] = code
    assert kinds(sink.publish_each(make_messages(4))) == [NONE, Refused, NONE, NONE]
    assert ids(server.messages) == ["m-0", "m-2", "m-3"]


def test_a_topic_that_does_not_exist_fails_its_messages_alone(
    server: PubSubServer, sink: PubSubSink
) -> None:
    messages = make_messages(3)
    messages[1].topic = "nowhere"
    assert kinds(sink.publish_each(messages)) == [NONE, Refused, NONE]


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    ],
)
def test_what_is_not_the_fault_of_a_message_is_an_outage(
    server: PubSubServer, sink: PubSubSink, code: grpc.StatusCode
) -> None:
    server.faults["m-1"] = code
    with pytest.raises(SinkUnavailable):
        sink.publish(make_messages(3))
    assert len(server.requests) == 1
    server.faults.clear()
    assert list(sink.publish_each(make_messages(3))) == [None] * 3


def test_the_outage_of_one_topic_does_not_fail_the_others(
    server: PubSubServer, sink: PubSubSink
) -> None:
    messages = make_messages(3)
    messages[1].topic = "other"
    server.faults["m-1"] = grpc.StatusCode.UNAVAILABLE
    assert kinds(sink.publish_each(messages)) == [NONE, SinkUnavailable, NONE]


def test_a_delayed_answer_is_waited_for(server: PubSubServer, sink: PubSubSink) -> None:
    server.faults["m-1"] = 0.5
    assert list(sink.publish_each(make_messages(2))) == [None, None]


def test_an_answer_that_never_comes_is_an_outage_after_the_deadline(
    server: PubSubServer,
) -> None:
    sink = PubSubSink("shop", "orders", timeout=0.5)
    server.faults["m-1"] = DROP
    messages = make_messages(3)
    messages[2].topic = "other"
    began = time.monotonic()
    assert kinds(sink.publish_each(messages)) == [SinkUnavailable, SinkUnavailable, NONE]
    assert time.monotonic() - began < 10
    sink.close()


def test_an_outage_ends_the_sending_one_by_one(server: PubSubServer, sink: PubSubSink) -> None:
    server.faults["m-2"] = grpc.StatusCode.UNAVAILABLE
    server.faults["m-1"] = BAD
    answers = sink.publish_each(make_messages(20))
    assert kinds(answers) == [NONE, Refused, *[SinkUnavailable] * 18]
    assert len(server.requests) == 4


def test_however_many_keys_hang_the_deadline_is_one_for_all(server: PubSubServer) -> None:
    sink = PubSubSink("shop", "orders", timeout=0.5, ordered=True)
    messages = [
        message for key in range(40) for message in make_messages(1, f"{key}", subject=f"{key}")
    ]
    server.faults.update({message.id: DROP for message in messages})
    began = time.monotonic()
    with pytest.raises(SinkUnavailable):
        sink.publish(messages)
    assert time.monotonic() - began < 5
    sink.close()


def test_messages_of_a_key_go_out_in_order_with_it_as_ordering_key(
    server: PubSubServer, ordered: PubSubSink
) -> None:
    messages = [
        *make_messages(3, "a", partitionkey="a"),
        *make_messages(3, "b", subject="b"),
        *make_messages(3, "none"),
    ]
    assert list(ordered.publish_each(messages)) == [None] * 9
    for key in ("a", "b"):
        arrived = [m for _, m in server.arrived if m.ordering_key == key]
        assert [m.attributes["ce-id"] for m in arrived] == [f"{key}-{n}" for n in range(3)]


def test_what_follows_a_message_that_failed_waits_if_it_has_its_key(
    server: PubSubServer, ordered: PubSubSink
) -> None:
    server.faults["a-1"] = BAD
    messages = make_messages(4, "a", partitionkey="a") + make_messages(2, "b", partitionkey="b")
    answers = ordered.publish_each(messages)
    assert kinds(answers) == [NONE, Refused, GivenBack, GivenBack, NONE, NONE]
    assert sorted(ids(server.messages)) == ["a-0", "b-0", "b-1"]


def test_what_follows_a_message_that_cannot_be_sent_waits_too(
    server: PubSubServer, ordered: PubSubSink
) -> None:
    messages = make_messages(3, "a", partitionkey="a") + make_messages(1, "b", partitionkey="b")
    messages[1].data = object()
    messages[1].attributes["datacontenttype"] = "text/plain"
    answers = ordered.publish_each(messages)
    assert [answer is None for answer in answers] == [True, False, False, True]
    assert isinstance(answers[2], GivenBack)


def test_more_than_a_request_may_hold_goes_out_in_several(
    server: PubSubServer, ordered: PubSubSink
) -> None:
    messages = make_messages(2100, partitionkey="a")
    assert list(ordered.publish_each(messages)) == [None] * 2100
    assert [len(request.messages) for request in server.requests] == [1000, 1000, 100]
    assert ids(server.messages) == ids(messages)


def test_requests_that_there_is_no_time_for_are_given_back(
    server: PubSubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.relay.sinks.pubsub._MAX_MESSAGES", 1)
    sink = PubSubSink("shop", "orders", timeout=1, ordered=True)
    server.faults.update({f"m-{number}": 0.4 for number in range(8)})
    answers = sink.publish_each(make_messages(8, partitionkey="a"))
    sink.close()
    went = ids(server.messages)
    assert 1 <= len(went) < 8
    assert kinds(answers) == [NONE] * len(went) + [GivenBack] * (8 - len(went))


def test_requests_stay_below_the_size_that_pubsub_takes(
    server: PubSubServer, sink: PubSubSink
) -> None:
    messages = make_messages(5)
    for message in messages:
        message.data = bytes(3_500_000)
    server.topics.discard("projects/shop/topics/orders")  # it refuses, and holds no megabytes
    sink.publish_each(messages)
    assert max(len(request.messages) for request in server.requests) == 2


def test_attributes_that_pubsub_cannot_hold_fail_alone(
    server: PubSubServer, sink: PubSubSink
) -> None:
    messages = make_messages(3)
    messages[1].attributes["long"] = "x" * 1025
    assert kinds(sink.publish_each(messages)) == [NONE, InvalidMessage, NONE]


def test_a_name_that_is_no_topic_fails_alone(sink: PubSubSink) -> None:
    messages = make_messages(2)
    messages[1].topic = "a/b"
    assert kinds(sink.publish_each(messages)) == [NONE, ConfigError]


def test_a_check_tells_whether_pubsub_answers(server: PubSubServer, sink: PubSubSink) -> None:
    sink.check()
    with server.outage(), pytest.raises(SinkUnavailable, match="cannot be reached"):
        sink.check()


def test_a_check_tells_whether_the_topic_is_there(server: PubSubServer) -> None:
    sink = PubSubSink("shop", "nowhere")
    with pytest.raises(SinkUnavailable, match="does not exist"):
        sink.check()
    sink.close()


def test_no_credentials_are_an_outage_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/at/all.json")
    sink = PubSubSink("shop", "orders")
    with pytest.raises(SinkUnavailable, match="GOOGLE_APPLICATION_CREDENTIALS"):
        sink.publish(make_messages(1))
    sink.close()


def test_without_an_emulator_it_is_googles_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    anonymous = google.auth.credentials.AnonymousCredentials()
    monkeypatch.setattr("google.auth.default", lambda *args, **kwargs: (anonymous, "shop"))
    sink = PubSubSink("shop", "orders")
    client = sink._connect()
    assert client.transport.host == "pubsub.googleapis.com:443"
    sink.close()
