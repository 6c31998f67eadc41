"""Jobs: the pipeline as a stream, which ends or goes on, over a lake; and days made again.

log ──▶ take ──▶ raw_events, silver        each micro-batch, once
                     └──▶ refresh          when there was time to, and at the end
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from conquiet.errors import ConfigError
from conquiet.events.catalog import Catalog
from conquiet.spark.bronze import raw_events
from conquiet.spark.tables.writing import query_of
from marketplace.catalog import CATALOG
from marketplace.pipeline.lake import Lake
from marketplace.pipeline.refresh import refresh
from marketplace.pipeline.state import State
from marketplace.pipeline.tables import NAMES, RAW, SILVER, with_sources
from marketplace.pipeline.taking import (
    ROWS,
    applied,
    days_between,
    level,
    retake,
    take,
    take_rows,
)

QUERY = "marketplace"
_REFRESH_SECONDS = 60.0
Outbox = Callable[[], DataFrame | None]
"""Reads the outbox as it is now, for reconciliation; None where there is none."""


def no_outbox() -> DataFrame | None:
    return None


@dataclass
class _Pace:
    """When tables were last brought up to silver, and whether silver has gone on since."""

    refreshed: float = field(default_factory=time.monotonic)
    is_behind: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Silver must not change under a refresh."""


@dataclass(frozen=True)
class Job:
    """A lake, which of its tables are made, and how often."""

    lake: Lake
    once: bool = False
    trigger_seconds: float = 0.0
    refresh_seconds: float | None = None
    """At least so long from one refresh of facts and marts to the next; a minute, unless said.
    With `once` and nothing said there is one, at the end."""
    tables: Collection[str] = NAMES
    """Those that are made, with those that they are made of: names of the contract."""
    catalog: Catalog = CATALOG
    outbox: Outbox = no_outbox
    _pace: _Pace = field(default_factory=_Pace, init=False, repr=False, compare=False)

    @property
    def checkpoint(self) -> str:
        return str(self.lake.root / "_checkpoints" / QUERY)

    @property
    def queries(self) -> list[str]:
        """By whose names bronze and silver remember batches: rows, and the stream of this lake."""
        try:
            about = json.loads(Path(self.checkpoint, "metadata").read_text())
        except FileNotFoundError:
            return [ROWS]
        return [ROWS, about["id"]]

    def start(self, events: DataFrame) -> StreamingQuery:
        """Start to take a stream in; hold the checkpoint meanwhile (`conquiet.spark.checkpoint`).

        After it has ended, `finish` brings the tables up to what was taken last.
        """
        self._refuse_what_others_took()
        writing = raw_events(events).writeStream.queryName(QUERY)
        trigger: dict[str, Any] = {"availableNow": True}
        if not self.once:
            trigger = {"processingTime": f"{self.trigger_seconds:g} seconds"}
        writing = writing.trigger(**trigger).option("checkpointLocation", self.checkpoint)
        return writing.foreachBatch(self._take).start()

    def _take(self, batch: DataFrame, number: int) -> None:
        with self._pace.lock:
            take(self.lake, batch, query_of(batch), number, self.catalog)
            self._pace.is_behind = True
            self.catch_up()

    def catch_up(self) -> None:
        """Refresh if it is time to and anything was taken since; call it while a stream runs.

        Batches do it too, but after the last of them there may be none for a long time.
        """
        pause = self.refresh_seconds
        if pause is None:
            pause = math.inf if self.once else _REFRESH_SECONDS
        pace = self._pace
        if pace.is_behind and time.monotonic() - pace.refreshed >= pause:
            self.finish()

    def take_outbox(self, rows: DataFrame) -> int:
        """Take in rows of `outbox_events` that are not there yet, in place of a log; how many."""
        self._refuse_what_others_took()
        self.level()
        return take_rows(self.lake, raw_events(rows), self.catalog)

    def _refuse_what_others_took(self) -> None:
        """Silver is made of the batches of this lake's own queries, and would lack all others."""
        lake = self.lake
        if lake.files(RAW) and all(applied(lake, RAW, query) < 0 for query in self.queries):
            raise ConfigError(
                f"{lake.path(RAW)} was filled by another query, or its checkpoint is gone:"
                " name another folder for the tables (--to), or remove this one to begin anew"
            )

    def level(self) -> None:
        """Finish a batch that was killed between bronze and silver; a stream does it by itself."""
        level(self.lake, self.queries, self.catalog)

    def finish(self) -> int:
        """Bring facts, marts and reconciliation up to silver; how many days had changed."""
        with self._pace.lock:
            self.level()
            if not with_sources(self.tables) or not self.lake.has(SILVER):
                return 0
            self._pace.is_behind = False
            changed = refresh(self.lake, self.outbox(), self.tables)
            self._pace.refreshed = time.monotonic()
        return changed


def replay(job: Job, since: date, until: date) -> int:
    """Make days of silver (UTC, `until` not included) again from bronze, and what follows of them.

    That takes what was refused and now can be read out of the quarantine. Returns the days.
    """
    if since >= until:
        raise ConfigError(f"since={since} is not before until={until}: name at least one day")
    job.level()  # else what bronze has of a batch would be counted now, and again when it goes on
    days = days_between(job.lake, since, until)
    if not days:
        return 0
    State.at(job.lake.root).forget(days)
    retake(job.lake, days, job.catalog)
    job.finish()
    return len(days)
