"""`conquiet trace`: one event by its id, from the outbox to the log to its consumers."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from conquiet.cli.options import (
    Verb,
    add_broker,
    add_database,
    add_verb,
    age,
    database_at,
    is_broker_given,
    is_database_given,
    redis_at,
)
from conquiet.cli.terminal import (
    FAILED,
    OK,
    dim,
    green,
    in_one_row,
    one_line,
    print_json,
    red,
    yellow,
)
from conquiet.errors import ConfigError


def register(commands: Any, common: ArgumentParser) -> None:
    parser = add_verb(commands, common, _TRACE)
    parser.add_argument("id", metavar="ID", help="of the event")
    add_broker(parser)
    add_database(parser)
    parser.add_argument(
        "--table",
        action="append",
        metavar="NAME",
        help="an outbox; may be given again (outbox, outbox_events, CONQUIET_OUTBOX_TABLE)",
    )
    parser.add_argument(
        "--inbox-table", default="processed_messages", metavar="NAME", help="(processed_messages)"
    )
    parser.add_argument(
        "--streams", default="*", metavar="PATTERN", help="the streams to look into (all)"
    )
    parser.add_argument(
        "--window", type=age, metavar="AGE", help="how far around its time to look (60s)"
    )
    parser.add_argument(
        "--full", action="store_true", help="read streams and keys from end to end; may take long"
    )


def _run(options: Namespace) -> int:
    from conquiet.config import TABLE, read
    from conquiet.operations.trace import WINDOW_SECONDS, trace_event

    window = options.window.total_seconds() if options.window else WINDOW_SECONDS
    tables = options.table or list(dict.fromkeys(("outbox", "outbox_events", read(TABLE))))
    with ExitStack() as open_:
        client = engine = None
        if is_broker_given(options.broker):
            client = open_.enter_context(redis_at(options.broker))
        if is_database_given(options.database):
            engine = open_.enter_context(database_at(options.database))
        if client is None and engine is None:
            raise ConfigError(
                "nothing to search: give --broker or --database, or set CONQUIET_BROKER_URL or"
                " CONQUIET_DATABASE_URL"
            )
        found = trace_event(
            options.id,
            client=client,
            engine=engine,
            outboxes=tables,
            inbox=options.inbox_table,
            streams=options.streams,
            window=window,
            full=options.full,
        )
    if options.json:
        print_json({"found": found.found, **asdict(found)})
    else:
        _print(found)
    return OK if found.found else FAILED


def _print(found: Any) -> None:
    for row in found.written:
        paint = {"published": green, "parked": red}.get(row.state, yellow)
        where = row.table if row.due_at else f"{row.table} row {row.id}"
        about = f"published {row.published_at or '-'}, {row.attempts} attempts"
        if row.due_at:
            about = f"due {row.due_at}"
        print(
            f"outbox   {in_one_row(where)}: {paint(row.state, sys.stdout)},"
            f" {in_one_row(row.event_type)}, written {row.created_at}, {about}"
        )
        if row.last_error:
            print(dim(f"           {one_line(row.last_error):.200}", sys.stdout))
    for entry in found.logged:
        print(f"log      {in_one_row(entry.stream)} {entry.id}, added {entry.time}")
        for taker in entry.takers:
            print(f"           {in_one_row(taker.name)}: {_state(taker)}")
    for letter in found.buried:
        where = in_one_row(f"{letter.stream} {letter.id}")
        print(red(f"dead     {where}: {one_line(letter.reason)}", sys.stdout))
    for item in found.remembered:
        where = dim(in_one_row(item.where), sys.stdout)
        print(f"inbox    {in_one_row(f'{item.subscriber}: {item.state} {item.time}')}  {where}")
    for part in found.searched:
        print(
            f"{in_one_row(part.stream)} was read from {part.begin} to {part.end} only",
            file=sys.stderr,
        )
    for note in found.notes:
        print(dim(one_line(note), sys.stderr), file=sys.stderr)
    if not found.found:
        print(f"no trace of {found.event_id!r}")


def _state(taker: Any) -> str:
    if taker.state == "pending":
        since = f"idle {taker.idle_seconds:,.1f} s, delivery {taker.deliveries}"
        return f"{yellow('in flight', sys.stdout)} with {in_one_row(taker.consumer)}, {since}"
    paint = yellow if taker.state == "unread" else green
    return paint(taker.state, sys.stdout)


_TRACE = Verb(
    "trace",
    "one event by its id: in the outbox, in the log, with its consumers, among dead letters",
    (
        "conquiet trace 0197f6c1-5f5e-7a53-9d0c-9d6f1f0b6a11",
        "conquiet trace e-17 --broker redis://localhost/0 --full --json",
    ),
    "0 found; 1 no trace of it, or a server is out of reach; 2 wrong usage or settings",
    _run,
    more="""
The log is searched around the publication time that the outbox stores, or from the creation time in
the id (UUIDv7). A group that began after the event counts as acked.
""",
)
