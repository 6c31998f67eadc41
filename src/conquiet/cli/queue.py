"""`conquiet queue stats|pending|claim|peek`: one stream, its groups, and what they hold."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from datetime import timedelta
from textwrap import indent
from typing import Any

from conquiet.cli.options import Verb, add_broker, add_group, add_verb, count, redis_at, span
from conquiet.cli.terminal import (
    FAILED,
    OK,
    dim,
    green,
    one_line,
    print_facts,
    print_json,
    print_row,
    print_table,
    printable,
    yellow,
)

_DATA_SHOWN = 200


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "queue",
        "the groups of a stream: backlog, entries in flight, stale entries",
        "conquiet queue stats orders",
    )
    stats, pending, claim, peek = (add_verb(verbs, common, verb) for verb in _VERBS)
    for parser in (stats, pending, claim, peek):
        add_broker(parser)
        parser.add_argument("stream", metavar="STREAM", help="its name")
    for parser in (pending, claim):
        parser.add_argument("group", metavar="GROUP", help="the group that reads it")
        parser.add_argument("--consumer", metavar="NAME", help="only entries of this consumer")
        parser.add_argument(
            "--limit", type=count, default=100, metavar="N", help="entries at most (100)"
        )
    _min_idle(pending, timedelta(0), "0")
    _min_idle(claim, timedelta(seconds=60), "60s")
    claim.add_argument("ids", nargs="*", metavar="ID", help="only these entries")
    claim.add_argument("--to", metavar="NAME", help="give them to this consumer (free them)")
    claim.add_argument("--dry-run", action="store_true", help="show what would be claimed")
    peek.add_argument("--from", dest="start", metavar="ID", help="begin at this entry")
    peek.add_argument("--newest", action="store_true", help="the newest first")
    peek.add_argument("--limit", type=count, default=10, metavar="N", help="entries at most (10)")
    peek.add_argument("--whole", action="store_true", help="all attributes, and data uncut")


def _min_idle(parser: ArgumentParser, default: timedelta, text: str) -> None:
    parser.add_argument(
        "--min-idle",
        type=span,
        default=default,
        metavar="AGE",
        help=f"only entries idle for so long: 90s, 10m ({text})",
    )


def _stats(options: Namespace) -> int:
    from conquiet.operations.streams import describe

    with redis_at(options.broker) as client:
        found = describe(client, options.stream)
    stuck = sum(
        consumer.pending
        for group in found.groups
        for consumer in group.consumers
        if not consumer.alive
    )
    if options.json:
        print_json({"ok": not stuck, **asdict(found)})
        return FAILED if stuck else OK
    print_facts(
        [
            ("entries", f"{found.length:,}"),
            ("first", found.first_id),
            ("last", found.last_id),
            ("bytes", f"{found.bytes:,}" if found.bytes is not None else None),
        ]
    )
    _print_groups(found)
    if stuck:
        print(
            f"{stuck:,} entries are in flight with consumers whose lease has ended; a live consumer"
            " takes them over, conquiet queue claim lets it do so at once",
            file=sys.stderr,
        )
    return FAILED if stuck else OK


def _print_groups(found: Any) -> None:
    rows: list[tuple[object, ...]] = []
    for group in found.groups:
        lag = group.lag if group.lag_is_exact else f">{group.lag:,}"
        rows.append((f"group {group.name}", lag, group.behind_seconds, group.pending, ""))
        rows += [
            (
                f"  {consumer.name}",
                *("", ""),
                consumer.pending,
                ("alive" if consumer.alive else "gone") + f", idle {consumer.idle_seconds:,.1f} s",
            )
            for consumer in group.consumers
        ]
    for reader in found.readers:
        lag = reader.lag if reader.lag_is_exact else f">{reader.lag:,}"
        rows.append((f"reader {reader.name}", lag, reader.behind_seconds, "", reader.position))
    if not rows:
        print("no group or reader")
        return
    print_table(
        ("who", "unread", "seconds behind", "in flight", ""),
        rows,
        [yellow if str(row[-1]).startswith("gone") and row[3] else None for row in rows],
    )


def _pending(options: Namespace) -> int:
    from conquiet.operations.streams import list_pending

    with redis_at(options.broker) as client:
        found = list_pending(
            *(client, options.stream, options.group),
            min_idle=options.min_idle.total_seconds(),
            limit=options.limit,
            consumer=options.consumer,
        )
    if options.json:
        print_json([asdict(entry) for entry in found])
    elif not found:
        print(green("nothing is pending", sys.stdout))
    else:
        rows = [(e.id, e.time, e.consumer, e.idle_seconds, e.deliveries) for e in found]
        print_table(("entry", "added", "consumer", "seconds idle", "deliveries"), rows)
    return OK


def _claim(options: Namespace) -> int:
    from conquiet.operations.streams import claim

    with redis_at(options.broker) as client:
        done = claim(
            *(client, options.stream, options.group),
            min_idle=options.min_idle.total_seconds(),
            limit=options.limit,
            consumer=options.consumer,
            ids=options.ids,
            to=options.to,
            dry_run=options.dry_run,
        )
    wanting = [item for item in options.ids if item not in done.ids]
    if options.json:
        print_json({**asdict(done), "dry_run": options.dry_run, "not_claimed": wanting})
    else:
        would = "would be " if options.dry_run else ""
        where = f"given to {done.to}" if done.to else "free for the next worker that looks"
        print(f"{len(done.ids):,} entries {would}{where}")
        for item in wanting:
            print(f"{item} is not pending, or not for so long", file=sys.stderr)
    return FAILED if wanting else OK


def _peek(options: Namespace) -> int:
    from conquiet.operations.streams import peek

    with redis_at(options.broker) as client:
        found = peek(*(client, options.stream, options.start, options.limit), newest=options.newest)
    if options.json:
        print_json([asdict(entry) for entry in found])
        return OK
    for entry in found:
        print_row(entry.id, entry.time, entry.event_type, entry.event_id)
        if options.whole:
            print_facts([(f"  {name}", value) for name, value in entry.attributes.items()])
        data = entry.data if options.whole else f"{one_line(entry.data):.{_DATA_SHOWN}}"
        if data:
            print(dim(indent(printable(data), "    ", lambda line: True), sys.stdout))
    if not found:
        print("no entries")
    return OK


_VERBS = (
    Verb(
        "stats",
        "length of a stream, and the state of its groups, consumers and readers",
        ("conquiet queue stats orders", "conquiet queue stats orders --json | jq '.groups[].lag'"),
        "0 all is well; 1 entries are in flight with a dead consumer, there is no such stream, or\n"
        "Redis is out of reach; 2 wrong usage or settings",
        _stats,
    ),
    Verb(
        "pending",
        "entries that were delivered to a group and not acked, the oldest first",
        ("conquiet queue pending orders billing --min-idle 10m",),
        "0 listed; 1 there is no such stream or group, or Redis is out of reach; 2 wrong usage",
        _pending,
    ),
    Verb(
        "claim",
        "free stale entries: the next worker of the group takes them over",
        (
            "conquiet queue claim orders billing --min-idle 10m --dry-run",
            "conquiet queue claim orders billing --consumer host-1-4711",
            "conquiet queue claim orders billing 1700000000000-0 --min-idle 0 --to pod-2",
        ),
        "0 done; 1 a named entry was not claimed, there is no such stream or group, or Redis is\n"
        "out of reach; 2 wrong usage",
        _claim,
        more="""
It neither acks entries nor counts as a delivery. An entry that is still in flight would be handled
twice: set --min-idle above the longest handler, unless there is an inbox.
""",
    ),
    Verb(
        "peek",
        "show entries of a stream; no group moves",
        (
            "conquiet queue peek orders --newest --limit 3",
            "conquiet queue peek orders --from 1700000000000-0 --json",
        ),
        "0 shown; 1 there is no such stream, or Redis is out of reach; 2 wrong usage",
        _peek,
    ),
)
