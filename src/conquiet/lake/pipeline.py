"""Pipeline: definitions and a lake in one object; it runs, refreshes, replays and reads."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from conquiet.errors import ConfigError
from conquiet.events.catalog import Catalog
from conquiet.lake import facts, silver
from conquiet.lake.definition import Definitions
from conquiet.lake.journal import FOLDER, Batch, Folded, Journal, Lease, Lock, Refresh
from conquiet.lake.judge import typed_schemas
from conquiet.lake.query import ROWS_PER_FILE as QUERY_ROWS_PER_FILE
from conquiet.lake.query import (
    Database,
    Mart,
    Query,
    TableRefresh,
    digest,
    forget_changes,
    mart,
    quoted,
)
from conquiet.lake.reconcile import COMPLETENESS, DELIVERY, Outbox, Scope, reconciliation
from conquiet.lake.replay import Quarantine, replay_days
from conquiet.lake.report import Chart
from conquiet.lake.source import Split, are_files, plan_splits
from conquiet.lake.tables import CHANGE, ROWS_PER_FILE, Files, Store
from conquiet.lake.tasks import Executors, Here, Tasks, balance, share_definition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from conquiet.lake.metrics import LakeMetrics

logger = logging.getLogger("conquiet.lake")

_FEW_ROWS = 10_000
"""A batch of so many entries is judged by the driver: a job of Spark would cost more."""
_PARTS_PER_CORE = 4
"""Into so many parts the files of a batch are divided, so that cores end at about the same time."""
_COMMITS_AT_ONCE = 8
_MERGES_AT_ONCE = 2
"""A merge holds the changes of a table of facts in memory."""
_COMMITS_PER_UPKEEP = 100
"""After so many batches, small files are put together and old ones are removed."""
_KEPT_HOURS = 168.0


class Progress(msgspec.Struct):
    """What a run has just done."""

    step: str
    batch: int
    events: int
    seconds: float


def _say_nothing(progress: Progress) -> None:
    """Take no notice of progress."""


class Driver:
    """Writes a lake: takes batches in, and brings facts and SQL tables up to them.

    `step` is called after everything that a kill could come after.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        tasks: Tasks | None = None,
        on_progress: Callable[[Progress], None] = _say_nothing,
    ) -> None:
        self.pipeline = pipeline
        self.definition = pipeline.definition
        self.files = Files(pipeline.lake)
        self.store = pipeline.open_store(self.files)
        self.journal = Journal(self.files)
        self.known = silver.KnownIds(self.store, silver.id_tables(self.definition))
        self.tasks = tasks or Here()
        self.shared = share_definition(self.definition, self.tasks)
        self._lock = Lock(self.files) if self.files.is_local else Lease(self.files)
        self._busy = threading.RLock()
        self._on_progress = on_progress
        self._began = time.monotonic()
        self._events = 0

    def __enter__(self) -> Driver:
        self._lock.acquire()
        try:
            self.store.check_types(
                [
                    *(typed_schemas(self.definition) if self.definition.typed else ()),
                    *self.definition.tables,
                ]
            )
            self.journal.load()
            for batch in self.journal.pending:
                self._commit(batch)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def step(self, name: str, batch: int) -> None:
        self._lock.check()
        logger.debug("batch %d: %s", batch, name)
        self._on_progress(Progress(name, batch, self._events, time.monotonic() - self._began))

    def _tasks_for(self, rows: int) -> Tasks:
        return Here() if rows <= _FEW_ROWS else self.tasks

    # --- silver ---------------------------------------------------------------------------------

    def take(
        self,
        entries: DataFrame | pa.Table,
        query: str,
        batch: int,
        *,
        new_only: bool = False,
        splits: Sequence[Split] = (),
    ) -> int:
        """Take a batch of entries in, once; return how many they are.

        `splits` are the parts of Parquet files that a frame is made of: tasks read them, and no row
        passes through the JVM.
        """
        with self._busy:
            found = self.journal.find(query, batch)
            if found is not None or batch <= self.journal.last_of(query):
                return 0  # finished when this driver started
            looked = [one for one in self._look(entries, splits) if len(one.hashes)]
            if not looked:
                return 0
            known: silver.KnownIds | silver.RawIds | None = None
            if self.definition.structs:
                known = self.known
            elif new_only:
                known = silver.RawIds(self.store)
            planned = silver.plan(looked, known)
            rows = sum(np.count_nonzero(one > 0) if new_only else len(one) for one in planned)
            self._events += int(rows)
            record = Batch(self.journal.next_number, query, batch)
            self.step("taken", record.number)
            work = []
            for one, many in zip(looked, planned, strict=True):
                part = one.part
                if isinstance(part, silver.RawFile) and not new_only:
                    record.add("raw_events", part.file)
                    if not self.definition.structs:
                        continue  # all of it is written
                work.append(
                    silver.JudgeTask(self.shared, self.files, part, many, new_only=new_only)
                )
            silver.run_judge(record, work, self.files, self._tasks_for(int(rows)))
            self.enter(record)
            for one, many in zip(looked, planned, strict=True):
                self.known.add(*(ids[many > 0] for ids in (one.hashes, one.checks, one.days)))
            return int(rows)

    def _look(self, entries: DataFrame | pa.Table, splits: Sequence[Split]) -> list[silver.Looked]:
        day = silver.today()
        if isinstance(entries, pa.Table):
            return list(silver.Take(self.files, day)(entries.to_batches()))
        if not splits:
            assert isinstance(self.tasks, Executors), "frames need Spark"
            return self.tasks.take(entries, silver.Take(self.files, day))
        groups = balance([one.length for one in splits], _PARTS_PER_CORE * self.tasks.cores)
        parts = [silver.SplitFiles([splits[place] for place in one], day) for one in groups]
        return self.tasks.map(silver.look, [silver.LookTask(self.files, one) for one in parts])

    def _commit(self, record: Batch) -> None:
        schemas = silver.schemas(self.definition)

        def commit(name: str) -> None:
            self.store.commit(
                name,
                record.files.get(name, []),
                record.number,
                schema=schemas[name],
                remove=record.remove.get(name, []),
            )
            self.step(f"{name} committed", record.number)

        names = sorted({*(name for name, found in record.files.items() if found), *record.remove})
        with ThreadPoolExecutor(_COMMITS_AT_ONCE) as pool:
            list(pool.map(commit, names))

    def enter(self, record: Batch) -> None:
        """Write the record of a batch whose files are written, and commit it."""
        with self._busy:
            self.step("judged files written", record.number)
            self.journal.write(record)
            self.step("judged", record.number)
            self._commit(record)

    # --- facts and SQL tables -------------------------------------------------------------------

    def refresh(self, outbox: Outbox | str | None = None) -> int:
        """Bring facts, marts and queries up to silver; return the number of batches applied."""
        with self._busy:
            applied = 0
            if self.journal.refresh.folded is not None:
                applied += self._apply(self.journal.refresh.folded, outbox)
            if not self.journal.pending and self._redefined():
                last = self.journal.last_of("tables")
                self.enter(Batch(self.journal.next_number, "tables", last + 1))
            pending = self.journal.pending
            if pending and self.definition.structs:
                applied += self._apply(self._fold(pending), outbox)
            elif pending:
                self.journal.write_refresh(Refresh(pending[-1].number))
                self.journal.forget()
            return applied

    def _redefined(self) -> list[str]:
        """Return the marts and queries that are defined otherwise than their tables were made."""
        before = self.journal.refresh
        if before.through < 0 or not self.definition.structs:
            return []  # no table was made yet, or none ever is
        return [
            one.name for one in self.pipeline.queries if before.queries.get(one.name) != digest(one)
        ]

    def _fold(self, batches: Sequence[Batch]) -> Folded:
        rows = sum(sum(one.rows.values()) for batch in batches for one in batch.feed)
        before = self.journal.refresh
        rebuild = any(one.rebuild for one in batches)
        new = set(self.definition.facts) - set(before.facts)
        if new and before.through >= 0 and not rebuild:
            raise ConfigError(
                f"{self.files.root} has events from before {', '.join(sorted(new))} was declared:"
                " replay them once, by pipeline.replay() or conquiet pipeline replay"
            )
        if rebuild:
            last = max(number for number, one in enumerate(batches) if one.rebuild)
            fed = batches[last:]  # an earlier batch is part of what a rebuild has read
        else:
            fed = list(batches)
        folded = facts.run_fold(
            self.shared,
            fed,
            before,
            self.files,
            self._tasks_for(rows),
            through=batches[-1].number,
            gone=self._all_rows() if rebuild else None,
        )
        self.step("states and changes written", folded.through)
        self.journal.write_refresh(msgspec.structs.replace(before, folded=folded))
        self.step("folded", folded.through)
        return folded

    def _all_rows(self) -> dict[str, list[str]]:
        """Write the rows of all tables of facts as removed: for marts and queries, all rows of a
        rebuild go before all rows come."""
        gone: dict[str, list[str]] = {}
        for name in self.definition.tables:
            for uri in self.store.files(name):
                rows = self.files.read([uri])
                rows = rows.append_column(CHANGE, pa.array(np.full(len(rows), -1, np.int8)))
                gone.setdefault(name, []).append(facts.write_changes(self.files, name, rows))
        return gone

    def _apply(self, folded: Folded, outbox: Outbox | str | None) -> int:
        batches = [one for one in self.journal.pending if one.number <= folded.through]
        if folded.counts:
            self.store.commit(
                "expectations",
                folded.counts,
                folded.through,
                schema=silver.EXPECTATIONS,
                app=f"{self.store.app}/rows",
            )
            self.step("expectations of rows committed", folded.through)

        def merge(name: str) -> None:
            facts.merge_table(self.store, self.definition, folded, name)
            self.step(f"{name} committed", folded.through)

        with ThreadPoolExecutor(_MERGES_AT_ONCE) as pool:
            list(pool.map(merge, self.definition.tables))
        changes = self._changes(batches, folded)
        pipeline = self.pipeline
        with TableRefresh(
            self.store,
            changes,
            folded.through,
            pipeline.names,
            self.definition.zone,
            self._redefined(),
        ) as tables:
            queries = [*pipeline.queries, *reconciliation(tables, self.definition, outbox)]
            for name, _ in tables.apply(queries):
                self.step(f"{name} committed", folded.through)
        before = self.journal.refresh
        self.journal.write_refresh(
            Refresh(
                folded.through,
                folded.levels,
                sorted(self.definition.facts),
                {one.name: digest(one) for one in pipeline.queries},
            )
        )
        self.step("applied", folded.through)
        self._clean(before, folded, batches)
        if folded.through // _COMMITS_PER_UPKEEP > before.through // _COMMITS_PER_UPKEEP >= 0:
            self.optimize(_KEPT_HOURS)
        return len(batches)

    def _changes(self, batches: Sequence[Batch], folded: Folded) -> dict[str, list[str]]:
        changes = {name: list(uris) for name, uris in folded.changes.items()}
        for batch in batches:
            for name, found in batch.files.items():
                if name not in batch.changes:
                    uris = [self.files.uri(name, one.name) for one in found]
                    changes.setdefault(name, []).extend(uris)
            for name, uris in batch.changes.items():
                changes.setdefault(name, []).extend(uris)
        return changes

    def _clean(self, before: Refresh, folded: Folded, batches: Sequence[Batch]) -> None:
        """Remove files that nothing needs after a refresh."""
        kept = {one.file for level in folded.levels for one in level}
        for level in before.levels:
            for one in level:
                if one.file not in kept:
                    self.files.remove(f"{FOLDER}/states/{one.file}")
        for batch in batches:
            for feed in batch.feed:
                self.files.remove(f"{FOLDER}/feed/{feed.file}")
            for uris in batch.changes.values():
                self._remove(uris)
        for uris in folded.changes.values():
            self._remove(uris)
        forget_changes(self.files)
        self.journal.forget()

    def optimize(self, hours: float) -> dict[str, int]:
        """Put small files together, and remove files that nothing names; return how many by
        table."""
        for name in silver.schemas(self.definition):
            if self.store.exists(name):
                self.store.optimize(name)
        for table in self.definition.tables.values():
            self.store.compact(
                table.name,
                order_by=table.key,
                partition_by=table.partition_by,
                rows_per_file=ROWS_PER_FILE,
            )
        queries = {one.name: one.sorted_by for one in self.pipeline.queries}
        queries |= {COMPLETENESS: ("hour",), DELIVERY: ("hour",)}
        for name, columns in queries.items():
            self.store.compact(
                name, order_by=columns, partition_by=None, rows_per_file=QUERY_ROWS_PER_FILE
            )
        self._remove_orphans()
        found = [one for one in self.pipeline.names if self.store.exists(one)]
        return {name: self.store.vacuum(name, hours) for name in found}

    def _remove_orphans(self) -> None:
        """Remove files below `_pipeline` that a kill has left and no record names."""
        refresh, batches = self.journal.refresh, self.journal.pending
        folded = refresh.folded or Folded(-1, [], {})
        named = {one.file for level in (*refresh.levels, *folded.levels) for one in level}
        named |= {feed.file for batch in batches for feed in batch.feed}
        for changes in (folded.changes, *(batch.changes for batch in batches)):
            named |= {uri.rpartition("/")[2] for uris in changes.values() for uri in uris}
        folders = [f"{FOLDER}/changes/{name}" for name in self.pipeline.names]
        for folder in (f"{FOLDER}/states", f"{FOLDER}/feed", *folders):
            for name in self.files.list(folder):
                if name not in named:
                    self.files.remove(f"{folder}/{name}")

    def _remove(self, uris: Iterable[str]) -> None:
        for uri in uris:
            self.files.remove(uri[len(self.files.root) + 1 :])


class Pipeline(Definitions):
    """Turns events into the tables of a lake, by its definitions.

    `catalog` may be None: without any event type there is `raw_events` alone.

    `lake` is a folder or `s3://bucket/path`. `name` identifies its commits, so it stays as it is.
    `zone` is the time zone of `day(moment)`. `moments` names, by event type, the field of data that
    says when an event happened. `typed=False` leaves out the tables of event types.
    """

    def __init__(
        self,
        catalog: Catalog | None = None,
        *,
        lake: str | os.PathLike[str] = "lake",
        name: str = "pipeline",
        zone: str = "UTC",
        moments: Mapping[str, str] | None = None,
        typed: bool = True,
    ) -> None:
        super().__init__(catalog, name=name, zone=zone, moments=moments, typed=typed)
        self.lake = os.fspath(lake)
        self.charts: list[Chart] = []

    # --- SQL tables -----------------------------------------------------------------------------

    def mart(
        self,
        name: str,
        *,
        of: type[msgspec.Struct] | str,
        by: Sequence[str],
        sums: Sequence[str] = (),
        counts: Mapping[str, str | None] | None = None,
    ) -> Mart:
        """Declare the table `name`, of `sums` and `counts` by some columns of a fact's table.

        `of` is the struct of its rows, the name of a table, or SQL without joins. `counts` names a
        column by the condition that a row must meet to be counted; None counts each row.
        """
        if not isinstance(of, str):
            table = self.definition.table_of(of)
            unknown = {*by, *sums} - set(table.schema.names)
            if unknown:
                raise ConfigError(
                    f"mart {name}: {of.__name__} has no field {', '.join(sorted(unknown))}"
                )
            of = table.name
        made = mart(self._new_name(name), of=of, by=by, sums=sums, counts=counts)
        self.queries.append(made)
        return made

    def query(self, name: str, *, sql: str, **more: Any) -> Query:
        """Declare the table `name` as SQL over tables of the lake, for the touched groups again.

        `more` are the other fields of `Query`: `touched`, `group` and `key` at least.
        """
        made = Query(self._new_name(name), sql=sql, **more)
        self.queries.append(made)
        return made

    @property
    def names(self) -> list[str]:
        """All tables of the pipeline."""
        made = [*self.definition.tables, *(one.name for one in self.queries)]
        if self.definition.structs:
            made += [COMPLETENESS, DELIVERY]
        return [*silver.schemas(self.definition), *made]

    # --- running --------------------------------------------------------------------------------

    def run(
        self,
        events: DataFrame | pa.Table,
        *,
        once: bool = False,
        trigger_seconds: float = 0.0,
        refresh_seconds: float | None = None,
        checkpoint: str | None = None,
        outbox: Outbox | str | None = None,
        new_only: bool = False,
        on_progress: Callable[[Progress], None] = _say_nothing,
        on_query: Callable[[Any], object] = lambda query: None,
    ) -> bool:
        """Take events in and keep the tables up to them; return whether a signal ended the run.

        A stream is followed until a signal ends it, or with `once` up to what there is now; its
        checkpoint is `_checkpoint` in a lake on a local disk. Facts and SQL tables follow every
        `refresh_seconds` (60, unless given), with `once` at the end. A batch frame, or a table of
        Arrow in the columns of the log, is taken in as one batch; `new_only` drops events that the
        lake has, instead of counting them as redeliveries. `on_query` is called several times a
        second with Spark's query, `on_progress` after each step.

        Batches follow each other by `trigger_seconds` at least. `outbox` is the table that
        `outbox_delivery` is counted by, or its URL.
        """
        if isinstance(events, pa.Table):
            with Driver(self, on_progress=on_progress) as driver:
                driver.take(events, "rows", driver.journal.last_of("rows") + 1, new_only=new_only)
                driver.refresh(outbox)
            return False
        from pyspark.sql import DataFrame
        from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

        assert isinstance(events, DataFrame) or hasattr(events, "sparkSession")
        if events.isStreaming and not isinstance(events, ClassicDataFrame):
            raise ConfigError(
                "a lake follows no stream through Spark Connect: the server would run the driver"
                " of the lake; use --master, or pass a batch frame to pipeline.run"
            )
        executors = Executors(events.sparkSession)
        with Driver(self, executors, on_progress) as driver:
            if not events.isStreaming:
                driver.take(events, "rows", driver.journal.last_of("rows") + 1, new_only=new_only)
                driver.refresh(outbox)
                return False
            if refresh_seconds is None:
                refresh_seconds = float("inf") if once else 60.0
            trigger: dict[str, Any] = {"availableNow": True}
            if not once:
                trigger = {"processingTime": f"{trigger_seconds:g} seconds"}
            if once:
                executors.warm_up(driver.shared)
            pace = _Pace(driver, refresh_seconds, outbox, are_files=are_files(events))
            place = checkpoint or self._checkpoint(driver.files)
            writing = events.writeStream.queryName(self.name).trigger(**trigger)
            is_stopped = self._follow(writing, place, pace, on_query)
            if once and not is_stopped:
                driver.refresh(outbox)
            return is_stopped

    def _follow(self, writing: Any, place: str, pace: _Pace, on_query: Any) -> bool:
        from conquiet.spark.query import run_query, start_query

        query = start_query(writing.foreachBatch(pace.take), place)

        def look(query: Any) -> None:
            on_query(query)
            pace.catch_up()

        return run_query(query, on_look=look)

    def _checkpoint(self, files: Files) -> str:
        if not files.is_local:
            raise ConfigError(
                f"lake={self.lake!r}: give a checkpoint on a local or shared disk (checkpoint=);"
                " Spark writes checkpoints to S3 with a jar of Hadoop only"
            )
        return files.uri("_checkpoint")

    def driver(
        self, spark: Any = None, on_progress: Callable[[Progress], None] = _say_nothing
    ) -> Driver:
        """Return a driver of the lake, which works in this process unless `spark` is a session.

        `on_progress` is called after each step.
        """
        return Driver(self, None if spark is None else Executors(spark), on_progress)

    def take(self, entries: pa.Table | Iterable[Mapping[str, Any]]) -> int:
        """Take entries in as one batch, without Spark; `refresh` brings facts up to them."""
        with self.driver() as driver:
            return driver.take(as_table(entries), "rows", driver.journal.last_of("rows") + 1)

    def refresh(self, *, outbox: Outbox | str | None = None, spark: Any = None) -> int:
        """Bring facts, marts and queries up to silver; return the number of batches applied.

        `outbox` is as for `run`; with `spark`, its executors do the work.
        """
        with self.driver(spark) as driver:
            return driver.refresh(outbox)

    def replay(
        self,
        since: date | None = None,
        until: date | None = None,
        *,
        spark: Any = None,
        outbox: Outbox | str | None = None,
        on_progress: Callable[[Progress], None] = _say_nothing,
    ) -> int:
        """Judge days of `raw_events` again, after a fix; return the number of days.

        They are days of UTC, from `since` on, `until` not included; all, unless given. Facts are
        made again from all events. `spark`, `outbox` and `on_progress` are as for `run` and
        `refresh`.
        """
        with self.driver(spark, on_progress) as driver:
            days = replay_days(driver, since, until)
            driver.refresh(outbox)
            return days

    @property
    def quarantine(self) -> Quarantine:
        """The events that were refused."""
        return Quarantine(self)

    def optimize(self, *, hours: float = 168.0) -> dict[str, int]:
        """Put small files of all tables together, and remove files that no version younger than
        `hours` names; return the number of removed files by table."""
        with self.driver() as driver:
            driver.refresh()  # it reads files of its batches, which must still be there
            return driver.optimize(hours)

    def local(
        self, *batches: pa.Table | Iterable[Mapping[str, Any]], outbox: Outbox | str | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """Make all tables of some entries without Spark, in a temporary lake: for unit tests.

        Entries have the columns of the log; each of `batches` is taken in by itself. `outbox` is as
        for `run`. Returns rows by table.
        """
        with tempfile.TemporaryDirectory(prefix="conquiet-lake-") as place, self._at(place):
            with Driver(self) as driver:
                for number, entries in enumerate(batches):
                    driver.take(as_table(entries), "local", number)
                    driver.refresh(outbox)
            store = self.open_store()
            found = [one for one in self.names if store.schema(one) is not None]
            with self.database() as database:
                database.offer(" ".join(found))
                return {name: database.arrow(f"FROM {quoted(name)}").to_pylist() for name in found}

    @contextmanager
    def _at(self, lake: str) -> Iterator[None]:
        before, self.lake = self.lake, lake
        try:
            yield
        finally:
            self.lake = before

    # --- reading --------------------------------------------------------------------------------

    def open_store(self, files: Files | None = None) -> Store:
        """Open the tables of the lake for reading, from `files` if they are open already."""
        declared = {name: one.schema for name, one in self.definition.tables.items()}
        return Store(
            files or Files(self.lake), self.name, {**silver.schemas(self.definition), **declared}
        )

    def read(self, name: str) -> pa.Table:
        """Read a table as Arrow, without Spark.

        `events` and `events_quarantine` have the deliveries of all batches; `expectations` has one
        row per rule and day.
        """
        with self.database() as database:
            database.require(name)
            return database.arrow(f"FROM {quoted(name)}")

    def database(self) -> Database:
        """Open DuckDB over the tables of the lake; without definitions, over all that it finds."""
        store = self.open_store()
        names = self.names if self.definition.structs else [*self.names, *store.names()]
        return Database(store, names, self.definition.zone)

    def metrics(self) -> LakeMetrics:
        """Return what the lake says of rules and quarantine, for a registry of Prometheus:
        `REGISTRY.register(pipeline.metrics())`."""
        from conquiet.lake.metrics import LakeMetrics

        return LakeMetrics(self)

    def chart(self, title: str, sql: str) -> None:
        """Add a chart to the report, under its `title`.

        `sql` gives a day or a name in its first column, a number in the second.
        """
        self.charts.append(Chart(title, sql))

    def reconcile(self, *, outbox: Outbox | str | None = None, all: bool = False) -> None:
        """Bring all tables up to silver, then count outbox, log and silver again: for hours that
        are not complete or of which the outbox has more than was counted, or for `all` hours.

        `recon_completeness` and `outbox_delivery` hold the counts.
        """
        if not self.definition.structs:
            raise ConfigError("a pipeline without event types has nothing to reconcile")
        with Driver(self) as driver:
            driver.refresh(outbox)
            # Not a batch: its commits are numbered by the clock, under a name of their own.
            store = self.open_store(driver.files)
            store.app = f"{self.name}/reconcile"
            version = time.time_ns() // 1_000_000
            with TableRefresh(store, {}, version, self.names, self.definition.zone) as tables:
                scope: Scope = "all" if all else "outbox"
                for _ in tables.apply(reconciliation(tables, self.definition, outbox, scope)):
                    pass
            forget_changes(driver.files)


class _Pace:
    """When facts and SQL tables were last brought up to silver."""

    def __init__(
        self, driver: Driver, seconds: float, outbox: Outbox | str | None, *, are_files: bool
    ) -> None:
        self._are_files = are_files
        self._driver = driver
        self._seconds = seconds
        self._outbox = outbox
        self._refreshed = time.monotonic()
        self._is_behind = bool(driver.journal.pending)

    def take(self, frame: DataFrame, number: int) -> None:
        """Take a micro-batch in."""
        query = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        splits = plan_splits(frame) if self._are_files else []
        self._driver.take(frame, str(query), number, splits=splits)
        self._is_behind = True
        self.catch_up()

    def catch_up(self) -> None:
        """Refresh if it is time to; after the last batch there may be none for a long time."""
        if self._is_behind and time.monotonic() - self._refreshed >= self._seconds:
            self._is_behind = False
            self._driver.refresh(self._outbox)
            self._refreshed = time.monotonic()


def as_table(entries: pa.Table | Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return entries of the log as a table of Arrow."""
    if isinstance(entries, pa.Table):
        return entries
    columns = pa.schema([one for one in silver.RAW if one.name != "ingest_date"])
    return pa.Table.from_pylist([dict(one) for one in entries], schema=columns)
