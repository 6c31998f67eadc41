"""`conquiet retries list|show|now|never`: messages that wait for a later try."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from conquiet.cli.options import Verb, add_broker, add_group, add_verb, count, redis_at
from conquiet.cli.terminal import (
    FAILED,
    OK,
    dim,
    green,
    hang,
    one_line,
    print_errors,
    print_facts,
    print_json,
    print_row,
)
from conquiet.config import DATABASES
from conquiet.errors import ConfigError

_PLACES = """
PLACE is the URL of a log with topic and group (worker run --source), or the name of a Redis stream,
whose group --group names; each partition of a topic is a stream, as orders:{0}. A message is named
by its id there, or by that of its event.
"""
_SHOWN = 160


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "retries",
        "messages that wait for a later try: until when, why, now, never",
        "conquiet retries list orders --group billing",
    )
    for verb in _VERBS:
        parser = add_verb(verbs, common, verb)
        parser.add_argument("place", metavar="PLACE", help="a stream, or the URL of a log")
        if verb.name == "list":
            parser.add_argument(
                "--limit", type=count, default=100, metavar="N", help="messages at most (100)"
            )
        elif verb.name == "show":
            parser.add_argument("id", metavar="ID", help="of the message or its event")
        else:
            parser.add_argument("ids", nargs="*", metavar="ID", help="of messages or their events")
            parser.add_argument("--all", action="store_true", help="all of them")
        parser.add_argument("--group", default="", metavar="NAME", help="of a Redis stream")
        add_broker(parser)


def _list(options: Namespace) -> int:
    with _retries(options) as retries:
        found = retries.list(options.limit)
        is_there = bool(found) or retries.exists()
    if options.json:
        print_json([asdict(item) for item in found])
        return OK if is_there else FAILED
    for item in found:
        until = f"until {item.due}" if item.due else "behind another"
        print_row(*(item.id, until, item.event_type, item.event_id, f"{item.attempts} attempts"))
        why = one_line(item.reason) or "waits for an earlier message of its key"
        print(dim(f"    {hang(f'{why:.{_SHOWN}}', 4)}", sys.stdout))
    if not is_there:
        print(f"no message waits: {retries.name} does not exist (yet)", file=sys.stderr)
        return FAILED
    if not found:
        print(green("no message waits", sys.stdout))
    return OK


def _show(options: Namespace) -> int:
    from conquiet.operations.retries import find

    with _retries(options) as retries:
        item = find(retries, options.id)
    facts = asdict(item)
    if options.json:
        print_json(facts)
        return OK
    del facts["errors"]
    print_facts(list(facts.items()))
    print_errors(item.errors)
    return OK


def _now(options: Namespace) -> int:
    return _act(options, "now", "are due now")


def _never(options: Namespace) -> int:
    return _act(options, "never", "are dead letters now")


def _act(options: Namespace, action: str, said: str) -> int:
    if bool(options.ids) == options.all:
        raise ConfigError("name messages by their ids, or give --all")
    with _retries(options) as retries:
        done = getattr(retries, action)(None if options.all else frozenset(options.ids))
    is_wanting = bool(options.ids) and not done
    if options.json:
        print_json({"ok": not is_wanting, "done": list(done)})
    else:
        print(f"{len(done):,} messages {said}")
        if is_wanting:
            print(
                "no message of such an id waits for its time; one that waits for an earlier message"
                " of its key is tried after that",
                file=sys.stderr,
            )
    return FAILED if is_wanting else OK


@contextmanager
def _retries(options: Namespace) -> Iterator[Any]:
    from conquiet.operations.retries import open_retries

    kind, colon, _ = options.place.partition(":")
    if colon and kind.partition("+")[0] in DATABASES:
        yield open_retries(options.place)
        return
    with redis_at(options.broker) as client:
        yield open_retries(options.place, client, options.group)


_CODES = "0 done; 1 no message has such an id, or the store is out of reach; 2 wrong usage"
_VERBS = (
    Verb(
        "list",
        "what waits, the next one first: until when, after how many attempts, and why",
        (
            "conquiet retries list orders --group billing",
            "conquiet retries list 'postgresql://app@localhost/shop?topic=shop&group=shop' --json",
        ),
        "0 listed; 1 no such stream or group, or the store is out of reach; 2 wrong usage",
        _list,
        _PLACES,
    ),
    Verb(
        "show",
        "one message: until when it waits, and the errors of its attempts",
        ("conquiet retries show orders 0197f6c1-5f5e-7a53-9d0c-9d6f1f0b6a11 --group billing",),
        "0 shown; 1 no message of that id waits, or the store is out of reach; 2 wrong usage",
        _show,
        f"{_PLACES}\nOf many errors, the first one is kept and the latest nine.\n",
    ),
    Verb(
        "now",
        "try messages again now, not when their time has come",
        ("conquiet retries now orders --group billing --all",),
        _CODES,
        _now,
        f"{_PLACES}\nA worker of the group takes them within a second.\n",
    ),
    Verb(
        "never",
        "give messages up: they are dead letters of their group at once",
        ("conquiet retries never orders --group billing 0197f6c1-5f5e-7a53-9d0c-9d6f1f0b6a11",),
        _CODES,
        _never,
        f"{_PLACES}\n`conquiet dead-letters` shows, replays and drops them.\n",
    ),
)
