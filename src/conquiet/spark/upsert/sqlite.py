"""Upsert into SQLite: stage in files beside the database, then one INSERT … ON CONFLICT.

SQLite has one writer: tasks that staged in the database itself would wait for each other, and for
the application. Each task has a file of its own instead, and only the driver takes the lock.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError, StoreError
from conquiet.spark.database import Database, driver, ingest, one_line
from conquiet.spark.upsert.target import (
    FENCES,
    QueryBatch,
    UnfitRows,
    UpsertFailed,
    UpsertOptions,
    advance_fence,
    create_fences,
    describe_duplicate,
    insert_into,
    list_names,
    match_columns,
    on_conflict,
    quote_name,
)

BUSY_SECONDS = 60.0
"""How long the driver waits for the application's transactions."""
_ROWS = "staged"


class SqliteTarget:
    """A table of SQLite."""

    def __init__(self, database: Database, options: UpsertOptions) -> None:
        self.database = database
        self.options = options
        self._file = Path(str(database.file))

    # --- checks -------------------------------------------------------------------------------

    def check(self, schema: StructType) -> None:
        with self._connection() as connection:
            staged = match_columns(
                self.options,
                self.database.shown,
                schema,
                self._columns(connection),
                postgresql=False,
            )
            values = ", ".join("NULL" for _ in staged)
            try:
                connection.execute(
                    f"EXPLAIN {insert_into(self.options, list(staged))} SELECT {values} WHERE true"
                    f" {on_conflict(self.options, list(staged))}"
                ).close()
            except sqlite3.OperationalError as error:
                raise ConfigError(
                    f"{self.options.table} has no unique index on its keys ({error}): CREATE"
                    f" UNIQUE INDEX … ON {self.options.table} ({list_names(self.options.keys)})"
                ) from error

    # --- tasks --------------------------------------------------------------------------------

    def stage(self, batches: Iterator[pa.RecordBatch], marked: str) -> str:
        rows = map(convert_batch, batches)
        first = next(rows)
        path = f"{self._file}-stage-{marked}-{secrets.token_hex(4)}"
        module = driver(self.database)
        try:
            with (
                module.connect(path, autocommit=True) as connection,
                connection.cursor() as cursor,
            ):
                # A task that loses this file writes it again: it need not survive a power cut.
                for setting in ("journal_mode = OFF", "synchronous = OFF"):
                    cursor.execute(f"PRAGMA {setting}")
                    cursor.fetchall()
                ingest(cursor, _ROWS, first.schema, chain([first], rows), mode="create")
        except module.Error as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise StoreError(f"{path}: {one_line(error):.300}") from error
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return path

    # --- the driver ---------------------------------------------------------------------------

    def apply(
        self, stages: Sequence[str], columns: Sequence[str], batch: QueryBatch | None
    ) -> bool:
        with self._connection() as connection:
            for path in stages:  # into a temporary table: no lock is held yet
                self._collect(connection, path, columns)
            connection.execute("BEGIN IMMEDIATE")
            try:
                fresh = batch is None or self._pass_fence(connection, batch)
                if fresh and stages:
                    self._refuse_duplicates(connection)
                    connection.execute(self._upsert(columns))
                connection.execute("COMMIT")
            except sqlite3.IntegrityError as error:
                raise UpsertFailed(f"{self.options.table}: {error}") from error
        self.drop(stages)
        return fresh

    def _collect(self, connection: sqlite3.Connection, path: str, columns: Sequence[str]) -> None:
        connection.execute("ATTACH ? AS stage", [path])
        connection.execute(
            f"CREATE TEMP TABLE IF NOT EXISTS {_ROWS} AS SELECT * FROM stage.{_ROWS} WHERE false"
        )
        names = list_names(columns)
        connection.execute(f"INSERT INTO temp.{_ROWS} ({names}) SELECT {names} FROM stage.{_ROWS}")
        connection.execute("DETACH stage")

    def _pass_fence(self, connection: sqlite3.Connection, batch: QueryBatch) -> bool:
        connection.execute(create_fences(FENCES, postgresql=False))
        table = self.options.table
        return advance_fence(connection.execute, FENCES, table, batch, parameter="?")

    def _refuse_duplicates(self, connection: sqlite3.Connection) -> None:
        """Raise for a key that is there twice: SQLite would keep either row."""
        if self.options.order_by:
            return
        keys = list_names(self.options.keys)
        found = connection.execute(
            f"SELECT {keys}, count(*) FROM temp.{_ROWS} GROUP BY {keys} HAVING count(*) > 1 LIMIT 1"
        ).fetchone()
        if found is not None:
            raise UnfitRows(describe_duplicate(self.options, found))

    def _upsert(self, columns: Sequence[str]) -> str:
        names, rows = list_names(columns), f"temp.{_ROWS}"
        if self.options.order_by:
            ranked = ", ".join(f"{quote_name(name)} DESC" for name in self.options.order_by)
            rows = (
                f"(SELECT *, row_number() OVER (PARTITION BY {list_names(self.options.keys)}"
                f" ORDER BY {ranked}) AS {quote_name(':rank')} FROM temp.{_ROWS})"
            )
        first = f"{quote_name(':rank')} = 1" if self.options.order_by else "true"
        return (
            f"{insert_into(self.options, columns)} SELECT {names} FROM {rows} WHERE {first}"
            f" {on_conflict(self.options, columns)}"
        )

    # --- leftovers ----------------------------------------------------------------------------

    def drop(self, stages: Sequence[str]) -> None:
        for path in stages:
            for ending in ("", "-journal", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path + ending)

    def sweep(self, marked: str, *, older_than: float | None = None) -> None:
        border = time.time() - (older_than or 0)
        for path in self._file.parent.glob(f"{glob.escape(self._file.name)}-stage-{marked}-*"):
            with contextlib.suppress(FileNotFoundError):
                if older_than is None or path.stat().st_mtime < border:
                    path.unlink()

    # --- the database ---------------------------------------------------------------------------

    def _columns(self, connection: sqlite3.Connection) -> list[str]:
        schema, _, table = self.options.table.rpartition(".")
        found = connection.execute(
            "SELECT name FROM pragma_table_info(?, ?)", [table, schema or "main"]
        )
        return [name for (name,) in found.fetchall()]

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if not self._file.exists():
            raise ConfigError(f"{self.database.shown}: there is no such file")
        connection = sqlite3.connect(self._file, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            yield connection
        except sqlite3.Error as error:
            raise StoreError(f"{self.database.shown}: {one_line(error):.500}") from error
        finally:
            connection.close()  # rolls back what was not committed


def convert_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert values as SQLAlchemy stores them in SQLite: times and decimals as text."""
    return pa.RecordBatch.from_arrays(
        [_convert(column) for column in batch.columns], names=batch.schema.names
    )


def _convert(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_boolean(kind):
        return column.cast(pa.int64())
    if pa.types.is_timestamp(kind):
        utc = column if kind.tz is None else column.cast(pa.timestamp("us", "UTC"))
        return pc.strftime(utc, format="%Y-%m-%d %H:%M:%S")
    if pa.types.is_date(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.string())
    return column
