"""`conquiet doctor`: what is installed, what is reachable, what is missing, and what fixes it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

_EPILOG = """\
examples:
  conquiet doctor
  conquiet doctor --need spark --need postgres
  conquiet doctor --json | jq '.checks[] | select(.status != "ok")'

A notice is worth a look and no fault: dead letters, parked rows, clocks that differ.

Servers: those of --redis-url and --database-url, else of CONQUIET_REDIS_URL and
CONQUIET_DATABASE_URL, else what listens on this machine at the usual port.

exit codes:
  0  nothing that was asked for is broken or missing
  1  a server that was named cannot be used, or something that was needed is missing
  2  wrong usage
"""


def register(commands: Any, common: ArgumentParser) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what is installed, reachable, missing, and the command that fixes it",
        description="Say what is installed, what is reachable, and what fixes the rest.",
        epilog=_EPILOG,
        parents=[common],
    )
    parser.add_argument("--redis-url", metavar="URL", help="a Redis that must be reachable")
    parser.add_argument("--database-url", metavar="URL", help="a database that must be reachable")
    parser.add_argument(
        "--need",
        action="append",
        default=[],
        metavar="NAME",
        help="an extra, or a check's name, that must be ok; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    parser.set_defaults(run=_run)


def _run(options: Namespace) -> int:
    from conquiet.cli.examination import examine

    return examine(options)
