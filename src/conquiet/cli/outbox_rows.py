"""`conquiet outbox status|list|show|retry|prune`: the rows of an outbox."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from conquiet.cli.confirmation import add_yes, confirmed
from conquiet.cli.numbers import age, count
from conquiet.cli.progress import Progress
from conquiet.cli.servers import database_at
from conquiet.cli.table import print_facts
from conquiet.cli.terminal import FAILED, OK, dim, green, one_line, print_json, printable, yellow
from conquiet.errors import ConfigError
from conquiet.operations.errors import NotFound

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
        "conquiet outbox list --parked --type 'order.*' --error timeout",
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
    _add_search(parsers["list"])
    parsers["show"].add_argument("id", metavar="ID", help="id of the event, or of the row")
    parsers["retry"].add_argument("ids", nargs="*", metavar="ID", help="ids of events or of rows")
    parsers["retry"].add_argument("--all", action="store_true", help="all that is parked")
    parsers["prune"].add_argument(
        "--older-than",
        type=age,
        default=timedelta(days=7),
        metavar="AGE",
        help="how long ago it was published: 12h, 7d (7d)",
    )
    add_yes(parsers["prune"])


def _add_search(parser: ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--parked", action="store_true", help="only what is parked")
    which.add_argument(
        "--state",
        choices=("waiting", "pending", "parked", "published", "any"),
        default="waiting",
        help="(waiting: not published yet)",
    )
    parser.add_argument("--type", default="", metavar="TYPE", help="of the event; * is anything")
    parser.add_argument(
        "--aggregate", default="", metavar="ID", help="its id or type; else key or topic"
    )
    parser.add_argument("--error", default="", metavar="TEXT", help="a part of the last error")
    parser.add_argument("--newest", action="store_true", help="the newest first")
    parser.add_argument("--limit", type=count, default=50, metavar="N", help="rows at most (50)")


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
        from conquiet.relay.search import Search

        state: Any = "parked" if options.parked else options.state
        search = Search(state, type=options.type, aggregate=options.aggregate, error=options.error)
        entries = inspection.entries(search=search, newest=options.newest, limit=options.limit)
    if options.json:
        print_json([asdict(entry) for entry in entries])
        return OK
    for entry in entries:
        about = " ".join(filter(None, (entry.aggregate_type, entry.aggregate_id)))
        line = (
            f"{entry.event_id}  {entry.state:<9}  {entry.attempts:>3} attempts"
            f"  {entry.created_at}  {entry.event_type}  {about}"
        )
        print(printable(line.rstrip()))
        if entry.last_error:
            print(dim(f"    {one_line(entry.last_error):.200}", sys.stdout))
    if not entries:
        is_plain = search in (Search("waiting"), Search("parked"))
        nothing = "nothing is parked" if state == "parked" else "nothing waits"
        print(green(nothing, sys.stdout) if is_plain else "no such row")
    return OK


def _show(options: Namespace) -> int:
    with _inspection(options) as inspection:
        found = inspection.show(options.id)
    if found is None:
        raise NotFound(
            f"no row {options.id!r:.100} in {inspection.name}: never written, or pruned; conquiet"
            " outbox list shows what waits"
        )
    entry, more = found
    whole = {**asdict(entry), **more}
    if options.json:
        print_json(whole)
        return OK
    print_facts(list(whole.items()))
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
        what = (
            f"delete {inspection.prunable(options.older_than):,} rows of {inspection.name} that"
            f" were published more than {options.older_than} ago"
        )
        if not confirmed(what, options.yes):
            return FAILED
        with Progress("pruning") as progress:
            removed = inspection.prune(options.older_than, tell=progress.tell)
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


@contextmanager
def _inspection(options: Namespace) -> Iterator[Any]:
    """The table that was named, by an engine that is disposed at the end."""
    from conquiet.relay.settings import setting

    # What was said here, or what the relay itself goes by.
    table = options.table or setting("table")
    attempts = options.max_attempts or setting("max_attempts")
    with database_at(options.url) as engine:
        from conquiet.relay.inspection import Inspection

        yield Inspection(engine, table, max_attempts=attempts)
