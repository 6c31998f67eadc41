"""Survey an outbox on the driver: where it ends, and how a read of it is cut into tasks.

Streams are cut by positions of the log, with exact counts by one scan of the index on (xid, id).
Batches need no exact count and are cut by ids, from a sample of the table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import SQLAlchemyError

from conquiet.errors import ConfigError, StoreError
from conquiet.spark.database import Database
from conquiet.spark.outbox.options import OutboxOptions
from conquiet.spark.outbox.statement import RowRange
from conquiet.spark.progress import DataLoss
from conquiet.sql import dialect
from conquiet.sql.log import Horizon, OutboxLog, Position
from conquiet.sql.schema import split_name

logger = logging.getLogger("conquiet.spark")


ROWS_PER_TASK = 100_000
SAMPLE_ROWS = 20_000
_GRAIN_ROWS = 10_000
_FINE_GRAIN_ROWS = 500


class Survey:
    """Queries the database before rows are read; lives on the driver."""

    def __init__(self, options: OutboxOptions) -> None:
        self.options = options
        self.database = Database.of(options.address)
        self.engine = dialect.engine(self.database.url, pool_pre_ping=True)
        schema, table = split_name(options.table)
        self._name = f"{schema}.{table}" if schema else table
        self._postgresql = self.database.is_postgresql

    def close(self) -> None:
        self.engine.dispose()

    # --- positions ----------------------------------------------------------------------------

    def horizon(self) -> Horizon:
        """Return how far the log can be read, and which transaction holds it up."""
        return OutboxLog(self.engine, self.options.table).horizon()

    def end(self) -> Position:
        """Return the position of the last row that can be read now."""
        query = _END if self._postgresql else _SQLITE_END
        found = self._rows(query.format(table=self._name), {})
        return Position(int(found[0].xid), found[0].id) if found else Position()

    def find_bound(self) -> Position:
        """Return a position past all rows, by which a wrong or restored database is noticed."""
        query = _REACHED if self._postgresql else _SQLITE_REACHED
        found = self._rows(query, {"table": self._name.rpartition(".")[2]})
        return Position(int(found[0].xid), found[0].id or 0) if found else Position()

    def cut(
        self, after: Position, upto: Position | None = None, limit: int | None = None
    ) -> list[RowRange]:
        """Return ranges with exact counts after a position, up to another, of `limit` rows at most.

        No row is ever added below the horizon, so the same positions give the same rows until
        rows are deleted.
        """
        grain = _GRAIN_ROWS if self.options.min_partitions == 1 else _FINE_GRAIN_ROWS
        given: dict[str, Any] = {"id": after.id, "grain": grain}
        if self._postgresql:
            bound = "AND (xid, id) <= (CAST(:to_xid AS xid8), :to_id)" if upto else ""
            query, given["xid"], given["limit"] = _CUT, str(after.xid), limit
        else:
            bound = "AND id <= :to_id" if upto else ""
            query, given["limit"] = _SQLITE_CUT, -1 if limit is None else limit
        if upto:
            given["to_id"] = upto.id
            given |= {"to_xid": str(upto.xid)} if self._postgresql else {}
        found = self._rows(query.format(table=self._name, bound=bound), given)
        marks = [(Position(int(row.xid), row.id), row.n) for row in found]
        return _even(after, marks, self.options.min_partitions)

    # --- ids ----------------------------------------------------------------------------------

    def ranges(self) -> list[RowRange]:
        """Return ranges of about the same number of rows, by id."""
        ids, rows = self._sample()
        tasks = max(self.options.min_partitions, round(rows / ROWS_PER_TASK))
        at = sorted({ids[len(ids) * n // tasks] for n in range(1, tasks)} if ids else set())
        borders = [None, *map(str, at), None]
        return [RowRange(above=a, to=b) for a, b in pairwise(borders)]

    def _sample(self) -> tuple[list[Any], int]:
        """Return some ids in order, and about how many rows there are."""
        if not self._postgresql:
            ids = [row.id for row in self._rows(_SQLITE_SAMPLE.format(table=self._name), {})]
            return ids, len(ids)
        [size] = self._rows(_SIZE, {"table": self._name})
        percent = min(100.0, 100.0 * SAMPLE_ROWS / max(size.rows, 1.0))
        ids = [
            row.id
            for row in self._rows(_SAMPLE.format(table=self._name), {"percent": float(percent)})
        ]
        return ids, int(len(ids) * 100 / percent)

    def _rows(self, query: str, given: dict[str, Any]) -> Sequence[Row[Any]]:
        try:
            with self.engine.connect() as connection:
                return connection.execute(text(query), given).all()
        except SQLAlchemyError as error:
            reason = dialect.one_line(error)
            if not self._exists():
                raise ConfigError(
                    f"{self.database.shown} has no table {self.options.table}; name another by the"
                    " option table, or create it: conquiet outbox schema"
                ) from error
            raise StoreError(f"{self.database.shown}: {reason:.300}") from error

    def _exists(self) -> bool:
        """Return whether the table exists; True if that cannot be found out."""
        try:
            with self.engine.connect() as connection:
                return _has_table(connection, self.options.table)
        except SQLAlchemyError:
            return True


def _has_table(connection: Connection, name: str) -> bool:
    schema, table = split_name(name)
    return connection.dialect.has_table(connection, table, schema=schema)


def _even(
    after: Position, marks: Iterable[tuple[Position, int]], min_partitions: int
) -> list[RowRange]:
    """Join grains to ranges of about the same number of rows."""
    marks = list(marks)
    rows = marks[-1][1] if marks else 0
    tasks = max(min_partitions, round(rows / ROWS_PER_TASK))
    ranges: list[RowRange] = []
    start, done = after, 0
    for position, count in marks:
        if count * tasks >= rows * (len(ranges) + 1) or count == rows:
            ranges.append(RowRange(start, position, rows=count - done))
            start, done = position, count
    return ranges


_END = """
SELECT o.xid::text AS xid, o.id FROM {table} AS o
 WHERE o.xid < pg_snapshot_xmin(pg_current_snapshot()) ORDER BY o.xid DESC, o.id DESC LIMIT 1
"""
_SQLITE_END = "SELECT 0 AS xid, id FROM {table} ORDER BY id DESC LIMIT 1"
_REACHED = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text AS xid, 0 AS id"
_SQLITE_REACHED = "SELECT 0 AS xid, max(seq) AS id FROM sqlite_sequence WHERE name = :table"
_CUT = """
SELECT counted.xid::text AS xid, id, n FROM (
    SELECT xid, id, row_number() OVER w AS n, lead(id) OVER w AS next FROM (
        SELECT xid, id FROM {table}
         WHERE (xid, id) > (CAST(:xid AS xid8), :id) {bound}
           AND xid < pg_snapshot_xmin(pg_current_snapshot())
         ORDER BY xid, id LIMIT :limit) AS ahead
    WINDOW w AS (ORDER BY xid, id)) AS counted
 WHERE n % :grain = 0 OR next IS NULL ORDER BY n
"""
_SQLITE_CUT = """
SELECT 0 AS xid, id, n FROM (
    SELECT id, row_number() OVER w AS n, lead(id) OVER w AS next FROM (
        SELECT id FROM {table} WHERE id > :id {bound} ORDER BY id LIMIT :limit) AS ahead
    WINDOW w AS (ORDER BY id)) AS counted
 WHERE n % :grain = 0 OR next IS NULL ORDER BY n
"""
# Of an outbox that is divided by day, PostgreSQL counts the rows of each day.
_SIZE = """
SELECT coalesce(
    (SELECT sum(greatest(c.reltuples, 0)) FROM pg_inherits AS i
       JOIN pg_class AS c ON c.oid = i.inhrelid WHERE i.inhparent = t.oid),
    t.reltuples)::float8 AS rows
  FROM pg_class AS t WHERE t.oid = CAST(:table AS regclass)
"""
_SAMPLE = "SELECT id FROM {table} TABLESAMPLE SYSTEM (:percent) ORDER BY id"
_SQLITE_SAMPLE = "SELECT id FROM {table} ORDER BY id"


def report_lost(
    options: OutboxOptions, after: Position | None, upto: Position | None, rows: int
) -> None:
    """Raise `DataLoss` for rows that were planned and are gone, or warn if that is allowed."""
    loss = (
        f"{rows} rows of {options.table} between {after} and {upto} were counted and are gone:"
        " cleanup was faster than this query"
    )
    if options.fail_on_data_loss:
        raise DataLoss(
            f"{loss}; keep published rows for longer (retention), or go on without them by"
            " option failOnDataLoss=false"
        )
    logger.warning("%s; failOnDataLoss=false: the query goes on without them", loss)


def report_ahead(options: OutboxOptions, start: Position, end: Position) -> None:
    """Raise `DataLoss` for a position that this database has not reached, or warn."""
    loss = (
        f"the query is at {start} of {options.table}, but its log ends at {end}: this is"
        " another database, or it was restored from a backup"
    )
    if options.fail_on_data_loss:
        raise DataLoss(
            f"{loss}; start with a new checkpoint, or wait until it has grown past that by option"
            " failOnDataLoss=false"
        )
    logger.warning("%s; failOnDataLoss=false: nothing is read until it has grown past that", loss)
