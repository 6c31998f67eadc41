"""`conquiet outbox`: the tables of inbox and outbox, and the rows in them."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from conquiet.cli.options import (
    Reached,
    Verb,
    add_broker,
    add_database,
    add_group,
    add_verb,
    age,
    count,
    database_at,
    database_url,
    redis_at,
    search_here,
)
from conquiet.cli.progress import Progress
from conquiet.cli.terminal import (
    FAILED,
    OK,
    add_watch,
    add_yes,
    confirm,
    dim,
    green,
    hang,
    in_one_row,
    one_line,
    print_facts,
    print_json,
    print_row,
    red,
    watch,
    yellow,
)
from conquiet.config import has_events_layout
from conquiet.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from conquiet.operations.log_groups import LogGroup

CATALOG_VARIABLE = "CONQUIET_OUTBOX_CATALOG"


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "outbox",
        "the tables of inbox and outbox, and the rows that wait or are parked in them",
        "conquiet outbox status --database postgresql://app@localhost/shop",
    )
    schema, verify, migrate = (add_verb(verbs, common, verb) for verb in _TABLE_VERBS)
    schema.add_argument(
        "--dialect", required=True, choices=["postgresql", "sqlite"], help="the kind of database"
    )
    for parser in (verify, migrate):
        add_database(parser)
    for parser in (schema, verify, migrate):
        _add_table(parser)
        _add_table_options(parser)
    migrate.add_argument(
        "--by-day",
        action="store_true",
        help="divide the outbox into a partition per day, on PostgreSQL; there is no way back",
    )
    rows = [add_verb(verbs, common, verb) for verb in _ROW_VERBS]
    for parser in rows:
        add_database(parser)
        _add_table(parser)
        parser.add_argument(
            "--max-attempts",
            type=count,
            metavar="N",
            help="when rows of outbox_events count as parked (CONQUIET_OUTBOX_MAX_ATTEMPTS)",
        )
    status, listed, show, cancel, retry, prune = rows
    add_watch(status)
    _add_search(listed)
    for parser in (listed, cancel):
        add_broker(parser, "the Redis of outboxes there, in place of a database: delayed events")
    cancel.add_argument("ids", nargs="+", metavar="ID", help="ids of delayed events")
    add_yes(cancel)
    show.add_argument("id", metavar="ID", help="id of the event, or of the row")
    retry.add_argument("ids", nargs="*", metavar="ID", help="ids of events or of rows")
    retry.add_argument("--all", action="store_true", help="all parked rows")
    prune.add_argument(
        "--older-than",
        type=age,
        default=timedelta(days=7),
        metavar="AGE",
        help="how long ago it was published: 12h, 7d (7d)",
    )
    add_yes(prune)


def _add_table(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--table", metavar="NAME", help="the outbox, or outbox_events (CONQUIET_OUTBOX_TABLE)"
    )


def _add_table_options(parser: ArgumentParser) -> None:
    parser.add_argument("--inbox-table", metavar="NAME", help="the inbox (processed_messages)")
    parser.add_argument("--no-inbox", action="store_true", help="leave the inbox out")
    parser.add_argument(
        "--catalog",
        metavar="MODULE:NAME",
        help=f"the catalog whose enums outbox_events has ({CATALOG_VARIABLE})",
    )
    parser.add_argument(
        "--ordered",
        action="store_true",
        help="add the index that relays need to keep an order; for outbox_events",
    )
    parser.add_argument(
        "--no-trigger",
        action="store_true",
        help="leave out the trigger that forbids changes of events; for outbox_events",
    )


def _add_search(parser: ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--parked", action="store_true", help="parked rows only")
    which.add_argument(
        "--delayed", action="store_true", help="events that wait until they are due, and until when"
    )
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


# --- tables ---------------------------------------------------------------------------------


class _Tables(NamedTuple):
    """The operations on one set of tables."""

    ddl: Callable[[str], str]
    """Returns the statements for a dialect."""
    verify: Callable[[Any], list[Any]]
    """Returns the differences in the database of a URL."""
    migrate: Callable[[Any], None]


def _schema(options: Namespace) -> int:
    text = _tables_of(options).ddl(options.dialect)
    if options.json:
        print_json({"dialect": options.dialect, "ddl": text})
    else:
        print(text, end="")
    return OK


def _verify(options: Namespace) -> int:
    tables = _tables_of(options)
    url = database_url(options.database, must_exist=True)
    with Reached(url):
        differences = tables.verify(url)
    if options.json:
        found = [
            {"table": item.table, "what": item.what, "expected": item.expected, "found": item.found}
            for item in differences
        ]
        print_json({"ok": not found, "differences": found})
    elif differences:
        for item in differences:
            print(red(str(item), sys.stdout))
        print("conquiet outbox migrate brings the tables up to date", file=sys.stderr)
    else:
        print(green("the tables are as conquiet needs them", sys.stdout))
    return FAILED if differences else OK


def _migrate(options: Namespace) -> int:
    tables = _tables_of(options)
    url = database_url(options.database)
    with Reached(url):
        before = tables.verify(url)
        tables.migrate(url)
        differences = tables.verify(url)
    done = [item for item in before if item not in differences]
    created = [item.table for item in done if item.what == "table"]
    changed = [f"{item.table}: {item.what}" for item in done if item.what != "table"]
    if options.json:
        left = [str(item) for item in differences]
        answer = {"ok": not left, "created": created, "changed": changed, "differences": left}
        print_json(answer)
        return FAILED if differences else OK
    for table in created:
        print(green(f"created {table}", sys.stdout))
    for change in changed:
        print(green(f"changed {change}", sys.stdout))
    for item in differences:
        print(red(str(item), sys.stdout))
    if differences:
        print("migrate does not repair them; conquiet outbox schema prints how", file=sys.stderr)
    elif options.by_day:
        print(green("the outbox is divided by day", sys.stdout))
    elif not done:
        print(green("the tables were up to date already", sys.stdout))
    return FAILED if differences else OK


def _tables_of(options: Namespace) -> _Tables:
    """Return the operations on the tables that the options name."""
    from conquiet.config import TABLE, missing_extra, read

    table = options.table or read(TABLE)
    try:
        if has_events_layout(table):
            return _events_tables(table, options)
        return _generic_tables(table, options)
    except ModuleNotFoundError as error:
        raise missing_extra(error, "postgres") from error


def _generic_tables(table: str, options: Namespace) -> _Tables:
    from conquiet.sql import schema

    if options.catalog:
        raise ConfigError(f"--catalog is for --table outbox_events; the table {table} has no enums")
    names: dict[str, Any] = {"outbox": table}
    if options.no_inbox:
        names["inbox"] = None
    elif options.inbox_table:
        names["inbox"] = options.inbox_table
    return _Tables(
        partial(schema.ddl, **names),
        partial(schema.verify, **names),
        partial(schema.migrate, by_day="by_day" in options and options.by_day, **names),
    )


def _events_tables(table: str, options: Namespace) -> _Tables:
    from conquiet.config import ORDERED, read
    from conquiet.events import schema

    if "by_day" in options and options.by_day:
        raise ConfigError("--by-day is for the generic outbox; outbox_events is one table")
    ordered = options.ordered or read(ORDERED)
    named: dict[str, Any] = {"catalog": _catalog(options), "table": table, "ordered": ordered}
    guarded = {**named, "append_only": not options.no_trigger}
    return _Tables(
        partial(schema.ddl, **guarded),
        partial(schema.verify, **named),
        partial(schema.migrate, **guarded),
    )


def _catalog(options: Namespace) -> Any:
    from conquiet.events import Catalog
    from conquiet.processes import resolve

    name = options.catalog or os.environ.get(CATALOG_VARIABLE)
    if not name:
        raise ConfigError(
            "the enums of outbox_events are those of a catalog: name yours with --catalog"
            f" module:NAME or {CATALOG_VARIABLE}, such as shop.events:CATALOG"
        )
    search_here()
    found = resolve(name)
    if not isinstance(found, Catalog):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a conquiet.events.Catalog")
    return found


# --- rows -----------------------------------------------------------------------------------


def _status(options: Namespace) -> int:
    return watch(options.watch, partial(_show_status, options))


def _show_status(options: Namespace) -> int:
    with _inspection(options) as inspection:
        figures = inspection.figures()
        delayed = inspection.count_delayed()
        groups = _groups_of(inspection)
    if options.json:
        found = {"table": inspection.name, **asdict(figures), "delayed": delayed}
        print_json({**found, "groups": [asdict(group) for group in groups]})
    else:
        no_relay = "  (for a relay; groups that read the table do not change it)" if groups else ""
        print(f"pending  {figures.pending}{no_relay}")
        print(f"oldest   {figures.oldest_seconds:.1f} s")
        print(f"delayed  {delayed}")
        parked = f"parked   {figures.parked}"
        print(yellow(parked, sys.stdout) if figures.parked else parked)
        if figures.slot:
            slot = f"slot     {figures.slot}, {figures.slot_lag_bytes:,} bytes behind"
            print(yellow(slot, sys.stdout) if figures.slot in ("lost", "missing") else slot)
        for group in groups:
            about = f"{group.lag:,} behind, {group.retries} to retry, {group.dead} dead"
            print(in_one_row(f"group    {group.name} of {group.topic}: {about}"))
        if figures.parked:
            print("conquiet outbox list --parked shows the reasons", file=sys.stderr)
    return FAILED if figures.parked else OK


def _groups_of(inspection: Any) -> list[LogGroup]:
    """Return the groups that read the table as a log."""
    from conquiet.operations import log_groups

    if has_events_layout(inspection.name):
        return []
    return log_groups.survey(inspection.engine, table=inspection.name)


def _list(options: Namespace) -> int:
    if options.delayed:
        return _list_delayed(options)
    if options.broker:
        raise ConfigError("--broker: of an outbox in Redis, delayed events are listed: --delayed")
    with _inspection(options) as inspection:
        from conquiet.relay.inspection import Search

        state: Any = "parked" if options.parked else options.state
        search = Search(state, type=options.type, aggregate=options.aggregate, error=options.error)
        entries = inspection.entries(search=search, newest=options.newest, limit=options.limit)
    if options.json:
        print_json([asdict(entry) for entry in entries])
        return OK
    for entry in entries:
        print_row(
            *(entry.event_id, f"{entry.state:<9}", f"{entry.attempts:>3} attempts"),
            *(entry.created_at, entry.event_type),
            " ".join(filter(None, (entry.aggregate_type, entry.aggregate_id))),
        )
        if entry.last_error:
            print(dim(f"    {hang(f'{one_line(entry.last_error):.200}', 4)}", sys.stdout))
    if not entries:
        is_plain = search in (Search("waiting"), Search("parked"))
        nothing = "nothing is parked" if state == "parked" else "nothing waits"
        print(green(nothing, sys.stdout) if is_plain else "no such row")
    return OK


def _list_delayed(options: Namespace) -> int:
    with _delayed(options) as outboxes:
        found = [item for one in outboxes for item in one.delayed(options.limit, type=options.type)]
    entries = sorted(found, key=lambda item: item.seconds_left)[: options.limit]
    if options.json:
        print_json([asdict(entry) for entry in entries])
        return OK
    for entry in entries:
        print_row(
            *(entry.event_id, entry.due_at, f"in {_duration(entry.seconds_left)}"),
            *(entry.event_type, f"{entry.topic} {entry.key}".rstrip()),
        )
    if not entries:
        print("no such event" if options.type else green("nothing is delayed", sys.stdout))
    return OK


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))


def _cancel(options: Namespace) -> int:
    if not confirm(f"delete {len(set(options.ids))} delayed events", options.yes):
        return FAILED
    with _delayed(options) as outboxes:
        done = sorted({id_ for one in outboxes for id_ in one.cancel(options.ids)})
        late = [id_ for id_ in dict.fromkeys(options.ids) if id_ not in done]
        answers = {id_: _why_too_late(options, outboxes, id_) for id_ in late}
    if options.json:
        print_json(
            {"cancelled": done, "too_late": {id_: why.state for id_, why in answers.items()}}
        )
        return FAILED if answers else OK
    for id_ in done:
        print(in_one_row(f"{id_} is cancelled"))
    for id_, why in answers.items():
        print(in_one_row(f"{id_}: {why.text}"), file=sys.stderr)
    return FAILED if answers else OK


class _TooLate(NamedTuple):
    """Why an event could not be cancelled."""

    state: str
    text: str


def _why_too_late(options: Namespace, outboxes: Sequence[Any], id_: str) -> _TooLate:
    if options.broker:
        moments = (one.find_promoted(id_) for one in outboxes)
        if moment := next(filter(None, moments), None):
            return _TooLate("due", f"too late, it was due and moved to the outbox at {moment}")
        text = "no event of this id waits, nor is it among the last 10,000 that became due"
        return _TooLate("unknown", f"{text}: never written, cancelled, or due long ago")
    found = outboxes[0].show(id_)
    if found is None:
        text = "no event of this id waits or was published: never written, cancelled, or pruned"
        return _TooLate("unknown", text)
    row = found[0]
    if row.published_at:
        return _TooLate(row.state, f"too late, it was published at {row.published_at}")
    return _TooLate(row.state, "too late, it was due and is in the outbox; a relay publishes it")


def _show(options: Namespace) -> int:
    with _inspection(options) as inspection:
        found = inspection.show(options.id)
        waiting = [] if found else inspection.delayed(1, id=options.id)
    if waiting:
        whole = {"state": "delayed", **asdict(waiting[0])}
        if options.json:
            print_json(whole)
        else:
            print_facts(list(whole.items()))
        return OK
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
        raise ConfigError("name the parked rows to retry by their ids, or give --all")
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
            f"delete {inspection.prunable(options.older_than.total_seconds()):,} rows of"
            f" {inspection.name} that were published more than {options.older_than} ago"
        )
        if not confirm(what, options.yes):
            return FAILED
        with Progress("pruning") as progress:
            removed = inspection.prune(options.older_than.total_seconds(), progress.show)
    if options.json:
        print_json({"removed": removed})
    else:
        print(f"{removed} published rows removed")
    return OK


@contextmanager
def _delayed(options: Namespace) -> Iterator[Sequence[Any]]:
    """Open what holds delayed events: a table, or all outboxes of a Redis."""
    if not options.broker:
        with _inspection(options) as inspection:
            yield [inspection]
        return
    if options.database or options.table:
        raise ConfigError("--broker or --database: give one of them; --table is of a database")
    with redis_at(options.broker) as client:
        from conquiet.operations.delayed import find_delayed

        yield find_delayed(client)


@contextmanager
def _inspection(options: Namespace) -> Iterator[Any]:
    """Open the table that the options, or the settings of the relay, name."""
    from conquiet.config import MAX_ATTEMPTS, TABLE, read

    table = options.table or read(TABLE)
    attempts = options.max_attempts or read(MAX_ATTEMPTS)
    with database_at(options.database) as engine:
        from conquiet.relay.inspection import Inspection

        yield Inspection(engine, table, max_attempts=attempts)


_TABLE_VERBS = (
    Verb(
        "schema",
        "print the statements that create the tables, for migrations of your own",
        (
            "conquiet outbox schema --dialect postgresql",
            "conquiet outbox schema --dialect sqlite --table sales_outbox --no-inbox",
            "conquiet outbox schema --dialect postgresql --table outbox_events"
            " --catalog shop.events:CATALOG",
        ),
        "0 printed, 2 wrong usage or settings",
        _schema,
    ),
    Verb(
        "verify",
        "compare the tables of a database with what conquiet needs",
        ("conquiet outbox verify --database postgresql://app@localhost/shop && echo fits",),
        "0 the tables fit, 1 they differ or the database is out of reach, 2 wrong usage",
        _verify,
    ),
    Verb(
        "migrate",
        "create the tables, or bring those of an older conquiet up to date",
        (
            "conquiet outbox migrate --database postgresql://app@localhost/shop",
            "conquiet outbox migrate --database sqlite:///shop.sqlite",
            "conquiet outbox migrate --table outbox_events --catalog shop.events:CATALOG",
            "conquiet outbox migrate --by-day --database postgresql://app@localhost/shop",
        ),
        "0 the tables are up to date, 1 they still differ or it failed, 2 wrong usage or settings",
        _migrate,
        more="It is safe to run it again, and to run several at once.",
    ),
)
_ROW_VERBS = (
    Verb(
        "status",
        "how many rows wait, how long, and how many are parked",
        ("conquiet outbox status --json | jq .parked", "conquiet outbox status --watch 5"),
        "0 nothing is parked, 1 a row is parked, or the database is out of reach, 2 wrong usage",
        _status,
    ),
    Verb(
        "list",
        "the rows that wait, the oldest first; --parked: rows that have used up their attempts",
        ("conquiet outbox list --parked --type 'order.*' --error timeout",),
        "0 listed, 1 the database is out of reach, 2 wrong usage",
        _list,
    ),
    Verb(
        "show",
        "one row with its payload and last error",
        ("conquiet outbox show 0197f6c1-5f5e-7a53-9d0c-9d6f1f0b6a11",),
        "0 shown, 1 there is no such row, 2 wrong usage",
        _show,
    ),
    Verb(
        "cancel",
        "delete delayed events that are not due yet; says so if it is too late",
        (
            "conquiet outbox list --delayed",
            "conquiet outbox list --delayed --broker redis://localhost:6379/0",
            "conquiet outbox cancel 0197f6c1-5f5e-7a53-9d0c-9d6f1f0b6a11 --yes",
        ),
        "0 cancelled, 1 too late, no such event or not confirmed, 2 wrong usage",
        _cancel,
    ),
    Verb(
        "retry",
        "give parked rows new attempts: relays publish them again",
        ("conquiet outbox retry --all",),
        "0 done, 1 an id is not that of a parked row, 2 wrong usage",
        _retry,
    ),
    Verb(
        "prune",
        "delete rows that were published long ago; never rows that wait or are parked",
        ("conquiet outbox prune --older-than 30d --yes",),
        "0 done, 1 it was not confirmed or failed, 2 wrong usage",
        _prune,
    ),
)
