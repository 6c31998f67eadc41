"""The source of SQS, on moto's server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.integration.sinks.sqs_server import REGION, serve_sqs

from conquiet import App, Router, Worker
from conquiet.cli import main
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


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serve_sqs() as endpoint:
        yield endpoint


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

    lease = 2.0
    """Its minimum is too short for a test that makes several requests within it."""
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


def test_messages_whose_lease_was_lost_do_not_count_as_in_flight(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    """Those that were nacked too late used to be counted for ever, until nothing was read."""
    publish(sqs, make_messages(2))
    source = open_source(lease=1, max_in_flight=1)
    [lost] = take(source, 1)
    assert list(source.read(1, 0.0)) == []
    eventually(lambda: not source._client.holds(lost.acking.token))
    lost.nack(ValueError("too late"))
    take(source, 1)


def test_a_lease_is_renewed_when_a_third_of_it_is_over(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    """A worker asks each second, and each request of ten messages costs money."""
    publish(sqs, make_messages(1))
    source = open_source(lease=2)
    held, sent = take(source, 1), []
    what = "before-call.sqs.ChangeMessageVisibilityBatch"
    source._client._sqs.meta.events.register(what, lambda **_: sent.append(1))
    source.renew(held)
    assert not sent
    eventually(lambda: source.renew(held) or sent)
    source.renew(held)
    assert len(sent) == 1
    assert source._client.holds(held[0].acking.token)


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


def test_dead_letters_of_a_fifo_queue_go_to_a_queue_whose_name_is_allowed(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    """They used to be tried again for ever: SQS allows no orders.fifo-dead."""
    kind = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
    url = sqs.create_queue(QueueName="orders.fifo", Attributes=kind)["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="{}", MessageGroupId="customer-7")
    source = open_source("orders.fifo")
    take(source, 1)[0].nack(PermanentError("never"))
    assert source.dead == 1
    assert (
        take(open_source("orders-dead"), 1)[0].attributes["deadreason"] == "PermanentError: never"
    )


def test_a_missing_queue_and_a_server_that_is_away_are_reported(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    with pytest.raises(StoreError, match="queue 'nowhere' of SQS"):
        open_source("nowhere").read(1, 0.0)
    with pytest.raises(StoreError, match="queue 'orders' of SQS"):
        open_source(endpoint="http://127.0.0.1:1", timeout=1).read(1, 0.0)


def test_dead_letters_are_listed_replayed_and_dropped_by_url(
    sqs: Any,
    endpoint: str,
    open_source: Callable[..., SqsSource],
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(sqs, make_messages(3))
    source = open_source()
    for message in take(source, 3):
        message.nack(PermanentError(f"never {message.id}"))
    place = f"sqs://{REGION}/orders-dead?endpoint={endpoint}"
    for _ in range(2):  # a list leaves all in its place
        assert main(["dead-letters", "list", place, "--error", "m-1", "--json"]) == 0
        [letter] = json.loads(capsys.readouterr().out)
        assert letter["event_id"] == "m-1"
    assert main(["dead-letters", "replay", place, "m-1"]) == 0
    [again] = take(source, 1)
    assert (again.id, again.data) == ("m-1", b"1")
    assert main(["dead-letters", "drop", place, "m-0", "--yes"]) == 0
    capsys.readouterr()
    assert main(["streams", "lag", place, "--json"]) == 0
    [lag] = json.loads(capsys.readouterr().out)["lags"]
    assert (lag["stream"], lag["lag"], lag["pending"]) == ("orders-dead", 1, 0)
    assert main(["streams", "lag", f"sqs://{REGION}/nowhere?endpoint={endpoint}"]) == 1
    assert "no queue 'nowhere'" in capsys.readouterr().err


def test_an_async_worker_reads_it_in_threads(
    sqs: Any, open_source: Callable[..., SqsSource]
) -> None:
    publish(sqs, make_messages(5))
    router, seen = Router(), []

    @router.raw(name="note", source="/contract")
    async def note(message: Message[Any]) -> None:
        await asyncio.sleep(0)
        seen.append(message.id)
        if len(seen) == 5:
            worker.stop()

    worker = Worker(open_source(), router)
    assert asyncio.run(worker.run_async())
    assert sorted(seen) == [f"m-{number}" for number in range(5)]
    assert list(open_source().read(1, 0.0)) == []


def test_a_worker_reads_a_queue_by_url(sqs: Any, endpoint: str) -> None:
    publish(sqs, make_messages(3))
    source = connect_source(f"sqs://{REGION}/orders?endpoint={endpoint}&lease=5", SourceOptions())
    assert len(take(source, 3)) == 3
    source.close()


def test_an_app_handles_a_queue_by_a_worker_beside_it(
    sqs: Any, endpoint: str, tmp_path: Path
) -> None:
    app = App("shop", database=f"sqlite:///{tmp_path}/shop.sqlite")
    app.create_tables()
    seen: list[Message[Any]] = []

    @app.on(type="sample")
    def note(message: Message[bytes]) -> None:
        seen.append(message)

    publish(sqs, make_messages(3))
    worker = Worker(SqsSource("orders", region=REGION, endpoint=endpoint), app.router)
    worker.start()
    eventually(lambda: len(seen) == 3)
    assert worker.stop(20)
    app.close()
    with pytest.raises(ConfigError, match=r"no consumer groups.*Worker\(SqsSource"):
        App("shop", database=f"sqlite:///{tmp_path}/shop.sqlite", broker=f"sqs://{REGION}")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqs://eu-central-1", "say which queue"),
        ("sqs://eu-central-1/orders?speed=high", "unknown setting 'speed'"),
        ("sqs://eu-central-1/orders?lease=0.5", "whole number of seconds"),
        ("sqs://eu-central-1/orders?endpoint=moto", "write https"),
        ("sqs:///orders", "say which region"),
    ],
)
def test_parameters_that_are_missing_or_wrong_are_named(
    url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(ConfigError, match=says):
        connect_source(url, SourceOptions())
