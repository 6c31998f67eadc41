"""The log that bench/pipeline.py is about: files of the generator, with all faults, made once.

A month has a million events, or as many as there are if they are fewer: ten million are ten months,
so that days are as full and history is longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marketplace.generator import Generator, write_parquet
from marketplace.oracle import Oracle

EVENTS_PER_ORDER = 17.25
"""Of a log with all faults; counted."""
MONTH_EVENTS, MONTH_DAYS = 1_000_000, 30
MOST_ROWS_PER_FILE = 100_000


@dataclass(frozen=True)
class Log:
    """Files in the order of publication, and what making them took."""

    files: list[Path]
    events: int
    last: int
    """How many of the files come last, after a history."""
    last_events: int
    seconds: float | None
    """None if they were there."""


def generator(events: int) -> Generator:
    months = max(events / MONTH_EVENTS, 1)
    return Generator(
        seed=1,
        orders=max(round(events / EVENTS_PER_ORDER), 1),
        days=round(months * MONTH_DAYS),
        faults="all",
    )


def log_of(events: int, directory: Path, oracle: Oracle | None = None) -> Log:
    """About so many events below a directory; an oracle is told of them, if they are made now."""
    import pyarrow.parquet

    folder = directory / f"log-{events}"
    rows_per_file = min(MOST_ROWS_PER_FILE, events // 10)
    seconds = None
    if not folder.exists() or oracle is not None:
        began = time.perf_counter()
        made: Any = generator(events).entries(oracle)
        new = folder.with_suffix(".new")
        _remove(new)
        write_parquet(made, new, rows_per_file=rows_per_file)
        _remove(folder)
        new.rename(folder)
        seconds = time.perf_counter() - began
    files = sorted(folder.glob("*.parquet"))
    rows = [int(pyarrow.parquet.read_metadata(path).num_rows) for path in files]
    last = 1 if rows[-1] >= rows_per_file // 2 else 2  # the rest may be a handful
    return Log(files, sum(rows), last, sum(rows[-last:]), seconds)


def _remove(folder: Path) -> None:
    for path in folder.glob("*.parquet"):
        path.unlink()
    if folder.exists():
        folder.rmdir()
