"""The relay: rows per second, and how long after a commit a consumer has the event.

Rows: an outbox that is full, or `outbox_events`, published to a Redis Stream and marked; the floor
is the same by hand with psycopg and redis-py: SELECT … FOR UPDATE SKIP LOCKED, a pipeline of XADDs,
one UPDATE, COMMIT.

Latency: `conquiet relay run` in a process of its own while transactions of one event each commit
at 300 per second; from the return of COMMIT to the entry in the consumer's hands, by one clock.
With wake-up, by polling every 500 ms alone, and from the write-ahead log; rows from the log are
measured beside the sink alone.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import json
import os
import statistics
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, cast

import psycopg
import redis
from sqlalchemy import Connection, Engine, text

from bench.harness import Case, arguments, report
from conquiet import Message, embedded
from conquiet.events import EventSource, emit
from conquiet.events import schema as events_schema
from conquiet.redis import StreamSink
from conquiet.relay.metrics import RelayMetrics
from conquiet.relay.process import WatchedRelay
from conquiet.source import Source
from conquiet.sql import Outbox, OutboxSource, WalSource, engine, notify_relays, schema
from marketplace.catalog import CATALOG, NotificationRequested

RATE = 300
DATA = json.dumps({"order": 1234567, "customer": "customer-17", "text": "x" * 240}).encode()
OUTBOX = Outbox("orders", source="/orders")


def event(number: int) -> Message[bytes]:
    attributes = {"type": "order.placed", "subject": f"order-{number}"}
    return Message(DATA, {**attributes, "datacontenttype": "application/json"})


class Publishing:
    """The same rows, published again and again; each round makes them new first."""

    table, stream = "outbox", "orders"
    select = (
        "SELECT id, event_id, event_type, data FROM outbox WHERE published_at IS NULL"
        " AND parked_at IS NULL ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED"
    )

    def __init__(self, made: Engine, url: str, client: redis.Redis, count: int) -> None:
        self.made, self.url, self.client, self.count = made, url, client, count
        for start in range(0, count, 1_000):
            with made.begin() as connection:
                self.fill(connection, range(start, start + 1_000))

    def fill(self, connection: Connection, numbers: range) -> None:
        OUTBOX.add(connection, [event(number) for number in numbers])

    def source(self) -> Source:
        return OutboxSource(self.made, wakeup=False)

    def again(self) -> None:
        """Unpublish: the same cost for both, and counted for neither."""
        self.client.delete(self.stream)
        with self.made.begin() as connection:
            connection.execute(text(f"UPDATE {self.table} SET published_at = NULL"))
        with self.made.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"VACUUM ANALYZE {self.table}"))

    def by_relay(self, batch: int) -> float:
        self.again()
        source = self.source()
        relay = WatchedRelay(
            source, StreamSink(self.client, self.stream), RelayMetrics(), batch_size=batch
        )
        began = time.perf_counter()
        while relay.run_once().published:
            pass
        seconds = time.perf_counter() - began
        source.close()
        self._check()
        return seconds

    def by_hand(self, batch: int) -> float:
        self.again()
        began = time.perf_counter()
        with psycopg.connect(self.url) as connection:
            while True:
                rows = connection.execute(self.select, (batch,)).fetchall()
                if not rows:
                    break
                pipeline: Any = self.client.pipeline(transaction=False)
                for _, event_id, kind, data in rows:
                    pipeline.xadd(self.stream, {"id": str(event_id), "type": kind, "data": data})
                pipeline.execute()
                connection.execute(
                    f"UPDATE {self.table} SET published_at = now() WHERE id = ANY(%s)",
                    ([row[0] for row in rows],),
                )
                connection.commit()
        seconds = time.perf_counter() - began
        self._check()
        return seconds

    def _check(self) -> None:
        if cast(Any, self.client).xlen(self.stream) != self.count:
            raise AssertionError("an event is missing")


class PublishingEvents(Publishing):
    """Domain events, whose payload is JSONB."""

    table, stream = "outbox_events", "domain-events"
    select = (
        "SELECT id, id, event_type::text, payload_json::text FROM outbox_events WHERE"
        " published_at IS NULL AND attempt_count < 10 ORDER BY created_at, id LIMIT %s"
        " FOR UPDATE SKIP LOCKED"
    )

    def fill(self, connection: Connection, numbers: range) -> None:
        ids = [uuid.uuid4() for _ in numbers]
        events = (NotificationRequested(id_, uuid.uuid4(), "email", "x" * 130) for id_ in ids)
        emit(connection, *(CATALOG.event(one, aggregate_id=one.notification_id) for one in events))

    def source(self) -> Source:
        return EventSource(self.made, wakeup=False, cloudevents=True)


def throughput(publishing: Publishing, quick: bool) -> list[Case]:
    count, rounds = publishing.count, 2 if quick else 5
    cases = []
    for batch in (50, 500):
        taken: dict[str, list[float]] = {"conquiet relay": [], "by hand": []}
        runs: dict[str, Callable[[int], float]] = {
            "conquiet relay": publishing.by_relay,
            "by hand": publishing.by_hand,
        }
        for number in range(rounds + 1):  # the first round is for caches and plans
            for name, run in runs.items():
                seconds = run(batch)
                if number:
                    taken[name].append(seconds)
        ours, floor = (count / statistics.median(taken[name]) for name in runs)
        cases.append(
            Case(
                name="rows published",
                rate=ours,
                floor="psycopg and redis-py by hand",
                floor_rate=floor,
                ratio=ours / floor,
                settings={"table": publishing.table, "batch": batch, "rows": count},
            )
        )
    return cases


def from_the_log(made: Engine, client: redis.Redis, quick: bool, rows: bool) -> list[Case]:
    """Events per second from the write-ahead log; the floor is the sink alone, with made messages.

    `rows` or events without rows.
    """
    outbox = Outbox("orders", source="/orders", rows=rows)
    count, batch, rounds = (3_000, 500, 2) if quick else (20_000, 500, 5)
    source = WalSource(made)
    sink = StreamSink(client, "orders")
    relay = WatchedRelay(source, sink, RelayMetrics(), batch_size=batch)
    while relay.run_once(1.0).published:  # what waited is claimed first
        pass
    ours: list[float] = []
    floor: list[float] = []
    for number in range(rounds + 1):
        cast(Any, client).delete("orders")
        for start in range(0, count, 1_000):
            with made.begin() as connection:
                outbox.add(connection, [event(one) for one in range(start, start + 1_000)])
        began, left = time.perf_counter(), count
        while left > 0:
            left -= relay.run_once(10.0).published
        taken = time.perf_counter() - began
        messages = [event(one) for one in range(count)]
        for one in messages:
            one.attributes.update(id=str(uuid.uuid4()), source="/orders", specversion="1.0")
        began = time.perf_counter()
        for start in range(0, count, batch):
            sink.publish_each(messages[start : start + batch])
        if number:
            ours.append(taken)
            floor.append(time.perf_counter() - began)
    source.close()
    rate, alone = count / statistics.median(ours), count / statistics.median(floor)
    return [
        Case(
            name="rows published from the log" if rows else "events without rows, from the log",
            rate=rate,
            floor="the sink alone",
            floor_rate=alone,
            ratio=rate / alone,
            settings={"table": "outbox", "batch": batch, "rows": count},
        )
    ]


class Consumer(threading.Thread):
    """Reads the stream as it grows, and notes when each event came."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._client: Any = redis.Redis.from_url(url, protocol=2)
        self.came: dict[str, float] = {}
        self.ending = False

    def run(self) -> None:
        after = b"0"
        while not self.ending:
            for _, entries in self._client.xread({"orders": after}, block=100, count=1_000) or ():
                now = time.monotonic()
                for _, fields in entries:
                    self.came[fields[b"id"].decode()] = now
                after = entries[-1][0]


def latency(made: Engine, url: str, redis_url: str, seconds: float, *flags: str) -> list[float]:
    """Milliseconds from commit to consumer, in order of size."""
    with made.begin() as connection:
        connection.execute(text("TRUNCATE outbox"))
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    consumer = Consumer(redis_url)
    consumer.start()
    command = [sys.executable, "-m", "conquiet", "relay", "run", "--database", url]
    command += ["--sink", redis_url, "--health", "off", "--log-level", "warning", *flags]
    committed: dict[str, float] = {}
    relay = subprocess.Popen(command, env=os.environ)
    try:
        [warm_up] = _commit(made, 0)
        _wait(lambda: warm_up in consumer.came)
        began = time.monotonic()
        for number in range(int(RATE * seconds)):
            time.sleep(max(0.0, began + number / RATE - time.monotonic()))
            [name] = _commit(made, number)
            committed[name] = time.monotonic()
        _wait(lambda: committed.keys() <= consumer.came.keys())
    finally:
        relay.terminate()
        relay.wait(30)
        consumer.ending = True
        consumer.join()
    return sorted((consumer.came[name] - at) * 1_000 for name, at in committed.items())


def _commit(made: Engine, number: int) -> list[str]:
    with made.begin() as connection:
        names = OUTBOX.add(connection, [event(number)])
    notify_relays(made)
    return names


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        if time.monotonic() > until:
            raise AssertionError("an event did not arrive within 30 s")
        time.sleep(0.01)


def timed(name: str, found: list[float]) -> Case:
    def at(share: float) -> float:
        return round(found[min(len(found) - 1, int(len(found) * share))], 1)

    return Case(
        name=name,
        rate=RATE,
        settings={"p50_ms": at(0.5), "p95_ms": at(0.95), "p99_ms": at(0.99), "events": len(found)},
    )


def main() -> None:
    options = arguments(__doc__)
    seconds = 4.0 if options.quick else 30.0
    logical = ("-c", "wal_level=logical")
    with embedded.postgres(options=logical) as server, embedded.redis() as stream:
        url = server.create_database()
        made = engine(url)
        schema.init(made)
        events_schema.init(made, CATALOG)
        count = 3_000 if options.quick else 20_000
        with redis.Redis.from_url(stream.url) as client:
            cases = throughput(Publishing(made, url, client, count), options.quick)
            cases += throughput(PublishingEvents(made, url, client, count), options.quick)
        woken = latency(made, url, stream.url, seconds, "--from", "claim")
        polled = latency(made, url, stream.url, seconds, "--from", "claim", "--no-wakeup")
        with redis.Redis.from_url(stream.url) as client:
            cases += from_the_log(made, client, options.quick, rows=True)
            cases += from_the_log(made, client, options.quick, rows=False)
        followed = latency(made, url, stream.url, seconds, "--from", "wal")
        made.dispose()
    cases.append(timed("commit to consumer, with wake-up", woken))
    cases.append(timed("commit to consumer, polling", polled))
    cases.append(timed("commit to consumer, from the log", followed))
    report(cases, options)


if __name__ == "__main__":
    main()
