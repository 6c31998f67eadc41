"""What `conquiet pipeline run` does: make the session, start the query, tell how it goes."""

from __future__ import annotations

import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from conquiet.cli.logs import set_up_logs
from conquiet.cli.terminal import FAILED, OK, has_colour, one_line, print_json, red
from conquiet.errors import ConfigError

_LINE_SECONDS = 10.0
"""How often a line is written where it cannot be written over."""
_ENDS_OF_QUERIES = "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution"
_URL_VARIABLES = {"log": "CONQUIET_REDIS_URL", "outbox": "CONQUIET_DATABASE_URL"}


def run(options: Namespace) -> int:
    debug = getattr(options, "debug", False)
    source = source_options(options)
    config = spark_settings(options, debug)
    _refuse_what_connect_lacks(options)
    try:
        import pyspark  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'conquiet[spark]'") from error
    _check_source(options.origin, source)
    if options.tables != "raw_events":
        from conquiet.cli.pipeline_job import run_tables

        return run_tables(options, source, config)
    return _carry(options, source, config)


def _carry(options: Namespace, source: dict[str, str], config: dict[str, str]) -> int:
    """Into the table `raw_events`."""
    from conquiet.spark.bronze import Bronze, is_whole_table
    from conquiet.spark.checkpoint import held
    from conquiet.spark.session import session

    table = Bronze(
        options.to, options.format, options.checkpoint, options.once, options.trigger_seconds
    )
    table.check()
    is_whole = is_whole_table(options.origin, source)
    if is_whole:
        _check_whole(options)
    debug = getattr(options, "debug", False)
    set_up_logs(logging.INFO if debug else logging.WARNING)
    with ExitStack() as stack:
        if options.remote is None:  # else the checkpoint is the server's
            stack.enter_context(held(table.checkpoint_path))
        spark = session(
            "conquiet pipeline", master=options.master, remote=options.remote, config=config
        )
        stack.callback(spark.stop)
        if not debug and options.remote is None:
            _leave_the_last_word_to_us(spark)
        progress = stack.enter_context(telling(options.json))
        try:
            if is_whole:
                stopped = _take_whole(spark, source, table, progress)
            else:
                stopped = _take_stream(spark, options.origin, source, table, progress)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - Spark's own, with pages of Java behind it
            return failed(error, debug)
        progress.end(table.path, stopped)
    return OK


def _take_stream(
    spark: Any, origin: Any, source: dict[str, str], table: Any, progress: Progress
) -> bool:
    from conquiet.spark.bronze import read_events, start_bronze
    from conquiet.spark.query import run_query

    query = start_bronze(read_events(spark, origin, source), table)
    return run_query(query, on_look=progress.look)


def _take_whole(spark: Any, source: dict[str, str], table: Any, progress: Progress) -> bool:
    from conquiet.spark.bronze import take_whole

    progress.take_whole(take_whole(spark, source, table))
    return False


def _check_whole(options: Namespace) -> None:
    """A table that is no log is read to its end, and its rows are added in one commit."""
    if not options.once:
        raise ConfigError("outbox_events is read as a whole, since it is no log: add --once")
    if options.remote is not None:
        raise ConfigError(
            "--remote cannot take outbox_events: its rows are committed by the driver"
        )
    if options.starting != "earliest" or options.max_events is not None:
        raise ConfigError(
            "outbox_events has no positions: choose its rows by --option since=… and until=…"
        )


def _leave_the_last_word_to_us(spark: Any) -> None:
    """What ends a query is told by `failed`, in a line; Spark's pages about it are for --debug."""
    log4j = spark._jvm.org.apache.logging.log4j
    log4j.core.config.Configurator.setLevel(_ENDS_OF_QUERIES, log4j.Level.OFF)


# --- settings -------------------------------------------------------------------------------


def source_options(options: Namespace) -> dict[str, str]:
    """The options of the format that reads the events."""
    if options.origin == "files":
        return _file_options(options)
    found = _address(options) | {"startingOffsets": options.starting}
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
    return found | dict(options.option)


def _check_source(origin: str, source: dict[str, str]) -> None:
    """What a source would refuse, before Spark is started for it."""
    if origin == "log":
        from conquiet.spark.log.options import ReadOptions, schema_of

        ReadOptions.of(source, streaming=True)
        schema_of(source)
    elif origin == "outbox":
        from conquiet.spark.outbox.options import OutboxOptions

        OutboxOptions.of(source)


def _address(options: Namespace) -> dict[str, str]:
    """Where the log or the outbox is, unless an option of the source says it."""
    told = {name.lower() for name, _ in options.option} & {"url", "urlfile", "urlenv"}
    if options.url and told:
        raise ConfigError(f"give --url or --option {told.pop()}, not both")
    if told:
        return {}
    variable = _URL_VARIABLES[options.origin]
    url = options.url or os.environ.get(variable)
    if not url:
        raise ConfigError(
            f"say where the {options.origin} is: --url, or {variable}, or --option urlFile=FILE"
        )
    return {"url": url}


def _file_options(options: Namespace) -> dict[str, str]:
    if not options.path:
        raise ConfigError("say where the files are: --path DIR")
    if options.tables == "raw_events":
        raise ConfigError("--from files is for --tables all: as they are, the files are raw events")
    if options.max_events is not None:
        raise ConfigError("--max-events is for logs; of files: --option maxFilesPerTrigger=1")
    return {"path": options.path} | dict(options.option)


def spark_settings(options: Namespace, debug: bool) -> dict[str, str]:
    """The settings of the session: the user's, and those that bring the archive along."""
    chosen = dict(options.conf)
    if not debug and options.remote is None:
        chosen.setdefault("spark.log.level", "ERROR")
        chosen.setdefault("spark.ui.showConsoleProgress", "false")
    if options.archive is not None:
        from conquiet.spark.packaging import settings_for

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


def _refuse_what_connect_lacks(options: Namespace) -> None:
    if options.remote is None:
        return
    if options.master is not None:
        raise ConfigError("--master and --remote exclude each other")
    if options.archive is not None:
        raise ConfigError(
            "--archive is for --master: a Spark Connect server is started with its own"
            " spark.archives, and has conquiet installed"
        )
    if options.format == "delta":
        raise ConfigError(
            "--remote cannot write Delta: its commits are made on the driver, which is the server;"
            " use --format parquet, or run the driver there: --master"
        )


# --- progress -------------------------------------------------------------------------------


@contextmanager
def telling(as_json: bool) -> Iterator[Progress]:
    progress = Progress(as_json)
    try:
        yield progress
    finally:
        progress.clear()


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
        self.lost = 0
        """Entries and rows that were gone before they were read (`failOnDataLoss=false`)."""

    def look(self, query: Any) -> None:
        from conquiet.spark.progress import lost

        for progress in query.recentProgress:
            if progress.batchId > self._last_batch:
                missed = sum(item.entries for item in lost(progress).values())
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
            told |= {"events_per_second": round(speed, 1), "lag": self.lag, "lost": self.lost}
            print_json(told)
            sys.stdout.flush()
            return
        behind = "" if self.lag is None else f", lag {self.lag:,}"
        behind += f", {self.lost:,} lost" if self.lost else ""
        text = f"batch {progress.batchId}: {progress.numInputRows:,} events, {speed:,.0f}/s{behind}"
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
        if self._over and self.batches and not self._as_json:
            print("\r\x1b[K", end="", file=sys.stderr)

    def end(self, path: str, stopped: bool) -> None:
        self.clear()
        seconds = time.monotonic() - self._started
        how = "stopped" if stopped else "done"
        missed = f"; {self.lost:,} were gone before they were read" if self.lost else ""
        print(
            f"{how}: {self.events:,} events in {self.batches:,} batches to {path},"
            f" in {seconds:.1f} s{missed}",
            file=sys.stderr,
        )


def failed(error: Exception, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    from conquiet.spark.query import own_words

    text = own_words(error) or str(error).partition("JVM stacktrace:")[0].partition("\n\tat ")[0]
    mark = red("conquiet: error:", sys.stderr)
    print(f"{mark} the query failed: {one_line(text)[:1500]}", file=sys.stderr)
    return FAILED
