"""The source of Kafka, on the mock cluster of librdkafka."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import confluent_kafka
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from tests.integration.sinks.kafka_cluster import Cluster

from conquiet import App, Router, Worker
from conquiet.cli import main
from conquiet.codec import to_json
from conquiet.errors import ConfigError, PermanentError, StoreError
from conquiet.message import Message
from conquiet.middleware.dead_letter import replay
from conquiet.operations import log_groups
from conquiet.registry import SourceOptions, connect_source
from conquiet.relay.sinks import KafkaSink
from conquiet.source import Source
from conquiet.sources import KafkaSource
from conquiet.sources.offsets import StoredOffsets
from conquiet.sql import (
    PositionInbox,
    Transaction,
    async_connection,
    connection,
    engine,
    schema,
)
from conquiet.testing import eventually
from conquiet.testing.contracts import SourceContract, WorkerContract
from conquiet.testing.contracts.samples import ids, make_messages

QUIET = {"log_level": 0}
QUICK = {**QUIET, "session.timeout.ms": 3_000, "heartbeat.interval.ms": 50}
SOON = {**QUICK, "session.timeout.ms": 1_500}
"""The mock cluster lets a member that joins a known group wait for the timeout less a second."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    cluster.create("orders", 1)
    cluster.create("wide", 2)
    yield cluster
    cluster.close()


@pytest.fixture
def open_source(cluster: Cluster) -> Iterator[Callable[..., KafkaSource]]:
    opened: list[KafkaSource] = []

    def open_(topics: Any = "orders", group: str = "billing", **settings: Any) -> KafkaSource:
        settings = {"backoff": 0.0, "settings": QUICK, **settings}
        opened.append(KafkaSource(cluster.servers, topics, group, **settings))
        return opened[-1]

    yield open_
    for source in opened:
        source.close()


def publish(cluster: Cluster, messages: Sequence[Message[Any]], topic: str = "orders") -> None:
    sink = KafkaSink(cluster.servers, topic, settings=QUIET)
    sink.publish(messages)
    sink.close()


def send_raw(cluster: Cluster, topic: str, value: bytes, **settings: Any) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.servers, **QUIET})
    producer.produce(topic, value, **settings)
    assert producer.flush(10) == 0


def take(source: Source, count: int) -> list[Message[Any]]:
    taken: list[Message[Any]] = []
    eventually(
        lambda: taken.extend(source.read(count - len(taken), 0.1)) or len(taken) == count,
        timeout=30,
    )
    return taken


def read_until_error(source: Source) -> None:
    for _ in range(100):
        source.read(10, 0.1)


class OnKafka:
    """One partition: its first consumer owns it, until it closes."""

    lease = None
    keeps_count = False
    redelivery_within = 30.0

    @pytest.fixture(autouse=True)
    def _on(self, cluster: Cluster) -> Iterator[None]:
        self.cluster = cluster
        self.sources: list[KafkaSource] = []
        self.sink = KafkaSink(cluster.servers, "orders", settings=QUIET)
        yield
        for source in self.sources:
            source.close()  # the contract closes them when the cluster is gone: they would wait
        self.sink.close()

    def open(self, lease: float, group: str = "billing") -> Source:
        source = KafkaSource(self.cluster.servers, "orders", group, backoff=0.0, settings=SOON)
        if not any(not other._closed and group in repr(other) for other in self.sources):
            eventually(lambda: source._client.join() > 0, timeout=60)
        self.sources.append(source)
        return source

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        self.sink.publish(messages)

    def crash(self, source: Source) -> None:
        assert isinstance(source, KafkaSource)
        source._client._consumer.close()


@pytest.mark.timeout(900)  # the model of settlements joins a group some 150 times
@pytest.mark.slow  # each test joins a group once or twice, which takes seconds
class TestKafkaSource(OnKafka, SourceContract):
    def open_other_group(self) -> Source:
        return self.open(60.0, "shipping")


@pytest.mark.slow
class TestKafkaSourceUnderWorker(OnKafka, WorkerContract):
    pass


# --- what arrives -------------------------------------------------------------------------------


def test_a_record_of_another_producer_is_named_by_its_place(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    send_raw(cluster, "orders", b"{}", key="customer-7")
    [message] = take(open_source(), 1)
    assert (message.data, message.key, message.topic) == (b"{}", "customer-7", "orders")
    assert (message.id, message.type, message.source) == ("0-0", "orders", "kafka:orders")


def test_a_structured_event_is_decoded(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    [sent] = make_messages(1)
    kind = [("content-type", b"application/cloudevents+json")]
    send_raw(cluster, "orders", to_json(sent), headers=kind, key="k")
    [got] = take(open_source(), 1)
    assert (got.id, got.data, got.type, got.key) == ("m-0", b"0", "sample", "k")


def test_what_cannot_be_handled_goes_to_the_dead_letter_topic(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    kind = [("content-type", b"application/cloudevents+json")]
    send_raw(cluster, "orders", b"not JSON", headers=kind)
    publish(cluster, make_messages(2))
    source = open_source(max_attempts=2)
    first, second = take(source, 2)
    first.nack(PermanentError("never"))
    second.nack(ValueError("failed"))
    take(source, 1)[0].nack(ValueError("failed again"))
    assert source.dead == 3
    letters = {letter.data: letter for letter in take(open_source("orders.dead", "operations"), 3)}
    assert letters.keys() == {b"not JSON", b"0", b"1"}
    assert letters[b"1"].attributes["deadreason"] == "ValueError: failed again"
    assert (replay(letters[b"0"]).id, replay(letters[b"0"]).topic) == ("m-0", "orders")


# --- offsets ------------------------------------------------------------------------------------


def test_messages_acked_behind_an_unacked_one_do_not_return(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    publish(cluster, make_messages(10))
    first = open_source()
    for message in take(first, 10):
        if message.id not in ("m-2", "m-7"):
            message.ack()
    first.close()
    second = open_source()
    assert ids(take(second, 2)) == ["m-2", "m-7"]
    assert list(second.read(1, 0.2)) == []


@pytest.mark.slow
def test_a_partition_revoked_in_a_batch_is_committed_by_its_new_owner_alone(
    cluster: Cluster, open_source: Callable[..., KafkaSource], caplog: pytest.LogCaptureFixture
) -> None:
    for partition in (0, 1):
        for number in range(5):
            name = f"{partition}-{number}".encode()
            send_raw(cluster, "wide", name, partition=partition)
    first = open_source("wide")
    held = take(first, 10)
    for message in held:
        if message.id.endswith("-0"):
            message.ack()
    second = open_source("wide")
    moved: list[Message[Any]] = []

    def rebalance() -> bool:
        first.read(1, 0.02)
        moved.extend(second.read(10, 0.02))
        return len(moved) >= 4

    eventually(rebalance, timeout=15)
    gone = moved[0].id[0]
    assert sorted(ids(moved)) == [f"{gone}-{number}" for number in range(1, 5)]
    for message in held:
        message.ack()  # those of the partition that moved are too late
    assert "after their partition was revoked" in caplog.text
    for message in moved[:2]:
        message.ack()
    first.close()
    second.close()
    last = open_source("wide")
    assert sorted(ids(take(last, 2))) == sorted(ids(moved[2:]))
    assert list(last.read(1, 0.2)) == []


def test_partitions_are_paused_while_too_much_is_in_flight(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    publish(cluster, make_messages(20))
    source = open_source(max_in_flight=5)
    held = take(source, 5)
    assert list(source.read(10, 0.2)) == []
    for message in held:
        message.ack()
    assert ids(take(source, 5)) == [f"m-{number}" for number in range(5, 10)]


def test_lag_is_what_is_not_acked(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    publish(cluster, make_messages(10))
    source = open_source()
    for message in take(source, 4)[:3]:
        message.ack()
    assert source.lag() == {("orders", 0): 7}
    source.close()
    again = open_source()
    for message in take(again, 7):
        message.ack()
    again.close()
    idle = open_source()
    eventually(lambda: not idle.read(1, 0.1) and idle.lag() == {("orders", 0): 0})


@pytest.mark.slow
def test_an_outage_is_reported_and_costs_nothing(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    publish(cluster, make_messages(3))
    settings = {**QUICK, "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 50}
    source = open_source(settings=settings)
    first, *rest = take(source, 3)
    first.ack()
    with cluster.outage(), pytest.raises(StoreError, match="cannot read from Kafka"):
        read_until_error(source)
    publish(cluster, make_messages(1, "after"))
    for message in (*rest, *_take_after(source, 1)):
        message.ack()
    source.close()
    again = open_source()
    assert list(again.read(1, 0.3)) == []
    assert sum(again.lag().values()) == 0


def test_a_cluster_that_is_away_is_reported_until_it_answers(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    """A worker used to be ready again after the first report."""
    settings = {**QUICK, "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 50}
    source = open_source(settings=settings)
    source.read(1, 0.1)
    with cluster.outage():
        with pytest.raises(StoreError, match="cannot read from Kafka"):
            read_until_error(source)
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot read from Kafka"):
                source.read(1, 0.1)
    publish(cluster, make_messages(1, "after"))
    assert ids(_take_after(source, 1)) == ["after-0"]
    assert list(source.read(1, 0.1)) == []


def test_topics_that_do_not_exist_are_reported_until_one_does(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    source = open_source(["late", "later"])
    with pytest.raises(StoreError, match="late"):
        read_until_error(source)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"later.*Unknown topic"):
            source.read(1, 0.1)
    cluster.create("late", 1)
    publish(cluster, make_messages(1), "late")
    assert ids(_take_after(source, 1)) == ["m-0"]


def _take_after(source: Source, count: int) -> list[Message[Any]]:
    """Read so many messages, also while the outage is still reported."""
    taken: list[Message[Any]] = []

    def found() -> bool:
        try:
            taken.extend(source.read(count, 0.1))
        except StoreError:
            pass
        return len(taken) == count

    eventually(found, timeout=30)
    return taken


@pytest.mark.slow
def test_a_long_handler_keeps_its_partition(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    publish(cluster, make_messages(1))
    short = {**QUICK, "session.timeout.ms": 2_000, "max.poll.interval.ms": 3_000}
    source = open_source(settings=short)
    [message] = take(source, 1)
    time.sleep(7)
    assert source._broker.holds(message.acking.token)  # type: ignore[union-attr]
    message.ack()
    source.close()
    again = open_source()
    assert list(again.read(1, 0.5)) == []


def test_an_async_worker_reads_it_in_threads(
    cluster: Cluster, open_source: Callable[..., KafkaSource]
) -> None:
    publish(cluster, make_messages(5))
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


# --- offsets in the database of the effects -----------------------------------------------------


@pytest.fixture
def database(database_url: str) -> Iterator[Engine]:
    made = engine(database_url)
    schema.init(made)
    with made.begin() as opened:
        opened.execute(text("CREATE TABLE effects (id TEXT PRIMARY KEY, times INTEGER)"))
    yield made
    made.dispose()


def position_router(source: KafkaSource, transaction: Transaction | None = None) -> Router:
    """Effects are counted; a message called bad fails after its effect."""
    router = Router()
    router.use(
        transaction or Transaction(source.engine), PositionInbox(source, producers_repeat=False)
    )

    @router.raw(name="count", source="/contract")
    def count(message: Message[Any]) -> None:
        with connection(source.engine) as found:
            found.execute(COUNT_UP, {"id": message.id})
        if message.id.startswith("bad"):
            raise ValueError("it never works")

    return router


COUNT_UP = text(
    "INSERT INTO effects (id, times) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET times = effects.times + 1"
)


def effects(made: Engine) -> dict[str, int]:
    with made.connect() as opened:
        return {row.id: row.times for row in opened.execute(text("SELECT id, times FROM effects"))}


def each_once(messages: Sequence[Message[Any]]) -> dict[str, int]:
    return dict.fromkeys(ids(messages), 1)


def test_a_batch_that_was_committed_and_not_acked_is_not_delivered_again(
    cluster: Cluster, open_source: Callable[..., KafkaSource], database: Engine
) -> None:
    publish(cluster, make_messages(8))
    first = open_source(positions=database)
    batch = take(first, 8)
    router = position_router(first)
    router.run(batch[2:4])  # out of order, as in threads
    router.run(batch[5:])
    router.run(batch[:2])
    first._client._consumer.close()  # and no ack
    second = open_source(positions=database)
    assert ids(take(second, 1)) == ["m-4"]
    assert list(second.read(1, 0.2)) == []
    assert len(effects(database)) == 7
    assert log_groups.survey(database) == []  # it is no group of the outbox


def test_a_stored_offset_that_kafka_does_not_know_is_committed_there_too(
    cluster: Cluster, open_source: Callable[..., KafkaSource], database: Engine
) -> None:
    publish(cluster, make_messages(3))
    first = open_source(positions=database)
    position_router(first).run(take(first, 3))
    first._client._consumer.close()  # a crash after the commit of the database
    second = open_source(positions=database)
    eventually(lambda: not second.read(1, 0.1) and second.lag() == {("orders", 0): 0})
    second.close()
    plain = open_source()  # begins with Kafka's own
    eventually(lambda: not plain.read(1, 0.1) and plain.lag() == {("orders", 0): 0})


def test_a_member_whose_partition_was_taken_cannot_commit_and_takes_it_again(
    cluster: Cluster, open_source: Callable[..., KafkaSource], database: Engine
) -> None:
    sent = make_messages(6)
    publish(cluster, sent)
    source = open_source(positions=database)
    router, batch = position_router(source), take(source, 6)
    router.process(batch[:2])
    other = StoredOffsets(database, "billing", threading.Lock())
    other.take([("orders", 0)])
    results = router.process(batch[2:])
    assert "another member" in str(results[0])
    assert effects(database) == each_once(sent[:2])
    again = take(source, 4)  # Kafka says that it is ours
    assert ids(again) == ids(sent[2:])
    router.process(again)
    assert effects(database) == each_once(sent)
    assert list(source.read(1, 0.1)) == []
    assert sum(source.lag().values()) == 0


def test_a_commit_whose_answer_is_lost_takes_effect_once(
    cluster: Cluster, open_source: Callable[..., KafkaSource], database: Engine
) -> None:
    class Deaf(Transaction):
        answers = 1

        def commit(self, next: Any, batch: Any) -> Any:
            results = super().commit(next, batch)
            if self.answers:
                self.answers -= 1
                raise StoreError("committed, and the connection was lost")
            return results

    sent = make_messages(3)
    publish(cluster, sent)
    source = open_source(positions=database)
    position_router(source, Deaf(database)).process(take(source, 3))
    assert effects(database) == each_once(sent)
    source.close()
    assert list(open_source(positions=database).read(1, 0.5)) == []


def test_a_dead_letter_is_passed_by_the_stored_offset(
    cluster: Cluster, open_source: Callable[..., KafkaSource], database: Engine
) -> None:
    good = [*make_messages(2), *make_messages(2, "n")]
    publish(cluster, [*good[:2], *make_messages(1, "bad"), *good[2:]])
    source = open_source(positions=database, max_attempts=2)
    router = position_router(source)
    eventually(lambda: router.process(source.read(10, 0.1)) and source.dead == 1, timeout=15)
    assert effects(database) == each_once(good)
    source._client._consumer.close()
    second = open_source(positions=database)
    publish(cluster, make_messages(1, "late"))
    assert ids(take(second, 1)) == ["late-0"]


def test_a_database_that_is_not_ready_at_the_assignment_is_reported_and_asked_again(
    cluster: Cluster, open_source: Callable[..., KafkaSource], sqlite_url: str
) -> None:
    publish(cluster, make_messages(3))
    made = engine(sqlite_url)
    source = open_source(positions=made)
    with pytest.raises(StoreError, match="outbox_positions"):
        read_until_error(source)
    schema.init(made)
    got = _take_after(source, 3)
    assert ids(got) == ["m-0", "m-1", "m-2"]
    for message in got:
        message.ack()
    source.close()
    assert list(open_source(positions=made).read(1, 0.5)) == []
    made.dispose()


def test_position_mode_is_refused_where_it_would_not_protect(
    open_source: Callable[..., KafkaSource], database: Engine
) -> None:
    with pytest.raises(ConfigError, match="positions=engine"):
        PositionInbox(open_source(), producers_repeat=False)
    with pytest.raises(ConfigError, match="producers_repeat=False"):
        PositionInbox(open_source(positions=database))
    with pytest.raises(ConfigError, match="cooperative-sticky"):
        open_source(positions=database, settings={"partition.assignment.strategy": "range"})


@pytest.mark.slow
def test_a_partition_revoked_in_a_transaction_takes_effect_once(
    cluster: Cluster, open_source: Callable[..., KafkaSource], database: Engine
) -> None:
    names = [f"{partition}-{number}" for partition in (0, 1) for number in range(20)]
    for name in names:
        send_raw(cluster, "wide", name.encode(), partition=int(name[0]))
    first = open_source("wide", positions=database)
    old, held = position_router(first), take(first, 40)
    second = open_source("wide", positions=database)
    new, moved = position_router(second), 0

    def rebalance() -> bool:
        nonlocal moved
        first.read(1, 0.02)
        batch = second.read(5, 0.02)
        new.process(batch)
        moved += len(batch)
        return moved == 20

    eventually(rebalance, timeout=15)
    for begin in range(0, 40, 8):  # batches with messages of both partitions
        old.process(held[begin : begin + 8])

    def finish() -> bool:
        old.process(first.read(10, 0.02))
        new.process(second.read(10, 0.02))
        return len(effects(database)) == 40

    eventually(finish, timeout=15)
    assert effects(database) == dict.fromkeys(names, 1)
    first.close()
    second.close()
    assert list(open_source("wide", positions=database).read(1, 1.0)) == []


def test_a_worker_keeps_its_offsets_in_the_database_that_the_url_names(
    cluster: Cluster, database: Engine
) -> None:
    sent = make_messages(20)
    publish(cluster, sent)
    where = quote(database.url.render_as_string(hide_password=False), safe="")
    how = f"positions={where}&exactly_once=position&producers_repeat=false&log_level=0"
    source = connect_source(
        f"kafka://{cluster.servers}?topic=orders&group=billing&{how}", SourceOptions()
    )
    router = Router()
    router.use(Transaction(database))

    @router.raw(name="count", source="/contract")
    def count(message: Message[Any]) -> None:
        with connection(database) as found:
            found.execute(COUNT_UP, {"id": message.id})

    worker = Worker(source, router, threads=2, batch_size=3)
    worker.start()
    eventually(lambda: len(effects(database)) == 20, timeout=15)
    assert worker.stop()
    assert effects(database) == each_once(sent)
    with database.connect() as opened:
        row = opened.execute(text("SELECT topic, id, settled FROM outbox_positions")).one()
    assert tuple(row) == ("kafka:orders", 19, "[]")


def test_an_async_worker_moves_the_offsets_in_its_async_transaction(
    cluster: Cluster, open_source: Callable[..., KafkaSource], sqlite_url: str
) -> None:
    publish(cluster, make_messages(6))
    made = engine(sqlite_url)
    schema.init(made)
    with made.begin() as opened:
        opened.execute(text("CREATE TABLE effects (id TEXT PRIMARY KEY, times INTEGER)"))
    source = open_source(positions=made, exactly_once="position", producers_repeat=False)
    loop_engine = create_async_engine(sqlite_url.replace("sqlite:", "sqlite+aiosqlite:"))
    router = Router()
    router.use(Transaction(loop_engine))

    @router.raw(name="count", source="/contract")
    async def count(message: Message[Any]) -> None:
        async with async_connection(loop_engine) as found:
            await found.execute(COUNT_UP, {"id": message.id})
        if message.id == "m-5":
            worker.stop()

    async def serve() -> bool:
        finished = await worker.run_async()
        await loop_engine.dispose()
        return finished

    worker = Worker(source, router, batch_size=2)
    assert asyncio.run(serve())
    assert effects(made) == each_once(make_messages(6))
    assert list(open_source(positions=made).read(1, 0.5)) == []
    made.dispose()


@dataclass
class PlaceOrder:
    id: str


@dataclass
class OrderPlaced:
    id: str


def test_an_async_app_works_by_kafka(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create("shop", 2)
    settings = "session.timeout.ms=3000&heartbeat.interval.ms=50&log_level=0&max_in_flight=100"
    broker = f"kafka://{cluster.servers}?{settings}&dead_letters=lost"
    app = App("shop", f"sqlite+aiosqlite:///{tmp_path}/shop.db", broker)
    seen: list[str] = []

    @app.on
    async def place_order(order: PlaceOrder) -> OrderPlaced:
        return OrderPlaced(order.id)

    @app.on
    async def note(placed: OrderPlaced) -> None:
        seen.append(placed.id)

    async def serve() -> None:
        async with app:
            for _ in range(2):  # as after an answer that was lost
                await app.send_async(PlaceOrder("o-1"), id="c-1")
            await app.send_async(PlaceOrder("o-2"), id="c-2")
            await asyncio.to_thread(eventually, lambda: len(seen) >= 2, timeout=30)

    app.create_tables()
    asyncio.run(serve())
    assert sorted(seen) == ["o-1", "o-2"]


# --- for operators ------------------------------------------------------------------------------


def test_dead_letters_of_a_topic_are_listed_and_replayed_once(
    cluster: Cluster,
    open_source: Callable[..., KafkaSource],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster.create("orders.dead", 1)
    publish(cluster, make_messages(2))
    source = open_source()
    for message in take(source, 2):
        message.nack(PermanentError(f"never {message.id}"))
    quick = "session.timeout.ms=3000&heartbeat.interval.ms=50&log_level=0"
    place = f"kafka://{cluster.servers}?topic=orders.dead&{quick}"
    assert main(["dead-letters", "replay", place, "m-1"]) == 0
    [again] = take(source, 1)
    assert (again.id, again.data) == ("m-1", b"1")
    capsys.readouterr()
    assert main(["dead-letters", "list", place, "--json"]) == 0
    letters = json.loads(capsys.readouterr().out)
    assert [(letter["event_id"], letter["reason"]) for letter in letters] == [
        ("m-0", "PermanentError: never m-0")
    ]


def test_the_lag_of_a_group_is_shown_by_partition_without_joining_it(
    cluster: Cluster,
    open_source: Callable[..., KafkaSource],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in range(6):
        send_raw(cluster, "wide", b"{}", partition=number % 2)
    source = open_source("wide")
    for message in take(source, 6):
        if message.id != "1-1":
            message.ack()
    source.close()
    place = f"kafka://{cluster.servers}?topic=wide&group=billing&start=now&log_level=0"
    assert main(["streams", "lag", place, "--json"]) == 0
    found = {lag["stream"]: lag["lag"] for lag in json.loads(capsys.readouterr().out)["lags"]}
    assert found == {"wide[0]": 0, "wide[1]": 1}
    assert main(["streams", "lag", place.replace("&group=billing", "")]) == 2
    assert "say which group" in capsys.readouterr().err


# --- by URL -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["?topic=orders&group=billing", "/orders?group=billing"])
def test_a_worker_reads_a_topic_by_url(cluster: Cluster, rest: str) -> None:
    publish(cluster, make_messages(3))
    source = connect_source(f"kafka://{cluster.servers}{rest}&log_level=0", SourceOptions())
    assert ids(take(source, 3)) == ["m-0", "m-1", "m-2"]
    source.close()


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ("?topic=orders", "say which group"),
        ("?group=billing", "say which topic"),
        (
            "?topic=orders&group=billing&speed=high",
            'source: No such configuration property: "speed"',
        ),
        ("?topic=orders&group=billing&group.id=x", "is the Kafka source's own"),
        ("?topic=orders&group=billing&start=later", "'beginning' or 'now'"),
        ("?topic=orders&group=billing&exactly_once=position", "needs positions"),
        ("?topic=orders&group=billing&exactly_once=always", "'inbox' or 'position'"),
    ],
)
def test_parameters_that_are_missing_or_wrong_are_named(rest: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        connect_source(f"kafka://localhost:9092{rest}", SourceOptions())
