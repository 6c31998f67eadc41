"""The history of handlers and relays: in PostgreSQL, SQLite and Redis, written by real workers."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from sqlalchemy import text

from conquiet import Router, Worker, sql
from conquiet.errors import ConquietError, PermanentError, StoreError
from conquiet.memory import Log, LogSink
from conquiet.message import Message
from conquiet.operations.history import (
    KEPT_MINUTES,
    History,
    Keeper,
    Key,
    Recorder,
    RedisKeeper,
    TableKeeper,
    find_keeper,
    quantile,
    record,
)
from conquiet.redis import StreamSink, StreamSource
from conquiet.relay.relay import Relay
from conquiet.sql import Outbox, OutboxSource, Transaction, schema
from conquiet.testing import eventually

CALLS = Key("handler", "place_order", "order.place", "calls")
LAG = Key("group", "billing", "orders", "lag")


@pytest.fixture(params=["postgresql", "sqlite", "redis"])
def keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    if request.param == "redis":
        with redis.Redis.from_url(request.getfixturevalue("redis_url")) as client:
            made = RedisKeeper(client)
            yield made
            made.close()
        return
    of = "database_url" if request.param == "postgresql" else "sqlite_url"
    engine = sql.engine(request.getfixturevalue(of))
    schema.init(engine)
    yield TableKeeper(engine)
    engine.dispose()


def totals(history: History) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for entry in history.entries:
        found[entry.key] = found.get(entry.key, 0.0) + entry.value
    return found


def test_counters_are_added_and_gauges_are_set(keeper: Keeper) -> None:
    keeper.write({CALLS: 3, LAG: 70})
    keeper.write({CALLS: 4.5, LAG: 12})
    found = totals(keeper.read(10))
    assert found[CALLS] == pytest.approx(7.5)
    assert found[LAG] == 12  # in a second minute it would be two entries, of 70 and 12
    assert totals(keeper.read(10, kind="group")) == {LAG: 12}
    assert totals(keeper.read(10, kind="handler", name="another")) == {}


def test_a_moment_is_that_of_the_store(keeper: Keeper) -> None:
    keeper.write({Key("process", "host-1", "worker", "seen"): 0.0})
    history = keeper.read(2)
    [entry] = history.entries
    assert history.now - 5 < entry.value < history.now + 0.01  # both are rounded
    assert entry.minute in (int(history.now // 60), int(history.now // 60) - 1)


def test_steps_have_the_sums_of_their_minutes(keeper: Keeper) -> None:
    keeper.write({CALLS: 3, LAG: 7})
    for step in (1, 5, 15):
        [calls, lag] = sorted(
            keeper.read(KEPT_MINUTES, step).entries, key=lambda one: one.key.kind
        )[::-1]
        assert (calls.value, lag.value) == (3, 7)
        assert calls.minute % step == 0


def test_processes_that_write_at_the_same_time_lose_nothing(keeper: Keeper) -> None:
    keys = [Key("handler", f"handler-{n}", "t", "calls") for n in range(20)]

    def write(order: int) -> None:
        for _ in range(10):
            keeper.write(dict.fromkeys(keys[::order], 1))

    threads = [threading.Thread(target=write, args=(order,)) for order in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals(keeper.read(10)) == dict.fromkeys(keys, 40)


def test_names_of_any_kind_come_back_without_control_characters(keeper: Keeper) -> None:
    keeper.write({Key("handler", "näme\x1f'; DROP\0", "*" * 500, "calls"): 1})
    [entry] = keeper.read(10).entries
    assert entry.key.name == "näme '; DROP"
    assert entry.key.type == "*" * 200


def test_a_table_forgets_what_is_older_than_a_day(sqlite_url: str) -> None:
    engine = sql.engine(sqlite_url)
    schema.init(engine)
    old = int(time.time() // 60) - KEPT_MINUTES - 2
    insert = "INSERT INTO outbox_history VALUES (:minute, 'handler', 'a', 'b', 'calls', 1)"
    with engine.begin() as connection:
        connection.execute(text(insert), [{"minute": old}, {"minute": old + 60}])
    TableKeeper(engine).write({CALLS: 1})
    with engine.connect() as connection:
        left = connection.execute(text("SELECT minute FROM outbox_history ORDER BY 1")).scalars()
        assert next(iter(left)) == old + 60
    engine.dispose()


def test_redis_forgets_what_is_older_than_a_day(redis_client: Any) -> None:
    RedisKeeper(redis_client).write({CALLS: 1})
    [key] = redis_client.keys("conquiet:history:*")
    assert 86_400 < redis_client.ttl(key) <= 86_400 + 600


def test_quantiles_are_within_their_bucket() -> None:
    buckets = {"<=0.01": 90.0, "<=0.1": 9.0, "<=inf": 1.0}
    assert 0.0 < (quantile(buckets, 0.5) or 0) <= 0.01
    assert 0.05 < (quantile(buckets, 0.95) or 0) <= 0.1
    assert quantile(buckets, 1.0) == 300
    assert quantile({}, 0.5) is None


# --- workers ----------------------------------------------------------------------------------


def made_router(*middlewares: Any) -> Router:
    router = Router()
    router.use(*middlewares)

    @router.raw(type="order.place", name="place_order")
    def place_order(message: Message[bytes]) -> None:
        time.sleep(0.03)
        if message.data == b"bad":
            raise PermanentError("no such customer")
        if message.data == b"again" and message.deliveries == 1:
            raise LookupError("not yet")

    return router


def publish(client: Any, *data: bytes) -> None:
    messages = [
        Message(one, {"type": "order.place", "source": "/shop", "id": f"m-{at}"})
        for at, one in enumerate(data)
    ]
    assert set(StreamSink(client, "orders").publish_each(messages)) == {None}


def test_a_worker_on_redis_reports_its_handlers_its_lag_and_itself(redis_client: Any) -> None:
    publish(redis_client, b"good", b"good", b"bad", b"again")
    source = StreamSource(redis_client, "orders", "billing", "billing-1", backoff=0.01)
    worker = Worker(source, made_router(), batch_size=1)
    recorder = record([worker])
    assert recorder is not None
    assert isinstance(recorder.keeper, RedisKeeper)
    worker.start()
    try:
        eventually(lambda: worker.health().handled == 5)
        recorder.write()
    finally:
        worker.stop()
    found = totals(recorder.keeper.read(10))

    def value(figure: str) -> float:
        return found.get(CALLS._replace(figure=figure), 0.0)

    assert {figure: value(figure) for figure in ("calls", "ok", "errors", "dead", "retries")} == {
        "calls": 5,
        "ok": 3,
        "errors": 2,
        "dead": 1,
        "retries": 1,
    }
    assert 0.15 <= value("seconds") < 5
    buckets = {key.figure: count for key, count in found.items() if key.figure.startswith("<=")}
    assert sum(buckets.values()) == 5
    assert (quantile(buckets, 0.5) or 0) >= 0.025
    assert found[LAG] == 0
    assert found[Key("process", "billing-1", "worker", "in_flight")] == 0
    assert Key("process", "billing-1", "worker", "seen") in found


def test_a_recorder_writes_by_itself_and_at_the_end(redis_client: Any) -> None:
    keeper = RedisKeeper(redis_client)
    recorder = Recorder(keeper, "host-1", seconds=0.05)
    recorder.start()
    eventually(lambda: keeper.read(2).entries)
    recorder.close()
    assert Key("process", "host-1", "worker", "ended") in totals(keeper.read(2))


def test_without_redis_it_is_beside_the_outbox(database_url: str) -> None:
    engine = sql.engine(database_url)
    schema.init(engine, outbox="billing_outbox")
    log = Log()
    router = made_router(Transaction(engine), Outbox("orders", table="billing_outbox"))
    worker = Worker(log.source("billing"), router)
    recorder = record([worker])
    assert recorder is not None
    LogSink(log).publish_each(
        [Message(b"good", {"type": "order.place", "source": "/", "id": "1"}, topic="orders")]
    )
    worker.start()
    eventually(lambda: worker.health().handled == 1)
    recorder.write()
    worker.stop()
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT value FROM billing_outbox_history WHERE figure = 'ok'")
        ).scalar_one()
    assert found == 1
    engine.dispose()


def test_a_relay_reports_what_it_publishes(database_url: str, redis_client: Any) -> None:
    engine = sql.engine(database_url)
    schema.init(engine)
    with engine.begin() as connection:
        Outbox("orders", source="/shop").add(
            connection, [Message({"n": n}, {"type": "order.placed"}) for n in range(7)]
        )
    relay = Relay(OutboxSource(engine), StreamSink(redis_client, "orders"))
    recorder = record([], relay)
    assert recorder is not None
    relay.run_once()
    recorder.write()
    recorder.write()
    found = totals(recorder.keeper.read(10))
    assert found[Key("relay", "outbox", "", "published")] == 7
    assert recorder.role == "relay"
    relay.source.close()
    engine.dispose()


def test_an_async_client_is_written_by_a_blocking_one_of_its_server(
    redis_client: Any, redis_url: str
) -> None:
    publish(redis_client, b"good")

    async def work() -> Recorder:
        client = redis.asyncio.Redis.from_url(redis_url)
        worker = Worker(StreamSource(client, "orders", "billing"), made_router())
        recorder = record([worker])
        assert recorder is not None
        async with worker:
            while worker.health().handled < 1:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(recorder.write)
        await client.aclose()
        return recorder

    recorder = asyncio.run(work())
    assert totals(RedisKeeper(redis_client).read(2))[CALLS] == 1
    recorder.keeper.close()


def test_a_store_in_memory_keeps_none() -> None:
    engine = sql.engine("sqlite://")
    assert find_keeper(Transaction(engine)) is None
    assert find_keeper(object()) is None
    engine.dispose()


class Broken:
    """Fails as often as it is told to."""

    def __init__(self) -> None:
        self.is_broken = True
        self.written: list[dict[Key, float]] = []

    def write(self, figures: Any) -> None:
        if self.is_broken:
            raise StoreError("the store is away")
        self.written.append(dict(figures))

    def read(self, minutes: int, step: int = 1, kind: str = "", name: str = "") -> History:
        return History(0.0)

    def close(self) -> None: ...


def test_a_failed_write_is_logged_once_and_made_up_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    keeper = Broken()
    recorder = Recorder(keeper, "p", read=lambda: {CALLS: 2.0, LAG: 5.0})
    recorder.write()
    recorder.write()
    [line] = caplog.messages
    assert "messages are not affected" in line
    keeper.is_broken = False
    recorder.write()
    assert keeper.written[0][CALLS] == 6
    assert keeper.written[0][LAG] == 5


def test_a_missing_table_does_not_touch_messages(
    sqlite_url: str, redis_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sql.engine(sqlite_url)
    keeper = TableKeeper(engine)
    with pytest.raises(ConquietError, match="no such table"):
        keeper.write({CALLS: 1})
    publish(redis_client, b"good")
    router = made_router()
    recorder = Recorder(keeper, seconds=0.02)
    router.insert(recorder)
    worker = Worker(StreamSource(redis_client, "orders", "billing"), router)
    recorder.start()
    worker.start()
    eventually(lambda: worker.health().handled == 1)
    worker.stop()
    recorder.close()
    assert worker.health().failed == 0
    assert sum("could not write the history" in one for one in caplog.messages) == 1
    engine.dispose()


APP = """
from conquiet import App, Message, Router

router = Router()

@router.raw(type="order.place", name="place_order")
def place_order(message: Message[bytes]) -> None: ...
"""


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            yield process
        finally:
            process.kill()


def is_drained(client: Any) -> bool:
    """Return whether the group has read and acked every entry; Redis 6.2 reports no lag."""
    last = client.xinfo_stream("orders")["last-generated-id"]
    return any(
        group["last-delivered-id"] == last and group["pending"] == 0
        for group in client.xinfo_groups("orders")
    )


def test_processes_of_the_command_line_report_together(
    redis_client: Any, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    command = [
        *(sys.executable, "-m", "conquiet", "worker", "run", "shop:router", "--processes", "2"),
        *("--source", "redis:?stream=orders&group=billing", "--broker", redis_url),
    ]
    keeper = RedisKeeper(redis_client)
    with running(command, tmp_path) as process:
        eventually(
            lambda: (
                len(redis_client.xinfo_consumers("orders", "billing")) == 2
                if redis_client.exists("orders") and redis_client.xinfo_groups("orders")
                else False
            ),
            timeout=60,
        )
        publish(redis_client, *[b"good"] * 40)
        eventually(lambda: is_drained(redis_client), timeout=30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    found = totals(keeper.read(10))
    assert found[CALLS._replace(figure="ok")] == 40
    ended = [key for key in found if key.kind == "process" and key.figure == "ended"]
    assert len(ended) == 2


def test_history_false_keeps_none(redis_client: Any, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    publish(redis_client, b"good")
    command = [
        *(sys.executable, "-m", "conquiet", "worker", "run", "shop:router", "--no-history"),
        *("--source", "redis:?stream=orders&group=billing", "--broker", redis_url),
    ]
    with running(command, tmp_path) as process:
        eventually(lambda: is_drained(redis_client), timeout=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert redis_client.keys("conquiet:history:*") == []


def test_a_relay_of_the_command_line_reports_what_waits_too(
    redis_client: Any, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    engine = sql.engine(sqlite_url)
    schema.init(engine)
    with engine.begin() as connection:
        Outbox("orders", source="/shop").add(
            connection, [Message({"n": n}, {"type": "order.placed"}) for n in range(7)]
        )
    engine.dispose()
    command = [
        *(sys.executable, "-m", "conquiet", "relay", "run", "--health", "off"),
        *("--database", sqlite_url, "--sink", redis_url, "--broker", redis_url),
    ]
    with running(command, tmp_path) as process:
        eventually(lambda: redis_client.xlen("orders") == 7, timeout=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    found = totals(RedisKeeper(redis_client).read(10))
    assert found[Key("relay", "outbox", "", "published")] == 7
    assert found[Key("relay", "outbox", "", "waiting")] == 0
