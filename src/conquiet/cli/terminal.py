"""The terminal: exit codes, the form of help and errors, colour, tables, confirmation."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from textwrap import indent, wrap
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from conquiet.cli.progress import end_waiting
from conquiet.errors import ConfigError, ConquietError
from conquiet.message import STEERING
from conquiet.message import printable as escape
from conquiet.secret import mask, mask_all

if TYPE_CHECKING:
    from conquiet.attempts import FailedAttempt

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""0: all is well. 1: something failed or differs. 2: wrong usage or settings. 130: Ctrl-C."""


class Parser(ArgumentParser):
    """Keeps the layout of examples, takes no abbreviations, and complains in one line.

    Options may come anywhere among the arguments of a command: `retry --table sales ID`.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        self._is_mixing = False
        self._given: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        if self._is_mixing or self._subparsers is not None:  # argparse mixes in commands only
            return super().parse_known_args(args, namespace)
        self._is_mixing = True
        try:
            found, rest = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_mixing = False
        unknown = [word for word in rest if word.startswith("--")]
        if unknown and self.add_help:  # here, where the options are known that it may mean
            close = suggest(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{close}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            choices = re.findall(r"[\w-]+", wrong[2])
            if close := suggest(wrong[1], choices):
                message = f"{message[: wrong.start()]}there is no {wrong[1]!r}{close}"
        for argument in self._given:  # whole, since a password may have spaces
            for quoted in (argument, repr(argument)[1:-1]):
                message = message.replace(quoted, mask(quoted))
        mark = red(f"{self.prog}: error:", sys.stderr)
        self.exit(USAGE, f"{mark} {one_line(mask_all(message))}; see {self.prog} --help\n")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a question that names similar words, if there are any.

    >>> suggest("statsu", ["status", "list"]), suggest("x", ["status"])
    ('; did you mean status?', '')
    """
    close = get_close_matches(word, known, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """Escape what would control the terminal in a text of several lines."""
    return escape(text, keep="\n\t")


def in_one_row(text: str) -> str:
    """Escape line breaks as well: one in a type must not look like another row of a list."""
    return escape(text)


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
    text = STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    print(text, file=stream or sys.stdout)


# --- tables ---------------------------------------------------------------------------------

Paint = Callable[[str, TextIO], str]


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    paints: Sequence[Paint | None] = (),
) -> None:
    """Print rows under their head; `paints` gives rows a colour, in their order.

    A column is as wide as its widest cell; numbers are aligned to the right. On a terminal, texts
    that do not fit continue in the next line of their column.
    """
    texts = [[_cell(value) for value in row] for row in rows]
    is_number = [_are_numbers([row[at] for row in rows]) for at in range(len(head))]
    columns = [[row[at] for row in texts] for at in range(len(head))]
    widths = [max(len(name), *map(len, cells)) for name, cells in zip(head, columns, strict=True)]
    if sys.stdout.isatty():
        widths = _fit(head, columns, widths, is_number, shutil.get_terminal_size().columns)
    for line in _lines(head, widths, is_number):
        print(dim(line, sys.stdout))
    for at, text in enumerate(texts):
        paint = paints[at] if at < len(paints) else None
        for line in _lines(text, widths, is_number):
            print(paint(line, sys.stdout) if paint else line)


_LEAST = 8
"""A column of texts is not made narrower than this."""
_DATE = len("2026-01-31T")
_time = re.compile(r"\d{4}-\d\d-\d\dT(\d\d:\d\d\S*)")


def _fit(
    head: Sequence[str],
    columns: Sequence[Sequence[str]],
    widths: Sequence[int],
    is_number: Sequence[bool],
    most: int,
) -> list[int]:
    """Narrow columns until a line fits, or none can be narrowed further.

    First names over narrow numbers, then times, each to date above clock, then the widest texts.
    Numbers and words of names are not broken.
    """
    found = list(widths)
    words = [max(map(len, name.split()), default=0) for name in head]
    clocks = [[_time.fullmatch(cell) for cell in cells] for cells in columns]

    def is_wide() -> bool:
        return sum(found) + 2 * (len(found) - 1) > most

    def narrow(chosen: Sequence[int], least: Callable[[int], int]) -> None:
        while is_wide() and (wider := [at for at in chosen if found[at] > least(at)]):
            found[max(wider, key=found.__getitem__)] -= 1

    def least_number(at: int) -> int:
        return max(words[at], *map(len, columns[at]))

    narrow([at for at, right in enumerate(is_number) if right], least_number)
    texts = [at for at, right in enumerate(is_number) if not right]
    for at in texts:
        if is_wide() and clocks[at] and all(clocks[at]):
            found[at] = max(words[at], _DATE, *(len(one[1]) for one in clocks[at] if one))
    narrow(texts, lambda at: max(_LEAST, words[at]))
    return found


def _lines(cells: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> list[str]:
    """Break cells that are wider than their columns, at a space, a dash or a colon if there is one.

    >>> _lines(["order.placed", "7"], [8, 1], [False, True])
    ['order.    7', 'placed']
    """
    broken = [_break(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, broken))
    rows = [[part[at] if at < len(part) else "" for part in broken] for at in range(height)]
    return [_line(row, widths, is_number) for row in rows]


def _break(text: str, width: int) -> list[str]:
    parts: list[str] = []
    if (
        len(text) > width
        and (found := _time.fullmatch(text))
        and max(_DATE, len(found[1])) <= width
    ):
        return [text[: found.start(1)], found[1]]
    while len(text) > width:
        at = max(text.rfind(mark, 0, width) for mark in " -:/._") + 1
        at = at if at > width // 2 else width
        parts.append(text[:at].rstrip())
        text = text[at:]
    return [*parts, text]


def _are_numbers(column: Sequence[object]) -> bool:
    """Return whether a column holds numbers, empty cells, or bounds such as `>10,000`."""
    kinds = [isinstance(cell, (int, float)) or str(cell).startswith(("<", ">")) for cell in column]
    return any(kinds) and all(kind or cell == "" for kind, cell in zip(kinds, column, strict=True))


def _line(cells: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    return "  ".join(
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, is_number, strict=True)
    ).rstrip()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else in_one_row(str(value))


def print_row(*fields: str) -> None:
    """Print fields in one row; on a terminal, those that do not fit go below, indented."""
    shown = [in_one_row(field) for field in fields if field]
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    line = ""
    for field in shown:
        if line and len(line) + 2 + len(field) > most:
            print(line)
            line = f"  {field}"
        else:
            line = f"{line}  {field}" if line else field
    print(line)


def hang(text: str, margin: int) -> str:
    """Break a text between its words, where a terminal ends, and indent what follows.

    >>> hang("not a terminal", 4)
    'not a terminal'
    """
    if not sys.stdout.isatty():
        return text
    width = max(_LEAST, shutil.get_terminal_size().columns - margin)
    lines = wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * margin).join(lines)


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Print names and values; a value of several lines is printed below its name, indented."""
    names = [in_one_row(name) for name, _ in facts]
    width = max(map(len, names), default=0)
    for name, (_, value) in zip(names, facts, strict=True):
        text = "-" if value in (None, "") else printable(str(value))
        if "\n" in text:
            print(name)
            margin = " " * (len(name) - len(name.lstrip(" ")) + 2)
            print(indent(text.rstrip(), margin, lambda line: True))
        else:
            print(f"{name:<{width}}  {text}")


def print_errors(errors: Sequence[FailedAttempt]) -> None:
    """Print the errors of attempts, one in a row."""
    rows = (in_one_row(f"{one.attempt}  {one.time}  {one.error}") for one in errors)
    if text := "".join(f"{row}\n" for row in rows):
        print_facts([("errors", text)])


# --- confirmation ---------------------------------------------------------------------------


def add_yes(parser: ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")


def confirm(what: str, yes: bool) -> bool:
    """Ask before deleting; `what` is such as "delete 3 rows of outbox", `yes` answers for it."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"this would {what}; --yes confirms it")
    end_waiting()
    try:
        answer = input(f"{what}? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("nothing was deleted", file=sys.stderr)
    return False


# --- watching -------------------------------------------------------------------------------

_CLEAR = "\x1b[H\x1b[2J"


def add_watch(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="show it again every so many seconds (2), until Ctrl-C",
    )


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def watch(seconds: float | None, show: Callable[[], int]) -> int:
    """Show once, or with `seconds` again and again until Ctrl-C; return the last exit code.

    A server that is out of reach meanwhile is reported, and asked again.
    """
    if seconds is None:
        return show()
    if not 0.1 <= seconds <= 86_400:
        raise ConfigError(f"--watch {seconds:g}: must be 0.1 seconds or more, and a day at most")
    code = OK
    try:
        while True:
            if sys.stdout.isatty():
                print(_CLEAR, end="")
            try:
                code = show()
            except ConfigError:
                raise
            except ConquietError as error:
                code = FAILED
                print(red(one_line(mask_all(str(error))), sys.stdout))
            sys.stdout.flush()
            time.sleep(seconds)
    except KeyboardInterrupt:
        return code
