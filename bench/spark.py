"""Spark: the log, the outbox, the sinks and the router, beside plain processes, in one run.

python bench/spark.py [--quick] [--json FILE] [--events N] [--full] [--parts log,latency,…]

log      events of about 300 bytes in 4 streams, read by a batch (count, to Parquet) and by
         AvailableNow (no-op, Parquet, tables), against two processes that read the same streams
         with redis-py and hiredis. And what an event costs in a log of other sizes.
latency  how long a trigger takes while another process adds 1,000 and 10,000 events a second
outbox   read to a count, against two processes that COPY the same rows
upsert   into an empty table with a key, against one COPY into it; and only its last statement, as
         it is for a table that is not empty, when the rows lie in the database already
sink     events to a stream, against redis-benchmark with the same XADD
router   the same router on Spark and in plain workers: inbox, one upsert, one outbox row; 1 and 2
         processes that handle

Everything on `local[2]`. CONQUIET_REDIS_FLAVOUR=path takes the redis-server of the PATH, whose
memory is jemalloc's, instead of the embedded Valkey, whose is libc's. PostgreSQL has fsync on. Each
result is counted. There are 2 million events, with --quick 200,000; sizes are a twentieth, a half
and, with --full, five times of that (10 million events are 3.2 GB in Redis). `bar` is the ratio
that was wanted.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import spark_log, spark_router, spark_sink, spark_sql
from bench.harness import Case, arguments, report
from bench.spark_ground import Ground
from conquiet import embedded
from conquiet.spark import session

EVENTS, QUICK_EVENTS, LEAST_EVENTS = 2_000_000, 200_000, 1_000
SETTINGS = {
    "spark.driver.memory": "3g",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.sql.streaming.numRecentProgressUpdates": 100_000,
}


class Wanted(NamedTuple):
    """What this benchmark can be told beyond what all can."""

    events: int | None
    full: bool
    parts: list[str]


def main() -> None:
    wanted = own_arguments()
    options = arguments(__doc__)
    events = wanted.events or (QUICK_EVENTS if options.quick else EVENTS)
    rounds, seconds = (1, 4.0) if options.quick else (3, 30.0)
    with ExitStack() as until:
        ground = prepared(until, events, rounds, seconds)
        parts: Mapping[str, Callable[[Ground], Iterable[Case]]] = {
            **PARTS,
            "log": partial(log, full=wanted.full),
        }
        cases: list[Case] = []
        for name in wanted.parts:
            print(f"{name} …", file=sys.stderr, flush=True)
            cases += parts[name](ground)
    report(cases, options)


def own_arguments() -> Wanted:
    """Taken out of the command line before the harness reads the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--events", type=int)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    given, sys.argv[1:] = parser.parse_known_args()
    if given.events is not None and given.events < LEAST_EVENTS:
        parser.error(f"--events {given.events}: at least {LEAST_EVENTS:,}")
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return Wanted(given.events, given.full, given.parts)


def prepared(until: ExitStack, events: int, rounds: int, latency_seconds: float) -> Ground:
    # The Python workers of Spark and the plain processes import bench too.
    checkout = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [checkout, os.environ.get("PYTHONPATH")])
    )
    directory = Path(until.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    streams = until.enter_context(embedded.redis(private=True))
    tables = until.enter_context(embedded.postgres(private=True))
    spawn = multiprocessing.get_context("spawn")
    plain = until.enter_context(ProcessPoolExecutor(2, mp_context=spawn))
    places = {
        "spark.local.dir": directory,
        "spark.sql.warehouse.dir": directory / "warehouse",
    }
    spark = session("bench", master="local[2]", config={**SETTINGS, **places})
    until.callback(spark.stop)
    return Ground(spark, plain, streams.url, tables, directory, events, rounds, latency_seconds)


def log(ground: Ground, full: bool = False) -> Iterator[Case]:
    """The log grows: what an event costs at each size, and everything else at the main one."""
    made = spark_log.Log(ground)
    costs = []
    for size in (ground.events // 20, ground.events // 2):
        made.grow(size)
        costs.append(made.cost())
    made.grow(ground.events)
    yield from made.reading()
    if full:
        made.grow(5 * ground.events)
        costs.append(made.cost())
    made.remove()
    yield from costs


PARTS: dict[str, Callable[[Ground], Iterable[Case]]] = {
    "log": log,
    "latency": spark_log.latency,
    "outbox": spark_sql.outbox,
    "upsert": spark_sql.upsert,
    "sink": spark_sink.sink,
    "router": spark_router.router,
}


if __name__ == "__main__":
    main()
