"""`conquiet dead-letters list|show|replay|drop`: in streams, files and queues."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from conquiet.cli.options import Verb, add_broker, add_group, add_verb, count, moment, redis_at
from conquiet.cli.progress import Progress
from conquiet.cli.terminal import (
    FAILED,
    OK,
    add_yes,
    confirm,
    dim,
    green,
    hang,
    in_one_row,
    one_line,
    print_errors,
    print_facts,
    print_json,
    print_row,
    print_table,
    red,
)
from conquiet.config import DATABASES
from conquiet.errors import ConfigError

_PLACES = """
PLACE is the name of a Redis stream, file:PATH of JSON lines (worker run --dead-letters),
kombu:QUEUE, the URL of a log with topic and group (worker run --source), or that of a dead letter
queue or topic: amqp://…?queue=orders.dead, kafka://…?topic=orders.dead, sqs://REGION/orders-dead. A
letter is named by its place in there (entry id, line, position, number) or by the id of its event.
"""
_SHOWN = 160


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "dead-letters",
        "failed messages: reasons, replay, deletion",
        "conquiet dead-letters list orders-dead --error timeout",
    )
    listed, show, replay, drop = (add_verb(verbs, common, verb) for verb in _VERBS)
    listed.add_argument("place", nargs="?", metavar="PLACE", help="(which streams hold some)")
    for parser in (show, replay, drop):
        parser.add_argument("place", metavar="PLACE", help="a stream, file:PATH, kombu:QUEUE, URL")
    show.add_argument("id", metavar="ID", help="of the letter, or of its event")
    for parser in (replay, drop):
        parser.add_argument("ids", nargs="*", metavar="ID", help="of letters, or of their events")
        parser.add_argument("--all", action="store_true", help="all of them")
        parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    for parser in (listed, replay, drop):
        _add_filter(parser)
    for parser in (listed, show, replay, drop):
        add_broker(parser)
        parser.add_argument(
            "--prefix", default="", metavar="TEXT", help="of kombu:QUEUE, its global_keyprefix"
        )
    replay.add_argument(
        "--to", metavar="WHERE", help="another stream or queue; of a file, a sink: redis:?stream=…"
    )
    add_yes(drop)


def _add_filter(parser: ArgumentParser) -> None:
    parser.add_argument("--type", default="", metavar="TYPE", help="of the event; may have * and ?")
    parser.add_argument("--source", default="", metavar="SOURCE", help="likewise")
    parser.add_argument("--error", default="", metavar="TEXT", help="in the reason or traceback")
    for name, what in (("--since", "died then or later"), ("--until", "then or earlier")):
        parser.add_argument(
            name, type=moment, metavar="TIME", help=f"{what}: 2h ago, or 2026-01-31T12:00 (UTC)"
        )
    parser.add_argument("--limit", type=count, metavar="N", help="letters at most (list: 100)")


def _list(options: Namespace) -> int:
    if options.place is None:
        return _list_places(options)
    from conquiet.operations import dead_letters

    with _letters(options) as letters:
        found = dead_letters.find(letters, _filter_of(options), options.limit or 100)
        is_there = bool(found) or letters.exists()
    if options.json:
        print_json([asdict(letter) for letter in found])
        return OK
    for letter in found:
        print_row(
            *(letter.id, letter.time, letter.event_type, letter.event_id, letter.handler),
            f"{letter.attempts} attempts",
        )
        print(dim(f"    {hang(f'{one_line(letter.reason):.{_SHOWN}}', 4)}", sys.stdout))
    if not found:
        print(green("no dead letters", sys.stdout))
        if not is_there:  # the first letter creates it
            print(f"{letters.name}: does not exist (yet)", file=sys.stderr)
    return OK


def _list_places(options: Namespace) -> int:
    from conquiet.operations import dead_letters

    with redis_at(options.broker) as client:
        found = dead_letters.list_streams(client)
    if options.json:
        print_json([{"stream": name, "letters": length} for name, length in found.items()])
    elif not found:
        print(green("no stream holds dead letters", sys.stdout))
    else:
        print_table(("stream", "letters"), list(found.items()))
    return OK


def _show(options: Namespace) -> int:
    from conquiet.operations import dead_letters

    with _letters(options) as letters:
        letter = dead_letters.show(letters, options.id)
    if options.json:
        print_json(asdict(letter))
        return OK
    facts = asdict(letter)
    attributes = facts.pop("attributes")
    del facts["errors"]
    data, traceback = facts.pop("data"), facts.pop("traceback")
    print_facts(list(facts.items()))
    print_errors(letter.errors)
    rows = [in_one_row(f"{name}: {value}") for name, value in attributes.items()]
    print_facts([("attributes", "\n".join(rows) + "\n")])
    print_facts(
        [("data", f"{_readable(data)}\n"), ("traceback", f"{traceback}\n" if traceback else "")]
    )
    return OK


def _readable(data: str) -> str:
    """Write JSON over several lines; anything else as it is."""
    import json

    try:
        return json.dumps(json.loads(data), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return data


def _replay(options: Namespace) -> int:
    from conquiet.operations import dead_letters

    wanted = _require_filter(options)
    is_file = options.place.startswith("file:")
    with _letters(options) as letters, Progress("replaying") as progress:
        outcome = dead_letters.replay(
            letters,
            wanted,
            to=None if is_file else options.to,
            limit=options.limit,
            dry_run=options.dry_run,
            progress=progress.show,
        )
    return _report(outcome, options, "replayed")


def _drop(options: Namespace) -> int:
    from conquiet.operations import dead_letters

    wanted = _require_filter(options)
    with _letters(options) as letters:
        going = dead_letters.drop(letters, wanted, limit=options.limit, dry_run=True)
        if options.dry_run or not going.done:
            return _report(going, options, "dropped")
        what = f"delete {len(going.done):,} dead letters of {letters.name} for good"
        if not confirm(what, options.yes):
            return FAILED
        with Progress("dropping", len(going.done)) as progress:
            # Not letters that arrived after the confirmation.
            outcome = dead_letters.drop(
                letters, wanted, among=frozenset(going.done), progress=progress.show
            )
    return _report(outcome, options, "dropped")


def _report(outcome: Any, options: Namespace, done: str) -> int:
    is_wanting = bool(outcome.failed) or (bool(options.ids) and not outcome.done)
    if options.json:
        print_json({"ok": not is_wanting, **asdict(outcome)})
        return FAILED if is_wanting else OK
    would = "would be " if outcome.dry_run else ""
    print(f"{len(outcome.done):,} dead letters {would}{done}")
    for failure in outcome.failed:
        line = f"{red('kept', sys.stderr)} {failure.id}: {one_line(failure.why)}"
        print(line, file=sys.stderr)
    if is_wanting and not outcome.failed:
        print("no letter has such an id", file=sys.stderr)
    return FAILED if is_wanting else OK


def _filter_of(options: Namespace) -> Any:
    from conquiet.operations.dead_letters import Filter

    return Filter(
        tuple(getattr(options, "ids", ())),
        options.type,
        options.source,
        options.error,
        options.since,
        options.until,
    )


def _require_filter(options: Namespace) -> Any:
    """Return the filter; all letters only with --all."""
    from conquiet.operations.dead_letters import Filter

    wanted = _filter_of(options)
    if (wanted == Filter()) != options.all:
        raise ConfigError(
            "name the letters by ids, --type, --source, --error, --since or --until; or give --all"
        )
    return wanted


@contextmanager
def _letters(options: Namespace) -> Iterator[Any]:
    """Open the place that was named."""
    from conquiet.operations.brokers import is_broker
    from conquiet.operations.dead_letters import open_letters

    kind = options.place.partition(":")[0].partition("+")[0]
    if (kind in DATABASES and options.place != kind) or is_broker(options.place):
        yield open_letters(options.place)
        return
    if not options.place.startswith("file:"):
        with redis_at(options.broker) as client:
            yield open_letters(options.place, client, prefix=options.prefix)
        return
    with ExitStack() as files:
        to = getattr(options, "to", None)
        sink = None if to is None else _sink_of(options, to, files)
        yield open_letters(options.place, sink=sink)


def _sink_of(options: Namespace, to: str, files: ExitStack) -> Any:
    from conquiet.registry import SinkOptions, connect_sink, refuse_one_file_for_both

    refuse_one_file_for_both(options.place, to)
    chosen = SinkOptions(broker=options.broker, needs_stream=True, origin="--to", closing=files)
    return connect_sink(to, chosen).sink


_VERBS = (
    Verb(
        "list",
        "the dead letters of a place, the oldest first; without one, which streams hold some",
        (
            "conquiet dead-letters list",
            "conquiet dead-letters list orders-dead --type 'order.*' --error timeout --since 2h",
            "conquiet dead-letters list file:failed.jsonl --json | jq '.[].reason'",
        ),
        "0 listed; 1 a file is not there, or Redis is out of reach; 2 wrong usage or settings",
        _list,
        _PLACES,
    ),
    Verb(
        "show",
        "one dead letter: payload, error, traceback, attempts, where it came from",
        ("conquiet dead-letters show orders-dead 0197f6c1-5f5e-7a53-9d0c-9d6f1f0b6a11",),
        "0 shown; 1 there is none of that id, or Redis is out of reach; 2 wrong usage",
        _show,
        _PLACES,
    ),
    Verb(
        "replay",
        "send messages on their way again, to where they came from or elsewhere",
        (
            "conquiet dead-letters replay orders-dead --error timeout --dry-run",
            "conquiet dead-letters replay orders-dead 1700000000000-0",
            "conquiet dead-letters replay file:failed.jsonl --all --to file:commands.jsonl",
        ),
        "0 done; 1 a letter could not be replayed and was kept, an id is not there, or Redis is\n"
        "out of reach; 2 wrong usage",
        _replay,
        f"""{_PLACES}
A message is published, then its letter is removed: killed in between, it is in both places. It
keeps its id, so that an inbox knows it. Every group of the stream gets it again.
""",
    ),
    Verb(
        "drop",
        "delete dead letters for good",
        (
            "conquiet dead-letters drop orders-dead --type 'test.*' --dry-run",
            "conquiet dead-letters drop orders-dead --until 30d --yes",
        ),
        "0 done; 1 it was not confirmed, an id is not there, or Redis is out of reach; 2 wrong"
        " usage",
        _drop,
        _PLACES,
    ),
)
