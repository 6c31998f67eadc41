"""What every benchmark shares: options, fair timing, a table, and cases for docs/performance.md.

def main() -> None:
    options = arguments(__doc__)
    seconds = measure({"conquiet": run_ours, "direct": run_theirs}, rounds=5)
    report([compare("one by one", 100_000, seconds, "conquiet", "direct")], options)
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec


class Case(msgspec.Struct, kw_only=True):
    """One line of the report; rates are per second, ratio is rate / floor_rate."""

    name: str
    rate: float
    floor: str | None = None
    floor_rate: float | None = None
    ratio: float | None = None
    settings: dict[str, str | int | float | bool] = {}


@dataclass(frozen=True)
class Options:
    quick: bool
    json: Path | None


@dataclass(frozen=True)
class Seconds:
    """How long one contestant took: in its best round, and in the middle one."""

    best: float
    median: float


def arguments(description: str | None) -> Options:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; under 30 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cases to FILE")
    given = parser.parse_args()
    return Options(quick=given.quick, json=given.json)


def measure(contestants: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Seconds]:
    """Time the contestants in turn, round after round, so that all meet the same conditions.

    One unmeasured round comes first, for caches and lazy imports.
    """
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            seconds = _time(run)
            if number:
                taken[name].append(seconds)
    return {name: Seconds(min(all_), statistics.median(all_)) for name, all_ in taken.items()}


def compare(
    name: str,
    operations: int,
    seconds: Mapping[str, Seconds],
    ours: str,
    floor: str | None = None,
    **settings: str | int | float | bool,
) -> Case:
    """The case of `ours` against `floor`, by the median rounds of one measure()."""
    rate = operations / seconds[ours].median
    if floor is None:
        return Case(name=name, rate=rate, settings=settings)
    floor_rate = operations / seconds[floor].median
    return Case(
        name=name,
        rate=rate,
        floor=floor,
        floor_rate=floor_rate,
        ratio=rate / floor_rate,
        settings=settings,
    )


def report(cases: Sequence[Case], options: Options) -> None:
    """Print the table, and write the cases where --json says."""
    print("\n".join(plain(table(cases))))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(list(cases)))


def table(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    head = ("case", "per second", "compared with", "per second", "ratio", "settings")
    rows: list[tuple[str, ...]] = [head]
    for case in cases:
        settings = ", ".join(f"{name}={value}" for name, value in case.settings.items())
        floor_rate = "" if case.floor_rate is None else f"{case.floor_rate:,.0f}"
        ratio = "" if case.ratio is None else f"{case.ratio:.2f}"
        rows.append((case.name, f"{case.rate:,.0f}", case.floor or "", floor_rate, ratio, settings))
    return rows


def plain(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in (1, 3, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return [head, "|---|---:|---|---:|---:|---|", *body]


def _time(run: Callable[[], object]) -> float:
    gc.collect()  # no contestant pays for the rubbish of the one before
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
