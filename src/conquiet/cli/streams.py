"""`conquiet streams list|lag|trim|prune|remove-group`: all streams of a server at a glance."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from conquiet.cli.options import (
    Verb,
    add_broker,
    add_database,
    add_group,
    add_verb,
    age,
    database_at,
    is_broker_given,
    is_database_given,
    redis_at,
    span,
    whole,
)
from conquiet.cli.terminal import (
    FAILED,
    OK,
    add_watch,
    add_yes,
    confirm,
    in_one_row,
    print_json,
    print_table,
    watch,
    yellow,
)
from conquiet.config import BROKER_VARIABLE, DATABASES
from conquiet.errors import ConfigError, ConquietError, NotFound

if TYPE_CHECKING:
    from conquiet.operations.streams import StreamInfo


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "streams",
        "the streams of a Redis, how far behind their readers are, and what may go",
        "conquiet streams lag 'orders*' --max 1000",
    )
    listed, lag, trim, prune, removal = (add_verb(verbs, common, verb) for verb in _VERBS)
    for parser in (listed, lag, prune):
        parser.add_argument(
            "pattern", nargs="?", default="*", metavar="PATTERN", help="of names, such as 'orders*'"
        )
    for parser in (listed, lag, trim, prune):
        add_broker(parser)
    add_database(lag, "the database whose outbox is read as a log, in place of a Redis")
    removal.add_argument("topic", metavar="TOPIC", help="of the outbox, or the stream in Redis")
    removal.add_argument("group", metavar="GROUP", help="its name")
    add_database(removal)
    add_broker(removal, f"the Redis with the stream; else {BROKER_VARIABLE}, without a database")
    add_yes(removal)
    for parser in (listed, lag):
        parser.add_argument(
            "--all", action="store_true", help="also those of Celery, and what is tried later"
        )
    add_watch(lag)
    lag.add_argument("--max", type=whole, metavar="N", help="exit with 1 if more wait; may be 0")
    trim.add_argument("streams", nargs="+", metavar="STREAM", help="its name")
    trim.add_argument(
        "--keep",
        type=age,
        metavar="AGE",
        help="keep all entries younger than this, such as 7d",
    )
    trim.add_argument("--exact", action="store_true", help="exact to the entry, which is slower")
    trim.add_argument("--dry-run", action="store_true", help="count what would be deleted")
    prune.add_argument(
        "--idle",
        type=span,
        default=timedelta(days=1),
        metavar="SPAN",
        help="only those without a request for so long, such as 12h (1d)",
    )
    prune.add_argument("--dry-run", action="store_true", help="show what would be removed")
    for parser in (trim, prune):
        add_yes(parser)


def _survey(options: Namespace) -> tuple[list[StreamInfo], int]:
    """Return the streams that match, and how many of Celery and of retries are left out."""
    from conquiet.operations import streams

    with redis_at(options.broker) as client:
        found = streams.survey(client, options.pattern)
    if not found and options.pattern != "*":
        raise NotFound(f"no stream matches {options.pattern!r}; conquiet streams list shows all")
    if options.all or options.pattern != "*":
        return found, 0
    own = [stream for stream in found if not streams.is_internal(stream.name)]
    return own, len(found) - len(own)


def _report_folded(folded: int) -> None:
    if folded:
        print(
            f"{folded:,} internal streams are left out: queues of Celery (conquiet kombu) and what"
            " is tried later (conquiet retries); --all shows them",
            file=sys.stderr,
        )


def _list(options: Namespace) -> int:
    found, folded = _survey(options)
    if options.json:
        print_json([asdict(stream) for stream in found])
    elif not found:
        print("no streams")
    else:
        print_table(
            ("stream", "entries", "bytes", "groups", "readers", "last added"),
            [
                (s.name, s.length, s.bytes or 0, len(s.groups), len(s.readers), s.last_time)
                for s in found
            ],
        )
    _report_folded(folded)
    return OK


def _lag(options: Namespace) -> int:
    return watch(options.watch, partial(_look_at_lag, options))


def _look_at_lag(options: Namespace) -> int:
    if options.database is not None:
        return _show_lags(options, _log_lags(options), "no groups", "to retry")
    from conquiet.operations import brokers

    if brokers.is_broker(options.pattern):
        return _show_lags(options, _broker_lags(options.pattern), "no queues")
    kind, is_url, _ = options.pattern.partition("://")
    if is_url and kind.partition("+")[0] in DATABASES:
        from conquiet.operations import log_groups

        lag = _log_lag(log_groups.describe(options.pattern))
        return _show_lags(options, [lag], "no groups", "to retry")
    if is_url:
        raise ConfigError(
            f"{kind}://… is no URL of a log or broker (postgresql, sqlite, amqp, kafka, sqs); of a"
            " Redis, give --broker URL and the name of the stream"
        )

    found, folded = _survey(options)
    lags = [
        {
            "stream": stream.name,
            "kind": kind,
            "name": item.name,
            "lag": item.lag,
            "lag_is_exact": item.lag_is_exact,
            "behind_seconds": item.behind_seconds,
            "pending": getattr(item, "pending", 0),
        }
        for stream in found
        for kind, items in (("group", stream.groups), ("reader", stream.readers))
        for item in items
    ]
    code = _show_lags(options, lags, "no groups or readers" if found else "no streams")
    _report_folded(folded)
    return code


def _log_lags(options: Namespace) -> list[dict[str, Any]]:
    from conquiet.operations import log_groups

    with database_at(options.database) as engine:
        found = log_groups.survey(engine, options.pattern)
    if not found and options.pattern != "*":
        raise NotFound(f"no topic with a group matches {options.pattern!r}")
    return [_log_lag(group) for group in found]


def _log_lag(group: Any) -> dict[str, Any]:
    return {
        "stream": group.topic,
        "kind": "group",
        "name": group.name,
        "lag": group.lag,
        "lag_is_exact": True,
        "behind_seconds": round(group.behind_seconds, 3),
        "pending": group.retries,
        "dead": group.dead,
        "members": group.members,
        "partitions": group.partitions,
    }


def _broker_lags(url: str) -> list[dict[str, Any]]:
    from conquiet.operations import brokers

    return [
        {
            "stream": backlog.place,
            "kind": "group" if backlog.group else "queue",
            "name": backlog.group,
            "lag": backlog.waiting,
            "lag_is_exact": backlog.is_exact,
            "behind_seconds": None,
            "pending": backlog.pending,
        }
        for backlog in brokers.survey(url)
    ]


def _show_lags(
    options: Namespace, lags: list[dict[str, Any]], none: str, in_flight: str = "in flight"
) -> int:
    late = [options.max is not None and lag["lag"] > options.max for lag in lags]
    if options.json:
        print_json({"ok": not any(late), "lags": lags})
    elif not lags:
        print(none)
    else:
        print_table(
            ("stream", "who", "unread", "seconds behind", in_flight),
            [
                (
                    lag["stream"],
                    f"{lag['kind']} {lag['name']}".rstrip(),
                    lag["lag"] if lag["lag_is_exact"] else _about(lag),
                    *("-" if lag[name] is None else lag[name] for name in _OFTEN_UNKNOWN),
                )
                for lag in lags
            ],
            [yellow if is_late else None for is_late in late],
        )
    return FAILED if any(late) else OK


_OFTEN_UNKNOWN = ("behind_seconds", "pending")


def _about(lag: Mapping[str, Any]) -> str:
    return f"{'~' if lag['kind'] == 'queue' else '>'}{lag['lag']:,}"


def _trim(options: Namespace) -> int:
    from conquiet.operations.streams import describe
    from conquiet.redis import trim_stream

    keep = options.keep.total_seconds() if options.keep else None
    with redis_at(options.broker) as client:
        for name in options.streams:
            describe(client, name)  # raises if there is none, before anything is deleted
        names = ", ".join(options.streams)
        what = f"delete from {names} entries that every group and reader has processed"
        if not options.dry_run and not confirm(what, options.yes):
            return FAILED
        done = [
            trim_stream(
                client, name, keep_seconds=keep, exact=options.exact, dry_run=options.dry_run
            )
            for name in options.streams
        ]
    if options.json:
        print_json([asdict(trim) for trim in done])
        return OK
    for trim in done:
        would = "would be deleted" if trim.dry_run else "deleted"
        kept = f"the rest is kept: {trim.kept_by}"
        print(in_one_row(f"{trim.stream}: {trim.removed:,} entries {would}; {kept}"))
        if not trim.removed and keep is None and not options.exact:
            print("only whole blocks are deleted; --exact deletes single entries", file=sys.stderr)
    return OK


def _prune(options: Namespace) -> int:
    from conquiet.operations import streams

    idle = options.idle.total_seconds()
    what = f"remove idle consumers from the groups of streams {options.pattern!r}"
    if not options.dry_run and not confirm(what, options.yes):
        return FAILED
    with redis_at(options.broker) as client:
        removed = streams.remove_idle_consumers(
            client, options.pattern, idle=idle, dry_run=options.dry_run
        )
    if options.json:
        print_json([asdict(consumer) for consumer in removed])
        return OK
    if removed:
        print_table(("stream", "group", "consumer"), [(c.stream, c.group, c.name) for c in removed])
    would = "would be removed" if options.dry_run else "removed"
    print(f"{len(removed):,} idle consumers {would}")
    return OK


def _remove_group(options: Namespace) -> int:
    has_broker_alone = not is_database_given(options.database) and is_broker_given(None)
    if options.broker or (has_broker_alone and not options.database):
        return _remove_group_of_stream(options)
    from conquiet.operations import log_groups

    what = f"remove group {options.group!r} of topic {options.topic!r}, with its dead letters"
    if not confirm(what, options.yes):
        return FAILED
    with database_at(options.database) as engine:
        log_groups.remove(engine, options.topic, options.group)
    return _report_removed(options, "topic")


def _remove_group_of_stream(options: Namespace) -> int:
    from conquiet.operations.retries import open_retries
    from conquiet.operations.streams import describe, remove_group

    stream, group = options.topic, options.group
    with redis_at(options.broker) as client:
        found = next((one for one in describe(client, stream).groups if one.name == group), None)
        if found is None:
            raise NotFound(
                f"stream {stream!r} has no group {group!r}; conquiet streams lag shows them"
            )
        if open_retries(stream, client, group).list(1):
            raise ConquietError(
                f"messages wait for a later try in group {group!r} of stream {stream!r}: conquiet"
                " retries now tries them, conquiet retries never gives them up"
            )
        lost = f"{found.pending:,} entries in flight and {found.lag:,} unread"
        if not confirm(f"remove group {group!r} of stream {stream!r}, with {lost}", options.yes):
            return FAILED
        remove_group(client, stream, group, pending=found.pending, position=found.last_delivered)
    return _report_removed(options, "stream")


def _report_removed(options: Namespace, kind: str) -> int:
    if options.json:
        print_json({"removed": options.group})
    else:
        print(in_one_row(f"group {options.group} of {kind} {options.topic} removed"))
    return OK


_VERBS = (
    Verb(
        "list",
        "all streams: their length, size, groups and readers",
        ("conquiet streams list 'orders*'", "conquiet streams list --json | jq '.[].name'"),
        "0 listed; 1 no stream matches PATTERN, or Redis is out of reach; 2 wrong usage",
        _list,
    ),
    Verb(
        "lag",
        "how far behind every group, and every reader without one, is",
        (
            "conquiet streams lag 'orders*' --max 1000",
            "conquiet streams lag orders --watch 5",
            "conquiet streams lag --database postgresql://db/shop",
            "conquiet streams lag 'kafka://broker:9092?topic=orders&group=billing' --max 1000",
        ),
        "0 no lag is above --max; 1 one is, no stream matches PATTERN, or Redis is out of reach; 2"
        " wrong usage",
        _lag,
        more="""
In place of PATTERN, the URL of a source shows what waits there: amqp://…?queue=orders,
kafka://…?topic=orders&group=billing (by partition, without joining the group), sqs://REGION/orders,
postgresql://…?topic=orders&group=billing, or sqlite:///FILE?….
""",
    ),
    Verb(
        "trim",
        "delete entries that every group has acked and every reader has passed",
        (
            "conquiet streams trim orders --dry-run",
            "conquiet streams trim orders 'orders:{0}' --keep 7d --yes",
        ),
        "0 done; 1 it was not confirmed, a stream is not there, or Redis is out of reach; 2 wrong"
        " usage",
        _trim,
        more="""
A stream without groups and readers is not trimmed. Spark reads without a group; its position counts
once it is registered (conquiet pipeline run does that).
""",
    ),
    Verb(
        "prune",
        "remove the names of consumers that are idle for long and hold no entry",
        (
            "conquiet streams prune --dry-run",
            "conquiet streams prune 'orders*' --idle 12h --yes",
        ),
        "0 done; 1 it was not confirmed, or Redis is out of reach; 2 wrong usage",
        _prune,
        more="""
A process that crashed leaves its name in the group. Workers remove names that are idle for a day by
themselves; a consumer that holds entries is never removed.
""",
    ),
    Verb(
        "remove-group",
        "remove a group of a stream, or of an outbox that is read as a log",
        (
            "conquiet streams remove-group orders billing --broker redis://localhost/0",
            "conquiet streams remove-group orders billing --database postgresql://db/shop --yes",
        ),
        "0 done; 1 it was not confirmed, there is no such group, it has live consumers, or the"
        " store is out of reach; 2 wrong usage",
        _remove_group,
        more="""
Remove one whose workers are gone for good: what it has not read is kept for it, in an outbox and,
by streams trim, in a stream. What is in flight is forgotten; of an outbox, its dead letters too. A
worker that starts later creates the group again, at the beginning.
""",
    ),
)
