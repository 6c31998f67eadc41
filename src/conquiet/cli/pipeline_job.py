"""What `conquiet pipeline run --tables …` does: the marketplace's tables, as a job over a lake."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from conquiet.cli.logs import set_up_logs
from conquiet.cli.pipeline_progress import Progress, telling
from conquiet.cli.pipeline_run import check_whole, failed, leave_the_last_word_to_us
from conquiet.cli.terminal import OK
from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marketplace.pipeline import Job


def run_tables(options: Namespace, source: dict[str, str], config: dict[str, str]) -> int:
    """Take events in, and make the tables that were asked for."""
    if options.remote is not None:
        raise ConfigError("--remote is for --tables raw_events: tables are committed by the driver")
    if options.checkpoint is not None:
        raise ConfigError("--checkpoint is for --tables raw_events: others keep it in the lake")
    tables = _tables(options.tables)
    from conquiet.spark.bronze import is_whole_table

    is_whole = is_whole_table(options.origin, source)
    if is_whole:
        check_whole(options)
    from conquiet.spark.checkpoint import held
    from conquiet.spark.settings import session
    from marketplace.pipeline import Job, Lake

    _check_places(options)
    debug = getattr(options, "debug", False)
    set_up_logs("info" if debug else "warning")
    with ExitStack() as stack:
        stack.enter_context(held(f"{options.to}/_checkpoints"))
        spark = session("conquiet pipeline", master=options.master, config=config)
        stack.callback(spark.stop)
        if not debug:
            leave_the_last_word_to_us(spark)
        progress = stack.enter_context(telling(options.json))
        job = Job(
            Lake(spark, options.to, options.format, progress.say),
            once=options.once,
            trigger_seconds=options.trigger_seconds or 0.0,
            refresh_seconds=options.refresh_seconds,
            tables=tables,
            outbox=outbox_at(spark, options.outbox_url),
        )
        try:
            if is_whole:
                progress.take_whole(job.take_outbox(_outbox(spark, source)))
                stopped = False
            else:
                stopped = _run_stream(job, _events(spark, options.origin, source), progress)
            job.finish()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - Spark's own, with pages of Java behind it
            return failed(error, debug)
        progress.end(options.to, stopped)
    return OK


def _check_places(options: Namespace) -> None:
    """What is wrong with the files that are read or the tables that are there, before Spark is."""
    from conquiet.spark.tables.commits import commits_of
    from conquiet.spark.tables.files import table_path
    from marketplace.pipeline.reading import check_files
    from marketplace.pipeline.tables import RAW, SILVER

    for name in (RAW, SILVER):
        commits_of(table_path(f"{options.to}/{name}"), options.format)
    if options.origin == "files":
        check_files(options.path)


def _tables(text: str) -> list[str]:
    from marketplace.pipeline.tables import NAMES, checked

    names = [name.strip() for name in text.split(",")]
    return list(NAMES) if names == ["all"] else [checked(name) for name in names]


def _events(spark: SparkSession, origin: str, source: dict[str, str]) -> DataFrame:
    if origin == "files":
        from marketplace.pipeline import read_files

        given = dict(source)
        return read_files(spark, given.pop("path"), **given)
    from conquiet.spark.bronze import read_events

    return read_events(spark, origin, source)  # type: ignore[arg-type]  # one of its choices


def _run_stream(job: Job, events: DataFrame, progress: Progress) -> bool:
    from conquiet.spark.query import run_query

    def look(query: Any) -> None:
        progress.look(query)
        job.catch_up()

    return run_query(job.start(events), on_look=look)


def outbox_at(spark: SparkSession, url: str | None) -> Callable[[], DataFrame | None]:
    """Reads `outbox_events` with the relay's attempts, or nothing where no database is named."""
    if url is None:
        return lambda: None
    from conquiet.events.table import EVENTS_TABLE

    return lambda: _outbox(spark, {"url": url, "table": EVENTS_TABLE})


def _outbox(spark: SparkSession, source: dict[str, str]) -> DataFrame:
    options: dict[str, Any] = {**source, "delivery": "true"}
    return spark.read.format("conquiet-outbox").options(**options).load()
