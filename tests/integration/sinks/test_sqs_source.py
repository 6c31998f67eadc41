"""The source of SQS, on moto's server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from moto.sqs.models import SQSBackend

from conquiet.codec import to_json
from conquiet.errors import ConfigError, PermanentError, StoreError
from conquiet.message import Message
from conquiet.middleware.dead_letter import replay
from conquiet.registry import SourceOptions, connect_source
from conquiet.source import Source
from conquiet.sources import SqsSource
from conquiet.testing import eventually
from conquiet.testing.contracts import SourceContract, WorkerContract
from conquiet.testing.contracts.samples import ids, make_messages

REGION = "eu-central-1"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SQSBackend, "receive_message", _receive_one_at_a_time)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


_receiving = threading.Lock()
_receive = SQSBackend.receive_message


def _receive_one_at_a_time(
    self: Any, queue: str, count: int, wait: int, *others: Any, **named: Any
) -> Any:
    """Moto has no lock: it gives a message to two receives that run at once."""
    end = time.monotonic() + wait
    while True:
        with _receiving:
            found = _receive(self, queue, count, 0, *others, **named)
        if found or time.monotonic() >= end:
            return found
        time.sleep(0.02)


@pytest.fixture
def sqs(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client; the queue `orders` is empty, and there is no other."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    client = boto3.client("sqs", region_name=REGION, endpoint_url=endpoint)
    client.create_queue(QueueName="orders")
    yield client
    for url in client.list_queues().get("QueueUrls", ()):
        client.delete_queue(QueueUrl=url)
    client.close()


@pytest.fixture
def open_source(sqs: Any, endpoint: str) -> Iterator[Callable[..., SqsSource]]:
    opened: list[SqsSource] = []

    def open_(queue: str = "orders", **settings: Any) -> SqsSource:
        settings = {"backoff": 0.0, "region": REGION, "endpoint": endpoint, **settings}
        opened.append(SqsSource(queue, **settings))
        return opened[-1]

    yield open_
    for source in opened:
        source.close()


def send(sqs: Any, *bodies: str, **settings: Any) -> None:
    url = sqs.get_queue_url(QueueName="orders")["QueueUrl"]
    for start in range(0, len(bodies), 10):
        entries = [
            {"Id": str(number), "MessageBody": body, **settings}
            for number, body in enumerate(bodies[start : start + 10])
        ]
        assert not sqs.send_message_batch(QueueUrl=url, Entries=entries).get("Failed")


def publish(sqs: Any, messages: Sequence[Message[Any]]) -> None:
    send(sqs, *(to_json(message).decode() for message in messages))


def take(source: Source, count: int) -> list[Message[Any]]:
    taken: list[Message[Any]] = []
    eventually(lambda: taken.extend(source.read(count - len(taken), 0.1)) or len(taken) == count)
    return taken


class OnSqs:
    """A lease is a whole number of seconds; SQS counts each receive, and promises no order."""

    lease = 1.0
    keeps_place = False
    keeps_count = False

    @pytest.fixture(autouse=True)
    def _on(self, sqs: Any, endpoint: str) -> None:
        self.sqs, self.endpoint = sqs, endpoint

    def open(self, lease: float) -> Source:
        return SqsSource("orders", region=REGION, endpoint=self.endpoint, lease=lease, backoff=0.0)

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        publish(self.sqs, messages)


@pytest.mark.slow  # they wait for leases, which last a second at least
class TestSqsSource(OnSqs, SourceContract):
    pass


@pytest.mark.slow
class TestSqsSourceUnderWorker(OnSqs, WorkerContract):
    pass


def test_a_message_of_another_producer_is_named_by_its_message_id(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    send(sqs, "hello", '{"order": 7}')
    plain, json = take(open_source(), 2)
    assert (plain.data, plain.type, plain.source) == (b"hello", "orders", "sqs:orders")
    assert json.data == b'{"order": 7}'
    assert plain.id
    assert plain.id != json.id


def test_message_attributes_can_be_a_cloudevent_in_binary_mode(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    names = {"ce_id": "7", "ce_type": "sold", "ce_source": "/shop"}
    send(
        sqs,
        "{}",
        MessageAttributes={
            name: {"DataType": "String", "StringValue": value} for name, value in names.items()
        },
    )
    [message] = take(open_source(), 1)
    assert (message.id, message.type, message.source, message.data) == ("7", "sold", "/shop", b"{}")


def test_more_than_ten_messages_make_one_batch(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    publish(sqs, make_messages(35))
    source = open_source()
    messages = source.read(100, 1.0)
    assert sorted(ids(messages)) == sorted(f"m-{number}" for number in range(35))


def test_what_cannot_be_handled_goes_to_the_dead_letter_queue(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    send(sqs, '{"specversion": "1.0"}')
    publish(sqs, make_messages(2))
    source = open_source(max_attempts=2)
    first, second = take(source, 2)
    first.nack(PermanentError("never"))
    second.nack(ValueError("failed"))
    take(source, 1)[0].nack(ValueError("failed again"))
    assert source.dead == 3
    letters = take(open_source("orders-dead"), 3)
    assert sorted(letter.data for letter in letters) == [b"0", b"1", b'{"specversion": "1.0"}']
    [letter] = [letter for letter in letters if letter.data == b"1"]
    assert letter.attributes["deadreason"] == "ValueError: failed again"
    assert (replay(letter).id, replay(letter).topic) == ("m-1", "orders")
    source.close()
    assert list(open_source().read(10, 0.0)) == []


def test_a_missing_queue_and_a_server_that_is_away_are_reported(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    with pytest.raises(StoreError, match="queue 'nowhere' of SQS"):
        open_source("nowhere").read(1, 0.0)
    with pytest.raises(StoreError, match="queue 'orders' of SQS"):
        open_source(endpoint="http://127.0.0.1:1", timeout=1).read(1, 0.0)


def test_a_worker_reads_a_queue_by_url(sqs: Any, endpoint: str) -> None:
    publish(sqs, make_messages(3))
    source = connect_source(f"sqs://{REGION}/orders?endpoint={endpoint}&lease=5", SourceOptions())
    assert len(take(source, 3)) == 3
    source.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqs://eu-central-1", "say which queue"),
        ("sqs://eu-central-1/orders?speed=high", "unknown setting 'speed'"),
        ("sqs://eu-central-1/orders?lease=0.5", "whole number of seconds"),
        ("sqs://eu-central-1/orders?endpoint=moto", "write https"),
    ],
)
def test_parameters_that_are_missing_or_wrong_are_named(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        connect_source(url, SourceOptions())
