"""Progress: tells how a pipeline goes, batch by batch, and what it has missed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from conquiet.cli.terminal import has_colour, print_json

_LINE_SECONDS = 10.0
"""How often a line is written where it cannot be written over."""


@contextmanager
def telling(as_json: bool) -> Iterator[Progress]:
    progress = Progress(as_json)
    try:
        yield progress
    finally:
        progress.clear()


class Missed(NamedTuple):
    """What was gone before this run could read it (`failOnDataLoss=false`)."""

    times: int
    entries: int
    """Of those times when they could be counted."""

    def __str__(self) -> str:
        return f"{self.entries:,} or more events lost (losses: {self.times:,})"


def _sum(lost: Mapping[str, Any]) -> Missed:
    return Missed(
        sum(item.times for item in lost.values()), sum(item.entries for item in lost.values())
    )


class Progress:
    """Tells batch by batch: on a terminal in one line, else now and then, or as JSON."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._over = has_colour(sys.stderr)
        self._started = self._told = time.monotonic()
        self._last_batch = -1
        self.events = 0
        self.batches = 0
        self.lag: int | None = None
        self.lost = Missed(0, 0)
        self._lost_before: Missed | None = None

    def look(self, query: Any) -> None:
        from conquiet.spark.progress import losses, losses_before

        for progress in query.recentProgress:
            if progress.batchId <= self._last_batch:
                continue
            if self._lost_before is None:  # by runs before this one
                self._lost_before = _sum(losses_before(progress))
            before, now = self._lost_before, _sum(losses(progress))
            missed = Missed(now.times - before.times, now.entries - before.entries)
            if progress.numInputRows or missed != self.lost:
                self.lost = missed
                self._take(progress)

    def _take(self, progress: Any) -> None:
        from conquiet.spark.progress import lag

        self._last_batch = progress.batchId
        self.batches += 1
        self.events += progress.numInputRows
        waiting = list(lag(progress).values())
        self.lag = None if not waiting or None in waiting else sum(item or 0 for item in waiting)
        speed = progress.processedRowsPerSecond or 0.0
        if self._as_json:
            told = {"batch": progress.batchId, "events": progress.numInputRows}
            told |= {"events_per_second": round(speed, 1), "lag": self.lag}
            told |= {"lost": self.lost.entries, "losses": self.lost.times}
            print_json(told)
            sys.stdout.flush()
            return
        behind = "" if self.lag is None else f", lag {self.lag:,}"
        behind += f", {self.lost}" if self.lost.times else ""
        self.say(
            f"batch {progress.batchId}: {progress.numInputRows:,} events, {speed:,.0f}/s{behind}"
        )

    def say(self, text: str) -> None:
        """Tell what is being done now, but for JSON, which has a line per batch."""
        if self._as_json:
            return
        if self._over:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def take_whole(self, events: int) -> None:
        """Of a table that was taken as one batch."""
        self.batches, self.events = 1, events
        if self._as_json:
            print_json({"batch": 0, "events": events})

    def clear(self) -> None:
        if self._over and not self._as_json:
            print("\r\x1b[K", end="", file=sys.stderr)

    def end(self, path: str, stopped: bool) -> None:
        self.clear()
        seconds = time.monotonic() - self._started
        how = "stopped" if stopped else "done"
        missed = f"; {self.lost}, gone before they were read" if self.lost.times else ""
        print(
            f"{how}: {self.events:,} events in {self.batches:,} batches to {path},"
            f" in {seconds:.1f} s{missed}",
            file=sys.stderr,
        )
