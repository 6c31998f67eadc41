"""How rows of `outbox_events` are claimed and marked, in each database.

PostgreSQL: the rows stay locked (FOR UPDATE SKIP LOCKED) in the transaction that claimed them
until the last of them is settled; then the marks and COMMIT. There is no marker column that a
crash could leave behind (S4, S5). SQLite has one writer, and holding its lock while a broker
answers would stop the application: a claim there is a lock on a file beside the database, one
relay has it at a time, and only the marks are written, under BEGIN IMMEDIATE.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    DateTime,
    Engine,
    Integer,
    MetaData,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from conquiet.errors import ConfigError, StoreError
from conquiet.events.table import SQLITE_NOW, UuidText
from conquiet.sql import dialect
from conquiet.sql.tables import checked_name

logger = logging.getLogger("conquiet.relay")


class Row(NamedTuple):
    """A claimed row."""

    id: UUID
    event_type: str
    aggregate_type: str
    aggregate_id: UUID
    payload_json: str
    created_at: datetime
    attempt_count: int


class Failure(NamedTuple):
    """What a nack leaves in a row."""

    id: UUID
    error: str


class Claimed(NamedTuple):
    """Rows that are claimed, and how their claim ends."""

    rows: Sequence[Row]
    claims: Claims
    connection: Connection | None

    def settle(self, published: Sequence[UUID], failures: Sequence[Failure]) -> Sequence[UUID]:
        """Mark and commit; returns the rows that could not be marked."""
        return self.claims.settle(self, published, failures)


def claims_of(engine: Engine, table: str, max_attempts: int) -> Claims:
    if dialect.is_sqlite(engine.dialect):
        return SqliteClaims(engine, table, max_attempts)
    if not dialect.is_postgresql(engine.dialect) or engine.dialect.is_async:
        raise ConfigError(
            f"EventSource takes a sync Engine of PostgreSQL or SQLite, not {engine.dialect.name}"
            f"+{engine.dialect.driver}; make one from the same URL"
        )
    return Claims(engine, table, max_attempts)


def relay_table(name: str) -> Table:
    """The table as a relay sees it: without a catalog, types are text."""
    schema, table = checked_name(name)
    return Table(
        table,
        MetaData(),
        Column("id", UuidText(), primary_key=True),
        Column("event_type", Text),
        Column("aggregate_type", Text),
        Column("aggregate_id", UuidText()),
        Column("payload_json", JSON),
        Column("created_at", DateTime(timezone=True)),
        Column("published_at", DateTime(timezone=True)),
        Column("attempt_count", Integer),
        Column("last_error", Text),
        schema=schema,
    )


class Claims:
    """On PostgreSQL: rows stay locked in an open transaction until they are settled."""

    def __init__(self, engine: Engine, table: str, max_attempts: int) -> None:
        self.engine = engine
        self.table = relay_table(table)
        self._errors = (SQLAlchemyError, engine.dialect.loaded_dbapi.Error)
        columns = self.table.c
        wanted = [
            cast(columns[name], Text).label(name)
            if name in ("event_type", "aggregate_type", "payload_json")
            else columns[name]
            for name in Row._fields
        ]
        self._query: Select[Any] = (
            select(*wanted)
            .where(columns.published_at.is_(None), columns.attempt_count < max_attempts)
            .order_by(columns.created_at, columns.id)
        )
        self._publish = (
            update(self.table)
            .values(published_at=self.clock())
            .where(columns.id.in_(bindparam("ids", expanding=True)))
        )
        self._fail = (
            update(self.table)
            .where(columns.id == bindparam("row"))
            .values(attempt_count=columns.attempt_count + 1, last_error=bindparam("error"))
        )

    def clock(self) -> Any:
        # Not now(), which is when the claim began: the row was not published yet.
        return func.clock_timestamp()

    def close(self) -> None:
        """Nothing is held between claims."""

    def claim(self, limit: int, resting: Sequence[UUID]) -> Claimed | None:
        connection: Connection | None = None
        try:
            # Under a stricter level, rows that another relay has just marked would be errors.
            connection = self.engine.connect()
            connection.execution_options(isolation_level="READ COMMITTED")
            query = self._due(limit, resting).with_for_update(skip_locked=True)
            rows = [Row._make(row) for row in connection.execute(query)]
        except BaseException as error:
            if connection is not None:
                self._drop(connection)
            if isinstance(error, self._errors):
                raise self._store_error(error) from error
            raise
        if not rows:
            self._drop(connection)
            return None
        return Claimed(rows, self, connection)

    def settle(
        self, claimed: Claimed, published: Sequence[UUID], failures: Sequence[Failure]
    ) -> Sequence[UUID]:
        connection = claimed.connection
        assert connection is not None
        try:
            unmarked = self._mark(connection, published, failures)
            connection.commit()
        except self._errors as error:
            raise self._store_error(error) from error
        finally:
            self._drop(connection)
        return unmarked

    def _due(self, limit: int, resting: Sequence[UUID]) -> Select[Any]:
        query = self._query.limit(limit)
        return query.where(self.table.c.id.not_in(resting)) if resting else query

    def _mark(
        self, connection: Connection, published: Sequence[UUID], failures: Sequence[Failure]
    ) -> Sequence[UUID]:
        error = self._try_mark(connection, published, failures)
        if error is None:
            return ()
        logger.warning("marking a batch failed, now row by row: %s", _one_line(error))
        return self._mark_each(connection, published, failures)

    def _mark_each(
        self, connection: Connection, published: Sequence[UUID], failures: Sequence[Failure]
    ) -> Sequence[UUID]:
        """One row that cannot be marked must not cost its neighbours their marks (S6)."""
        unmarked: list[UUID] = []
        refused: list[Failure] = []
        for id_ in published:
            error = self._try_mark(connection, (id_,), ())
            if error is not None:
                unmarked.append(id_)
                reason = f"published, but not marked: {_one_line(error):.1900}"
                logger.error("event_id=%s is %s", id_, reason)
                refused.append(Failure(id_, reason))
        for failure in (*failures, *refused):
            error = self._try_mark(connection, (), (failure,))
            if error is not None:
                logger.error("event_id=%s could not be marked: %s", failure.id, _one_line(error))
        return unmarked

    def _try_mark(
        self, connection: Connection, published: Sequence[UUID], failures: Sequence[Failure]
    ) -> Exception | None:
        if not published and not failures:
            return None
        try:
            with connection.begin_nested():
                if published:
                    connection.execute(self._publish, {"ids": list(published)})
                if failures:
                    rows = [{"row": failure.id, "error": failure.error} for failure in failures]
                    connection.execute(self._fail, rows)
        except self._errors as error:
            if dialect.is_lost(connection) or dialect.is_store_failure(error):
                raise
            return error
        return None

    def _drop(self, connection: Connection) -> None:
        if not connection.invalidated and dialect.is_lost(connection):
            connection.invalidate()
        with contextlib.suppress(*self._errors):
            connection.close()

    def _store_error(self, error: BaseException) -> StoreError:
        return StoreError(f"{self.engine.url.render_as_string()}: {_one_line(error):.300}")


class SqliteClaims(Claims):
    """One claimer at a time, by a lock that dies with its process; marks in short writes."""

    def __init__(self, engine: Engine, table: str, max_attempts: int) -> None:
        super().__init__(engine, table, max_attempts)
        path = (engine.url.database or "").removeprefix("file:").partition("?")[0]
        if not path or path == ":memory:" or "mode=memory" in str(engine.url):
            raise ConfigError("a relay needs a SQLite file: one in memory is seen by nobody else")
        self._path = f"{path}-{self.table.name}-relay"
        self._lock: int | None = None
        self._changing = threading.Lock()
        self._in_flight: set[UUID] = set()

    def clock(self) -> Any:
        return literal_column(SQLITE_NOW)

    def close(self) -> None:
        with self._changing:
            self._unlock()

    def claim(self, limit: int, resting: Sequence[UUID]) -> Claimed | None:
        with self._changing:
            if self._lock is None and not self._take_lock():
                return None
            try:
                query = self._due(limit, [*resting, *self._in_flight])
                with self.engine.connect() as connection:
                    rows = [Row._make(row) for row in connection.execute(query)]
                self._in_flight.update(row.id for row in rows)
            except self._errors as error:
                raise self._store_error(error) from error
            finally:
                if not self._in_flight:
                    self._unlock()
        return Claimed(rows, self, None) if rows else None

    def settle(
        self, claimed: Claimed, published: Sequence[UUID], failures: Sequence[Failure]
    ) -> Sequence[UUID]:
        try:
            if not published and not failures:
                return ()
            with self.engine.connect() as connection, connection.begin():
                dialect.begin_immediate(connection)
                return self._mark(connection, published, failures)
        except self._errors as error:
            raise self._store_error(error) from error
        finally:
            with self._changing:
                self._in_flight.difference_update(row.id for row in claimed.rows)
                if not self._in_flight:
                    self._unlock()

    def _take_lock(self) -> bool:
        # A new description each time: flock() tells those apart, also within one process.
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._lock = file
        return True

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _one_line(error: BaseException) -> str:
    original = getattr(error, "orig", None) or error
    return " ".join(str(original).split()) or type(original).__name__
