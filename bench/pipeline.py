"""The marketplace's pipeline: a log of files into every table, beside DuckDB, in one run.

python bench/pipeline.py [--quick] [--json FILE] [--events N] [--full] [--check] [--logs DIR]

A million events, with --quick 100,000, with --full ten million after the one; all faults are on. A
driver with 4 GB of heap, on `local[2]`, takes them in batches of a million and makes all tables;
then the last 100,000 events (--quick: 10,000) come and it makes them again, which is what a refresh
costs where a history is. Memory is that of driver, JVM and Python workers together.

--check compares every table with the oracle afterwards: a wrong answer cannot be fast. --logs keeps
the files of the generator, or takes those that are there.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.harness import Case, arguments, report
from bench.pipeline_cost import Cost, costing
from bench.pipeline_driver import Order, Taken
from bench.pipeline_log import Log, log_of
from marketplace.oracle import Oracle

EVENTS, QUICK_EVENTS, FULL_EVENTS, LEAST_EVENTS = 1_000_000, 100_000, 10_000_000, 1_000
FILES_PER_BATCH = 10
FLOOR = "DuckDB: once each, one mart"


class Wanted(NamedTuple):
    """What this benchmark can be told beyond what all can."""

    events: int | None
    full: bool
    check: bool
    logs: Path | None


class Run(NamedTuple):
    """One log through the pipeline, and through DuckDB."""

    log: Log
    taken: Taken
    cost: Cost
    floor_seconds: float
    floor_cost: Cost


def main() -> None:
    wanted = own_arguments()
    options = arguments(__doc__)
    sizes = [wanted.events or (QUICK_EVENTS if options.quick else EVENTS)]
    if wanted.full:
        sizes.append(FULL_EVENTS)
    cases: list[Case] = []
    runs: list[Run] = []
    for events in sizes:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            run = run_of(events, Path(directory), wanted.logs, wanted.check)
        runs.append(run)
        cases += cases_of(run)
    if len(runs) > 1:
        cases += flatness(*runs)
    report(cases, options)


def own_arguments() -> Wanted:
    """Taken out of the command line before the harness reads the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--events", type=int)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--logs", type=Path)
    given, sys.argv[1:] = parser.parse_known_args()
    if given.events is not None and given.events < LEAST_EVENTS:
        parser.error(f"--events {given.events}: at least {LEAST_EVENTS:,}")
    return Wanted(given.events, given.full, given.check, given.logs)


def run_of(events: int, directory: Path, logs: Path | None, check: bool) -> Run:
    oracle = Oracle(outbox=False, spill=directory / "oracle") if check else None
    log = log_of(events, logs or directory, oracle)
    told(f"{log.events:,} events in {len(log.files)} files", log.seconds)
    order = Order(
        [str(file) for file in log.files],
        log.last,
        str(directory / "ours"),
        FILES_PER_BATCH,
    )
    answer, cost = in_process("bench.pipeline_driver", input=msgspec.json.encode(order))
    taken = msgspec.json.decode(answer, type=Taken)
    if oracle is not None:
        compare(directory / "ours", oracle)
    (directory / "floor").mkdir()
    files = [str(directory / "floor"), *order.files]
    answer, floor_cost = in_process("bench.pipeline_floor", *files)
    told("DuckDB", float(answer))
    return Run(log, taken, cost, float(answer), floor_cost)


def compare(ours: Path, oracle: Oracle) -> None:
    from bench.pipeline_check import counted, differences

    in_process("bench.pipeline_check", str(ours))
    began = time.perf_counter()
    wrong = list(differences(ours / "tables", oracle))
    if wrong:
        raise AssertionError("\n".join(["the tables are not the oracle's:", *wrong]))
    rows = counted(oracle)
    told(
        f"all {len(rows)} tables are the oracle's: {sum(rows.values()):,} rows",
        time.perf_counter() - began,
    )


def in_process(module: str, *given: str, input: bytes | None = None) -> tuple[bytes, Cost]:
    """What a module prints as a program, and what it cost with all that it started."""
    checkout = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    with costing(process.pid) as cost:
        answer, _ = process.communicate(input)
    if process.returncode:
        raise SystemExit(f"{module} failed: {process.returncode}")
    return answer, cost


def told(what: str, seconds: float | None) -> None:
    after = "" if seconds is None else f": {seconds:,.1f} s"
    print(f"{what}{after}", file=sys.stderr, flush=True)


# --- cases --------------------------------------------------------------------------------------


def cases_of(run: Run) -> Iterator[Case]:
    taken, log = run.taken, run.log
    first = log.events - run.log.last_events
    of: dict[str, Any] = {"events": log.events}
    if log.seconds is not None:
        yield Case(name="generated, into files", rate=log.events / log.seconds, settings=of)
    yield Case(name="bronze and silver", rate=first / taken.take, settings=of)
    yield Case(name="facts, marts, reconciliation", rate=first / taken.refresh, settings=of)
    floor_rate = log.events / run.floor_seconds
    rate = first / (taken.take + taken.refresh)
    about = {
        "session_s": round(taken.session, 1),
        "cpu_s": run.cost.cpu_seconds,
        "peak_MB": run.cost.peak_mb,
        "floor_cpu_s": run.floor_cost.cpu_seconds,
        "floor_peak_MB": run.floor_cost.peak_mb,
    }
    yield Case(
        name="all tables",
        rate=rate,
        floor=FLOOR,
        floor_rate=floor_rate,
        ratio=rate / floor_rate,
        settings={**of, **about},
    )
    yield Case(
        name="more events, all tables again",
        rate=more_rate(run),
        settings={
            "events": run.log.last_events,
            "after": first,
            "take_s": round(taken.more_take, 1),
            "refresh_s": round(taken.more_refresh, 1),
        },
    )


def flatness(small: Run, large: Run) -> Iterator[Case]:
    """What an event costs in the large log, beside the small one."""
    rates = {
        "all tables": (whole_rate(large), whole_rate(small)),
        "more events, all tables again": (more_rate(large), more_rate(small)),
    }
    for name, (rate, before) in rates.items():
        yield Case(
            name=f"{name}, large log",
            rate=rate,
            floor=f"a log of {small.log.events:,}",
            floor_rate=before,
            ratio=rate / before,
            settings={"events": large.log.events},
        )


def whole_rate(run: Run) -> float:
    return (run.log.events - run.log.last_events) / (run.taken.take + run.taken.refresh)


def more_rate(run: Run) -> float:
    return run.log.last_events / (run.taken.more_take + run.taken.more_refresh)


if __name__ == "__main__":
    main()
