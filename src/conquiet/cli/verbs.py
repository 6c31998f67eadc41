"""A command and its help, in the form that all have."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """What a command does, how it is called, and what its exit codes mean."""

    name: str
    what: str
    """Its description; up to the first colon or semicolon it stands in the list of commands."""
    examples: tuple[str, ...]
    codes: str
    run: Callable[[Namespace], int]
    more: str = ""
    """What else its users should know."""


def add_verb(verbs: Any, common: ArgumentParser, verb: Verb) -> ArgumentParser:
    title = "example" if len(verb.examples) == 1 else "examples"
    lines = "\n".join(f"  {example}" for example in verb.examples)
    more = f"\n{verb.more.strip()}\n" if verb.more else ""
    parser: ArgumentParser = verbs.add_parser(
        verb.name,
        help=verb.what.partition(";")[0].partition(":")[0],
        description=f"{verb.what[0].upper()}{verb.what[1:]}.",
        epilog=f"{title}:\n{lines}\n{more}\nexit codes: {verb.codes}\n",
        parents=[common],
    )
    parser.set_defaults(run=verb.run)
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    return parser


def add_group(commands: Any, name: str, what: str, example: str) -> Any:
    """A group of commands, such as `conquiet streams`."""
    group = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"example:\n  {example}\n\nexit codes: as each command says in its own --help\n",
    )
    return group.add_subparsers(title="commands", metavar="COMMAND", required=True)
