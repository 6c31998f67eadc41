"""`conquiet pipeline`: events of a log or an outbox into the tables of a lake, and what is in them.

`run` needs Spark. The other commands read and write Delta without a JVM.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conquiet.cli.options import (
    Verb,
    add_broker,
    add_database,
    add_group,
    add_verb,
    count,
    search_here,
    seconds,
)
from conquiet.cli.progress import Waiting
from conquiet.cli.terminal import FAILED, OK, in_one_row, print_json, print_table
from conquiet.config import BROKER_VARIABLE, DATABASE_VARIABLE
from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from conquiet.lake import Pipeline
    from conquiet.lake.query import Database

_CODES = "0 done; 1 it failed; 2 wrong usage or settings"
_TARGET = "the Pipeline, as app:pipeline"
_RUN_MORE = """\
Without a pipeline, events go into the table raw_events and nowhere else.

Where a run stopped, the next one goes on; that is kept in the checkpoint, by default in the lake.
The table outbox_events is not a log: it is read as a whole, with --once, and rows with new ids are
added. Through Spark Connect (--remote) every log and every outbox is read in that way.

The first SIGTERM or Ctrl-C lets the batch under way finish. A second one ends it; the next run does
it again.
"""


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "pipeline",
        "events into the tables of a lake",
        "conquiet pipeline run app:pipeline --streams 'orders*' --to lake --once",
    )
    _register_run(verbs, common)
    _register_tables(verbs, common)
    _register_package(verbs, common)
    add_verb(
        verbs,
        common,
        Verb(
            "prepare",
            "keep classes of Spark in a file, so that sessions here start at less cost",
            ("conquiet pipeline prepare",),
            "0 the file is there; 1 it could not be made; 2 wrong usage or settings",
            _prepare,
            "It takes half a minute, and 190 MB in the user's cache. Do it again after an update\n"
            "of Spark or Java: they ignore the file of another version.",
        ),
    )


def _register_run(verbs: Any, common: ArgumentParser) -> None:
    run = add_verb(
        verbs,
        common,
        Verb(
            "run",
            "take events into the tables of a lake, in batches, until a signal comes",
            (
                "conquiet pipeline run app:pipeline --streams 'orders:*' --to lake",
                "conquiet pipeline run app:pipeline --from outbox --table outbox_events --once \\",
                "      --database postgresql://app@localhost/shop",
                "conquiet pipeline run app:pipeline --from files --path log --once \\",
                "      --to s3://bucket/lake --checkpoint /var/lib/checkpoint",
                "conquiet pipeline run --streams orders --to lake --once",
                "conquiet pipeline run app:pipeline --streams orders --to /shared/lake \\",
                "      --master spark://host:7077 --archive conquiet-packages.zip",
            ),
            _CODES,
            _run,
            _RUN_MORE,
        ),
    )
    run.add_argument("pipeline", nargs="?", metavar="MODULE:NAME", help=_TARGET)
    run.add_argument(
        "--from", dest="origin", choices=("log", "outbox", "files"), default="log", help="(log)"
    )
    add_broker(run, f"the log; else {BROKER_VARIABLE}")
    add_database(
        run,
        f"--from outbox: where it is, else {DATABASE_VARIABLE}; --from log: the outbox to"
        " reconcile the log with",
    )
    run.add_argument("--streams", metavar="NAMES", help="streams of the log: 'orders,payments:*'")
    run.add_argument("--table", metavar="NAME", help="table of the outbox (outbox)")
    run.add_argument("--path", metavar="DIR", help="--from files: Parquet in the log's columns")
    _lake(run)
    run.add_argument("--checkpoint", metavar="DIR", help="Spark's (_checkpoints in the lake)")
    run.add_argument("--once", action="store_true", help="take what is there, then end")
    run.add_argument("--trigger-seconds", type=seconds, metavar="S", help="time between batches")
    run.add_argument(
        "--refresh-seconds",
        type=seconds,
        default=60.0,
        metavar="S",
        help="time between refreshes of facts and SQL tables (60; --once: at the end)",
    )
    run.add_argument(
        "--starting", default="earliest", metavar="OFFSETS", help="where a first run begins"
    )
    run.add_argument("--max-events", type=count, metavar="N", help="per batch at most")
    run.add_argument(
        "--metrics", type=_host_port, metavar="HOST:PORT", help="where /metrics answers (nowhere)"
    )
    run.add_argument("--master", metavar="URL", help="local[*] (default), spark://…, k8s://…, yarn")
    run.add_argument(
        "--remote", metavar="URL", help="a Spark Connect server, as sc://host:15002; with --once"
    )
    run.add_argument(
        "--archive", metavar="FILE", help="what `pipeline package` made, for executors"
    )
    for name, whose in (("--conf", "of Spark"), ("--option", "of the source")):
        run.add_argument(
            name, action="append", default=[], type=_pair, metavar="NAME=VALUE", help=whose
        )


def _register_tables(verbs: Any, common: ArgumentParser) -> None:
    show = add_verb(
        verbs,
        common,
        Verb(
            "show",
            "print rows of a table, or of a query that names any of the tables",
            (
                "conquiet pipeline show store_daily --to lake --limit 5",
                "conquiet pipeline show app:pipeline --sql \\",
                "      'SELECT week, gmv_cents / 100 / orders AS basket FROM admin_weekly'",
            ),
            "0 done; 1 the query failed; 2 wrong usage, no such table, or SQL that cannot be read",
            _show,
            "SQL is DuckDB's. Without a name, the tables and their rows are listed.",
        ),
    )
    show.add_argument("names", nargs="*", metavar="[MODULE:NAME] [TABLE]", help="as store_daily")
    show.add_argument("--sql", metavar="QUERY", help="about any of the tables")
    show.add_argument("--limit", type=count, default=20, metavar="N", help="rows at most (20)")
    _lake(show)
    report = _verb(
        verbs,
        common,
        "report",
        "write a page of HTML with charts; it needs no network",
        ("conquiet pipeline report app:pipeline --to lake --output report.html",),
        _report,
    )
    report.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="(report.html)"
    )
    reconcile = _verb(
        verbs,
        common,
        "reconcile",
        "count outbox, log, silver and quarantine by hour; print what does not agree",
        ("conquiet pipeline reconcile app:pipeline --database postgresql://app@localhost/shop",),
        _reconcile,
        codes="0 everything agrees; 1 rows on stdout do not, or it failed; 2 wrong usage",
    )
    add_database(reconcile, "the outbox to compare the log with")
    reconcile.add_argument(
        "--all", action="store_true", help="count all hours again, not only those that changed"
    )
    replay = _verb(
        verbs,
        common,
        "replay",
        "judge days again from raw_events, and refresh what follows from them",
        (
            "conquiet pipeline replay app:pipeline --since 2026-03-01 --until 2026-03-08",
            "conquiet pipeline replay app:pipeline --to lake",
        ),
        _replay,
    )
    replay.add_argument("--since", type=_day, metavar="DAY", help="2026-01-31, UTC (the first)")
    replay.add_argument("--until", type=_day, metavar="DAY", help="not included (all later days)")
    quarantine = _verb(
        verbs,
        common,
        "quarantine",
        "list refused events by reason, or judge them again",
        (
            "conquiet pipeline quarantine list app:pipeline --to lake",
            "conquiet pipeline quarantine retry app:pipeline --reason unknown_version",
        ),
        _quarantine,
        before=("do", "list", "retry"),
    )
    quarantine.add_argument("--reason", metavar="NAME", help="of that reason alone")
    quarantine.add_argument("--limit", type=count, default=20, metavar="N", help="(20)")
    optimize = _verb(
        verbs,
        common,
        "optimize",
        "put small files together, and remove files that no recent version names",
        ("conquiet pipeline optimize app:pipeline --to lake --hours 168",),
        _optimize,
    )
    optimize.add_argument(
        "--hours", type=float, default=168.0, metavar="H", help="versions that stay readable (168)"
    )
    take = _verb(
        verbs,
        common,
        "import",
        "take in raw_events of an earlier lake, or any Parquet files in the log's columns",
        ("conquiet pipeline import app:pipeline old_lake/raw_events --to lake",),
        _import,
    )
    take.add_argument("path", metavar="DIR", help="a folder of Parquet files")


def _register_package(verbs: Any, common: ArgumentParser) -> None:
    package = add_verb(
        verbs,
        common,
        Verb(
            "package",
            "pack conquiet, and what it needs, into an archive for executors that have neither",
            (
                "conquiet pipeline package",
                "conquiet pipeline package --output /shared/packages.zip --include app.py",
                "conquiet pipeline package --python 3.11.2",
            ),
            "0 the archive is there; 1 it could not be written; 2 wrong usage or settings",
            _package,
            "It holds the versions that are installed here, for this platform and minor version of"
            " Python.",
        ),
    )
    package.add_argument(
        "--output",
        type=Path,
        default=Path("conquiet-packages.zip"),
        metavar="FILE",
        help="(conquiet-packages.zip)",
    )
    package.add_argument(
        "--include",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="a package's directory or a module of yours, as that of your pipeline",
    )
    package.add_argument(
        "--python",
        metavar="VERSION",
        help="the Python of the executors, as 3.11.2: pack what that release needs (this one)",
    )
    package.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="a distribution that the executors have",
    )


def _verb(
    verbs: Any,
    common: ArgumentParser,
    name: str,
    what: str,
    examples: tuple[str, ...],
    run: Any,
    *,
    codes: str = _CODES,
    before: tuple[str, ...] = (),
) -> ArgumentParser:
    verb = add_verb(verbs, common, Verb(name, what, examples, codes, run))
    if before:
        verb.add_argument(before[0], choices=before[1:], help="what to do")
    verb.add_argument("pipeline", metavar="MODULE:NAME", help=_TARGET)
    _lake(verb)
    return verb


def _lake(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--to", metavar="LAKE", help="a folder or s3://bucket/path (the pipeline's own, or lake)"
    )


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a day such as 2026-01-31") from None


def _host_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ArgumentTypeError(f"{text!r} is not HOST:PORT such as 127.0.0.1:9100")
    return host, int(port)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def find_pipeline(target: str | None, lake: str | None) -> Pipeline:
    """Import the pipeline that MODULE:NAME names, and point it at a lake if one is named."""
    from conquiet.lake import Pipeline
    from conquiet.processes import resolve

    if target is None:
        return Pipeline(lake=lake or "lake")
    search_here()
    found = resolve(target)
    if not isinstance(found, Pipeline):
        raise ConfigError(f"{target} is {found!r:.80}, not a conquiet.lake.Pipeline")
    if lake is not None:
        found.lake = lake
    return found


def find_lake(target: str | None, lake: str | None) -> Pipeline:
    """Return the pipeline as `find_pipeline` does, if its lake is there."""
    from conquiet.lake.tables import Files

    pipeline = find_pipeline(target, lake)
    try:
        is_there = Files(pipeline.lake).exist()
    except OSError as error:
        raise ConfigError(f"the lake {pipeline.lake} cannot be read: {error}") from error
    if not is_there:
        raise ConfigError(f"there is no lake at {pipeline.lake}: name it by --to")
    return pipeline


# --- commands -----------------------------------------------------------------------------------


def _run(options: Namespace) -> int:
    from conquiet.cli.pipeline_run import run

    return run(options, lambda: find_pipeline(options.pipeline, options.to))


def _show(options: Namespace) -> int:
    from conquiet.lake.query import naming, quoted

    targets = [name for name in options.names if ":" in name]
    names = [name for name in options.names if ":" not in name]
    if len(targets) > 1 or len(names) > 1 or (names and options.sql):
        raise ConfigError("name one pipeline and one table, or ask by --sql")
    pipeline = find_lake(targets[0] if targets else None, options.to)
    with pipeline.database() as database:
        if names:
            database.require(names[0])
        if not names and not options.sql:
            return _list_tables(database, options.json)
        sql = options.sql or f"FROM {quoted(names[0])} ORDER BY ALL"
        database.offer(sql)
        with naming("--sql"):
            found = database.connection.sql(sql).limit(options.limit).to_arrow_table()
    rows = [{name: _plain(value) for name, value in row.items()} for row in found.to_pylist()]
    _print_rows(found.column_names, rows, options.json)
    return OK


def _list_tables(database: Database, as_json: bool) -> int:
    from conquiet.lake.query import quoted

    rows = []
    for name in sorted(database.names):
        database.offer(name)
        rows.append(
            {"table": name, "rows": database.count(quoted(name)) if database.exists(name) else 0}
        )
    _print_rows(["table", "rows"], rows, as_json)
    return OK


def _print_rows(head: Iterable[str], rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print_json(row)
        return
    names = list(head)
    print_table(names, [["" if row[one] is None else row[one] for one in names] for row in rows])


def _plain(value: Any) -> Any:
    """Write a value as JSON can have it: times and days as text."""
    if hasattr(value, "isoformat"):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _report(options: Namespace) -> int:
    from conquiet.lake.report import report

    pipeline = find_lake(options.pipeline, options.to)
    with pipeline.database() as database:
        page = report(database, pipeline.name, pipeline.charts)
    options.output.write_text(page)
    if options.json:
        print_json({"path": str(options.output), "characters": len(page)})
    print(f"{options.output}: {len(page):,} characters", file=sys.stderr)
    return OK


def _reconcile(options: Namespace) -> int:
    from conquiet.lake.reconcile import disagreements

    pipeline = find_lake(options.pipeline, options.to)
    pipeline.reconcile(outbox=options.database, all=options.all)
    wrong = 0
    with pipeline.database() as database:
        for name, row in disagreements(database):
            wrong += 1
            plain = {column: _plain(value) for column, value in row.items()}
            if options.json:
                print_json({"table": name, **plain})
            else:
                cells = ", ".join(f"{column}={_text(plain[column])}" for column in plain)
                print(in_one_row(f"{name}: {cells}"))
    print(f"{wrong} rows do not agree" if wrong else "everything agrees", file=sys.stderr)
    return FAILED if wrong else OK


def _text(value: Any) -> str:
    return " ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)


def _replay(options: Namespace) -> int:
    since, until = options.since, options.until
    if since is not None and until is not None and since >= until:
        raise ConfigError(f"--since {since} is not before --until {until}")
    pipeline = find_lake(options.pipeline, options.to)
    with Waiting("replay") as waiting:
        days = pipeline.replay(
            since, until, on_progress=lambda done: waiting.show(f"replay: {done.step}")
        )
    _print_done({"days": days}, f"{days:,} days were judged again", options.json)
    return OK


def _quarantine(options: Namespace) -> int:
    pipeline = find_lake(options.pipeline, options.to)
    if options.do == "retry":
        back = pipeline.quarantine.retry(reason=options.reason)
        _print_done({"events": back}, f"{back:,} events left the quarantine", options.json)
        return OK
    rows = pipeline.quarantine.list(reason=options.reason, limit=options.limit)
    plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
    _print_rows(plain[0] if plain else ["reason"], plain, options.json)
    return OK


def _optimize(options: Namespace) -> int:
    pipeline = find_lake(options.pipeline, options.to)
    done = pipeline.optimize(hours=options.hours)
    removed = sum(done.values())
    _print_done(done, f"{removed:,} files of {len(done)} tables were removed", options.json)
    return OK


def _import(options: Namespace) -> int:
    import pyarrow.parquet as pq

    from conquiet.lake.source import check_files, parquet_files

    pipeline = find_pipeline(options.pipeline, options.to)
    check_files(options.path)
    folder = Path(options.path).resolve()
    taken = 0
    with pipeline.driver() as driver:
        for number, file in enumerate(parquet_files(folder)):
            rows = pq.read_table(file, partitioning=None)
            taken += driver.take(rows, f"import {folder}", number)
        driver.refresh()
    _print_done({"entries": taken}, f"{taken:,} entries taken in", options.json)
    return OK


def _print_done(answer: dict[str, Any], sentence: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    print(sentence, file=sys.stderr)


def _prepare(options: Namespace) -> int:
    try:
        from conquiet.spark.class_archive import make_archive
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'conquiet[spark]'") from error
    with Waiting("starting Spark once"):
        made = make_archive()
    size = made.stat().st_size
    done = f"{made}: {size / 1e6:,.0f} MB; sessions of Spark use it from now on"
    _print_done({"path": str(made), "bytes": size}, done, options.json)
    return OK


def _package(options: Namespace) -> int:
    from conquiet.spark.archive import pack, settings_for

    made = pack(
        options.output, include=options.include, without=options.without, python=options.python
    )
    if options.json:
        about = {"path": str(made.path), "bytes": made.bytes, "python": made.python}
        print_json({**about, "packages": made.packages})
        return OK
    print(
        f"{made.path}: {len(made.packages)} packages, {made.bytes / 1e6:,.0f} MB, for Python",
        end=" ",
    )
    print(
        f"{made.python} and later patch releases; give it to executors by"
        f" --archive {made.path}, or else by"
    )
    for name, value in settings_for(str(made.path)).items():
        print(f"  --conf {name}={value}")
    return OK
