"""Claims on SQLite, which has one writer.

Holding its lock while a broker answers would stop the application. So a claim is a lock on a file
beside the database, one relay has it at a time, and only the marks are written, under BEGIN
IMMEDIATE.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, literal_column, or_, text

from conquiet.sql import dialect
from conquiet.sql.claim_rows import Opened, Rows
from conquiet.sql.claimed import Failure
from conquiet.sql.layout import SQLITE_NOW, Layout, Row
from conquiet.sql.resting import Resting
from conquiet.sql.turn import turn_of


class SqliteRows(Rows):
    """One claimer at a time, by a lock that dies with its process; marks in short writes."""

    def __init__(self, engine: Engine, layout: Layout, ordered: bool) -> None:
        super().__init__(engine, layout, ordered)
        self._turn = turn_of(engine, layout.table)
        self._changing = threading.Lock()
        self._in_flight: dict[Any, Row] = {}
        self._stuck = layout.stuck(self.name, f"{self.name}.{layout.key}")

    def clock(self) -> Any:
        return literal_column(SQLITE_NOW)

    def close(self) -> None:
        self._turn.release()

    def claim(self, limit: int, resting: Resting) -> Opened | None:
        with self._changing:
            if not self._in_flight and not self._turn.take():
                return None
            try:
                with self.engine.connect() as connection:
                    rows = self._select(connection, limit, resting)
                self._in_flight.update((row.id, row) for row in rows)
            except self._errors as error:
                raise self._store_error(error) from error
            finally:
                if not self._in_flight:
                    self._turn.release()
        return Opened(rows, self, None) if rows else None

    def _select(self, connection: Connection, limit: int, resting: Resting) -> list[Row]:
        layout = self.layout
        held = [*resting.ids(), *self._in_flight]
        if not self.ordered:
            return layout.rows(connection.execute(self._query(layout.claimable, held).limit(limit)))
        key = self.table.c[layout.key]
        condition = layout.claimable if layout.has_unkeyed else layout.keyed
        keys = {*resting.keys(), *(row.key for row in self._in_flight.values())} - {None}
        query = self._query(condition, held).where(text(f"NOT {self._stuck}")).limit(limit)
        if keys:
            query = query.where(or_(key.is_(None), key.not_in(keys)))
        return layout.not_overtaking(layout.rows(connection.execute(query)))

    def settle(
        self, opened: Opened, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        try:
            if not published and not failures:
                return ()
            with self.engine.connect() as own, own.begin():
                dialect.begin_immediate(own)
                return self._mark(own, published, failures)
        except self._errors as error:
            raise self._store_error(error) from error
        finally:
            with self._changing:
                for row in opened.rows:
                    self._in_flight.pop(row.id, None)
                if not self._in_flight:
                    self._turn.release()
