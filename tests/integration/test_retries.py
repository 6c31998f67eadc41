"""What waits for a later try: listed, tried now, given up; over SQLite, PostgreSQL and Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from conquiet import Message, Router, Worker
from conquiet.acking import settle
from conquiet.cli import main
from conquiet.errors import ConfigError, GivenBack, TryLater
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


@contextmanager
def in_database(url: str) -> Iterator[Place]:
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


URLS = {"sqlite": "sqlite_url", "postgresql": "database_url"}


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "redis":
        names = ("redis_client", "redis_url")
        yield in_redis(*(request.getfixturevalue(name) for name in names))
        return
    with in_database(request.getfixturevalue(URLS[request.param])) as place:
        yield place


@pytest.fixture(params=["sqlite", "postgresql"])
def log(request: pytest.FixtureRequest) -> Iterator[Place]:
    with in_database(request.getfixturevalue(URLS[request.param])) as place:
        yield place


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


def show(place: Place, id_: str) -> list[str]:
    return [place.arguments[0], id_, *place.arguments[1:]]


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

        tried = retries.list()[-1]
        assert [(one.attempt, one.error) for one in tried.errors] == [
            (1, "ValueError: no stock"),
            (2, "ValueError: no stock"),
        ]
        assert main(["retries", "show", *show(place, "o-1")]) == 0
        shown = capsys.readouterr().out
        assert f"2  {tried.errors[1].time}  ValueError: no stock" in shown
        assert main(["retries", "show", *show(place, tried.id), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["errors"][0]["attempt"] == 1
        assert main(["retries", "show", *show(place, "o-99")]) == 1
        assert "no message 'o-99' of group 'billing'" in capsys.readouterr().err

        assert list(retries.never([found["o-2"].id])) == [found["o-2"].id]
        assert list(retries.never(["o-2", "o-99"])) == []
        [letter] = dead_letters.find(place.letters())
        assert (letter.event_id, letter.attempts) == ("o-2", 1)
        assert "no stock" in letter.reason
        assert [one.error for one in letter.errors] == ["ValueError: no stock"]

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
    assert main(["retries", "list", *place.arguments]) == 0
    assert "does not exist" not in capsys.readouterr().err
    wrong = [place.arguments[0].replace("orders", "o"), *place.arguments[1:]]
    assert main(["retries", "list", *wrong]) == 1
    assert "does not exist (yet)" in capsys.readouterr().err


def letters_at(place: Place) -> list[str]:
    return ["orders:dead", *place.arguments[3:]] if len(place.arguments) > 1 else place.arguments


def test_after_the_last_delay_it_is_a_dead_letter_of_the_source(place: Place, capsys: Any) -> None:
    place.publish([order(1)])
    with Shop(place, [0.1, 0.1]) as shop:
        eventually(lambda: bool(dead_letters.find(place.letters())), timeout=60)
    [letter] = dead_letters.find(place.letters())
    assert (letter.event_id, letter.attempts) == ("o-1", 3)
    assert "failed 3 times, at last with ValueError: no stock" in letter.reason
    assert "no stock" in letter.traceback
    assert [(one.attempt, one.error) for one in letter.errors] == [
        (number, "ValueError: no stock") for number in (1, 2, 3)
    ]
    assert main(["dead-letters", "show", *letters_at(place), "o-1"]) == 0
    assert f"2  {letter.errors[1].time}  ValueError: no stock" in capsys.readouterr().out
    assert shop.calls == [("o-1", 1), ("o-1", 2), ("o-1", 3)]
    assert place.retries().list() == []


def test_there_may_be_more_delays_than_the_source_has_attempts(place: Place) -> None:
    place.publish([order(1)])
    with Shop(place, [0.01] * 30) as shop:
        eventually(lambda: bool(dead_letters.find(place.letters())), timeout=60)
    assert [count for _, count in shop.calls] == list(range(1, 32))
    # Of their errors, the first one is kept and the latest ones.
    [letter] = dead_letters.find(place.letters())
    assert [one.attempt for one in letter.errors] == [1, *range(23, 32)]


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


# --- order by key on Redis ------------------------------------------------------------------


def take_in_order(client: Any, *, ordered: bool = True) -> StreamSource:
    source = StreamSource(client, "orders", "billing")
    source.allow_delays(4, ordered=ordered)
    return source


def read_ids(source: Any) -> list[str]:
    return [message.id for message in source.read(10, 0.3)]


def test_who_waits_for_another_is_listed_and_freed_by_never(
    redis_client: Any, redis_url: str, capsys: Any
) -> None:
    place = in_redis(redis_client, redis_url)
    source = take_in_order(redis_client)
    place.publish([order(0)])
    [first] = source.read(10, 1.0)
    first.nack(TryLater(3_600, ValueError("no stock")))
    place.publish([order(1), order(2)])
    assert read_ids(source) == []
    assert source.in_flight == 0
    assert redis_client.xpending("orders", "billing")["pending"] == 0
    found = place.retries().list()
    assert [(item.event_id, item.attempts, bool(item.due)) for item in found] == [
        ("o-0", 1, True),
        ("o-1", 0, False),
        ("o-2", 0, False),
    ]
    assert main(["retries", "list", *place.arguments]) == 0
    shown = capsys.readouterr().out
    assert "behind another" in shown
    assert "waits for an earlier message of its key" in shown
    assert main(["retries", "now", *place.arguments, "o-1"]) == 1
    assert "is tried after that" in capsys.readouterr().err

    assert list(place.retries().never(["o-1"])) == [found[1].id]  # not the first: none is freed
    assert read_ids(source) == []
    assert list(place.retries().never(["o-0"])) == [found[0].id]
    [last] = source.read(10, 5.0)
    assert (last.id, last.deliveries) == ("o-2", 1)
    last.ack()
    assert place.retries().list() == []
    assert [letter.event_id for letter in dead_letters.find(place.letters())] == ["o-1", "o-0"]
    assert not redis_client.exists("conquiet:turns:{orders}:billing")
    source.close()


def test_now_lets_the_first_go_and_the_others_follow_one_by_one(redis_client: Any) -> None:
    place = in_redis(redis_client, "")
    source = take_in_order(redis_client)
    place.publish([order(number) for number in range(4)])
    first, *others = source.read(10, 1.0)
    first.nack(TryLater(3_600, ValueError("no stock")))
    for message in others:
        message.nack(GivenBack("an earlier one failed"))
    assert read_ids(source) == []
    assert len(place.retries().now()) == 1
    for number in range(4):
        [message] = source.read(10, 5.0)
        assert (message.id, message.deliveries) == (f"o-{number}", 2 if number == 0 else 1)
        assert read_ids(source) == []  # the next one waits for the ack
        message.ack()
    assert read_ids(source) == []
    source.close()


@pytest.mark.parametrize("verb", ["now", "never"])
def test_in_a_log_what_waits_behind_another_goes_with_it(log: Place, verb: str) -> None:
    source = log.source()
    source.allow_delays(4, ordered=True)
    log.publish([order(0)])
    [first] = source.read(10, 5.0)
    first.nack(TryLater(3_600, ValueError("no stock")))
    log.publish([order(1), order(2)])
    assert read_ids(source) == []
    found = log.retries().list()
    shown = [(item.event_id, item.attempts, bool(item.due)) for item in found]
    assert shown == [("o-0", 1, True), ("o-1", 0, False), ("o-2", 0, False)]
    assert log.retries().now(["o-1"]) == []  # it is tried after the first
    assert log.retries().list() == found
    assert getattr(log.retries(), verb)(["o-0"]) == [found[0].id]
    left = ["o-0", "o-1", "o-2"][verb == "never" :]
    read: list[str] = []

    def has_read_all() -> bool:
        for message in source.read(10, 0.1):
            read.append(message.id)
            message.ack()
        return len(read) == len(left)

    eventually(has_read_all, timeout=60)
    assert read == left
    assert log.retries().list() == []
    source.close()


def test_in_a_log_one_that_waits_behind_another_can_be_given_up(log: Place, capsys: Any) -> None:
    source = log.source()
    source.allow_delays(4, ordered=True)
    log.publish([order(0)])
    [first] = source.read(10, 5.0)
    first.nack(TryLater(3_600, ValueError("no stock")))
    log.publish([order(1), order(2)])
    assert read_ids(source) == []
    assert main(["retries", "never", *log.arguments, "o-1"]) == 0
    assert read_ids(source) == []
    capsys.readouterr()
    assert main(["retries", "list", *log.arguments]) == 0
    shown = capsys.readouterr().out
    assert "o-1" not in shown
    assert shown.count("behind another") == 1
    assert main(["retries", "now", *log.arguments, "--all"]) == 0
    capsys.readouterr()
    assert main(["retries", "list", *log.arguments]) == 0
    shown = capsys.readouterr().out
    assert f"until {datetime.now(UTC).year}" in shown
    assert shown.count("behind another") == 1
    source.close()


def test_a_later_one_that_is_due_waits_for_an_earlier_one_that_is_not(redis_client: Any) -> None:
    """Two consumers of one stream may fail on messages of one key at the same time."""
    place = in_redis(redis_client, "")
    source = take_in_order(redis_client)
    place.publish([order(0), order(1)])
    first, second = source.read(10, 1.0)
    second.nack(TryLater(0.01, ValueError("short")))
    first.nack(TryLater(1.0, ValueError("long")))
    found: list[str] = []

    def read() -> bool:
        for message in source.read(10, 0.1):
            found.append(message.id)
            message.ack()
        return len(found) == 2

    eventually(read, timeout=60)
    assert found == ["o-0", "o-1"]
    source.close()


def test_an_unordered_worker_frees_what_waits_for_another(redis_client: Any) -> None:
    place = in_redis(redis_client, "")
    source = take_in_order(redis_client)
    place.publish([order(0), order(1)])
    [first, second] = source.read(10, 1.0)
    first.nack(TryLater(1.0, ValueError("no stock")))
    second.nack(GivenBack("an earlier one failed"))
    assert read_ids(source) == []
    source.close()
    later = take_in_order(redis_client, ordered=False)
    [first] = later.read(10, 5.0)
    first.nack(TryLater(0.1, ValueError("no stock")))
    [first] = later.read(10, 5.0)
    assert (first.id, first.deliveries) == ("o-0", 3)
    first.ack()
    [second] = later.read(10, 5.0)
    assert second.id == "o-1"
    second.ack()
    later.close()


def test_a_turn_is_kept_by_a_consumer_that_was_killed(redis_client: Any) -> None:
    place = in_redis(redis_client, "")
    source = StreamSource(redis_client, "orders", "billing", lease=0.2)
    source.allow_delays(4, ordered=True)
    place.publish([order(0), order(1)])
    first, second = source.read(10, 1.0)
    first.nack(TryLater(0.01, ValueError("no stock")))
    second.nack(GivenBack("an earlier one failed"))
    [first] = source.read(10, 5.0)  # and is never settled: its process is dead
    other = StreamSource(redis_client, "orders", "billing", lease=0.2, claim_interval=0.1)
    other.allow_delays(4, ordered=True)
    found: list[str] = []

    def read() -> bool:
        for message in other.read(10, 0.1):
            found.append(message.id)
            message.ack()
        return len(found) == 2

    eventually(read, timeout=60)
    assert found == ["o-0", "o-1"]
    assert redis_client.xlen("conquiet:again:{orders}:billing") == 0
    other.close()


def test_a_stream_needs_its_group() -> None:
    with pytest.raises(ConfigError, match="--group billing"):
        open_retries("orders")


# --- a database of an older version -----------------------------------------------------------


def test_a_table_without_errors_keeps_the_last_one_until_it_is_migrated(sqlite_url: str) -> None:
    engine = make_engine(sqlite_url)
    schema.migrate(engine, revision="0005")
    missing = "outbox_retries: column errors should be text, is missing"
    assert missing in [str(found) for found in schema.verify(engine)]
    where = f"{sqlite_url}?topic=orders&group=billing"
    with engine.begin() as connection:
        Outbox("orders").add(connection, [order(1)])
    source = LogSource(engine, "orders", "billing")
    source.allow_delays(9, ordered=False)

    def fail() -> tuple[str, ...]:
        """Fail once more, and return the errors of the attempts before."""
        found: list[Message[Any]] = []
        eventually(lambda: bool(found.extend(source.read(10, 0.1)) or found), timeout=60)
        found[0].nack(TryLater(0.01, ValueError(f"no {found[0].deliveries}")))
        return tuple(one.error for one in found[0].errors)

    assert [fail(), fail()] == [(), ()]
    [waiting] = open_retries(where).list()
    assert (waiting.attempts, waiting.reason, waiting.errors) == (2, "ValueError: no 2", ())
    schema.migrate(engine)
    assert schema.verify(engine) == []
    assert [fail(), fail()] == [(), ("ValueError: no 3",)]
    [waiting] = open_retries(where).list()
    assert [one.attempt for one in waiting.errors] == [3, 4]
    source.close()
    engine.dispose()
