"""Workers and relays as 1, 2 and 4 processes, on PostgreSQL and Redis, on this machine.

python bench/processes.py [--quick] [--json FILE]

worker  a Redis stream and one group; inbox, an upsert and an outbox row per message, by 200
relay   rows of an outbox to a Redis stream, claimed by 200

`per_core` is the rate by the cores that the processes can have. `client_us` and `server_us` are
the CPU time of a message in our processes, and in PostgreSQL and Redis: if they stay the same, more
processes wait for cores, and not for each other. `lock_waits` is how many connections waited for a
lock of PostgreSQL, on average of all looks during the run.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import redis

from bench.harness import Case, arguments, report
from bench.sql import FILLING, ORDERS, _encode, orders_router
from conquiet import Worker, embedded
from conquiet.redis import StreamSink, StreamSource
from conquiet.relay import Relay
from conquiet.sql import Outbox, OutboxSource, engine, schema
from conquiet.testing import message

BATCH = 200
TICKS = os.sysconf("SC_CLK_TCK")
_spawned = multiprocessing.get_context("spawn")


def main() -> None:
    options = arguments(__doc__)
    count = 10_000 if options.quick else 60_000
    rounds = 2 if options.quick else 3
    cases: list[Case] = []
    with embedded.postgres(private=True) as server, embedded.redis(private=True) as streams:
        for name, setting in (("worker", Workers), ("relay", Relays)):
            ground = setting(server, streams.url, count)
            taken: dict[int, list[Figures]] = {1: [], 2: [], 4: []}
            for _ in range(rounds + 1):
                for processes, found in taken.items():
                    found.append(ground.run(processes))
            first: Case | None = None
            for processes, found in taken.items():
                case = summarize(name, processes, count, found[1:])
                if first is None:
                    first = case
                else:
                    case.floor, case.floor_rate = "1 process", first.rate
                    case.ratio = case.rate / first.rate
                cases.append(case)
    report(cases, options)


class Figures:
    """Is what one run took."""

    def __init__(self, seconds: float, client: float, server: float, waits: float) -> None:
        self.seconds, self.client, self.server, self.waits = seconds, client, server, waits


def summarize(name: str, processes: int, count: int, found: list[Figures]) -> Case:
    middle = statistics.median
    rate = count / middle(one.seconds for one in found)
    cores = min(processes, len(os.sched_getaffinity(0)))
    return Case(
        name=name,
        rate=rate,
        settings={
            "processes": processes,
            "per_core": round(rate / cores),
            "client_us": round(middle(one.client for one in found) / count * 1e6, 1),
            "server_us": round(middle(one.server for one in found) / count * 1e6, 1),
            "lock_waits": round(middle(one.waits for one in found), 2),
        },
    )


class Ground:
    """Has a database and streams, and lets processes work on them."""

    def __init__(self, server: embedded.PostgresServer, redis_url: str, count: int) -> None:
        self.url = server.create_database()
        self.redis_url = redis_url
        self.count = count
        self.made = engine(self.url)
        schema.init(self.made)
        self.client = redis.Redis.from_url(redis_url)
        self.direct = psycopg.connect(self.url, autocommit=True)
        self.direct.execute(ORDERS)
        self.watch = psycopg.connect(self.url, autocommit=True)
        self._servers = (
            int(self.direct.execute("SELECT pg_backend_pid()").fetchone()[0]),  # type: ignore[index]
            int(self.client.info("server")["process_id"]),
        )

    def run(self, processes: int) -> Figures:
        self.prepare()
        ready, go = _spawned.Semaphore(0), _spawned.Event()
        stop, spent = _spawned.Event(), _spawned.Queue()
        work = partial(run_child, self.start(), self.url, self.redis_url, ready, go, stop, spent)
        children = [_spawned.Process(target=work) for _ in range(processes)]
        for child in children:
            child.start()
        for _ in children:
            ready.acquire()
        server = self._server_seconds()
        go.set()
        began = time.perf_counter()
        waits: list[int] = []
        while not self.is_done():
            waits.append(self._waiting())
        seconds = time.perf_counter() - began
        server = self._server_seconds() - server
        stop.set()
        client = sum(spent.get() for _ in children)
        for child in children:
            child.join()
        return Figures(seconds, client, server, statistics.mean(waits or [0]))

    def prepare(self) -> None:
        raise NotImplementedError

    def is_done(self) -> bool:
        raise NotImplementedError

    def start(self) -> Callable[[str, str], Any]:
        """Return what makes a worker or a relay in a child."""
        raise NotImplementedError

    def _waiting(self) -> int:
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND datname = current_database()"
        )
        row = self.watch.execute(query).fetchone()
        assert row is not None
        time.sleep(0.005)
        return int(row[0])

    def _server_seconds(self) -> float:
        """Return the CPU time of PostgreSQL, of all its processes, and of Redis."""
        backend, streams = self._servers
        postmaster = int(stat(backend)[1])
        return cpu(streams) + cpu(postmaster) + sum(map(cpu, children_of(postmaster)))


def stat(pid: int) -> list[str]:
    """Return the fields of a process behind its name: state, parent, and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu(pid: int) -> float:
    """Return the CPU time of a process, and of its children that have ended."""
    try:
        return sum(map(int, stat(pid)[11:15])) / TICKS
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def run_child(
    make: Callable[[str, str], Any],
    url: str,
    redis_url: str,
    ready: Any,
    go: Any,
    stop: Any,
    spent: Any,
) -> None:
    made = make(url, redis_url)
    ready.release()
    go.wait()
    began = time.process_time()
    thread = threading.Thread(target=made.run)
    thread.start()
    stop.wait()
    spent.put(time.process_time() - began)
    made.stop()
    thread.join()


class Workers(Ground):
    def prepare(self) -> None:
        self.client.flushall()
        self.direct.execute("TRUNCATE outbox, processed_messages, orders")
        pipeline = self.client.pipeline(transaction=False)
        for number in range(self.count):
            data = _encode({"order_id": f"o-{number}", "total": 7, "note": FILLING})
            fields: dict[Any, Any] = {
                "id": f"m-{number}",
                "type": "place.order",
                "source": "/web",
                "data": data,
            }
            pipeline.xadd("commands", {"specversion": "1.0", **fields})
            if number % 1_000 == 999:
                pipeline.execute()
        pipeline.execute()
        self.client.xgroup_create("commands", "billing", id="0")

    def is_done(self) -> bool:
        [group] = self.client.xinfo_groups("commands")
        return not group["pending"] and not group["lag"]

    def start(self) -> Callable[[str, str], Any]:
        return make_worker


def make_worker(url: str, redis_url: str) -> Worker:
    source = StreamSource(redis.Redis.from_url(redis_url), "commands", "billing", batch_size=BATCH)
    return Worker(source, orders_router(engine(url)), batch_size=BATCH)


class Relays(Ground):
    def prepare(self) -> None:
        self.client.flushall()
        self.direct.execute("TRUNCATE outbox")
        outbox = Outbox("orders", notify=False)
        with self.made.begin() as connection:
            for start in range(0, self.count, 1_000):
                events = [
                    message({"total": 7, "note": FILLING}, id=f"e-{start + n}", source="/shop")
                    for n in range(1_000)
                ]
                outbox.add(connection, events)
        self.direct.execute("VACUUM ANALYZE outbox")

    def is_done(self) -> bool:
        query = "SELECT 1 FROM outbox WHERE published_at IS NULL AND parked_at IS NULL LIMIT 1"
        return self.direct.execute(query).fetchone() is None

    def start(self) -> Callable[[str, str], Any]:
        return make_relay


def make_relay(url: str, redis_url: str) -> Relay:
    sink = StreamSink(redis.Redis.from_url(redis_url), "orders")
    return Relay(OutboxSource(engine(url)), sink, batch_size=BATCH)


if __name__ == "__main__":
    main()
