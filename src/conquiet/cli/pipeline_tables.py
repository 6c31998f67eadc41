"""`conquiet pipeline replay, reconcile, show, report`: commands for tables that are there."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conquiet.cli.options import count
from conquiet.cli.terminal import FAILED, OK, print_json
from conquiet.errors import ConfigError, ConquietError

if TYPE_CHECKING:
    from marketplace.pipeline import Lake

_REPLAY = """\
Make days again from `raw_events`, by what the catalog says now, and every table there is that
follows from them. What was refused and can now be read leaves the quarantine. With nothing changed,
every row stays as it is.
"""
_REPLAY_EPILOG = """\
examples:
  conquiet pipeline replay --to lake --since 2026-03-01 --until 2026-03-08

exit codes:
  0  the days were made again
  1  that failed; the next replay or run does what is left
  2  wrong usage or settings
"""
_RECONCILE = """\
Count what the outbox, the log, silver and the quarantine hold, per hour, and list where the money
of an order contradicts itself. Rows that do not agree are printed, with the events they are about;
they are in the tables recon_completeness and recon_money too.
"""
_RECONCILE_EPILOG = """\
examples:
  conquiet pipeline reconcile --to lake
  conquiet pipeline reconcile --to lake --outbox-url postgresql://app@localhost/shop --json

exit codes:
  0  everything agrees
  1  something does not, which rows on stdout say; or it could not be counted
  2  wrong usage or settings
"""
_SHOW = """\
Print rows of a table, or what a query says about the tables, each of which it can name. Events of
one type and version are a table too, such as order_created_v1, with their data in typed columns.
"""
_SHOW_EPILOG = """\
examples:
  conquiet pipeline show store_daily --to lake --limit 5
  conquiet pipeline show --to lake --sql \\
      'SELECT week, gmv_cents / 100 / orders AS basket FROM admin_weekly'
  conquiet pipeline show --to lake --sql \\
      'SELECT data.order_id, data.amount_cents, data.collected_at FROM cash_collected_v1'

exit codes:
  0  the rows were printed
  1  the query failed
  2  wrong usage or settings, no such table, or SQL that cannot be read
"""
_REPORT = (
    "Write a page of HTML with charts of days, categories, ads and weeks; it needs no network."
)

_REPORT_EPILOG = """\
examples:
  conquiet pipeline report --to lake --output report.html

exit codes:
  0  the page was written
  1  it could not be made
  2  wrong usage or settings
"""


def register(verbs: Any, common: ArgumentParser) -> None:
    replay = _verb(verbs, common, "replay", "make days again from raw_events", _REPLAY, _replay)
    replay.epilog = _REPLAY_EPILOG
    replay.add_argument("--since", type=_day, required=True, metavar="DAY", help="2026-01-31, UTC")
    replay.add_argument("--until", type=_day, required=True, metavar="DAY", help="not included")
    _outbox_url(replay)
    replay.add_argument("--json", action="store_true", help="answer in JSON")
    reconcile = _verb(
        verbs, common, "reconcile", "do events and money agree?", _RECONCILE, _reconcile
    )
    reconcile.epilog = _RECONCILE_EPILOG
    _outbox_url(reconcile)
    reconcile.add_argument("--json", action="store_true", help="a line of JSON per row")
    show = _verb(verbs, common, "show", "print rows of a table", _SHOW, _show)
    show.epilog = _SHOW_EPILOG
    show.add_argument("table", nargs="?", metavar="TABLE", help="such as fact_order")
    show.add_argument("--sql", metavar="QUERY", help="about any of the tables")
    show.add_argument("--limit", type=count, default=20, metavar="N", help="rows at most (20)")
    show.add_argument("--json", action="store_true", help="a line of JSON per row")
    report = _verb(verbs, common, "report", "a page with charts", _REPORT, _report)
    report.epilog = _REPORT_EPILOG
    report.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="(report.html)"
    )
    report.add_argument("--json", action="store_true", help="answer in JSON")


def _verb(
    verbs: Any, common: ArgumentParser, name: str, help: str, description: str, run: Any
) -> ArgumentParser:
    verb: ArgumentParser = verbs.add_parser(
        name, help=help, description=description, parents=[common]
    )
    verb.set_defaults(run=partial(_told_in_a_line, run))
    verb.add_argument("--to", default="lake", metavar="DIR", help="where the tables are (lake)")
    verb.add_argument("--master", metavar="URL", help="local[*] (default), spark://…")
    return verb


def _told_in_a_line(run: Callable[[Namespace], int], options: Namespace) -> int:
    """What Spark fails with comes in pages, of Python and of Java; they are for --debug."""
    debug = getattr(options, "debug", False)
    if not debug:
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        return run(options)
    except (ConquietError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - told as `run` tells it
        from conquiet.cli.pipeline_run import failed

        return failed(error, debug)


def _outbox_url(verb: ArgumentParser) -> None:
    verb.add_argument("--outbox-url", metavar="URL", help="the outbox, to reconcile the log with")


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no day such as 2026-01-31") from None


@contextmanager
def _lake(options: Namespace, *, writes: bool) -> Iterator[Lake]:
    """The lake, in a session of its own; whoever writes has it alone."""
    from contextlib import ExitStack

    from conquiet.spark.checkpoint import held
    from conquiet.spark.settings import session
    from conquiet.spark.tables.commits import format_of
    from marketplace.pipeline import Lake

    root = Path(options.to)
    found = format_of(root / "silver") or (None if writes else format_of(root / "raw_events"))
    if found is None:
        raise ConfigError(
            f"{root} has no tables of the marketplace: make them by"
            " conquiet pipeline run --tables all --once"
        )
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    with ExitStack() as stack:
        if writes:
            stack.enter_context(held(f"{options.to}/_checkpoints"))
        spark = session("conquiet pipeline", master=options.master, config=quiet)
        stack.callback(spark.stop)
        yield Lake(spark, root, found)


def _replay(options: Namespace) -> int:
    if options.since >= options.until:
        raise ConfigError(f"--since {options.since} is not before --until {options.until}")
    with _lake(options, writes=True) as lake:
        from conquiet.cli.pipeline_job import outbox_at
        from marketplace.pipeline import Job, replay
        from marketplace.pipeline.tables import NAMES

        there = [name for name in NAMES if lake.has(name)]
        outbox = outbox_at(lake.spark, options.outbox_url)
        job = Job(lake, once=True, tables=there, outbox=outbox)
        days = replay(job, options.since, options.until)
    if options.json:
        print_json({"days": days})
    print(f"{days} days made again", file=sys.stderr)
    return OK


def _reconcile(options: Namespace) -> int:
    with _lake(options, writes=True) as lake:
        from conquiet.cli.pipeline_job import outbox_at
        from marketplace.pipeline import Job
        from marketplace.pipeline.refresh import reconcile
        from marketplace.pipeline.state import State

        outbox = outbox_at(lake.spark, options.outbox_url)
        kept = State.at(lake.root).tables if State.is_at(lake.root) else set()
        # What a run took in and had no time to refresh, or was not asked for, is looked at too.
        Job(lake, once=True, tables=kept | {"recon_money"}, outbox=outbox).finish()
        reconcile(lake, outbox())
        wrong = {
            "recon_completeness": lake.read("recon_completeness").where("NOT complete"),
            "recon_money": lake.read("recon_money"),
        }
        found = {name: _rows(frame) for name, frame in wrong.items()}
    for name, rows in found.items():
        for row in rows:
            row.pop("day", None), row.pop("bucket", None)
            if options.json:
                print_json({"table": name, **row})
            else:
                print(f"{name}: " + ", ".join(f"{key}={_text(row[key])}" for key in row))
    wrong_rows = sum(map(len, found.values()))
    print(f"{wrong_rows} rows do not agree" if wrong_rows else "everything agrees", file=sys.stderr)
    return FAILED if wrong_rows else OK


def _text(value: Any) -> str:
    return " ".join(value) or "-" if isinstance(value, list) else str(value)


def _show(options: Namespace) -> int:
    from marketplace.pipeline.lake import TYPED
    from marketplace.pipeline.tables import NAMES, checked

    if options.table is None and options.sql is None:
        raise ConfigError(f"name a table, or ask by --sql; there are {', '.join(NAMES)}")
    if options.table is not None and options.table not in TYPED:
        checked(options.table)
    with _lake(options, writes=False) as lake:
        table = None if options.table is None else lake.read(options.table)
        if options.sql is None:
            frame = _ordered(table, options.table)
        else:
            named = [name for name in (*NAMES, *TYPED) if name in options.sql.lower()]
            for name in filter(lake.has, named):
                lake.read(name).createOrReplaceTempView(name)
            frame = _asked(lake, options.sql)
        if options.json:
            for row in _rows(frame.limit(options.limit)):
                print_json(row)
        else:
            frame.show(options.limit, truncate=False)
    return OK


def _ordered(frame: Any, name: str) -> Any:
    """The column that files are grouped by first: as it is stored, it is last, and rows mixed."""
    from marketplace.pipeline.tables import STORED

    if name not in STORED:
        return frame
    first = STORED[name].partition_by
    rest = [column for column in frame.columns if column != first]
    return frame.select(first, *rest).orderBy(first, *STORED[name].key)


def _asked(lake: Lake, sql: str) -> Any:
    from pyspark.errors import PySparkException

    try:
        return lake.spark.sql(sql)
    except PySparkException as error:
        raise ConfigError(f"--sql: {str(error).partition(';')[0]:.500}") from error


def _report(options: Namespace) -> int:
    with _lake(options, writes=False) as lake:
        from marketplace.pipeline.report import report

        page = report(lake)
    options.output.write_text(page)
    if options.json:
        print_json({"path": str(options.output), "characters": len(page)})
    print(f"{options.output}: {len(page):,} characters", file=sys.stderr)
    return OK


def _rows(frame: Any) -> list[dict[str, Any]]:
    """Rows as JSON can have them: times and days as text."""
    return [
        {name: _plain(value) for name, value in row.items()} for row in frame.toArrow().to_pylist()
    ]


def _plain(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat().replace("+00:00", "Z")
    return value.decode(errors="replace") if isinstance(value, bytes) else value
