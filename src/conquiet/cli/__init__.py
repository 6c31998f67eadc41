"""The command line: one module per group of commands, found in `GROUPS`.

A group's module is imported whenever a parser is built, so it imports nothing heavy itself:
`conquiet --help` answers at once. What a command needs, it imports when it runs.
"""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from conquiet.cli import (
    app,
    completion,
    dashboard,
    dead_letters,
    demo,
    doctor,
    kombu,
    outbox,
    pipeline,
    queue,
    relay,
    retries,
    schedule,
    streams,
    top,
    trace,
    worker,
)
from conquiet.cli.options import print_help
from conquiet.cli.terminal import FAILED, INTERRUPTED, OK, USAGE, Parser, one_line, printable, red
from conquiet.errors import ConfigError, ConquietError
from conquiet.secret import mask_all

GROUPS = (
    demo,
    app,
    schedule,
    worker,
    relay,
    top,
    outbox,
    queue,
    streams,
    retries,
    dead_letters,
    trace,
    kombu,
    pipeline,
    dashboard,
    doctor,
    completion,
)

_EPILOG = """\
examples:
  conquiet run shop:app --create-tables
  conquiet worker run app:router < commands.jsonl > events.jsonl

exit codes of every command:
  0  all is well
  1  something failed, or differs from what it should be
  2  wrong usage or settings
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; a wrong usage raises SystemExit(2)."""
    chosen = build_parser().parse_args(arguments)
    try:
        code = int(chosen.run(chosen))
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it; Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # noqa: BLE001 - one line, whatever it was
        return _report(error, getattr(chosen, "debug", False))


def build_parser() -> ArgumentParser:
    parser = Parser(
        prog="conquiet",
        description="Reliable messaging: effects exactly once, events never lost.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    common = Parser(add_help=False)
    common.add_argument(
        "--debug", action="store_true", default=SUPPRESS, help="show tracebacks and more logs"
    )
    parser.add_argument("--debug", action="store_true", default=SUPPRESS, help=SUPPRESS)
    parser.set_defaults(run=partial(print_help, parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for group in GROUPS:
        group.register(commands, common)
    return parser


def _report(error: Exception, debug: bool) -> int:
    if debug:
        import traceback

        lines = "".join(traceback.format_exception(error)).splitlines()
        print(*(printable(mask_all(line)) for line in lines), sep="\n", file=sys.stderr)
    known = isinstance(error, ConquietError)
    text = str(error) if known else f"{type(error).__name__}: {error}; --debug shows where"
    print(f"{red('conquiet: error:', sys.stderr)} {one_line(mask_all(text))}", file=sys.stderr)
    return USAGE if isinstance(error, ConfigError) else FAILED


class _Version(Action):
    def __call__(self, parser: ArgumentParser, namespace: Namespace, *_: Any) -> None:
        from importlib.metadata import version  # slow to import

        print(f"conquiet {version('conquiet')}")
        parser.exit(OK)
