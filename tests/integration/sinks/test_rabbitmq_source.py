"""The source of RabbitMQ, on a private broker."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import kombu
import pytest
from tests.faults.proxy import Proxy
from tests.integration.sinks.rabbitmq import RabbitMQ

from conquiet import App, Router, Worker
from conquiet.acking import settle
from conquiet.cli import main
from conquiet.codec import to_json
from conquiet.errors import ConfigError, ConquietError, PermanentError, StoreError
from conquiet.memory import Log
from conquiet.message import Message
from conquiet.middleware.dead_letter import replay
from conquiet.registry import SourceOptions, connect_source
from conquiet.relay.sinks import KombuSink
from conquiet.source import Source
from conquiet.sources import AmqpSource
from conquiet.testing import eventually
from conquiet.testing.contracts import SourceContract, WorkerContract
from conquiet.testing.contracts.samples import ids, make_messages

QUEUES = ("events", "events.dead", "more", "more.dead")


@pytest.fixture
def rabbitmq(server: RabbitMQ) -> Iterator[RabbitMQ]:
    """Without the queues of other tests."""
    yield server
    with kombu.Connection(server.url) as connection:
        channel = connection.channel()
        for queue in QUEUES:
            channel.queue_delete(queue)
        for exchange in ("orders", "events.dead", "more.dead"):
            channel.exchange_delete(exchange)


@pytest.fixture
def open_source(rabbitmq: RabbitMQ) -> Iterator[Callable[..., AmqpSource]]:
    opened: list[AmqpSource] = []

    def open_(queues: Any = "events", url: str = rabbitmq.url, **settings: Any) -> AmqpSource:
        settings = {"queue_type": "classic", "backoff": 0.0, **settings}
        opened.append(AmqpSource(url, queues, **settings))
        return opened[-1]

    yield open_
    for source in opened:
        source.close()


def publish(rabbitmq: RabbitMQ, messages: Sequence[Message[Any]], *queues: str) -> None:
    sink = KombuSink(rabbitmq.url, "orders", queues=queues)
    sink.publish(messages)
    sink.close()


def send_raw(rabbitmq: RabbitMQ, body: bytes, queue: str = "events", **settings: Any) -> None:
    with kombu.Connection(rabbitmq.url) as connection:
        connection.Producer().publish(body, routing_key=queue, **settings)


def waiting(rabbitmq: RabbitMQ, queue: str = "events") -> int:
    """How many messages of a queue no consumer holds."""
    with kombu.Connection(rabbitmq.url) as connection:
        return int(connection.channel().queue_declare(queue, passive=True).message_count)


def take(source: Source, count: int) -> list[Message[Any]]:
    taken: list[Message[Any]] = []
    eventually(lambda: taken.extend(source.read(count - len(taken), 0.1)) or len(taken) == count)
    return taken


def read_until_error(source: Source) -> None:
    for _ in range(100):
        source.read(10, 0.1)


class OnRabbitMQ:
    lease = None
    keeps_count = False
    queue_type: ClassVar[Any] = "classic"

    @pytest.fixture(autouse=True)
    def _on(self, rabbitmq: RabbitMQ) -> Iterator[None]:
        self.rabbitmq = rabbitmq
        source = AmqpSource(rabbitmq.url, "events", topics=["orders"], queue_type=self.queue_type)
        source.read(1, 0.0)  # creates the queue
        source.close()
        self.sink = KombuSink(rabbitmq.url, "orders")
        yield
        self.sink.close()

    def open(self, lease: float) -> Source:
        return AmqpSource(self.rabbitmq.url, "events", backoff=0.0, prefetch=100)

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        self.sink.publish(messages)

    def crash(self, source: Source) -> None:
        connection = source._broker._connection  # type: ignore[attr-defined]
        connection.sock.shutdown(socket.SHUT_RDWR)  # as the kernel does; what was sent arrives


class TestClassicQueue(OnRabbitMQ, SourceContract):
    pass


@pytest.mark.slow
class TestClassicQueueUnderWorker(OnRabbitMQ, WorkerContract):
    pass


class OnQuorumQueue(OnRabbitMQ):
    queue_type = "quorum"


@pytest.mark.slow
class TestQuorumQueue(OnQuorumQueue, SourceContract):
    pass


@pytest.mark.slow
class TestQuorumQueueUnderWorker(OnQuorumQueue, WorkerContract):
    pass


# --- what arrives -------------------------------------------------------------------------------


def test_a_message_of_another_producer_is_named_by_its_properties(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    source = open_source()
    source.read(1, 0.0)
    send_raw(rabbitmq, b"{}", message_id="7", type="sold", content_type="application/json")
    send_raw(rabbitmq, b"x", app_id="/shop", correlation_id="c", content_type="text/plain")
    named, bare = take(source, 2)
    assert (named.data, named.id, named.type, named.source) == (b"{}", "7", "sold", "amqp:events")
    assert (bare.data, bare.id, bare.type, bare.source) == (b"x", "", "events", "/shop")
    assert (bare.correlationid, bare.datacontenttype) == ("c", "text/plain")


def test_a_structured_event_is_decoded(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    source = open_source()
    source.read(1, 0.0)
    [sent] = make_messages(1)
    send_raw(rabbitmq, to_json(sent), content_type="application/cloudevents+json; charset=utf-8")
    [got] = take(source, 1)
    assert (got.id, got.data, got.type) == ("m-0", b"0", "sample")


def test_an_event_in_binary_mode_by_the_names_of_amqp_1_0_is_decoded(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    source = open_source()
    source.read(1, 0.0)
    headers = {f"cloudEvents:{name}": name for name in ("id", "type", "source", "subject")}
    send_raw(rabbitmq, b"{}", headers=headers, content_type="application/json")
    [got] = take(source, 1)
    assert (got.id, got.type, got.source, got.data) == ("id", "type", "source", b"{}")
    assert (got.key, got.datacontenttype) == ("subject", "application/json")


def test_queues_are_read_together_and_acked_together(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    source = open_source(["events", "more"])
    source.read(1, 0.0)
    for number in range(10):
        send_raw(rabbitmq, b"", "more" if number % 2 else "events", message_id=str(number))
    messages = take(source, 10)
    assert sorted(ids(messages)) == [str(number) for number in range(10)]
    assert {message.topic for message in messages} == {"events", "more"}
    for message in messages[3:]:  # not in the order of their tags, and some not at all
        message.ack()
    source.close()
    assert waiting(rabbitmq) + waiting(rabbitmq, "more") == 3


# --- failures of a message ----------------------------------------------------------------------


def test_a_message_that_fails_too_often_is_a_dead_letter_with_its_reason(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    publish(rabbitmq, make_messages(3), "events")
    source = open_source(max_attempts=2)
    first, failed, last = take(source, 3)
    settle([first.acking, last.acking], [(failed.acking, ValueError("not yet"))])  # type: ignore[list-item]
    take(source, 1)[0].nack(ValueError("no such order"))
    assert source.dead == 1
    assert list(source.read(10, 0.05)) == []
    [letter] = take(open_source("events.dead"), 1)
    assert letter.attributes["deadreason"] == "ValueError: no such order"
    assert (letter.attributes["deadattempts"], letter.attributes["deadtopic"]) == ("2", "orders")
    original = replay(letter)
    assert (original.id, original.data, original.topic) == ("m-1", b"1", "orders")


def test_a_permanent_error_and_what_is_no_event_are_dead_at_once(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    source, log = open_source(), Log()
    letters = open_source("more", dead_letters=log.sink("dead"))
    source.read(1, 0.0), letters.read(1, 0.0)
    send_raw(rabbitmq, b"not JSON", "more", content_type="application/cloudevents+json")
    send_raw(rabbitmq, b"", "more", message_id="good")
    [good] = take(letters, 1)
    assert (good.id, letters.dead) == ("good", 1)
    good.nack(PermanentError("never"))
    assert letters.dead == 2
    dead = list(log.replay())
    assert [letter.data for letter in dead] == [b"not JSON", b""]
    assert "PermanentError: never" in dead[1].attributes["deadreason"]
    letters.close()
    assert waiting(rabbitmq, "more") == 0


def test_a_quorum_queue_counts_deliveries_of_consumers_that_died(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    first = open_source(queue_type="quorum", topics=["orders"])
    first.read(1, 0.0)
    first.close()
    publish(rabbitmq, make_messages(1))
    with Proxy(rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}//"
        for deliveries in (1, 2, 3):
            source = open_source(url=url, max_attempts=3)
            assert take(source, 1)[0].deliveries == deliveries
            proxy.cut()
    last = open_source(max_attempts=3)
    eventually(lambda: list(last.read(1, 0.1)) == [] and last.dead == 1)
    [letter] = take(open_source("events.dead"), 1)
    assert "delivered 3 times and never settled" in letter.attributes["deadreason"]


def test_rabbitmqs_own_delivery_limit_and_dead_letter_exchange_work_beside_it(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    own = {"x-queue-type": "quorum", "x-delivery-limit": 1}
    own |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "more.dead"}
    with kombu.Connection(rabbitmq.url) as connection:
        channel = connection.channel()
        channel.queue_declare("more", durable=True, auto_delete=False, arguments=own)
        channel.queue_declare("more.dead", durable=True, auto_delete=False)
    send_raw(rabbitmq, b"{}", "more", message_id="7")
    for deliveries in (1, 2):
        source = open_source("more")  # which exists, and is taken as it is
        assert take(source, 1)[0].deliveries == deliveries
        source.close()  # the broker counts what is returned
    eventually(lambda: waiting(rabbitmq, "more.dead") == 1)
    assert waiting(rabbitmq, "more") == 0


def test_dead_letters_and_a_sink_take_a_queue_of_another_type_as_it_is(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    for name in ("events", "events.dead"):
        first = open_source(name, queue_type="quorum")
        first.read(1, 0.0)
        first.close()
    sink = KombuSink(rabbitmq.url, "orders", queues=["events"])
    sink.publish(make_messages(1))
    sink.close()
    source = open_source()
    take(source, 1)[0].nack(PermanentError("never"))
    assert source.dead == 1
    assert take(open_source("events.dead"), 1)[0].attributes["deadreason"].endswith("never")


def test_a_queue_without_room_for_dead_letters_keeps_the_message(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    class Full(Log().sink("x").__class__):  # type: ignore[misc]
        def publish_each(self, messages: Sequence[Message[Any]]) -> Any:
            raise StoreError("full")

    publish(rabbitmq, make_messages(1), "events")
    source = open_source(max_attempts=1, dead_letters=Full(Log(), "x"))
    take(source, 1)[0].nack(ValueError("failed"))
    assert source.dead == 0
    take(source, 1)[0].ack()
    source.close()
    assert waiting(rabbitmq) == 0


# --- failures of the connection -----------------------------------------------------------------


def test_a_connection_lost_in_a_batch_repeats_the_batch_and_acks_each_message_once(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource], caplog: pytest.LogCaptureFixture
) -> None:
    publish(rabbitmq, make_messages(20), "events")
    with Proxy(rabbitmq.port) as proxy:
        source = open_source(url=f"amqp://guest:guest@127.0.0.1:{proxy.port}//")
        held = take(source, 10)
        held[0].ack()
        eventually(lambda: waiting(rabbitmq) == 0)
        proxy.cut()
        with pytest.raises(StoreError, match="lost the connection"):
            read_until_error(source)
        # Too late: these must not ack other messages by their tags.
        settle([message.acking for message in held[1:]])  # type: ignore[misc]
        assert "9 acks came after their connection was lost" in caplog.text
        again = take(source, 19)
        assert sorted(ids(again)) == sorted(f"m-{number}" for number in range(1, 20))
        for message in again:
            message.ack()
        source.close()
    assert waiting(rabbitmq) == 0


def test_a_broker_that_is_away_is_reported_and_found_again(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    publish(rabbitmq, make_messages(1), "events")
    with Proxy(rabbitmq.port) as proxy:
        source = open_source(url=f"amqp://guest:guest@127.0.0.1:{proxy.port}//", timeout=2)
        with proxy.outage(), pytest.raises(StoreError, match="cannot consume events"):
            source.read(1, 0.1)
        assert ids(take(source, 1)) == ["m-0"]


def test_a_consumer_that_the_broker_cancels_subscribes_again(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    source = open_source()
    source.read(1, 0.0)
    with kombu.Connection(rabbitmq.url) as connection:
        connection.channel().queue_delete("events")
    with pytest.raises(StoreError, match="was the queue deleted"):
        read_until_error(source)
    source.read(1, 0.0)
    send_raw(rabbitmq, b"", message_id="after")
    assert ids(take(source, 1)) == ["after"]


def test_a_queue_that_must_exist_is_not_created(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    with pytest.raises(StoreError, match="no queue 'events'"):
        open_source(declare=False).read(1, 0.0)


def test_no_more_than_the_prefetch_is_taken_from_other_consumers(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    publish(rabbitmq, make_messages(10), "events")
    first = open_source(prefetch=4)
    assert len(take(first, 4)) == 4
    assert list(first.read(10, 0.05)) == []
    assert len(take(open_source(), 6)) == 6


@pytest.mark.slow
def test_heartbeats_go_on_while_a_handler_works(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    publish(rabbitmq, make_messages(1), "events")
    source = open_source(heartbeat=1)
    [message] = take(source, 1)
    time.sleep(5)  # the broker closes a connection after two heartbeats that it missed
    message.ack()
    source.close()
    assert waiting(rabbitmq) == 0


@pytest.mark.slow
def test_heartbeats_go_on_while_a_reader_waits(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource], caplog: pytest.LogCaptureFixture
) -> None:
    source = open_source(heartbeat=1)
    source.read(1, 0.0)
    generation = source._broker._generation  # type: ignore[attr-defined]
    until = time.monotonic() + 6  # the broker closes a connection after two that it missed
    while time.monotonic() < until:
        assert list(source.read(1, 0.5)) == []
    assert source._broker._generation == generation  # type: ignore[attr-defined]
    assert not caplog.records


@pytest.mark.slow
def test_a_network_that_went_silent_is_noticed_and_replaced(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    with Proxy(rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}//"
        source = open_source(url=url, heartbeat=1, timeout=2)
        source.read(1, 0.0)
        publish(rabbitmq, make_messages(1, "before"), "events")
        take(source, 1)[0].ack()
        proxy.mute()

        def lost() -> bool:
            try:
                source.read(1, 0.1)
            except StoreError:
                return True
            return source._broker._connection is None  # type: ignore[attr-defined]

        eventually(lost, timeout=30)
        proxy.cut()
        proxy.heal()
        publish(rabbitmq, make_messages(1, "after"), "events")
        got: list[str] = []

        def found() -> bool:
            try:
                got.extend(ids(source.read(1, 0.1)))
            except StoreError:
                return False
            return bool(got)

        eventually(found, timeout=30)
        assert got == ["after-0"]


@pytest.mark.slow
def test_a_broker_that_is_killed_and_started_again_loses_and_repeats_no_effect() -> None:
    with RabbitMQ() as rabbitmq:
        publish(rabbitmq, make_messages(3_000), "events")
        done: dict[str, int] = {}
        lock = threading.Lock()
        router = Router()

        @router.raw(name="count", source="/contract")
        def count(message: Message[Any]) -> None:
            with lock:
                done[message.id] = done.get(message.id, 0) + 1
            time.sleep(0.0005)

        source = AmqpSource(rabbitmq.url, "events", prefetch=200, timeout=5)
        worker = Worker(source, router, threads=2)
        worker.start()
        eventually(lambda: len(done) > 500)
        rabbitmq.kill()
        rabbitmq.start()
        eventually(lambda: len(done) == 3_000, timeout=60)
        assert worker.stop()
        assert waiting(rabbitmq) == 0
        assert max(done.values()) <= 2  # a delivery before and one after; an inbox makes it one


def test_an_async_worker_reads_it_in_threads(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource]
) -> None:
    publish(rabbitmq, make_messages(5), "events")
    source = open_source()
    router, seen = Router(), []

    @router.raw(name="note", source="/contract")
    async def note(message: Message[Any]) -> None:
        await asyncio.sleep(0)
        seen.append(message.id)
        if len(seen) == 5:
            worker.stop()

    worker = Worker(source, router)
    assert asyncio.run(worker.run_async())
    assert seen == [f"m-{number}" for number in range(5)]
    again = open_source()
    assert list(again.read(1, 0.3)) == []


# --- for operators ------------------------------------------------------------------------------


def test_dead_letters_are_listed_replayed_to_their_queue_and_dropped_by_url(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource], capsys: pytest.CaptureFixture[str]
) -> None:
    publish(rabbitmq, make_messages(3), "events", "more")
    source = open_source()
    for message in take(source, 3):
        message.nack(PermanentError(f"never {message.id}"))
    place = f"{rabbitmq.url}?queue=events.dead"
    for _ in range(2):  # a list leaves all in its place
        assert main(["dead-letters", "list", place, "--error", "never M-1", "--json"]) == 0
        [letter] = json.loads(capsys.readouterr().out)
        assert (letter["id"], letter["event_id"], letter["attempts"]) == ("2", "m-1", 1)
    assert main(["dead-letters", "show", place, "m-2"]) == 0
    assert "never m-2" in capsys.readouterr().out
    assert main(["dead-letters", "replay", place, "m-1"]) == 0
    [again] = take(source, 1)
    assert (again.id, again.data, again.deliveries) == ("m-1", b"1", 1)
    assert main(["dead-letters", "drop", place, "m-0", "--yes"]) == 0
    assert waiting(rabbitmq, "events.dead") == 1
    assert waiting(rabbitmq, "more") == 3  # a replay is for the queue whose consumer failed


def test_a_list_shows_more_dead_letters_than_a_worker_would_prefetch(
    rabbitmq: RabbitMQ, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(rabbitmq, make_messages(1_200), "events.dead")
    place = f"{rabbitmq.url}?queue=events.dead"
    assert main(["dead-letters", "list", place, "--limit", "2000", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1_200


def test_what_rabbitmq_itself_dead_lettered_can_be_replayed(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource], capsys: pytest.CaptureFixture[str]
) -> None:
    with kombu.Connection(rabbitmq.url) as connection:
        channel = connection.channel()
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "events.dead"}
        channel.queue_declare("events", durable=True, auto_delete=False, arguments=arguments)
        channel.queue_declare("events.dead", durable=True, auto_delete=False)
        send_raw(rabbitmq, b"{}", message_id="7", type="sold", content_type="application/json")
        eventually(lambda: waiting(rabbitmq) == 1)
        channel.basic_reject(channel.basic_get("events").delivery_tag, requeue=False)
    eventually(lambda: waiting(rabbitmq, "events.dead") == 1)
    place = f"{rabbitmq.url}?queue=events.dead"
    assert main(["dead-letters", "replay", place, "--all"]) == 0
    [message] = take(open_source(), 1)
    assert (message.id, message.type, message.data) == ("7", "sold", b"{}")


def test_what_waits_in_queues_is_shown_by_the_url_of_their_source(
    rabbitmq: RabbitMQ, open_source: Callable[..., AmqpSource], capsys: pytest.CaptureFixture[str]
) -> None:
    publish(rabbitmq, make_messages(5), "events", "more")
    take(open_source("more", prefetch=2), 2)
    place = f"{rabbitmq.url}?queue=events,more&prefetch=10"
    assert main(["streams", "lag", place, "--json"]) == 0
    found = {lag["stream"]: lag["lag"] for lag in json.loads(capsys.readouterr().out)["lags"]}
    assert found == {"events": 5, "more": 3}
    assert main(["streams", "lag", place, "--max", "4"]) == 1
    assert main(["streams", "lag", f"{rabbitmq.url}?queue=nowhere"]) == 1
    assert "no queue 'nowhere'" in capsys.readouterr().err


# --- by URL -------------------------------------------------------------------------------------


def test_a_worker_reads_a_queue_by_url(rabbitmq: RabbitMQ) -> None:
    url = rabbitmq.url + "?queue=events&topic=orders&queue_type=classic&prefetch=10"
    source = connect_source(url, SourceOptions(max_attempts=3))
    source.read(1, 0.0)
    publish(rabbitmq, make_messages(5))
    assert ids(take(source, 5)) == [f"m-{number}" for number in range(5)]
    source.close()


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ("", "say which queue"),
        ("?queue=orders&speed=high", "unknown setting 'speed'"),
        ("?queue=orders&prefetch=0", "prefetch=0: must be from 1"),
        ("?queue=orders&prefetch=many", "prefetch='many'"),
        ("?queue=orders&queue_type=stream", "choose 'quorum' or 'classic'"),
        ("?queue=orders&declare=maybe", "choose true or false"),
        ("?queue=orders&timeout=-1", "timeout=-1"),
    ],
)
def test_parameters_that_are_missing_or_wrong_are_named(rest: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        connect_source(f"amqp://app:secret@localhost/shop{rest}", SourceOptions())


def test_a_wrong_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        AmqpSource("amqp://app:pa[55@host/", "events")
    assert "pa[55" not in str(caught.value)


@dataclass
class PlaceOrder:
    id: str


@dataclass
class OrderPlaced:
    id: str


def test_an_app_sends_handles_and_publishes_by_rabbitmq(server: RabbitMQ, tmp_path: Path) -> None:
    settings = "prefetch=10&queue_type=classic&dead_letters=lost&timeout=5&mandatory=true"
    app = App("shop", f"sqlite:///{tmp_path}/shop.db", f"{server.url}?{settings}")
    seen: list[str] = []

    @app.on
    def place_order(order: PlaceOrder) -> OrderPlaced:
        return OrderPlaced(order.id)

    @app.on
    def note(placed: OrderPlaced) -> None:
        seen.append(placed.id)

    app.create_tables()
    running = app.open()
    running.start()
    try:
        # Until the worker has declared its queue, RabbitMQ would drop the command, and send raises.
        eventually(lambda: _is_sent(app, PlaceOrder("o-1")))
        app.send(PlaceOrder("o-1"), id="c-1")
        eventually(lambda: seen == ["o-1"])
    finally:
        assert running.stop()
        app.close()


def _is_sent(app: App, command: PlaceOrder) -> bool:
    try:
        return bool(app.send(command, id="c-1"))
    except ConquietError:
        return False
