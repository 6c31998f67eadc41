"""Write the tables of options in docs/spark.md from the code: python scripts/spark_options.py

A table follows a comment that names it, as `<!-- options: outbox -->`, up to a blank line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from conquiet.spark.log.options import READ_OPTIONS, WRITE_OPTIONS
from conquiet.spark.options import Option
from conquiet.spark.outbox.options import OUTBOX_OPTIONS
from conquiet.spark.upsert.target import UPSERT_OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "spark.md"
TABLES: dict[str, Mapping[str, Option]] = {
    "log": READ_OPTIONS,
    "outbox": OUTBOX_OPTIONS,
    "upsert": UPSERT_OPTIONS,
    "sink": WRITE_OPTIONS,
}

_table = re.compile(r"<!-- options: (\w+) -->\n\n(?:\|.*\n)*")


def written(page: str) -> str:
    """Return the page with its tables as the code has them now."""
    found = set(_table.findall(page))
    if found != set(TABLES):
        raise SystemExit(f"{PAGE.name} has tables of {sorted(found)}, not of {sorted(TABLES)}")
    return _table.sub(lambda match: _rows(match[1]), page)


def _rows(name: str) -> str:
    rows = [(f"`{option}`", *about) for option, about in TABLES[name].items()]
    head = ("option", "default", "meaning")
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join(
        [f"<!-- options: {name} -->", "", lines[0], "|---" * len(head) + "|", *lines[1:], ""]
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
