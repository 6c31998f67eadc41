"""`conquiet worker run`: consume."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from conquiet.cli.numbers import count, seconds
from conquiet.cli.verbs import add_group

_RUN = """\
Run a router, or a worker, of your own until its source ends or a signal comes.

TARGET is module:name, looked up from the current directory; the name is that of a Router,
a Worker, or a function that returns one of them.

A router needs a source of messages and, if its handlers return events and it has no outbox,
a sink. Both are JSON lines of CloudEvents unless you say otherwise:

  -, stdin:, stdout:   the standard streams (default)
  file:PATH            a file; a sink appends to it
  redis://HOST/0?stream=NAME&group=NAME
                       a Redis Stream; a sink needs no group. Also &partitions=N and
                       &dead_letters=NAME. redis:?stream=… is on CONQUIET_REDIS_URL.
"""

_RUN_EPILOG = """\
examples:
  conquiet worker run app:router < commands.jsonl > events.jsonl
  conquiet worker run app:router --source file:commands.jsonl --dead-letters failed.jsonl
  conquiet worker run app:make_worker --processes 4 --stuck-after 60
  conquiet worker run app:router --source 'redis:?stream=commands&group=billing'

A message that keeps failing, and a line that is no CloudEvent, goes to the dead letters: the
file given, else stderr. So does, at a stop, what was read from a pipe or file and not handled.
A Redis Stream keeps what failed and delivers it again; --tries limits that.

The first SIGTERM or Ctrl-C stops softly: what is in flight finishes. A second one hurries.

exit codes:
  0  every line was handled; of other sources, all that was in flight at the stop was finished
  1  a line failed or was not handled, or something in flight had to be abandoned
  2  wrong usage or settings
"""


def register(commands: Any, common: ArgumentParser) -> None:
    example = "conquiet worker run app:router < commands.jsonl > events.jsonl"
    verbs = add_group(commands, "worker", "consume messages", example)
    run = verbs.add_parser(
        "run",
        help="run a router or a worker",
        description=_RUN,
        epilog=_RUN_EPILOG,
        parents=[common],
    )
    run.set_defaults(run=_run)
    run.add_argument("target", metavar="TARGET", help="module:name, such as app:router")
    run.add_argument("--source", metavar="URL", help="where a router's messages come from")
    run.add_argument("--sink", metavar="URL", help="where a router's events go to")
    run.add_argument("--batch-size", type=count, metavar="N", help="messages per batch (100)")
    run.add_argument(
        "--batch-wait", type=seconds, metavar="S", help="how long to wait for a full batch (0)"
    )
    run.add_argument("--threads", type=count, metavar="N", help="threads of a router (1)")
    run.add_argument("--processes", type=count, metavar="N", help="workers, each in a process")
    run.add_argument(
        "--ordered", action="store_true", default=None, help="keep the order of each key"
    )
    run.add_argument(
        "--grace", type=seconds, metavar="S", help="time to finish at a stop (30 seconds)"
    )
    run.add_argument(
        "--stuck-after",
        type=_positive_seconds,
        metavar="S",
        help="end a worker whose handler takes longer; with --processes it is replaced",
    )
    run.add_argument("--dead-letters", metavar="PATH", help="file to append failed messages to")
    run.add_argument(
        "--tries", type=count, metavar="N", help="deliveries before that (3; no limit on Redis)"
    )
    run.add_argument(
        "--max-line-bytes", type=count, metavar="N", help="longest line taken (32 MiB)"
    )
    run.add_argument("--json", action="store_true", help="the summary, on stderr, as JSON")


def _run(options: Namespace) -> int:
    from conquiet.cli.running import run

    return run(options)


def _positive_seconds(text: str) -> float:
    value = seconds(text)
    if not value:
        raise ArgumentTypeError("must be more than 0 seconds")
    return value
