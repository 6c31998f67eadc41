"""The lake of the marketplace: a log of files into all 17 tables, beside Spark and DuckDB by hand.

python bench/lake.py [--quick] [--json FILE] [--events N] [--check] [--logs DIR] [--no-floors]

A million events (--quick: 100,000) with all faults, on `local[2]`. Of the log, 5,000 events that
are spread over all days and the newest 5,000 are held back: the first run takes the rest, then each
of the two comes as a batch of its own to the same session. The floors write nine tables once, by
hand: bench/lake_floor.py says what they leave out. Memory is that of all processes together.

--check compares every table with the oracle afterwards. --logs keeps the files of the generator, or
takes those that are there.
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
from typing import Any, NamedTuple

import msgspec

from bench.harness import Case, arguments, report
from bench.lake_cost import Cost, costing
from marketplace.generator import Generator, write_parquet
from marketplace.oracle import TABLES, Oracle

EVENTS, QUICK_EVENTS = 1_000_000, 100_000
EVENTS_PER_ORDER = 17.25
"""Of a log with all faults; counted."""
MONTH_EVENTS, MONTH_DAYS = 1_000_000, 30
MORE = 5_000
ROWS_PER_FILE = 100_000


class Wanted(NamedTuple):
    events: int | None
    check: bool
    logs: Path | None
    floors: bool


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
    late: float
    newest: float
    tables: dict[str, float]
    """Of the first run, by step."""


def main() -> None:
    wanted = own_arguments()
    options = arguments(__doc__)
    events = wanted.events or (QUICK_EVENTS if options.quick else EVENTS)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as directory:
        report(list(cases(events, Path(directory), wanted)), options)


def own_arguments() -> Wanted:
    """Take our own options out of the command line before the harness reads the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--events", type=int)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--no-floors", action="store_true")
    given, sys.argv[1:] = parser.parse_known_args()
    return Wanted(given.events, given.check, given.logs, not given.no_floors)


def cases(events: int, directory: Path, wanted: Wanted) -> Iterator[Case]:
    oracle = Oracle(outbox=False, spill=directory / "oracle") if wanted.check else None
    log = make_log(events, wanted.logs or directory, oracle)
    lake = directory / "lake"
    answer, cost = in_process("bench.lake_driver", str(log.folder), str(lake))
    times = msgspec.json.decode(answer, type=Times)
    if oracle is not None:
        compare(lake, oracle)
    first = log.events - 2 * MORE
    floors: dict[str, float] = {}
    for name in ("duckdb", "pyspark") if wanted.floors else ():
        files = [str(one) for one in log.first]
        answer, floor_cost = in_process("bench.lake_floor", name, str(directory / name), *files)
        floors[name] = first / float(answer)
        say(f"{name} by hand", float(answer), floor_cost)
        shutil.rmtree(directory / name, ignore_errors=True)
    about: dict[str, Any] = {"events": first, "session_s": round(times.session, 1)}
    about |= {"cpu_s": cost.cpu_seconds, "peak_MB": cost.peak_mb}
    rate = first / times.first
    for name in floors or {"": 0.0}:
        yield Case(
            name="all 17 tables, first run",
            rate=rate,
            floor=f"nine tables by hand: {name}" if name else None,
            floor_rate=floors.get(name),
            ratio=rate / floors[name] if name else None,
            settings=about,
        )
    for name, seconds in (("late, over all days", times.late), ("the newest", times.newest)):
        yield Case(
            name=f"{MORE:,} events more, {name}, all 17 tables",
            rate=MORE / seconds,
            settings={"after": first, "seconds": round(seconds, 2)},
        )
    for step, seconds in sorted(times.tables.items(), key=lambda one: -one[1])[:8]:
        say(f"  {step}", seconds)


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
