"""Delayed events: how late they are published, and what promoting costs beside a million that wait.
Retries: what messages cost that wait for a later try, and come back, beside a million others.

    python -m bench.time            a thousand due per second; 10³ to 10⁶ waiting
    python -m bench.time --quick    for a quarter of the time; 10³ to 10⁵ waiting

How late is the time from when an event is due, by the clock of the store, to when a relay has read
it. Store and relay are on one machine, so they have one clock. Retries are those of an ordered
worker, each with a key of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any

import redis

from conquiet import Message, embedded
from conquiet import redis as on_redis
from conquiet.errors import TryLater
from conquiet.redis.delay import DelayKeys
from conquiet.redis.promotion import Delayed
from conquiet.redis.wire import Wire
from conquiet.sql import LogSource, Outbox, OutboxSource, engine, schema
from conquiet.sql.promotion import Promoter

RATE = 1_000
FAR = timedelta(days=365)
STREAM = "conquiet:outbox:bench"


class OnSql:
    def __init__(self, url: str) -> None:
        self.engine = engine(url)
        schema.init(self.engine)
        self.outbox = Outbox("bench", source="/bench")

    def add(self, messages: list[Message[Any]]) -> None:
        with self.engine.begin() as connection:
            self.outbox.add(connection, messages)

    def source(self) -> Any:
        return OutboxSource(self.engine)

    def group(self) -> Any:
        return LogSource(self.engine, "bench", "group")

    def publish(self, messages: list[Message[Any]]) -> None:
        self.add(messages)

    def _series(self, count: int) -> tuple[str, str]:
        """Return how a query of the numbers up to `count` begins, and what it is from."""
        if self.engine.dialect.name != "sqlite":
            return "SELECT", f"generate_series(1, {count}) AS numbers (n)"
        numbers = f"SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count}"
        return f"WITH RECURSIVE numbers (n) AS ({numbers}) SELECT", "numbers"

    def fill_retries(self, count: int) -> None:
        """Let `count` messages wait for a later try; their rows in the log are not needed."""
        series, rows = self._series(count)
        with self.engine.begin() as connection:
            for table in ("outbox_retries", "outbox_positions", "outbox"):
                connection.exec_driver_sql(f"DELETE FROM {table}")
            connection.exec_driver_sql(
                "INSERT INTO outbox_retries (id, consumer_group, topic, partition, xid, key,"
                f" attempts, next_try, last_error) {series} -n, 'group', 'bench', mod(n, 8), 0,"
                f" 'far-' || n, 1, {time.time() + FAR.total_seconds()} + n, 'no stock' FROM {rows}"
            )

    def fill(self, count: int) -> None:
        """Let `count` events wait; in SQL itself, which is faster."""
        is_sqlite = self.engine.dialect.name == "sqlite"
        series, rows = self._series(count)
        data = "x'7b7d'" if is_sqlite else "'{}'::bytea"
        due = (
            "datetime('now', '+1 year', n || ' seconds') || '.000000'"
            if is_sqlite
            else "now() + interval '1 year' + n * interval '1 second'"
        )
        with self.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM outbox_delayed")
            connection.exec_driver_sql(
                "INSERT INTO outbox_delayed (due_at, topic, event_type, event_id, content_type,"
                f" data, attributes) {series} {due}, 'bench', 'far', 'far-' || n,"
                f" 'application/json', {data}, '{{}}' FROM {rows}"
            )

    def promote(self, messages: list[Message[Any]]) -> float:
        """Add events that are due, and return the seconds that promoting them takes."""
        self.add(messages)
        promoter = Promoter(self.engine, was_notified=lambda: True)
        promoter.promote()  # looks for the table, and moves the first ones
        self.add(messages)
        time.sleep(0.03)
        begun = time.perf_counter()
        assert promoter.promote(len(messages)) == len(messages)
        return time.perf_counter() - begun


class OnRedis:
    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url)
        self.outbox = on_redis.Outbox("bench", STREAM, source="/bench")
        self.delayed = Delayed(STREAM)

    def add(self, messages: list[Message[Any]]) -> None:
        pipeline = self.client.pipeline()
        self.outbox.add(pipeline, messages)
        pipeline.execute()

    def source(self) -> Any:
        return on_redis.OutboxSource(self.client, STREAM)

    def group(self) -> Any:
        return on_redis.StreamSource(self.client, "bench", "group")

    def publish(self, messages: list[Message[Any]]) -> None:
        on_redis.StreamSink(self.client, "bench").publish(messages)

    def fill_retries(self, count: int) -> None:
        """Let `count` entries wait for a later try."""
        self.client.flushdb()
        keys = DelayKeys.of("bench", "group")
        due = (time.time() + FAR.total_seconds()) * 1_000
        for start in range(0, count, 5_000):
            pipeline = self.client.pipeline(transaction=False)
            for n in range(start, min(start + 5_000, count)):
                id_, turn = f"1-{n + 1}", f"{n:040x}:{n:040d}"
                pipeline.xadd(keys.later, {"data": "{}", ":attempts": 1, ":turn": turn}, id_)
                pipeline.zadd(keys.turns, {f"{turn}:{id_}": 0})
                pipeline.zadd(keys.due, {id_: due + n})
            pipeline.execute()

    def fill(self, count: int) -> None:
        self.client.flushdb()
        moment = datetime.now(UTC) + FAR
        for start in range(0, count, 5_000):
            numbers = range(start, min(start + 5_000, count))
            self.add([_event(f"far-{n}", moment + timedelta(seconds=n)) for n in numbers])

    def promote(self, messages: list[Message[Any]]) -> float:
        self.add(messages)
        wire = Wire(self.client)
        begun = time.perf_counter()
        moved, *_ = wire.call(self.delayed.times, *self.delayed.promote(len(messages)))
        taken = time.perf_counter() - begun
        assert moved == len(messages)
        return taken


def _event(id: str, notbefore: datetime | timedelta | None, **attributes: str) -> Message[Any]:
    named = {"id": id, "type": "bench", "source": "/bench", **attributes}
    return Message(b"{}", named, notbefore=notbefore)


def measure_lateness(store: Any, seconds: float) -> list[float]:
    """Let events be due at a steady rate while others are written; return how late each is read."""
    count = int(RATE * seconds)
    start = datetime.now(UTC) + timedelta(seconds=1.5)

    def write() -> None:
        for first in range(0, count, 100):
            due = start + timedelta(seconds=first / RATE)
            time.sleep(max(0.0, (due - datetime.now(UTC)).total_seconds() - 1.0))
            moments = [start + timedelta(seconds=n / RATE) for n in range(first, first + 100)]
            store.add([_event(moment.isoformat(), moment) for moment in moments])

    writer = threading.Thread(target=write)
    writer.start()
    source = store.source()
    late: list[float] = []
    deadline = time.monotonic() + seconds + 60
    while len(late) < count and time.monotonic() < deadline:
        messages = source.read(100, 1.0)
        now = datetime.now(UTC)
        for message in messages:
            late.append((now - datetime.fromisoformat(message.id)).total_seconds())
            message.ack()
    writer.join()
    source.close()
    assert len(late) == count, f"{len(late)} of {count} events were published"
    return sorted(late)


def measure_cost(store: Any, waiting: int) -> float:
    """Return the median seconds of promoting a hundred events beside those that wait."""
    store.fill(waiting)
    past = datetime.now(UTC) - timedelta(seconds=1)
    costs: list[float] = [
        store.promote([_event(f"{turn}-{n}", past) for n in range(100)]) for turn in range(9)
    ]
    return median(costs)


def measure_retries(store: Any, waiting: int) -> float:
    """Return the median seconds in which a hundred messages fail, come back, and are acked."""
    store.fill_retries(waiting)
    source = store.group()
    source.allow_delays(3, ordered=True)
    assert not source.read(100, 0.1), "nothing was published"
    costs: list[float] = []
    for turn in range(9):
        ids = [f"{turn}-{n}" for n in range(100)]
        store.publish([_event(id_, None, subject=id_) for id_ in ids])
        taken, tried = 0.0, 0
        while tried < 200:  # each of them twice
            begun = time.perf_counter()
            messages = source.read(200, 0.0)
            for message in messages:
                first = message.deliveries == 1
                message.nack(TryLater(0.05, ValueError("no stock"))) if first else message.ack()
            if messages:
                taken += time.perf_counter() - begun
            tried += len(messages)
            time.sleep(0.0 if messages else 0.005)
        costs.append(taken)
    source.close()
    return median(costs)


@contextmanager
def stores(names: list[str]) -> Iterator[dict[str, Any]]:
    opening: dict[str, Callable[[ExitStack], Any]] = {
        "PostgreSQL": lambda stack: OnSql(stack.enter_context(embedded.postgres()).url),
        "SQLite": lambda stack: OnSql(
            f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/time.db"
        ),
        "Redis": lambda stack: OnRedis(stack.enter_context(embedded.redis()).url),
    }
    with ExitStack() as stack:
        yield {name: opening[name](stack) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--store", action="append", choices=("PostgreSQL", "SQLite", "Redis"))
    given = parser.parse_args()
    seconds = 5.0 if given.quick else 20.0
    sizes = (1_000, 10_000, 100_000) if given.quick else (1_000, 10_000, 100_000, 1_000_000)
    print("| store | due per second | p50 late | p95 late | p99 late |", end="")
    print(" promoting 100, by those that wait | 100 retries, by those that wait |")
    print("|---|---:|---:|---:|---:|---|---|")
    with stores(given.store or ["PostgreSQL", "SQLite", "Redis"]) as opened:
        for name, store in opened.items():
            late = measure_lateness(store, seconds)
            at = [late[int(len(late) * part)] * 1_000 for part in (0.5, 0.95, 0.99)]
            figures = " | ".join(f"{value:.0f} ms" for value in at)
            print(f"| {name} | {RATE:,} | {figures}", end=" | ", flush=True)
            for measure in (measure_cost, measure_retries):
                costs = [f"{size:,}: {measure(store, size) * 1_000:.1f} ms" for size in sizes]
                print(", ".join(costs), end=" | ", flush=True)
            print()


if __name__ == "__main__":
    main()
