"""`conquiet outbox status|list|show|retry|prune`: the rows of an outbox."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from conquiet.cli.numbers import count
from conquiet.cli.terminal import FAILED, OK, dim, green, one_line, print_json, yellow
from conquiet.errors import ConfigError

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_VERBS: tuple[tuple[str, str, str, str], ...] = (
    (
        "status",
        "how many rows wait, how long, and how many are parked",
        "conquiet outbox status --json | jq .parked",
        "0 nothing is parked, 1 something is, or the database is out of reach, 2 wrong usage",
    ),
    (
        "list",
        "what waits, the oldest first; --parked: what has used up its attempts",
        "conquiet outbox list --parked",
        "0 listed, 1 the database is out of reach, 2 wrong usage",
    ),
    (
        "show",
        "one row with its payload and last error",
        "conquiet outbox show 0197f6c1-5f5e-7a53-9d0c-9d6f1f0b6a11",
        "0 shown, 1 there is no such row, 2 wrong usage",
    ),
    (
        "retry",
        "give parked rows new attempts: relays publish them again",
        "conquiet outbox retry --all",
        "0 done, 1 an id is not that of a parked row, 2 wrong usage",
    ),
    (
        "prune",
        "delete what was published long ago; never what waits or is parked",
        "conquiet outbox prune --older-than 30d --yes",
        "0 done, 1 it was not confirmed or failed, 2 wrong usage",
    ),
)


def register(verbs: Any, common: ArgumentParser) -> None:
    parsers: dict[str, ArgumentParser] = {}
    for name, what, example, codes in _VERBS:
        parsers[name] = parser = verbs.add_parser(
            name,
            help=what.partition(";")[0].partition(":")[0],
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"example:\n  {example}\n\nexit codes: {codes}\n",
            parents=[common],
        )
        parser.set_defaults(run=_COMMANDS[name])
        parser.add_argument(
            "--url", help="the database, as SQLAlchemy names it; else CONQUIET_DATABASE_URL"
        )
        parser.add_argument(
            "--table", metavar="NAME", help="the outbox, or outbox_events (CONQUIET_OUTBOX_TABLE)"
        )
        parser.add_argument(
            "--max-attempts",
            type=count,
            metavar="N",
            help="when rows of outbox_events count as parked (CONQUIET_OUTBOX_MAX_ATTEMPTS)",
        )
        parser.add_argument("--json", action="store_true", help="answer in JSON")
    parsers["list"].add_argument("--parked", action="store_true", help="only what is parked")
    parsers["list"].add_argument(
        "--limit", type=count, default=50, metavar="N", help="rows at most (50)"
    )
    parsers["show"].add_argument("id", metavar="ID", help="id of the event, or of the row")
    parsers["retry"].add_argument("ids", nargs="*", metavar="ID", help="ids of events or of rows")
    parsers["retry"].add_argument("--all", action="store_true", help="all that is parked")
    parsers["prune"].add_argument(
        "--older-than",
        type=_age,
        default=timedelta(days=7),
        metavar="AGE",
        help="how long ago it was published: 12h, 7d (7d)",
    )
    parsers["prune"].add_argument("--yes", action="store_true", help="do not ask")


def _status(options: Namespace) -> int:
    with _inspection(options) as inspection:
        figures = inspection.figures()
    if options.json:
        print_json({"table": inspection.name, **asdict(figures)})
    else:
        print(f"pending  {figures.pending}")
        print(f"oldest   {figures.oldest_seconds:.1f} s")
        parked = f"parked   {figures.parked}"
        print(yellow(parked, sys.stdout) if figures.parked else parked)
        if figures.parked:
            print("conquiet outbox list --parked says why", file=sys.stderr)
    return FAILED if figures.parked else OK


def _list(options: Namespace) -> int:
    with _inspection(options) as inspection:
        entries = inspection.entries(parked=options.parked, limit=options.limit)
    if options.json:
        print_json([asdict(entry) for entry in entries])
        return OK
    for entry in entries:
        about = " ".join(filter(None, (entry.aggregate_type, entry.aggregate_id)))
        print(
            f"{entry.event_id}  {entry.state:<7}  {entry.attempts:>3} attempts"
            f"  {entry.created_at}  {entry.event_type}  {about}".rstrip()
        )
        if entry.last_error:
            print(dim(f"    {one_line(entry.last_error):.200}", sys.stdout))
    if not entries:
        print(green("nothing is parked" if options.parked else "nothing waits", sys.stdout))
    return OK


def _show(options: Namespace) -> int:
    with _inspection(options) as inspection:
        found = inspection.show(options.id)
    if found is None:
        print(f"no row {options.id!r} in {inspection.name}", file=sys.stderr)
        return FAILED
    entry, more = found
    whole = {**asdict(entry), **more}
    if options.json:
        print_json(whole)
        return OK
    width = max(map(len, whole))
    for name, value in whole.items():
        print(f"{name:<{width}}  {'-' if value in (None, '') else value}")
    return OK


def _retry(options: Namespace) -> int:
    if bool(options.ids) == options.all:
        raise ConfigError("say which parked rows to retry: their ids, or --all")
    with _inspection(options) as inspection:
        done = inspection.retry(None if options.all else options.ids)
    wanting = 0 if options.all else max(0, len(set(options.ids)) - len(done))
    if options.json:
        print_json({"retried": done, "not_parked": wanting})
    else:
        print(f"{len(done)} rows will be published again")
        if wanting:
            print(f"{wanting} of the ids are not those of parked rows", file=sys.stderr)
    return FAILED if wanting else OK


def _prune(options: Namespace) -> int:
    with _inspection(options) as inspection:
        count = inspection.prunable(options.older_than)
        if not options.yes and not _confirmed(count, inspection.name, options.older_than):
            return FAILED
        removed = inspection.prune(options.older_than)
    if options.json:
        print_json({"removed": removed})
    else:
        print(f"{removed} published rows removed")
    return OK


_COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "status": _status,
    "list": _list,
    "show": _show,
    "retry": _retry,
    "prune": _prune,
}


def _confirmed(count: int, table: str, age: timedelta) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{count} rows would be deleted; --yes says that you mean it")
    question = f"delete {count} rows of {table} that were published more than {age} ago? [y/N] "
    if input(question).strip().lower() in ("y", "yes"):
        return True
    print("nothing was deleted", file=sys.stderr)
    return False


@contextmanager
def _inspection(options: Namespace) -> Iterator[Any]:
    """The table that was named, by an engine that is disposed at the end."""
    from conquiet.cli.outbox import Reached, database_url
    from conquiet.relay.settings import setting

    # What was said here, or what the relay itself goes by.
    table = options.table or setting("table")
    attempts = options.max_attempts or setting("max_attempts")
    url = database_url(options, must_exist=True)
    with Reached(url):
        from conquiet.relay.inspection import Inspection
        from conquiet.sql import engine as make_engine

        engine = make_engine(url)
        try:
            yield Inspection(engine, table, max_attempts=attempts)
        finally:
            engine.dispose()


def _age(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None or int(found[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is not an age such as 90m, 12h or 7d")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])
