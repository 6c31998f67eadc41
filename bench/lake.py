"""The lake of the marketplace: a log of files into tables, beside Spark and DuckDB by hand.

python bench/lake.py [--quick] [--json FILE] [--events N] [--check] [--logs DIR] [--ours]
    [--prepared]

A million events (--quick: 100,000) with all faults, on `local[2]`. Of the log, 5,000 events that
are spread over all days and the newest 5,000 are held back: the first run takes the rest, then each
of the two comes as a batch of its own to the same session. Memory is that of all processes.

Floors write nine tables by hand (bench/lake_floor.py says what they leave out), and the same nine
are made by a pipeline. All three are timed from the start of their session on. Then all 17 tables.
No session uses a class archive. With --prepared ours use that of `conquiet pipeline prepare`, made
before; plain PySpark has no such thing.

--ours leaves the floors and the nine tables out. --check compares every table with the oracle
afterwards. --logs keeps the files of the generator, or takes those that are there. With more than a
million events, the two batches are compared with those after a million.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.harness import Case, arguments, report
from bench.lake_cost import Cost, costing
from conquiet.spark.class_archive import make_archive
from marketplace.generator import Generator, write_parquet
from marketplace.oracle import TABLES, Oracle

EVENTS, QUICK_EVENTS = 1_000_000, 100_000
EVENTS_PER_ORDER = 17.25
"""Of a log with all faults; counted."""
MONTH_EVENTS, MONTH_DAYS = 1_000_000, 30
MORE = 5_000
FEWER_EVENTS = 200_000
"""A session's start and its first code are paid for within so many."""
ROWS_PER_FILE = 100_000


class Wanted(NamedTuple):
    events: int | None
    check: bool
    logs: Path | None
    floors: bool
    prepared: bool


class Log(NamedTuple):
    """The files of a first run, and two later ones: late events of all days, the newest."""

    folder: Path
    events: int

    @property
    def first(self) -> list[Path]:
        return sorted((self.folder / "first").glob("*.parquet"))


class Times(msgspec.Struct):
    """Seconds of a driver."""

    session: float
    first: float
    tables: dict[str, float]
    """By step."""
    jobs: dict[str, int]
    """Of Spark, by part of the log."""
    late: float = 0.0
    newest: float = 0.0


def main() -> None:
    wanted = own_arguments()
    options = arguments(__doc__)
    events = wanted.events or (QUICK_EVENTS if options.quick else EVENTS)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as directory:
        os.environ["XDG_CACHE_HOME"] = directory  # where a class archive would be
        if wanted.prepared:
            make_archive()
        report(list(cases(events, Path(directory), wanted)), options)


def own_arguments() -> Wanted:
    """Take our own options out of the command line before the harness reads the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--events", type=int)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--prepared", action="store_true")
    given, sys.argv[1:] = parser.parse_known_args()
    return Wanted(given.events, given.check, given.logs, not given.ours, given.prepared)


def cases(events: int, directory: Path, wanted: Wanted) -> Iterator[Case]:
    logs = wanted.logs or directory
    base = None
    if events > EVENTS:
        base, _ = make_tables(make_log(EVENTS, logs, None), directory)
    oracle = Oracle(outbox=False, spill=directory / "oracle") if wanted.check else None
    log = make_log(events, logs, oracle)
    if wanted.floors:
        yield from nine_tables(log, make_log(FEWER_EVENTS, logs, None), directory)
    times, cost = make_tables(log, directory, oracle)
    first = log.events - 2 * MORE
    yield Case(
        name="all 17 tables, first run",
        rate=first / times.first,
        settings={
            "events": first,
            "seconds": round(times.first, 1),
            "session_s": round(times.session, 1),
            "cpu_s": cost.cpu_seconds,
            "peak_MB": cost.peak_mb,
        },
    )
    for name, part in (("late, over all days", "late"), ("the newest", "newest")):
        seconds = getattr(times, part)
        before = getattr(base, part) if base is not None else None
        yield Case(
            name=f"{MORE:,} events more, {name}, all 17 tables",
            rate=MORE / seconds,
            floor="the same after a million" if before else None,
            floor_rate=MORE / before if before else None,
            ratio=before / seconds if before else None,
            settings={
                "after": first,
                "seconds": round(seconds, 2),
                "jobs": times.jobs[part],
            },
        )


def nine_tables(log: Log, fewer: Log, directory: Path) -> Iterator[Case]:
    """Make nine tables by hand and by a pipeline, each in a process of its own."""
    first = log.events - 2 * MORE
    _settle(log, fewer)
    fewer_times, _ = _by_pipeline(fewer, directory)
    times, cost = _by_pipeline(log, directory)
    seconds = times.session + times.first
    more = log.events - fewer.events
    yield Case(
        name=f"nine tables, first run, beyond the first {fewer.events - 2 * MORE:,} events",
        rate=more / (seconds - fewer_times.session - fewer_times.first),
        settings={"events": more, "fewer_s": round(fewer_times.session + fewer_times.first, 1)},
    )
    for name in ("duckdb", "pyspark"):
        place = directory / name
        files = [str(one) for one in log.first]
        answer, floor_cost = in_process("bench.lake_floor", name, str(place), *files)
        say(f"{name} by hand", float(answer), floor_cost)
        _remove(place)
        os.sync()
        yield Case(
            name="nine tables, first run, from the start of a session",
            rate=first / seconds,
            floor=f"by hand: {name}",
            floor_rate=first / float(answer),
            ratio=float(answer) / seconds,
            settings={
                "events": first,
                "seconds": round(seconds, 1),
                "session_s": round(times.session, 1),
                "cpu_s": cost.cpu_seconds,
                "floor_cpu_s": floor_cost.cpu_seconds,
            },
        )


def _settle(*logs: Log) -> None:
    """Let every contender find the log in memory, and a disk that has nothing left to write."""
    for log in logs:
        for file in log.first:
            file.read_bytes()
    os.sync()


def _by_pipeline(log: Log, directory: Path) -> tuple[Times, Cost]:
    place = directory / "nine"
    answer, cost = in_process("bench.lake_driver", str(log.folder), str(place), "nine")
    times = msgspec.json.decode(answer, type=Times)
    say(f"nine tables of {log.events:,} events", times.session + times.first, cost)
    _say_steps(times)
    _remove(place)
    os.sync()
    return times, cost


def make_tables(log: Log, directory: Path, oracle: Oracle | None = None) -> tuple[Times, Cost]:
    """Make all tables of a log, in a process of its own."""
    lake = directory / "lake"
    answer, cost = in_process("bench.lake_driver", str(log.folder), str(lake))
    times = msgspec.json.decode(answer, type=Times)
    say(f"all tables of {log.events:,} events", times.first, cost)
    _say_steps(times)
    if oracle is not None:
        compare(lake, oracle)
    _remove(lake)
    return times, cost


def _say_steps(times: Times) -> None:
    for step, seconds in sorted(times.tables.items(), key=lambda one: -one[1])[:8]:
        say(f"  {step}", seconds)


def _remove(place: Path) -> None:
    for one in place.parent.glob(f"{place.name}*"):
        shutil.rmtree(one, ignore_errors=True)


def make_log(events: int, directory: Path, oracle: Oracle | None) -> Log:
    """Write the log in three folders, unless it is there and no oracle wants to see it."""
    import pyarrow.parquet as pq

    folder = directory / f"log-{events}"
    if not (folder / "done").exists() or oracle is not None:
        shutil.rmtree(folder, ignore_errors=True)
        months = max(events / MONTH_EVENTS, 1)
        orders = max(round(events / EVENTS_PER_ORDER), 1)
        days = round(months * MONTH_DAYS)
        world = Generator(seed=1, orders=orders, days=days, faults="all")
        began = time.perf_counter()
        write_parquet(world.entries(oracle), folder / "whole", rows_per_file=ROWS_PER_FILE)
        _divide(folder)
        (folder / "done").touch()
        say("generated", time.perf_counter() - began)
    parts = ("first", "late", "newest")
    files = [file for part in parts for file in (folder / part).glob("*.parquet")]
    return Log(folder, sum(pq.read_metadata(file).num_rows for file in files))


def _divide(folder: Path) -> None:
    """Hold back every n-th entry as late events, and the last ones as the newest."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = sorted((folder / "whole").glob("*.parquet"))
    total = sum(pq.read_metadata(file).num_rows for file in files)
    every = (total - MORE) // MORE
    late, newest, seen = [], [], 0
    for part in ("first", "late", "newest"):
        (folder / part).mkdir()
    for file in files:
        rows = pq.read_table(file)
        number = np.arange(seen, seen + len(rows))
        seen += len(rows)
        is_new = number >= total - MORE
        is_late = (number % every == 0) & ~is_new & (number // every < MORE)
        late.append(rows.filter(pa.array(is_late)))
        newest.append(rows.filter(pa.array(is_new)))
        pq.write_table(rows.filter(pa.array(~is_late & ~is_new)), folder / "first" / file.name)
        file.unlink()
    pq.write_table(pa.concat_tables(late), folder / "late" / "part.parquet")
    pq.write_table(pa.concat_tables(newest), folder / "newest" / "part.parquet")


def compare(lake: Path, oracle: Oracle) -> None:
    """Compare every table with the oracle's: a wrong answer cannot be fast."""
    from marketplace.lake import pipeline

    pipeline.lake = str(lake)
    wrong = []
    for name, table in TABLES.items():
        right = oracle.arrow(name)
        found = pipeline.read(name).select(list(table.columns)).cast(right.schema)
        keys = [(column, "ascending") for column in table.key]
        if found.sort_by(keys).combine_chunks() != right.sort_by(keys).combine_chunks():
            wrong += oracle.differences(name, found.to_pylist())[:3]
    if wrong:
        raise AssertionError("\n".join(["the tables are not the oracle's:", *wrong]))
    say(f"all {len(TABLES)} tables are the oracle's")


def in_process(module: str, *given: str) -> tuple[bytes, Cost]:
    """Run a module as a program; return its output, and the cost of it and all that it started."""
    checkout = Path(__file__).resolve().parent.parent
    places = [str(checkout), str(checkout / "examples" / "marketplace")]
    path = os.pathsep.join(filter(None, [*places, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *given],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    with costing(process.pid) as cost:
        answer, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{module} failed: {process.returncode}")
    return answer.splitlines()[-1], cost


def say(what: str, seconds: float | None = None, cost: Cost | None = None) -> None:
    after = "" if seconds is None else f": {seconds:,.1f} s"
    after += "" if cost is None else f", {cost.cpu_seconds} CPU-s, {cost.peak_mb} MB"
    print(f"{what}{after}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
