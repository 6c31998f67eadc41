"""`conquiet pipeline`: the events of a log or an outbox into tables, by Spark."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from conquiet.cli import pipeline_tables
from conquiet.cli.options import add_group, count, seconds

_RUN = """\
Carry events into the table `raw_events`, in batches, until a signal comes: each once, though
drivers, executors and tasks may die and be started again.

They come from the event log (Redis Streams), from an outbox, or from Parquet files with the
columns of the log. Where it stopped, the next run goes on; that is kept in the checkpoint, by
default beside the table.

The table `outbox_events` is no log: it is read as a whole, with --once, and its rows are added
that are not there yet, be they from an earlier run or from the log.

With --tables, the tables of the marketplace are made of them, after every batch or so: those that
are named, and those that they are made of. A run with other names makes anew what is out of date.
"""
_RUN_EPILOG = """\
examples:
  conquiet pipeline run --url redis://localhost/0 --streams 'events:*' --to lake --once
  conquiet pipeline run --from outbox --url postgresql://app@localhost/shop --to lake
  conquiet pipeline run --from outbox --url sqlite:///shop.sqlite --table outbox_events \\
      --to lake --once
  conquiet pipeline run --from files --path log --to lake --tables all --once
  conquiet pipeline run --from files --path log --to lake --tables store_daily,ad_daily --once
  conquiet pipeline run --url redis://localhost/0 --tables all \\
      --outbox-url postgresql://app@localhost/shop
  conquiet pipeline run --streams orders --to /shared/lake --format delta \\
      --master spark://host:7077 --archive conquiet-packages.zip
  conquiet pipeline run --streams orders --to /lake --master k8s://https://host:6443 \\
      --conf spark.kubernetes.container.image=registry.example/spark-py:4.3.0

The first SIGTERM or Ctrl-C lets the batch under way finish. A second one ends it; the next run
does it again.

exit codes:
  0  with --once, everything that was there is in the table; else stopped by a signal
  1  the query failed
  2  wrong usage or settings
"""
_PACKAGE = """\
Pack conquiet, and what it needs, into an archive for the executors of a cluster that has neither.
It holds the versions that are installed here, and fits this Python version and platform.
"""
_PACKAGE_EPILOG = """\
examples:
  conquiet pipeline package
  conquiet pipeline package --output /shared/packages.zip --include app.py --without pandas

exit codes:
  0  the archive is there
  1  it could not be written
  2  wrong usage or settings
"""


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "pipeline",
        "events into tables, by Spark",
        "conquiet pipeline run --streams 'orders*' --to lake --once",
    )
    _register_run(verbs, common)
    _register_package(verbs, common)
    pipeline_tables.register(verbs, common)


def _register_run(verbs: Any, common: ArgumentParser) -> None:
    run = verbs.add_parser(
        "run",
        help="carry events into the table raw_events",
        description=_RUN,
        epilog=_RUN_EPILOG,
        parents=[common],
    )
    run.set_defaults(run=_run)
    run.add_argument(
        "--from", dest="origin", choices=("log", "outbox", "files"), default="log", help="(log)"
    )
    run.add_argument(
        "--url",
        metavar="URL",
        help="of Redis or of the database; else CONQUIET_BROKER_URL or CONQUIET_DATABASE_URL",
    )
    run.add_argument(
        "--streams",
        metavar="NAMES",
        help="streams of the log: 'orders,payments:*' (--tables: pf-*)",
    )
    run.add_argument(
        "--table", metavar="NAME", help="table of the outbox (outbox; --tables: outbox_events)"
    )
    run.add_argument("--path", metavar="DIR", help="of --from files: where they are")
    run.add_argument("--to", default="lake", metavar="DIR", help="where tables are (lake)")
    run.add_argument("--format", choices=("parquet", "delta"), default="parquet", help="(parquet)")
    run.add_argument("--checkpoint", metavar="DIR", help="(_checkpoints/raw_events beside it)")
    run.add_argument("--once", action="store_true", help="take what is there, then end")
    run.add_argument("--trigger-seconds", type=seconds, metavar="S", help="time between batches")
    run.add_argument(
        "--starting", default="earliest", metavar="OFFSETS", help="where a first run begins"
    )
    run.add_argument("--max-events", type=count, metavar="N", help="per batch at most")
    run.add_argument("--master", metavar="URL", help="local[*] (default), spark://…, k8s://…, yarn")
    run.add_argument("--remote", metavar="URL", help="a Spark Connect server, sc://host:15002")
    run.add_argument(
        "--archive", metavar="FILE", help="what `pipeline package` made, for executors"
    )
    run.add_argument(
        "--conf", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="of Spark"
    )
    run.add_argument(
        "--option",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=VALUE",
        help="of the source",
    )
    run.add_argument("--json", action="store_true", help="a line of JSON per batch, on stdout")
    run.add_argument(
        "--tables", default="raw_events", metavar="NAMES",
        help="raw_events (default); names of the marketplace's, with those they are made of; all",
    )  # fmt: skip
    run.add_argument(
        "--refresh-seconds", type=seconds, metavar="S",
        help="of --tables: time between refreshes of facts and marts (60; --once: at the end)",
    )  # fmt: skip
    run.add_argument(
        "--outbox-url", metavar="URL", help="of --tables: the outbox, to reconcile the log with"
    )


def _register_package(verbs: Any, common: ArgumentParser) -> None:
    package = verbs.add_parser(
        "package",
        help="pack conquiet and what it needs for executors",
        description=_PACKAGE,
        epilog=_PACKAGE_EPILOG,
        parents=[common],
    )
    package.set_defaults(run=_package)
    package.add_argument(
        "--output",
        type=Path,
        default=Path("conquiet-packages.zip"),
        metavar="FILE",
        help="(conquiet-packages.zip)",
    )
    package.add_argument(
        "--include", action="append", default=[], type=Path, metavar="PATH",
        help="a package's directory or a module of yours, as that of your handlers",
    )  # fmt: skip
    package.add_argument(
        "--without", action="append", default=[], metavar="NAME",
        help="a distribution that the executors have",
    )  # fmt: skip
    package.add_argument("--json", action="store_true", help="answer in JSON")


def _run(options: Namespace) -> int:
    from conquiet.cli.pipeline_run import run

    if options.tables != "raw_events":
        _fill_in(options)
    return run(options)


def _fill_in(options: Namespace) -> None:
    """Where the events of the marketplace are, unless it is said."""
    if options.origin == "log" and not options.streams:
        options.streams = "pf-*"
    if options.origin == "outbox" and not options.table:
        options.table = "outbox_events"


def _package(options: Namespace) -> int:
    from conquiet.cli.terminal import OK, print_json
    from conquiet.spark.packaging import pack, python_version, settings_for

    made = pack(options.output, include=options.include, without=options.without)
    if options.json:
        about = {"path": str(made.path), "bytes": made.bytes, "python": python_version()}
        print_json({**about, "packages": made.packages})
        return OK
    print(
        f"{made.path}: {len(made.packages)} packages, {made.bytes / 1e6:,.0f} MB, for Python",
        end=" ",
    )
    print(f"{python_version()}; give it to executors by --archive {made.path}, or else by")
    for name, value in settings_for(str(made.path)).items():
        print(f"  --conf {name}={value}")
    return OK


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
