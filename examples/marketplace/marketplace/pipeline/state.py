"""State: from which files of silver the other tables were made, and what is still to be done.

A file of silver is named by its bytes, so a day whose file has another name has other rows. Days of
the marts are written down before the facts change under them: after a crash nobody could tell any
more on which day an order stood before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from urllib.parse import unquote

from marketplace.pipeline.tables import STORED


@dataclass
class State:
    """What `DIR/_pipeline/state.json` holds."""

    path: Path
    files: set[str] = field(default_factory=set)
    """Of silver, when all tables were last made from it."""
    days: set[date] = field(default_factory=set)
    """Of the marts, that a refresh began with and did not finish."""
    tables: set[str] = field(default_factory=lambda: set(STORED))
    """Which tables that is true of; others may be older, or not there."""
    raw: set[str] = field(default_factory=set)
    """Files of bronze, when all tables were last made: what came since is in the others."""

    @staticmethod
    def is_at(root: Path) -> bool:
        """Whether there ever was a refresh."""
        return _path(root).exists()

    @classmethod
    def at(cls, root: Path) -> State:
        path = _path(root)
        if not path.exists():
            return cls(path)
        said = json.loads(path.read_text())
        days = {date.fromisoformat(day) for day in said["days"]}
        tables, raw = said.get("tables", STORED), said.get("raw", ())
        return cls(path, set(said["files"]), days, set(tables), set(raw))

    def choose(self, tables: Collection[str]) -> None:
        """Have some tables made from here on: anew, if it is not known what they were made from."""
        if not self.tables.issuperset(tables):
            self.files = set()
        self.tables = set(tables)

    def changed_days(self, files: set[str]) -> set[date | None]:
        """The days of silver that were written since."""
        return {day_of(name) for name in self.files ^ files}

    def forget(self, days: set[date | None]) -> None:
        """Have days made again, all of them, whether or not their files change."""
        self.files = {name for name in self.files if day_of(name) not in days}
        self.raw = set()
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        said = {
            "files": sorted(self.files),
            "days": sorted(map(str, self.days)),
            "tables": sorted(self.tables),
            "raw": sorted(self.raw),
        }
        new = self.path.with_suffix(".new")
        with new.open("w") as file:
            json.dump(said, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)


def _path(root: Path) -> Path:
    return root / "_pipeline" / "state.json"


def day_of(name: str) -> date | None:
    """The day of a file of silver: `kind=event/day=2026-03-01/part-….parquet`."""
    value = unquote(Path(name).parent.name.removeprefix("day="))
    return None if value.startswith("__HIVE") else date.fromisoformat(value)
