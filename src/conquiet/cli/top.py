"""`conquiet top`: handlers, groups, queues and processes at a glance, again and again."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from conquiet.cli.options import (
    Verb,
    add_broker,
    add_database,
    add_verb,
    count,
    database_at,
    is_broker_given,
    is_database_given,
    redis_at,
)
from conquiet.cli.terminal import (
    FAILED,
    OK,
    add_watch,
    one_line,
    print_json,
    print_row,
    print_table,
    red,
    watch,
    yellow,
)
from conquiet.errors import ConfigError, ConquietError

if TYPE_CHECKING:
    from conquiet.operations.history import Entry, HandlerFigures, History, Report

_HANDLERS = ("handler", "type", "per s", "p50 ms", "p95 ms", "busy %", "errors", "retries", "dead")
_FORGOTTEN_SECONDS = 600.0
"""A process that has been silent for so long is not shown."""
_GROUPS = ("group", "of", "unread", "seconds behind", "in flight", "alive")


def register(commands: Any, common: ArgumentParser) -> None:
    parser = add_verb(commands, common, _TOP)
    add_broker(parser)
    add_database(parser)
    parser.add_argument("--table", default="", metavar="NAME", help="the outbox (outbox)")
    parser.add_argument(
        "--minutes",
        type=count,
        default=10,
        metavar="N",
        help="handlers of the last N (10)",
    )
    parser.add_argument(
        "--limit", type=count, default=20, metavar="N", help="handlers and groups at most (20)"
    )
    add_watch(parser)


@dataclass(frozen=True)
class _Group:
    """A group of a stream or of a database's log, or a queue of Celery."""

    name: str
    of: str
    unread: int
    behind_seconds: float
    in_flight: int | None
    """None in the log of a database, which knows positions only."""
    alive: int


@dataclass
class _Look:
    """What the stores have at one moment."""

    entries: list[Entry] = field(default_factory=list)
    now: float = 0.0
    groups: list[_Group] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def add(self, read: Callable[[], History]) -> None:
        history = read()
        self.entries += history.entries
        self.now = max(self.now, history.now)


def _run(options: Namespace) -> int:
    from conquiet.config import TABLE, read

    options.table = options.table or read(TABLE)
    with ExitStack() as open_:
        client = engine = None
        if is_broker_given(options.broker):
            client = open_.enter_context(redis_at(options.broker))
        if is_database_given(options.database):
            engine = open_.enter_context(database_at(options.database))
        if client is None and engine is None:
            raise ConfigError(
                "nothing to look at: give --broker or --database, or set CONQUIET_BROKER_URL or"
                " CONQUIET_DATABASE_URL"
            )
        return watch(options.watch, partial(_show, options, client, engine))


def _show(options: Namespace, client: Any, engine: Any) -> int:
    from conquiet.operations.history import list_handlers, list_reports, span

    look = _look(options, client, engine)
    seconds = span(look.entries, look.now, options.minutes)
    handlers = sorted(
        list_handlers(look.entries, seconds), key=lambda one: (-(one.p95 or 0.0), one.name)
    )[: options.limit]
    groups = sorted(look.groups, key=lambda one: (-one.unread, one.name))[: options.limit]
    reports = list_reports(look.entries, look.now)
    processes = sorted(
        (one for one in reports if one.seconds < _FORGOTTEN_SECONDS), key=lambda one: one.name
    )
    if options.json:
        print_json(
            {
                "ok": not look.troubles,
                "handlers": [asdict(one) for one in handlers],
                "groups": [asdict(one) for one in groups],
                "processes": [asdict(one) | {"alive": one.is_alive} for one in processes],
                "troubles": look.troubles,
            }
        )
    else:
        _print(handlers, groups, processes)
    for why in look.troubles:
        print(red(one_line(why), sys.stderr), file=sys.stderr)
    return FAILED if look.troubles else OK


def _look(options: Namespace, client: Any, engine: Any) -> _Look:
    look = _Look()
    takes = [partial(_look_at_redis, client)] if client is not None else []
    if engine is not None:
        takes.append(partial(_look_at_database, engine, options.table))
    for take in takes:
        try:
            take(options.minutes, look)
        except ConquietError as error:
            if len(takes) == 1:
                raise
            look.troubles.append(str(error))
    return look


def _look_at_redis(client: Any, minutes: int, look: _Look) -> None:
    from conquiet.operations import streams
    from conquiet.operations.history import RedisKeeper

    found = streams.survey(client)
    for stream in found:
        if not streams.is_internal(stream.name):
            look.groups += [
                _Group(
                    *(group.name, stream.name, group.lag, group.behind_seconds, group.pending),
                    group.alive,
                )
                for group in stream.groups
            ]
    look.groups += [
        _Group(
            *(f"queue {queue.name}", queue.prefix or "Celery", queue.ready),
            *(queue.behind_seconds, queue.in_flight, queue.alive),
        )
        for queue in streams.list_celery_queues(found)
    ]
    look.add(partial(RedisKeeper(client).read, minutes))


def _look_at_database(engine: Any, table: str, minutes: int, look: _Look) -> None:
    from conquiet.config import has_events_layout
    from conquiet.operations import log_groups
    from conquiet.operations.history import TableKeeper

    if has_events_layout(table):
        return
    look.groups += [
        _Group(one.name, one.topic, one.lag, one.behind_seconds, None, one.members)
        for one in log_groups.survey(engine, table=table)
    ]
    look.add(partial(TableKeeper(engine, table).read, minutes))


def _print(handlers: list[HandlerFigures], groups: list[_Group], processes: list[Report]) -> None:
    if handlers:
        print_table(
            _HANDLERS,
            [(*_cells(one), int(one.errors), int(one.retries), int(one.dead)) for one in handlers],
            [red if one.dead else None for one in handlers],
        )
    else:
        print("no handler has reported")
    if groups:
        print()
        rows = [
            tuple("" if value is None else value for value in asdict(one).values())
            for one in groups
        ]
        alone = [(one.unread or one.in_flight) and not one.alive for one in groups]
        print_table(_GROUPS, rows, [yellow if is_alone else None for is_alone in alone])
    alive = [one for one in processes if one.is_alive]
    print()
    noun = "process" if len(alive) == 1 else "processes"
    print_row(f"{len(alive):,} {noun} alive", *(f"{one.name} ({one.role})" for one in alive))
    if silent := [one for one in processes if not one.is_alive]:
        names = [f"{one.name} ({one.seconds:.0f} s)" for one in silent]
        print_row(f"{len(silent):,} silent", *names)


def _cells(one: HandlerFigures) -> Iterator[object]:
    yield from (one.name, one.type, one.rate)
    for seconds in (one.p50, one.p95):
        yield "" if seconds is None else "<1" if seconds < 0.001 else 1000 * seconds
    yield 100 * one.busy


_TOP = Verb(
    "top",
    "which handler is slow, which group is behind, which process lives; --watch keeps it on",
    (
        "conquiet top --watch",
        "conquiet top --broker redis://localhost/0 --minutes 60 --json | jq .handlers[0]",
    ),
    "0 shown; 1 a server is out of reach, or lacks the history; 2 wrong usage or settings",
    _run,
    more="""
Figures of handlers and processes are those that workers of conquiet run and conquiet worker run
keep in the store, as the dashboard shows them; p50 and p95 are estimated from a histogram.
""",
)
