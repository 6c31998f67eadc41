"""`conquiet kombu`: the queues of Kombu and Celery on Redis Streams, and clearing up after them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from conquiet.cli.options import add_broker, add_group, redis_at
from conquiet.cli.terminal import (
    FAILED,
    OK,
    add_yes,
    confirm,
    green,
    in_one_row,
    one_line,
    print_json,
    print_table,
    red,
    yellow,
)
from conquiet.errors import ConfigError

_INSPECT_EPILOG = """\
examples:
  conquiet kombu inspect --broker redis-streams://localhost/0
  conquiet kombu inspect celery --dead-letters
  conquiet kombu inspect --json | jq '.queues[] | {name, ready, pending}'

exit codes: 0 all is well; 1 there are dead letters, a dead consumer holds messages, a named queue
is not there, or Redis is out of reach; 2 wrong usage or settings
"""
_CLEAN_EPILOG = """\
examples:
  conquiet kombu clean --broker redis-streams://localhost/0
  conquiet kombu clean --delete-queue old.orders
  conquiet kombu clean --delete-dead-letters celery --yes

Without --delete-…, no message is lost by it: it is safe at any time, and while workers run.

exit codes: 0 done; 1 a queue was kept or is not there, it was not confirmed, or Redis is out of
reach; 2 wrong usage or settings
"""
_HEAD = ("queue", "ready", "in flight", "consumers", "dead consumers", "dead letters")
_LETTERS_SHOWN = 100


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "kombu",
        "the queues of Kombu and Celery on Redis Streams",
        "conquiet kombu inspect --broker redis-streams://localhost/0",
    )
    for parser in (_inspect_parser(verbs, common), _clean_parser(verbs, common)):
        add_broker(parser)
        parser.add_argument(
            "--prefix", default="", metavar="TEXT", help="the global_keyprefix of the application"
        )
        parser.add_argument("--json", action="store_true", help="answer in JSON")


def _inspect_parser(verbs: Any, common: ArgumentParser) -> ArgumentParser:
    parser: ArgumentParser = verbs.add_parser(
        "inspect",
        help="backlog, messages in flight and consumers of each queue",
        description="Show the backlog, messages in flight and consumers of each queue.",
        epilog=_INSPECT_EPILOG,
        parents=[common],
    )
    parser.add_argument("queues", nargs="*", metavar="QUEUE", help="only these (all)")
    parser.add_argument("--dead-letters", action="store_true", help="with their reasons")
    parser.set_defaults(run=_inspect)
    return parser


def _clean_parser(verbs: Any, common: ArgumentParser) -> ArgumentParser:
    parser: ArgumentParser = verbs.add_parser(
        "clean",
        help="remove dead consumers and the names of expired queues",
        description="Remove dead consumers, which gives back their messages, and expired queues.",
        epilog=_CLEAN_EPILOG,
        parents=[common],
    )
    many: Any = {"action": "append", "default": [], "metavar": "QUEUE"}
    parser.add_argument(
        "--delete-queue",
        help="also delete this queue, if it is empty and has no consumer; may be given again",
        **many,
    )
    parser.add_argument("--force", action="store_true", help="delete it with its messages")
    parser.add_argument(
        "--delete-dead-letters",
        help="also delete the dead letters of this queue; may be given again",
        **many,
    )
    add_yes(parser)
    parser.set_defaults(run=_clean)
    return parser


def _inspect(options: Namespace) -> int:
    room = _room()
    with redis_at(options.broker) as client:
        found = {info.name: info for info in room.queues(client, options.prefix)}
        chosen = [found[name] for name in options.queues or found if name in found]
        letters = {}
        if options.dead_letters:
            letters = {
                info.name: room.dead_letters(client, info.name, options.prefix, _LETTERS_SHOWN)
                for info in chosen
                if info.dead_letters
            }
    missing = _print_missing(options.queues, found, options.prefix)
    is_well = not missing and not any(map(_is_in_trouble, chosen))
    if options.json:
        print_json({"ok": is_well, "queues": [_as_json(info, letters) for info in chosen]})
    else:
        _print_queues(chosen, letters)
    return OK if is_well else FAILED


def _print_missing(named: Sequence[str], known: Collection[str], prefix: str) -> list[str]:
    """Return the named queues that do not exist, and print them."""
    missing = [name for name in named if name not in known]
    for name in missing:
        print(f"no queue {name!r} under the prefix {prefix!r}", file=sys.stderr)
    return missing


def _count_stuck(info: Any) -> int:
    """Count messages in flight with dead consumers; a live consumer takes them over."""
    return sum(consumer.pending for consumer in info.consumers if not consumer.alive)


def _as_json(info: Any, letters: dict[str, list[Any]]) -> dict[str, Any]:
    shown = asdict(info) | {"alive": info.alive, "expired": info.expired}
    if info.name in letters:
        shown["letters"] = [
            asdict(letter) | {"message": (letter.message or b"").decode(errors="replace")}
            for letter in letters[info.name]
        ]
    return shown


def _print_queues(chosen: Sequence[Any], letters: dict[str, list[Any]]) -> None:
    if not chosen:
        print("no queues")
        return
    rows = [
        (
            info.name if info.exists else f"{info.name} (expired)",
            *(info.ready, info.pending, info.alive, info.expired, info.dead_letters),
        )
        for info in chosen
    ]
    print_table(_HEAD, rows, [yellow if _is_in_trouble(info) else None for info in chosen])
    for queue, some in letters.items():
        for letter in some:
            print(red(in_one_row(f"{queue} {letter.id}"), sys.stdout), one_line(letter.reason))
    if any(_count_stuck(info) for info in chosen):
        print("conquiet kombu clean gives back the messages of dead consumers", file=sys.stderr)


def _is_in_trouble(info: Any) -> bool:
    return bool(info.dead_letters or _count_stuck(info))


def _clean(options: Namespace) -> int:
    room = _room()
    if options.force and not options.delete_queue:
        raise ConfigError("--force belongs to --delete-queue: name the queue to delete")
    going = _describe_deletions(options)
    if going and not confirm(f"delete {going}", options.yes):
        return FAILED
    with redis_at(options.broker) as client:
        known = {info.name for info in room.queues(client, options.prefix)}
        removed = room.remove_dead_consumers(client, options.prefix)
        expired = room.forget_expired_queues(client, options.prefix)
        deleted = {
            name: room.delete_queue(client, name, options.prefix, options.force)
            for name in options.delete_queue
            if name in known
        }
        letters = {
            name: room.delete_dead_letters(client, name, options.prefix)
            for name in options.delete_dead_letters
        }
    missing = _print_missing(options.delete_queue, known, options.prefix)
    kept = [name for name, is_gone in deleted.items() if not is_gone]
    if options.json:
        print_json(
            {"ok": not kept and not missing, **asdict(removed), "expired_queues": expired}
            | {"deleted_queues": [name for name in deleted if name not in kept]}
            | {"kept_queues": kept, "deleted_dead_letters": letters}
        )
    else:
        _print_cleaned(removed, len(expired), deleted, letters)
    return FAILED if kept or missing else OK


def _print_cleaned(
    removed: Any, expired: int, deleted: dict[str, bool], letters: dict[str, int]
) -> None:
    print(
        f"removed {removed.consumers} dead consumers, gave back {removed.given_back} messages,"
        f" forgot {expired} expired queues"
    )
    for name, count in letters.items():
        print(f"deleted {count} dead letters of {name}")
    for name, is_gone in deleted.items():
        if is_gone:
            print(green(f"deleted {name}", sys.stdout))
        else:
            print(
                red(f"kept {name}: it is not empty, or has a consumer;", sys.stdout),
                "--force deletes it anyway",
            )


def _describe_deletions(options: Namespace) -> str:
    """Describe what the options delete for good."""
    with_what = " with all its messages" if options.force else ""
    going = [f"the queue {name}{with_what}" for name in options.delete_queue]
    going += [f"the dead letters of {name}" for name in options.delete_dead_letters]
    return ", ".join(going)


def _room() -> Any:
    from conquiet.config import require

    return require("conquiet.kombu.inspection", "kombu")
