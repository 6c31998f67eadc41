"""What waits for a later try: listed, tried now, given up; over SQLite, PostgreSQL and Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from conquiet import Message, Router, Worker
from conquiet.acking import settle
from conquiet.cli import main
from conquiet.errors import ConfigError, TryLater
from conquiet.middleware import Retry
from conquiet.operations import dead_letters
from conquiet.operations.retries import Retries, open_retries
from conquiet.redis import StreamSink, StreamSource
from conquiet.sql import LogSource, Outbox, schema
from conquiet.sql import engine as make_engine
from conquiet.testing import eventually


@dataclass
class Place:
    """A topic of one store, its group, and the arguments of the command line for it."""

    source: Callable[[], Any]
    publish: Callable[[Sequence[Message[Any]]], object]
    retries: Callable[[], Retries]
    letters: Callable[[], Any]
    arguments: list[str]


def in_redis(client: Any, url: str) -> Place:
    return Place(
        lambda: StreamSource(client, "orders", "billing"),
        StreamSink(client, "orders").publish,
        lambda: open_retries("orders", client, "billing"),
        lambda: dead_letters.open_letters("orders:dead", client),
        ["orders", "--group", "billing", "--broker", url],
    )


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "redis":
        names = ("redis_client", "redis_url")
        yield in_redis(*(request.getfixturevalue(name) for name in names))
        return
    url = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "database_url")
    engine = make_engine(url)
    schema.init(engine)
    where = f"{url}{'&' if '?' in url else '?'}topic=orders&group=billing"

    def publish(messages: Sequence[Message[Any]]) -> None:
        with engine.begin() as connection:
            Outbox("orders").add(connection, messages)

    yield Place(
        lambda: LogSource(engine, "orders", "billing"),
        publish,
        lambda: open_retries(where),
        lambda: dead_letters.open_letters(where),
        [where],
    )
    engine.dispose()


def order(number: int) -> Message[bytes]:
    attributes = {
        "specversion": "1.0",
        "id": f"o-{number}",
        "type": "order.placed",
        "source": "/shop",
        "subject": "customer-7",
    }
    return Message(b"{}", attributes)


class Shop:
    """A worker whose handler fails while it shall."""

    def __init__(self, place: Place, delays: Sequence[float] = (3_600, 7_200)) -> None:
        self.fails = True
        self.calls: list[tuple[str, int]] = []
        self.done: list[str] = []
        router = Router()
        if delays:
            router.use(Retry(delays=delays))

        @router.raw(name="handle", source="/shop")
        def handle(message: Message[Any]) -> None:
            self.calls.append((message.id, message.deliveries))
            if self.fails:
                raise ValueError("no stock")
            self.done.append(message.id)

        self.worker = Worker(place.source(), router)

    def __enter__(self) -> Shop:
        self.worker.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.worker.stop(grace=20)


def test_what_waits_is_listed_and_tried_now_or_never(place: Place, capsys: Any) -> None:
    retries = place.retries()
    place.publish([order(number) for number in range(4)])
    with Shop(place) as shop:
        eventually(lambda: len(retries.list()) == 4, timeout=60)
        eventually(lambda: shop.worker.health().in_flight == 0, timeout=60)
        found = {item.event_id: item for item in retries.list()}
        assert {item.attempts for item in found.values()} == {1}
        assert {item.reason for item in found.values()} == {"ValueError: no stock"}
        assert {item.event_type for item in found.values()} == {"order.placed"}

        assert list(retries.now(["o-1"])) == [found["o-1"].id]
        eventually(lambda: ("o-1", 2) in shop.calls, timeout=60)
        # It failed again, and waits two hours; the others wait one.
        eventually(lambda: retries.list()[-1].event_id == "o-1", timeout=60)
        assert retries.list()[-1].attempts == 2

        assert list(retries.never([found["o-2"].id])) == [found["o-2"].id]
        assert list(retries.never(["o-2", "o-99"])) == []
        [letter] = dead_letters.find(place.letters())
        assert (letter.event_id, letter.attempts) == ("o-2", 1)
        assert "no stock" in letter.reason

        assert main(["retries", "list", *place.arguments, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == 3
        assert main(["retries", "list", *place.arguments]) == 0
        assert "ValueError: no stock" in capsys.readouterr().out
        assert main(["retries", "now", *place.arguments, "o-99"]) == 1
        assert main(["retries", "now", *place.arguments]) == 2
        assert main(["retries", "never", *place.arguments, "o-3", "--json"]) == 0
        shop.fails = False
        assert main(["retries", "now", *place.arguments, "--all"]) == 0
        eventually(lambda: sorted(shop.done) == ["o-0", "o-1"], timeout=60)
        eventually(lambda: retries.list() == [], timeout=60)
    assert dict(shop.calls)["o-1"] == 3


def test_after_the_last_delay_it_is_a_dead_letter_of_the_source(place: Place) -> None:
    place.publish([order(1)])
    with Shop(place, [0.1, 0.1]) as shop:
        eventually(lambda: bool(dead_letters.find(place.letters())), timeout=60)
    [letter] = dead_letters.find(place.letters())
    assert (letter.event_id, letter.attempts) == ("o-1", 3)
    assert "failed 3 times, at last with ValueError: no stock" in letter.reason
    assert "no stock" in letter.traceback
    assert shop.calls == [("o-1", 1), ("o-1", 2), ("o-1", 3)]
    assert place.retries().list() == []


def test_there_may_be_more_delays_than_the_source_has_attempts(place: Place) -> None:
    place.publish([order(1)])
    with Shop(place, [0.01] * 30) as shop:
        eventually(lambda: len(shop.calls) == 31, timeout=60)
    assert [count for _, count in shop.calls] == list(range(1, 32))


def test_what_waits_comes_back_also_to_a_worker_without_the_middleware(place: Place) -> None:
    place.publish([order(1)])
    with Shop(place) as shop:
        eventually(lambda: len(place.retries().list()) == 1, timeout=60)
    place.retries().now()
    later = Shop(place, ())
    later.fails = False
    with later:
        eventually(lambda: later.done == ["o-1"], timeout=60)
    assert shop.calls + later.calls == [("o-1", 1), ("o-1", 2)]


def test_other_groups_of_a_stream_are_not_concerned(redis_client: Any, redis_url: str) -> None:
    place = in_redis(redis_client, redis_url)
    place.publish([order(1)])
    other = StreamSource(redis_client, "orders", "shipping")
    [message] = other.read(10, 1.0)
    message.ack()
    with Shop(place, [0.1] * 3) as shop:
        eventually(lambda: len(shop.calls) == 4, timeout=60)
    assert other.read(10, 0.2) == []
    other.close()


def test_an_entry_that_another_consumer_has_claimed_is_not_moved(redis_client: Any) -> None:
    StreamSink(redis_client, "orders").publish([order(1)])
    first = StreamSource(redis_client, "orders", "billing", lease=0.05, claim_interval=0.05)
    first.allow_delays(2, ordered=False)
    [stale] = first.read(10, 1.0)
    second = StreamSource(redis_client, "orders", "billing", lease=60, claim_interval=0.05)
    taken: list[Message[Any]] = []

    def take() -> bool:
        taken.extend(second.read(10, 0.1))
        return bool(taken)

    eventually(take, timeout=60)
    assert stale.acking is not None
    settle((), [(stale.acking, TryLater(1.0, ValueError("late")))])
    assert open_retries("orders", redis_client, "billing").list() == []
    assert redis_client.xpending("orders", "billing")["pending"] == 1
    assert taken[0].ack()
    for source in (first, second):
        source.close()


def test_what_cannot_wait_beside_its_stream_pauses_in_the_worker(redis_client: Any) -> None:
    """A script that fails in the middle moves nothing: the entry stays pending, and is retried."""
    redis_client.set("conquiet:due:{orders}:billing", "no sorted set")
    place = in_redis(redis_client, "")
    place.publish([order(1)])
    source = StreamSource(redis_client, "orders", "billing")
    router = Router()
    router.use(Retry(delays=[3_600, 3_600, 3_600]))
    calls: list[int] = []

    @router.raw(name="handle", source="/shop")
    def handle(message: Message[Any]) -> None:
        calls.append(message.deliveries)
        if len(calls) == 1:
            raise ValueError("no stock")

    redis_client.delete("conquiet:due:{orders}:billing")
    worker = Worker(source, router)
    worker.build_chain()
    [message] = source.read(10, 1.0)
    redis_client.set("conquiet:due:{orders}:billing", "no sorted set")
    assert message.nack(TryLater(3_600, ValueError("no stock")))
    redis_client.delete("conquiet:due:{orders}:billing")
    assert redis_client.xpending("orders", "billing")["pending"] == 1
    again: list[Message[Any]] = []

    def take() -> bool:
        again.extend(source.read(10, 0.1))
        return bool(again)

    eventually(take, timeout=60)
    assert (again[0].id, again[0].deliveries) == ("o-1", 2)
    again[0].ack()
    assert place.retries().list() == []
    source.close()


def test_a_stream_needs_its_group() -> None:
    with pytest.raises(ConfigError, match="--group billing"):
        open_retries("orders")
