"""`conquiet demo`: the whole path of an event, with a crash in the middle; then the report."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conquiet.cli.numbers import count
from conquiet.cli.terminal import FAILED, OK, green, print_json, red
from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from marketplace.demo.servers import Servers
    from marketplace.demo.story import Story

_DESCRIPTION = """\
Orders of a marketplace that never was, from commands to tables: two workers (one is killed in the
middle) write business tables and an outbox, two relays publish it to a log, Spark makes tables of
the log. Duplicates and bad events are injected. In the end everything is counted and compared with
what the generator of the orders knows, to the cent.

Servers are private, on loopback, and gone afterwards; what stays is a folder with a report.
"""
_EPILOG = """\
examples:
  conquiet demo
  conquiet demo --orders 500 --no-spark --to /tmp/demo
  conquiet demo --keep                     (then, elsewhere: conquiet dashboard)
  conquiet demo --postgres postgresql://me@localhost/scratch --redis redis://localhost/9

Of a PostgreSQL of yours the demo has a schema to itself, of a Redis the keys market-* and pf-*,
which must not be there before. Both are removed in the end.

exit codes:
  0    all is as the generator foresaw it
  1    something differs, or a part failed
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
    demo.add_argument("--postgres", metavar="URL", help="a PostgreSQL of yours")
    demo.add_argument("--redis", metavar="URL", help="a Redis of yours")
    demo.add_argument("--json", action="store_true", help="the verdict as JSON, on stdout")


def _run(options: Namespace) -> int:
    if not options.no_spark:
        _refuse_without_java()
    try:
        from marketplace.demo.running import run_demo
        from marketplace.demo.settings import Settings
    except ImportError as error:
        raise ConfigError(
            f"{error}: pip install 'conquiet[postgres,redis,embedded,spark]'"
        ) from error

    settings = Settings(
        orders=options.orders,
        seed=options.seed,
        folder=options.to,
        spark=not options.no_spark,
        keep=options.keep,
        postgres=options.postgres,
        redis=options.redis,
    )
    told = _Told()
    if options.no_spark:
        told.end("without Spark: no tables, no quarantine, and no revenue by Spark to compare")

    def done(story: Story, servers: Servers) -> None:
        told.clear()
        if options.json:
            print_json({**story.as_json(), "report": str(settings.folder / "report.html")})
        else:
            _print(story, settings.folder)
        if options.keep:
            _tell_kept(servers)

    try:
        story = run_demo(settings, told, when_done=done)
    finally:
        told.clear()
    return OK if story.verdict.is_right else FAILED


def _refuse_without_java() -> None:
    """Before anything is started: one line that says what to do."""
    import importlib.util

    from conquiet.cli.examination import java

    left_out = "or leave Spark out: conquiet demo --no-spark"
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError(f"pyspark is not installed: pip install 'conquiet[spark]', {left_out}")
    found = java()
    if found.status != "ok":
        raise ConfigError(f"Java: {found.detail}: {found.fix}, {left_out}")


class _Told:
    """Tells how it goes on stderr: a bar on a terminal, and a line for all that has happened."""

    def __init__(self) -> None:
        from conquiet.cli.progress import Progress

        self._began = time.monotonic()
        self._bar = Progress("", after=0.0)

    def begin(self, what: str, word: str) -> None:
        from conquiet.cli.progress import Progress

        self._say(f"{what} …")
        self._bar = Progress(word, after=0.0)  # its own: the time that is left is the stage's

    def progress(self, done: int, total: int) -> None:
        self._bar.total = total or None
        self._bar.tell(done)

    def end(self, what: str) -> None:
        self._say(what)

    def clear(self) -> None:
        self._bar.clear()

    def _say(self, text: str) -> None:
        self._bar.clear()
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)


def _print(story: Story, folder: Path) -> None:
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
        print(red("\nWRONG: see above", sys.stdout), end="")
    print(f", in {story.seconds:.0f} s; look at {folder / 'report.html'}")


def _tell_kept(servers: Servers) -> None:
    from conquiet.relay.masked import masked

    database, broker = masked(servers.database), masked(servers.broker)
    print(
        "\nworkers, relays and servers go on; Ctrl-C ends and removes them. To look around:\n\n"
        f"  conquiet dashboard --table outbox_events --redis {broker} \\\n"
        f"      --database '{database}'\n"
        f"  psql '{database}'\n"
        f"  redis-cli -u {broker}\n",
        file=sys.stderr,
        flush=True,
    )
