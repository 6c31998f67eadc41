"""`conquiet pipeline run`: make the session, start the query, print progress."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from conquiet.cli.logs import set_up_logs
from conquiet.cli.terminal import FAILED, OK, has_colour, one_line, print_json, red
from conquiet.config import has_events_layout
from conquiet.errors import ConfigError, ConquietError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from conquiet.lake import Pipeline

_FORMATS = {"log": "conquiet", "outbox": "conquiet-outbox"}
_LINE_SECONDS = 10.0
"""Seconds between lines of progress where a line cannot be written over."""
_POSITIONS = frozenset({"startingoffsets", "endingoffsets", "maxoffsetspertrigger"})
"""Options of a log, in small letters."""
_last = re.compile(r"^[ \t]*(?:Caused by: )?((?!SQLSTATE)[A-Za-z_][\w.$]*: .+)$", re.MULTILINE)
_BEHIND = ("=== Streaming Query ===", "JVM stacktrace:")
"""What Spark writes behind the text of an error."""


def run(options: Namespace, find_pipeline: Callable[[], Pipeline]) -> int:
    """Run the pipeline, which is imported when the options are known to be right."""
    debug = getattr(options, "debug", False)
    source = source_options(options)
    config = spark_settings(options, debug)
    if options.once and options.trigger_seconds is not None:
        raise ConfigError("--once and --trigger-seconds exclude each other: --once ends by itself")
    if options.remote is not None:
        _check_remote(options)
    is_table = is_whole_table(options.origin, source)
    if is_table:
        _check_whole(options)
    is_whole = is_table or options.remote is not None
    try:
        import pyspark  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'conquiet[spark]'") from error
    _check_source(options, source, streaming=not is_whole)
    pipeline = find_pipeline()
    set_up_logs("info" if debug else "warning")
    # Spark does not count rows that it does not read itself.
    progress = BatchProgress(options.json, by_steps=is_whole or options.origin == "files")
    with ExitStack() as stack:
        log = None if debug else stack.enter_context(SparkLog())
        stack.callback(progress.clear)
        if options.metrics is not None:
            stack.enter_context(serve_metrics(pipeline, *options.metrics))
        try:
            with nullcontext() if log is None else log.redirect():
                spark = _session(options, config)
            stack.callback(spark.stop)
            stopped = pipeline.run(
                _events(spark, options.origin, source, is_whole),
                once=options.once,
                trigger_seconds=options.trigger_seconds or 0.0,
                refresh_seconds=options.refresh_seconds,
                checkpoint=options.checkpoint,
                outbox=None if options.origin == "outbox" else options.database,
                new_only=is_whole,
                on_query=progress.look,
                on_progress=progress.say,
            )
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - Spark's own, with pages of Java behind it
            return _print_failure(error, log)
        progress.end(pipeline.lake, stopped)
    return OK


@contextmanager
def serve_metrics(pipeline: Pipeline, host: str, port: int) -> Iterator[int]:
    """Answer `/metrics` of a pipeline over HTTP; yield the port, which is chosen for 0."""
    collector = pipeline.metrics()
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"--metrics {host}:{port} cannot be used ({error.strerror})") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class SparkLog:
    """A file for what Java and Spark's Python processes write to stderr; a failed run keeps it."""

    def __enter__(self) -> SparkLog:
        self._descriptor, self.path = tempfile.mkstemp(prefix="conquiet-spark-", suffix=".log")
        self.is_kept = False
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)
        if not self.is_kept:
            os.remove(self.path)

    @contextmanager
    def redirect(self) -> Iterator[None]:
        """Let processes that are started meanwhile write to the file, as long as they live."""
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(self._descriptor, 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _session(options: Namespace, config: dict[str, str]) -> SparkSession:
    from conquiet.spark import session

    return session(
        "conquiet pipeline",
        master=options.master,
        remote=options.remote,
        config=config,
        formats=options.origin != "files",
        quick_start=options.once,
    )


def _events(spark: SparkSession, origin: str, source: dict[str, str], whole: bool) -> DataFrame:
    if origin == "files":
        from conquiet.lake.source import read_files

        given = dict(source)
        return read_files(spark, given.pop("path"), **given)
    if whole:
        return spark.read.format(_FORMATS[origin]).options(**source).load()
    return spark.readStream.format(_FORMATS[origin]).options(**source).load()


# --- settings -----------------------------------------------------------------------------------


def source_options(options: Namespace) -> dict[str, str]:
    """Return the options of the format that reads the events."""
    if options.origin == "files":
        return _file_options(options)
    found = _address(options)
    if options.origin == "log":
        if not options.streams:
            raise ConfigError("name the streams of the log: --streams 'orders,payments:*'")
        if options.table:
            raise ConfigError("--table is for --from outbox")
        found["streams"] = options.streams
    else:
        if options.streams:
            raise ConfigError("--streams is for --from log")
        if options.table:
            found["table"] = options.table
    if options.max_events is not None:
        found["maxOffsetsPerTrigger"] = str(options.max_events)
    found |= dict(options.option)
    if not is_whole_table(options.origin, found):
        found = {"startingOffsets": options.starting} | found
    return found


def is_whole_table(origin: str, options: Mapping[str, str]) -> bool:
    """Return whether the events are in a table that is not a log: it is read as a whole."""
    if origin != "outbox":
        return False
    given = {name.lower(): value for name, value in options.items()}
    return has_events_layout(given.get("table", ""))


def _check_whole(options: Namespace) -> None:
    if not options.once:
        raise ConfigError("outbox_events is read as a whole, since it is not a log: add --once")
    given = {name.lower() for name, _ in options.option} & _POSITIONS
    if options.starting != "earliest" or options.max_events is not None or given:
        raise ConfigError(
            "outbox_events has no positions: choose its rows by --option since=… and until=…"
        )


def _check_remote(options: Namespace) -> None:
    """Refuse what a Connect server would have to run, decide or keep."""
    if not options.once:
        raise ConfigError(
            "--remote: a lake follows no stream through Spark Connect, whose server would run the"
            " driver of the lake: add --once, or use --master"
        )
    if options.origin == "files":
        raise ConfigError("--remote is for --from log and --from outbox")
    given = {name for name in ("master", "archive", "checkpoint") if getattr(options, name)}
    if given:
        raise ConfigError(f"--{min(given)} is the server's to choose: leave it out with --remote")
    if options.max_events is not None:
        raise ConfigError("--max-events is for streams: with --remote a log is read as a whole")


def _check_source(options: Namespace, source: dict[str, str], *, streaming: bool) -> None:
    """Refuse what the source would refuse, before Spark is started for it."""
    if options.origin == "log":
        from conquiet.spark.log.options import ReadOptions

        ReadOptions.of(source, streaming=streaming)
    elif options.origin == "outbox":
        from conquiet.spark.outbox.options import OutboxOptions

        OutboxOptions.of(source)
    else:
        from conquiet.lake.source import check_files

        check_files(options.path)
        return
    from conquiet.spark.payload import schema_of

    schema_of(source)


def _address(options: Namespace) -> dict[str, str]:
    """Return where the log or the outbox is, unless an option of the source says it."""
    flag, variable, url = {
        "log": ("--broker", "CONQUIET_BROKER_URL", options.broker),
        "outbox": ("--database", "CONQUIET_DATABASE_URL", options.database),
    }[options.origin]
    given = {name.lower() for name, _ in options.option} & {"url", "urlfile", "urlenv"}
    if url and given:
        raise ConfigError(f"give {flag} or --option {given.pop()}, not both")
    if given:
        return {}
    url = url or os.environ.get(variable)
    if not url:
        raise ConfigError(
            f"where is the {options.origin}? {flag}, or {variable}, or --option urlFile=FILE"
        )
    return {"url": url}


def _file_options(options: Namespace) -> dict[str, str]:
    if not options.path:
        raise ConfigError("where are the files? --path DIR")
    if options.max_events is not None:
        raise ConfigError("--max-events is for logs; of files: --option maxFilesPerTrigger=1")
    return {"path": options.path} | dict(options.option)


def spark_settings(options: Namespace, debug: bool) -> dict[str, str]:
    """Return the settings of the session: the user's, and those that bring the archive along."""
    chosen = dict(options.conf)
    if not debug and options.remote is None:
        chosen.setdefault("spark.log.level", "ERROR")
        chosen.setdefault("spark.ui.showConsoleProgress", "false")
    if options.archive is not None:
        from conquiet.spark.archive import settings_for

        if not os.path.isfile(options.archive):
            raise ConfigError(
                f"--archive {options.archive}: there is no such file; make it by"
                f" conquiet pipeline package --output {options.archive}"
            )
        for name, value in settings_for(os.path.abspath(options.archive)).items():
            if name in chosen:
                raise ConfigError(f"--archive sets {name}, and so does --conf: give one of them")
            chosen[name] = value
    return chosen


def _print_failure(error: Exception, log: SparkLog | None) -> int:
    where = ""
    if log is not None:
        log.is_kept = True
        where = f" (Spark's log: {log.path})"
    else:
        import traceback

        traceback.print_exception(error)
    from conquiet.spark.query import own_words

    text = str(error) if isinstance(error, ConquietError) else own_words(error)
    mark = red("conquiet: error:", sys.stderr)
    text = one_line(text or last_words(str(error)))[:1500]
    print(f"{mark} the run failed: {text}{where}", file=sys.stderr)
    return FAILED


def last_words(text: str) -> str:
    """Return the line that names the fault: Python's below Spark, else Java's."""
    for heading in _BEHIND:
        text = text.partition(heading)[0]
    _, _, trace = text.partition("Traceback (most recent call last):")
    found = _last.findall(trace)
    return found[-1] if found else text.partition("\n\tat ")[0]


# --- progress -----------------------------------------------------------------------------------


class Missed(NamedTuple):
    """Entries that were gone before this run could read them (`failOnDataLoss=false`)."""

    times: int
    entries: int
    """Of those times when they could be counted."""

    def __str__(self) -> str:
        return f"{self.entries:,} or more events lost (losses: {self.times:,})"


def _sum(lost: Mapping[str, Any]) -> Missed:
    return Missed(
        sum(item.times for item in lost.values()), sum(item.entries for item in lost.values())
    )


class BatchProgress:
    """Prints batches and tables: on a terminal in one line, else now and then, or as JSON.

    Batches are those of a query, or with `by_steps` those that the pipeline has taken in.
    """

    def __init__(self, as_json: bool, *, by_steps: bool = False) -> None:
        self._as_json = as_json
        self._by_steps = by_steps
        self._over = has_colour(sys.stderr)
        self._started = self._printed = time.monotonic()
        self._last_batch = -1
        self._taken_at = 0.0
        self._line = ""
        self.events = 0
        self.batches = 0
        self.lag: int | None = None
        self.lost = Missed(0, 0)
        self._lost_before: Missed | None = None

    def look(self, query: Any) -> None:
        """Print the batches that a query has finished since the last look."""
        from conquiet.spark.progress import losses, losses_before

        for progress in () if self._by_steps else query.recentProgress:
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
        waiting = list(lag(progress).values())
        self.lag = None if not waiting or None in waiting else sum(item or 0 for item in waiting)
        speed = progress.processedRowsPerSecond or 0.0
        self.count(progress.batchId, progress.numInputRows, speed)

    def count(self, batch: int, events: int, speed: float) -> None:
        """Print one batch."""
        self.batches += 1
        self.events += events
        if self._as_json:
            line: dict[str, Any] = {
                "batch": batch,
                "events": events,
                "events_per_second": round(speed, 1),
            }
            line |= {"lag": self.lag, "lost": self.lost.entries, "losses": self.lost.times}
            print_json(line)
            sys.stdout.flush()
            return
        behind = "" if self.lag is None else f", lag {self.lag:,}"
        behind += f", {self.lost}" if self.lost.times else ""
        self._line = f"batch {batch}: {events:,} events, {speed:,.0f}/s{behind}"
        self._print(self._line)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, done: Any) -> None:
        """Print the step that a pipeline has just done, as the table that it committed."""
        if self._by_steps and done.step == "taken":
            events = done.events - self.events
            self.count(self.batches, events, events / max(done.seconds - self._taken_at, 0.001))
            self._taken_at = done.seconds
        self._print(f"{self._line}; {done.step}" if self._line else done.step)

    def _print(self, text: str) -> None:
        if self._as_json:
            return
        if self._over:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._printed >= _LINE_SECONDS:
            self._printed = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._over and not self._as_json:
            print("\r\x1b[K", end="", file=sys.stderr)

    def end(self, lake: str, stopped: bool) -> None:
        self.clear()
        how = "stopped" if stopped else "done"
        missed = f"; {self.lost}, gone before they were read" if self.lost.times else ""
        print(
            f"{how}: {self.events:,} events in {self.batches:,} batches to {lake},"
            f" in {self.seconds:.1f} s{missed}",
            file=sys.stderr,
        )
