"""How rows of an outbox are claimed and marked, whatever its layout.

The rows stay locked (FOR UPDATE SKIP LOCKED) in the transaction that claimed them until the last
of them is settled; then one UPDATE and COMMIT. There is no marker column that a crash could leave
behind.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Engine,
    Select,
    Text,
    bindparam,
    case,
    cast,
    func,
    select,
    text,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from conquiet.errors import StoreError
from conquiet.sql import claim_keys, dialect
from conquiet.sql.claimed import Failure, error_text
from conquiet.sql.layout import Layout, Row
from conquiet.sql.resting import Resting

logger = logging.getLogger("conquiet.relay")


class Opened:
    """Rows that are claimed, and how their claim ends."""

    def __init__(self, rows: Sequence[Row], store: Rows, connection: Connection | None) -> None:
        self.rows = rows
        self.connection = connection
        self._store = store

    def settle(self, published: Sequence[Any], failures: Sequence[Failure]) -> Sequence[Any]:
        """Mark and commit; returns the rows that could not be marked."""
        return self._store.settle(self, published, failures)


class Rows:
    """The statements of a claim by SQLAlchemy, for any driver of PostgreSQL."""

    def __init__(self, engine: Engine, layout: Layout, ordered: bool) -> None:
        self.engine = engine
        self.layout = layout
        self.table = layout.table
        self.ordered = ordered
        self.name = engine.dialect.identifier_preparer.format_table(layout.table)
        self._errors = (SQLAlchemyError, engine.dialect.loaded_dbapi.Error)
        self._after = layout.first_key
        self._unkeyed_at = 0.0
        id_, attempts = self.table.c.id, self.table.c[layout.attempts]
        self._order = [self.table.c[name] for name in layout.order]
        self._wanted = [
            cast(column, Text).label(column.name) if column.name in layout.as_text else column
            for column in layout.columns
        ]
        self._publish = (
            update(self.table)
            .values(published_at=self.clock())
            .where(id_.in_(bindparam("ids", expanding=True)))
        )
        failed: dict[Column[Any], Any] = {
            attempts: attempts + 1,
            self.table.c.last_error: bindparam("error"),
        }
        parks = bindparam("parks", type_=Boolean)
        if layout.most_attempts is None:
            failed[self.table.c.parked_at] = case((parks, self.clock()), else_=None)
        else:
            failed[attempts] = case((parks, layout.most_attempts), else_=attempts + 1)
        self._fail = update(self.table).where(id_ == bindparam("row")).values(failed)

    def clock(self) -> Any:
        # Not now(), which is when the claim began: the row was not published yet.
        return func.clock_timestamp()

    def close(self) -> None:
        """Nothing is held between claims."""

    # --- claiming

    def claim(self, limit: int, resting: Resting) -> Opened | None:
        connection = self._connect()
        try:
            self._set(connection)
            rows = self._select(connection, limit, resting)
        except self._errors as error:
            self._drop(connection)
            raise self._store_error(error) from error
        except BaseException:
            self._drop(connection)
            raise
        if not rows:
            self._drop(connection)
            return None
        return Opened(rows, self, connection)

    def _connect(self) -> Connection:
        try:
            # Under a stricter level, rows that another relay has just marked would be errors.
            level = {"isolation_level": "READ COMMITTED"}
            return self.engine.connect().execution_options(**level)
        except self._errors as error:
            raise self._store_error(error) from error

    def _set(self, connection: Connection) -> None:
        connection.exec_driver_sql(self.layout.setting)

    def _select(self, connection: Connection, limit: int, resting: Resting) -> list[Row]:
        if not self.ordered:
            return self._any(connection, limit, resting.ids(), unkeyed=False)
        rows: list[Row] = []
        now = time.monotonic()
        if self.layout.has_unkeyed and now >= self._unkeyed_at:
            # Behind a long backlog of keys this is the costly part: not in every round.
            rows = self._any(connection, (limit + 1) // 2, resting.ids(), unkeyed=True)
            self._unkeyed_at = 0.0 if rows else now + 0.5
        keys = self._lock_keys(connection, limit - len(rows), resting.keys())
        if keys:
            each = max(1, (limit - len(rows)) // len(keys))
            rows.extend(self._of_keys(connection, keys, each))
            self.layout.sort(rows)
        return self.layout.not_overtaking(rows)

    def _lock_keys(self, connection: Connection, count: int, held: Collection[str]) -> list[str]:
        """Keys that are ours until the transaction ends, each time from where we stopped."""
        if count < 1:
            return []
        found: list[str] = []
        first, start = self.layout.first_key, self._after
        for after in (start, first) if start != first else (first,):
            sql = claim_keys.lock_keys(
                self.layout,
                self.name,
                self.engine.dialect,
                beyond=">=" if after == first else ">",
            )
            missing = count - len(found)
            seed = zlib.crc32(self.name.encode())
            given = {"after": after, "held": list(held), "count": missing, "seed": seed}
            new = [key for (key,) in connection.execute(text(sql), given)]
            found.extend(key for key in new if key not in found)
            self._after = new[-1] if new else first
            if len(new) >= missing:
                break
            self._after = first
        return found

    def _any(
        self, connection: Connection, limit: int, held: Sequence[Any], unkeyed: bool
    ) -> list[Row]:
        query = self._query(self.layout.claimable, held).limit(limit)
        if unkeyed:
            query = query.where(self.table.c[self.layout.key].is_(None))
        return self.layout.rows(connection.execute(query.with_for_update(skip_locked=True)))

    def _query(self, condition: str, held: Sequence[Any]) -> Select[Any]:
        query = select(*self._wanted).where(text(condition)).order_by(*self._order)
        return query.where(self.table.c.id.not_in(held)) if held else query

    def _of_keys(self, connection: Connection, keys: Sequence[str], each: int) -> list[Row]:
        sql = claim_keys.of_keys(
            self.layout, self.name, self.engine.dialect, keys=":keys", each=":each"
        )
        # With the types of the columns: drivers differ in what a UUID is to them.
        statement = text(sql).columns(*self._wanted)
        given = {"keys": list(keys), "each": each}
        return self.layout.rows(connection.execute(statement, given))

    # --- settling

    def settle(
        self, opened: Opened, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        connection = opened.connection
        assert connection is not None
        try:
            unmarked = self._mark(connection, published, failures)
            self._commit(connection)
        except self._errors as error:
            raise self._store_error(error) from error
        finally:
            self._drop(connection)
        return unmarked

    def _mark(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        if not published and not failures:
            return ()
        try:
            with connection.begin_nested():
                self._mark_all(connection, published, failures)
        except self._errors as error:
            if dialect.is_lost(connection) or dialect.is_store_failure(error):
                raise
            logger.warning("marking a batch failed, now row by row: %s", dialect.one_line(error))
            return self._mark_each(connection, published, failures)
        return ()

    def _commit(self, connection: Connection) -> None:
        connection.commit()

    def _mark_all(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> None:
        if published:
            connection.execute(self._publish, {"ids": published})
        if failures:
            rows = [{"row": f.id, "error": f.error, "parks": f.parks} for f in failures]
            connection.execute(self._fail, rows)

    def _mark_each(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        """One row that cannot be marked must not cost its neighbours their marks (S6)."""
        unmarked: list[Any] = []
        refused: list[Failure] = []
        for id_ in published:
            error = self._try_mark(connection, (id_,), ())
            if error is not None:
                unmarked.append(id_)
                reason = error_text(error)
                logger.error("row %s of %s is published and %s", id_, self.name, reason)
                refused.append(Failure(id_, f"published, but not marked: {reason}"[:2000], False))
        for failure in (*failures, *refused):
            error = self._try_mark(connection, (), (failure,))
            if error is not None:
                logger.error("row %s of %s: %s", failure.id, self.name, error_text(error))
        return unmarked

    def _try_mark(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Exception | None:
        try:
            with connection.begin_nested():
                self._mark_all(connection, published, failures)
        except self._errors as error:
            if dialect.is_lost(connection):
                raise
            return error
        return None

    def _drop(self, connection: Connection) -> None:
        if not connection.invalidated and dialect.is_lost(connection):
            connection.invalidate()
        with contextlib.suppress(*self._errors):
            connection.close()

    def _store_error(self, error: BaseException) -> StoreError:
        return StoreError(f"{dialect.shown(self.engine.url)}: {dialect.one_line(error):.300}")
