"""The two databases that upserts go to, seen from beside Spark."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg


@dataclass(frozen=True)
class Base:
    """A database of a test: statements, rows, and what lies in staging."""

    url: str
    file: Path | None = None

    @property
    def is_sqlite(self) -> bool:
        return self.file is not None

    @property
    def binary(self) -> str:
        return "blob" if self.is_sqlite else "bytea"

    def run(self, statement: str) -> None:
        if self.file is not None:
            with closing(sqlite3.connect(self.file)) as connection:
                connection.execute(statement)
                connection.commit()
            return
        with psycopg.connect(self.url) as connection:
            connection.execute(statement)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        if self.file is not None:
            with closing(sqlite3.connect(self.file)) as connection:
                return connection.execute(query).fetchall()
        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchall()

    def staged(self) -> list[str]:
        """The places where rows wait for a driver."""
        if self.file is not None:
            return sorted(map(str, self.file.parent.glob(f"{self.file.name}-stage-*")))
        found = self.rows("SELECT tablename FROM pg_tables WHERE tablename LIKE 'conquiet_stage%'")
        return sorted(name for (name,) in found)


def sqlite_base(url: str) -> Base:
    return Base(url, Path(url.removeprefix("sqlite:///")))


def postgres_base(url: str) -> Base:
    return Base(url)
