"""What the commands share: exit codes, the form of help and errors, colour on terminals."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""0: all is well. 1: something failed or differs. 2: wrong usage or settings. 130: Ctrl-C."""


class Parser(ArgumentParser):
    """Keeps the layout of examples, takes no abbreviations, and complains in one line.

    Options may stand anywhere among the arguments of a command: `retry --table sales ID`.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        self._is_mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._is_mixing or self._subparsers is not None:  # argparse mixes in commands only
            return super().parse_known_args(args, namespace)
        self._is_mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_mixing = False

    def error(self, message: str) -> NoReturn:
        mark = red(f"{self.prog}: error:", sys.stderr)
        self.exit(USAGE, f"{mark} {one_line(message)}; see {self.prog} --help\n")


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """Control characters written out: what a message holds must not steer somebody's terminal."""
    return _steering.sub(lambda found: repr(found[0])[1:-1], text)


_steering = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def has_colour(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _painter(code: int) -> Callable[[str, TextIO], str]:
    def paint(text: str, stream: TextIO) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if has_colour(stream) else text

    return paint


red, green, yellow, dim = (_painter(code) for code in (31, 32, 33, 2))


def print_json(value: Any, stream: TextIO | None = None) -> None:
    import json

    text = json.dumps(value, ensure_ascii=False)
    text = _steering.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    print(text, file=stream or sys.stdout)
