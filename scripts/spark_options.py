"""Writes the tables of options in docs/spark.md from the code: python scripts/spark_options.py

A table stands behind a comment that names it, as `<!-- options: outbox -->`, up to a blank line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from conquiet.spark.log.options import READ_OPTIONS
from conquiet.spark.log.writer_options import WRITE_OPTIONS
from conquiet.spark.outbox.options import OPTIONS as OUTBOX_OPTIONS
from conquiet.spark.upsert.options import OPTIONS as UPSERT_OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "spark.md"
TABLES: dict[str, Mapping[str, str] | Mapping[str, tuple[str, str]]] = {
    "log": READ_OPTIONS,
    "outbox": OUTBOX_OPTIONS,
    "upsert": UPSERT_OPTIONS,
    "sink": WRITE_OPTIONS,
}

_table = re.compile(r"<!-- options: (\w+) -->\n\n(?:\|.*\n)*")


def written(page: str) -> str:
    """The page with its tables as the code has them now."""
    found = set(_table.findall(page))
    if found != set(TABLES):
        raise SystemExit(f"{PAGE.name} has tables of {sorted(found)}, not of {sorted(TABLES)}")
    return _table.sub(lambda match: _rows(match[1]), page)


def _rows(name: str) -> str:
    options = TABLES[name]
    rows = [
        (f"`{option}`", *((about,) if isinstance(about, str) else about))
        for option, about in options.items()
    ]
    has_defaults = len(rows[0]) == 3
    head = ("option", "default", "meaning") if has_defaults else ("option", "meaning")
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join(
        [f"<!-- options: {name} -->", "", lines[0], "|---" * len(head) + "|", *lines[1:], ""]
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
