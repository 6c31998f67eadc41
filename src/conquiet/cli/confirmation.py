"""Before something is deleted for good, somebody says so."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from conquiet.cli.progress import end_waiting
from conquiet.errors import ConfigError


def add_yes(parser: ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")


def confirmed(what: str, yes: bool) -> bool:
    """Whether to go on: by --yes, or by an answer; `what` is such as "delete 3 rows of outbox"."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"this would {what}; --yes says that you mean it")
    end_waiting()
    try:
        answer = input(f"{what}? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("nothing was deleted", file=sys.stderr)
    return False
