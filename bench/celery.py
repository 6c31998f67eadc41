"""Whole Celery: no-op tasks through our transport beside Kombu's over lists, in one run.

python bench/celery.py [--quick] [--json FILE]

A worker of two processes, or of two threads, runs the tasks that are waiting when it is ready. The
last task is known by a counter in a Redis of its own, which both transports pay for.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import os
import statistics
import subprocess
import time
from contextlib import ExitStack

import redis
from celery import Celery

import conquiet.kombu  # noqa: F401 - registers redis-streams
from bench.harness import Case, Seconds, arguments, compare, report
from conquiet import embedded

LISTS, STREAMS = "lists", "streams"
SCHEMES = {LISTS: "redis", STREAMS: "redis-streams"}
POOLS = ("prefork", "threads")
WARM_UP = 100

app = Celery("bench", broker=os.environ.get("BENCH_BROKER", "memory://"))
app.conf.update(task_ignore_result=True, worker_hijack_root_logger=False)
counter = redis.Redis.from_url(os.environ.get("BENCH_COUNTER", "redis://"))


@app.task(name="bench.nothing")  # type: ignore[untyped-decorator]
def nothing() -> None:
    counter.incr("done")


def main() -> None:
    options = arguments(__doc__)
    tasks, rounds = (2_000, 2) if options.quick else (10_000, 3)
    cases: list[Case] = []
    for pool in POOLS:
        taken: dict[str, list[float]] = {LISTS: [], STREAMS: []}
        for _ in range(rounds):
            for transport, all_ in taken.items():
                all_.append(_time(transport, pool, tasks))
        seconds = {
            name: Seconds(min(all_), statistics.median(all_)) for name, all_ in taken.items()
        }
        cases.append(
            compare(
                "Celery, tasks that do nothing",
                tasks,
                seconds,
                STREAMS,
                LISTS,
                pool=pool,
                concurrency=2,
            )
        )
    report(cases, options)


def _time(name: str, pool: str, tasks: int) -> float:
    """Return the seconds from the first tasks, which show that the worker is ready, to the last."""
    with ExitStack() as until:
        broker = until.enter_context(embedded.redis(private=True))
        counts = until.enter_context(embedded.redis(private=True))
        url = broker.url.replace("redis://", f"{SCHEMES[name]}://", 1)
        client = until.enter_context(redis.Redis.from_url(counts.url))
        with app.connection_for_write(url) as connection:
            producer = connection.Producer()
            for _ in range(tasks + WARM_UP):
                nothing.apply_async(producer=producer)
        command = [sys.executable, "-m", "celery", "-A", "bench.celery", "worker", "-P", pool]
        worker = subprocess.Popen(
            [*command, "-c", "2", "--loglevel", "error"],
            stdout=subprocess.DEVNULL,  # its banner
            env={**os.environ, "BENCH_BROKER": url, "BENCH_COUNTER": counts.url},
        )
        try:
            start = _wait_for(client, WARM_UP, worker)
            return _wait_for(client, WARM_UP + tasks, worker) - start
        finally:
            worker.terminate()
            worker.wait(60)


def _wait_for(client: redis.Redis, count: int, worker: subprocess.Popen[bytes]) -> float:
    deadline = time.monotonic() + 300
    while int(client.get("done") or 0) < count:
        if worker.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the worker ended, or did not run {count} tasks in time")
        time.sleep(0.002)
    return time.perf_counter()


if __name__ == "__main__":
    main()
