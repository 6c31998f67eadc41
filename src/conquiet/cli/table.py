"""Tables on the screen: a column as wide as its widest cell, numbers to the right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from conquiet.cli.terminal import dim, printable
from conquiet.message import printable as in_one_row

Paint = Callable[[str, TextIO], str]


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    paints: Sequence[Paint | None] = (),
) -> None:
    """Rows under their head; `paints` gives rows a colour, in their order."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *texts, strict=True)]
    is_number = [_are_numbers([row[at] for row in rows]) for at in range(len(head))]
    print(dim(_line(head, widths, is_number), sys.stdout))
    for at, text in enumerate(texts):
        line = _line(text, widths, is_number)
        paint = paints[at] if at < len(paints) else None
        print(paint(line, sys.stdout) if paint else line)


def _are_numbers(column: Sequence[object]) -> bool:
    """Of a column in which some cells may be empty, or say that there are more: `>10,000`."""
    kinds = [isinstance(cell, (int, float)) or str(cell).startswith(">") for cell in column]
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


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Names and values; a value of several lines stands below its name."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        text = "-" if value in (None, "") else printable(str(value))
        if "\n" in text:
            print(name)
            print("\n".join(f"  {line}" for line in text.rstrip().splitlines()))
        else:
            print(f"{name:<{width}}  {text}")
