"""Claims on PostgreSQL by psycopg: the same as `claim_rows`, in two round trips."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine

from conquiet.sql import claim_keys, dialect
from conquiet.sql.claim_rows import Rows
from conquiet.sql.claimed import Failure
from conquiet.sql.layout import Layout, Row

logger = logging.getLogger("conquiet.relay")

_START_OVER_SECONDS = 1.0


class PsycopgRows(Rows):
    """The hot statements straight to psycopg."""

    def __init__(self, engine: Engine, layout: Layout, ordered: bool) -> None:
        super().__init__(engine, layout, ordered)
        self._can_pipeline: bool = engine.dialect.loaded_dbapi.Pipeline.is_supported()
        self._behind: tuple[Any, ...] = layout.start
        self._start_over_at = 0.0
        types = [layout.type_of(name, engine.dialect) for name in layout.order]
        order = ", ".join(layout.order)
        query = (
            f"SELECT {layout.selected()} FROM {self.name} WHERE {layout.claimable}"
            f" AND ({order}) > ({', '.join(f'%s::{type_}' for type_ in types)}){{}}{{}}"
            f" ORDER BY {order} LIMIT %s FOR UPDATE SKIP LOCKED"
        )
        ids = types[-1]
        self._queries = {
            (unkeyed, held): query.format(
                f" AND {layout.key} IS NULL" if unkeyed else "",
                f" AND id <> ALL(%s::{ids}[])" if held else "",
            )
            for unkeyed in (False, True)
            for held in (False, True)
        }
        self._publish_sql = (
            f"UPDATE {self.name} SET published_at = clock_timestamp() WHERE id = ANY(%s::{ids}[])"
        )
        attempts, most = f"o.{layout.attempts} + 1", layout.most_attempts
        if most is None:
            attempts += ", parked_at = CASE WHEN f.parks THEN clock_timestamp() END"
        else:
            attempts = f"CASE WHEN f.parks THEN {most:d} ELSE {attempts} END"
        self._fail_sql = (
            f"UPDATE {self.name} AS o SET last_error = f.error, {layout.attempts} = {attempts}"
            f" FROM unnest(%s::{ids}[], %s::text[], %s::boolean[]) AS f (id, error, parks)"
            " WHERE o.id = f.id"
        )
        self._of_keys_sql = claim_keys.of_keys(
            layout, self.name, engine.dialect, keys="%s", each="%s::integer"
        )

    def _pipeline(self, driver: Any) -> contextlib.AbstractContextManager[object]:
        return driver.pipeline() if self._can_pipeline else contextlib.nullcontext()

    def _set(self, connection: Connection) -> None:
        """In the round trip of the claim itself, unless that is ordered."""
        if self.ordered:
            super()._set(connection)

    def _any(
        self, connection: Connection, limit: int, held: Sequence[Any], unkeyed: bool
    ) -> list[Row]:
        # While an old snapshot is open anywhere, vacuum leaves the index entries of published
        # rows, and a claim from the start would walk over all of them. So go on behind the last
        # claim, and once a second look from the start, for what failed or committed late.
        now = time.monotonic()
        start = self.layout.start
        behind = self._behind if now < self._start_over_at else start
        if behind == start:
            self._start_over_at = now + _START_OVER_SECONDS
        sql = self._queries[unkeyed, bool(held)]
        rows = self._fetch(connection, sql, (*behind, *((held,) if held else ()), limit))
        if not rows and behind != start:
            rows = self._fetch(connection, sql, (*start, *((held,) if held else ()), limit))
        self._behind = self.layout.position(rows[-1]) if len(rows) == limit else start
        return rows

    def _of_keys(self, connection: Connection, keys: Sequence[str], each: int) -> list[Row]:
        return self._fetch(connection, self._of_keys_sql, (keys, each))

    def _fetch(self, connection: Connection, sql: str, given: Sequence[Any]) -> list[Row]:
        driver = dialect.driver_connection(connection)
        # BEGIN, which psycopg sends first, and the statement in one round trip.
        with self._pipeline(driver), driver.cursor(binary=True) as cursor:
            if not self.ordered:
                driver.execute(self.layout.setting)
            cursor.execute(sql, given)
            return self.layout.rows(cursor.fetchall())

    def _mark(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        """Savepoint, marks and COMMIT in one round trip; a failed mark keeps it from committing."""
        if not published and not failures:
            return ()
        driver = dialect.driver_connection(connection)
        try:
            with self._pipeline(driver):
                driver.execute("SAVEPOINT marks")
                self._mark_all(connection, published, failures)
                driver.commit()
        except self._errors as error:
            if dialect.is_lost(connection) or dialect.is_store_failure(error):
                raise
            logger.warning("marking a batch failed, now row by row: %s", dialect.one_line(error))
            driver.execute("ROLLBACK TO SAVEPOINT marks")
            return self._mark_each(connection, published, failures)
        return ()

    def _commit(self, connection: Connection) -> None:
        # By the driver: SQLAlchemy has not seen the statements that went past it.
        dialect.driver_connection(connection).commit()

    def _mark_all(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> None:
        with dialect.driver_connection(connection).cursor() as cursor:
            if published:
                cursor.execute(self._publish_sql, (list(published),))
            if failures:
                cursor.execute(self._fail_sql, [list(part) for part in zip(*failures, strict=True)])
