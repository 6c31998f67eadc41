"""Claims on SQLite, which has one writer.

Holding its lock while a broker answers would stop the application. So a claim is a lock on a file
beside the database, one relay has it at a time, and only the marks are written, under BEGIN
IMMEDIATE.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, Table, func, or_, select

from conquiet.sql import dialect
from conquiet.sql.claim_rows import Opened, Rows
from conquiet.sql.claimed import Failure, Row, as_rows
from conquiet.sql.resting import Resting
from conquiet.sql.turn import turn_of


class SqliteRows(Rows):
    """One claimer at a time, by a lock that dies with its process; marks in short writes."""

    def __init__(self, engine: Engine, table: Table, ordered: bool) -> None:
        super().__init__(engine, table, ordered)
        self._turn = turn_of(engine, table)
        self._changing = threading.Lock()
        self._in_flight: dict[int, Row] = {}
        parked = table.alias("parked")
        stuck = select(parked.c.id).where(
            parked.c.parked_at.is_not(None), parked.c.key == table.c.key
        )
        self._not_stuck = or_(table.c.key.is_(None), ~stuck.exists())

    def clock(self) -> Any:
        return func.current_timestamp()

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
        held = [*resting.ids(), *self._in_flight]
        query = self._query(held, unkeyed=False).limit(limit)
        if self.ordered:
            key = self.table.c.key
            keys = {*resting.keys(), *(row.key for row in self._in_flight.values())} - {None}
            query = query.where(self._not_stuck)
            if keys:
                query = query.where(or_(key.is_(None), key.not_in(keys)))
        return as_rows(connection.execute(query))

    def settle(
        self, opened: Opened, published: Sequence[int], failures: Sequence[Failure]
    ) -> Sequence[int]:
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
