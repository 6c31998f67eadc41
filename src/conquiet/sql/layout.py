"""Layout: what a claim must know of a table of events.

Two kinds of table are claimed alike: the generic outbox, which says with `parked_at` that a row's
attempts are used up, and `outbox_events`, whose locked columns have only the count to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from sqlalchemy import Column, Dialect, Table

SQLITE_NOW = "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"
"""SQLite's clock to the millisecond, as SQLAlchemy writes a time."""


class Row(Protocol):
    """A claimed row; what else it carries is for the message that is made of it."""

    @property
    def id(self) -> Any: ...
    @property
    def key(self) -> str | None: ...
    @property
    def attempts(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """Which rows of a table wait, in which order they go out, and how they are marked."""

    table: Table
    row: Any
    """A NamedTuple, whose fields are the columns of a claim."""
    order: tuple[str, ...]
    """The columns that rows go out by; the last is `id`."""
    start: tuple[str, ...]
    """What comes before every value of them."""
    key: str
    """The column whose order is kept in an ordered claim."""
    first_key: str
    attempts: str
    as_text: frozenset[str] = frozenset()
    """Columns that are read as text, whatever they are in the database."""
    most_attempts: int | None = None
    """Rows with so many attempts are parked; None: those that have `parked_at`."""
    sorts: bool = True
    """Whether PostgreSQL may sort for a claim, where it could go by the order of an index."""

    @property
    def setting(self) -> str:
        """What is set for the transaction of a claim on PostgreSQL.

        It is idle while the sink works; ended for that, its rows would go out again and again.
        """
        sort = "" if self.sorts else ", set_config('enable_sort', 'off', true)"
        return f"SELECT set_config('idle_in_transaction_session_timeout', '0', true){sort}"

    @property
    def columns(self) -> tuple[Column[Any], ...]:
        return tuple(self.table.c[name] for name in self.row._fields)

    @property
    def has_unkeyed(self) -> bool:
        return bool(self.table.c[self.key].nullable)

    @property
    def claimable(self) -> str:
        """The condition of a row that waits and is not parked."""
        if self.most_attempts is None:
            return "published_at IS NULL AND parked_at IS NULL"
        return f"published_at IS NULL AND {self.attempts} < {self.most_attempts:d}"

    @property
    def keyed(self) -> str:
        """The condition of a row that an ordered claim meets, as its index has it."""
        if self.most_attempts is None:
            return f"{self.claimable} AND {self.key} IS NOT NULL"
        return "published_at IS NULL"

    def stuck(self, table: str, key: str) -> str:
        """The condition of a key that is held up by a row which is parked."""
        if self.most_attempts is None:
            return (
                f"EXISTS (SELECT 1 FROM {table} AS stuck"
                f" WHERE stuck.parked_at IS NOT NULL AND stuck.{self.key} = {key})"
            )
        # The first that waits, by the index on (key, order): one step, however many wait.
        return (
            f"(SELECT head.{self.attempts} >= {self.most_attempts:d} FROM {table} AS head"
            f" WHERE head.published_at IS NULL AND head.{self.key} = {key}"
            f" ORDER BY {', '.join(f'head.{name}' for name in self.order)} LIMIT 1)"
        )

    def type_of(self, column: str, dialect: Dialect) -> str:
        return str(self.table.c[column].type.compile(dialect))

    def selected(self) -> str:
        """The columns of a claim, as PostgreSQL is asked for them."""
        names = self.row._fields
        return ", ".join(f"{name}::text" if name in self.as_text else name for name in names)

    def rows(self, found: Iterable[Sequence[Any]]) -> list[Any]:
        return [self.row._make(values) for values in found]

    def sort(self, rows: list[Any]) -> None:
        rows.sort(key=attrgetter(*self.order))

    def position(self, row: Any) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in self.order)

    def not_overtaking(self, rows: Sequence[Any]) -> list[Any]:
        """Without what stands behind a parked row of its key; the rows come in order."""
        if self.most_attempts is None:
            return list(rows)
        kept: list[Any] = []
        stuck: set[str | None] = set()
        for row in rows:
            if row.attempts >= self.most_attempts:
                stuck.add(row.key)
            elif row.key not in stuck:
                kept.append(row)
        return kept
