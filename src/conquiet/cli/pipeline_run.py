"""What `conquiet pipeline run` does: make the session, start the query, tell how it goes."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from contextlib import ExitStack
from typing import Any

from conquiet.cli.logs import set_up_logs
from conquiet.cli.pipeline_progress import Progress, telling
from conquiet.cli.terminal import FAILED, OK, one_line, red
from conquiet.errors import ConfigError

_ENDS_OF_QUERIES = "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution"
_last = re.compile(r"^(?:Caused by: )?([A-Za-z_][\w.$]*: .+)$", re.MULTILINE)
_POSITIONS = frozenset({"startingoffsets", "endingoffsets", "maxoffsetspertrigger"})
"""Options of a log, in small letters."""
_URL_VARIABLES = {"log": "CONQUIET_BROKER_URL", "outbox": "CONQUIET_DATABASE_URL"}


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
    from conquiet.spark.settings import session

    table = Bronze(
        options.to, options.format, options.checkpoint, options.once, options.trigger_seconds
    )
    table.check()
    _refuse_a_lake_of_tables(options)
    is_whole = is_whole_table(options.origin, source)
    if is_whole:
        check_whole(options)
    debug = getattr(options, "debug", False)
    set_up_logs("info" if debug else "warning")
    with ExitStack() as stack:
        if is_whole:
            stack.enter_context(held(table.checkpoint_path))
        elif options.remote is None:  # else the checkpoint is the server's
            with held(table.checkpoint_path):
                pass  # the query will hold it; that another does is told before Spark is started
        spark = session(
            "conquiet pipeline", master=options.master, remote=options.remote, config=config
        )
        stack.callback(spark.stop)
        if not debug and options.remote is None:
            leave_the_last_word_to_us(spark)
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


def check_whole(options: Namespace) -> None:
    """A table that is no log is read to its end, and its rows are added in one commit."""
    if not options.once:
        raise ConfigError("outbox_events is read as a whole, since it is no log: add --once")
    if options.remote is not None:
        raise ConfigError(
            "--remote cannot take outbox_events: its rows are committed by the driver"
        )
    told = {name.lower() for name, _ in options.option} & _POSITIONS
    if options.starting != "earliest" or options.max_events is not None or told:
        raise ConfigError(
            "outbox_events has no positions: choose its rows by --option since=… and until=…"
        )


def _refuse_a_lake_of_tables(options: Namespace) -> None:
    """Tables are made of what their own run took in; events that another brings are in none."""
    from conquiet.spark.checkpoint import local_directory
    from conquiet.spark.tables.commits import format_of

    folder = local_directory(options.to)
    if folder is not None and format_of(folder / "silver") is not None:
        raise ConfigError(
            f"{options.to} has tables that are made of its raw_events: add --tables all, or name"
            " another folder by --to"
        )


def leave_the_last_word_to_us(spark: Any) -> None:
    """What ends a query is told by `failed`, in a line; Spark's pages about it are for --debug."""
    log4j = spark._jvm.org.apache.logging.log4j
    log4j.core.config.Configurator.setLevel(_ENDS_OF_QUERIES, log4j.Level.OFF)


# --- settings -------------------------------------------------------------------------------


def source_options(options: Namespace) -> dict[str, str]:
    """The options of the format that reads the events."""
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
    from conquiet.spark.bronze import is_whole_table

    if not is_whole_table(options.origin, found):
        found = {"startingOffsets": options.starting} | found
    return found


def _check_source(origin: str, source: dict[str, str]) -> None:
    """What a source would refuse, before Spark is started for it."""
    if origin == "log":
        from conquiet.spark.log.options import ReadOptions

        ReadOptions.of(source, streaming=True)
    elif origin == "outbox":
        from conquiet.spark.outbox.options import OutboxOptions

        OutboxOptions.of(source)
    else:
        return
    from conquiet.spark.payload import schema_of

    schema_of(source)


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


def failed(error: Exception, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    from conquiet.spark.query import own_words

    text = own_words(error) or _last_words(str(error))
    mark = red("conquiet: error:", sys.stderr)
    print(f"{mark} the query failed: {one_line(text)[:1500]}", file=sys.stderr)
    return FAILED


def _last_words(text: str) -> str:
    """Of an error that Python raised below Spark, the line that says what; else what Java says."""
    text = text.partition("JVM stacktrace:")[0]
    _, _, trace = text.partition("Traceback (most recent call last):")
    found = _last.findall(trace)
    return found[-1] if found else text.partition("\n\tat ")[0]
