"""Upsert into PostgreSQL: stage in unlogged tables by ADBC, then one INSERT … ON CONFLICT."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import chain

import psycopg
import pyarrow as pa
from psycopg import errors
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError, StoreError
from conquiet.spark.database import Database, begin, ingest
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
    staging_columns,
)
from conquiet.sql.schema import split_name
from conquiet.sql.tls import add_advice

_PREFIX = "conquiet_stage"
_DEADLOCKS = 3
"""How often a batch is retried that lost a deadlock: its transaction is the whole batch."""


class PostgresTarget:
    """A table of PostgreSQL."""

    def __init__(self, database: Database, options: UpsertOptions) -> None:
        self.database = database
        self.options = options
        self._schema, self._table = split_name(options.table)
        self._prefix = f"{self._schema}." if self._schema else ""

    # --- checks -------------------------------------------------------------------------------

    def check(self, schema: StructType) -> None:
        with self._connection() as connection:
            types = self._types(connection)
            staged = match_columns(
                self.options, self.database.shown, schema, list(types), postgresql=True
            )
            names = list(staged)
            values = ", ".join(f"NULL::{kind}::{types[name]}" for name, kind in staged.items())
            try:
                connection.execute(
                    f"EXPLAIN {insert_into(self.options, names)} SELECT {values}"
                    f" {on_conflict(self.options, names)}"
                )
            except errors.InvalidColumnReference:
                raise ConfigError(
                    f"{self.options.table} has no unique index on its keys: CREATE UNIQUE INDEX"
                    f" ON {self.options.table} ({list_names(self.options.keys)})"
                ) from None
            except errors.Error as error:
                raise ConfigError(
                    f"the frame does not fit {self.options.table}: {_one_line(error)}"
                ) from error

    # --- tasks --------------------------------------------------------------------------------

    def stage(self, batches: Iterator[pa.RecordBatch], marked: str) -> str:
        first = next(batches)
        name = f"{_PREFIX}_{marked}_{int(time.time()):x}_{secrets.token_hex(4)}"
        columns = ", ".join(
            f"{quote_name(column)} {kind}"
            for column, kind in staging_columns(first.schema, postgresql=True).items()
        )

        # One transaction: a task that dies leaves nothing behind.
        with begin(self.database) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE UNLOGGED TABLE {self._prefix}{name} ({columns})")
            rows = chain([first], batches)
            ingest(cursor, name, first.schema, rows, mode="append", db_schema_name=self._schema)
            connection.commit()
        return name

    # --- the driver ---------------------------------------------------------------------------

    def apply(
        self, stages: Sequence[str], columns: Sequence[str], batch: QueryBatch | None
    ) -> bool:
        for attempt in range(_DEADLOCKS + 1):
            try:
                with self._connection() as connection:
                    return self._apply(connection, stages, columns, batch)
            except errors.DeadlockDetected:
                if attempt == _DEADLOCKS:
                    raise
        raise AssertionError("unreachable")

    def _apply(
        self,
        connection: psycopg.Connection,
        stages: Sequence[str],
        columns: Sequence[str],
        batch: QueryBatch | None,
    ) -> bool:
        fresh = batch is None or self._pass_fence(connection, batch)
        if fresh and stages:
            try:
                self._write(connection, stages, columns)
            except errors.CardinalityViolation:
                connection.rollback()
                raise UnfitRows(self._duplicate(connection, stages)) from None
            except (errors.DataError, errors.IntegrityError) as error:
                raise UpsertFailed(f"{self.options.table}: {_one_line(error)}") from error
        self._drop(connection, stages)
        return fresh

    def _pass_fence(self, connection: psycopg.Connection, batch: QueryBatch) -> bool:
        fences = f"{self._prefix}{FENCES}"
        if connection.execute("SELECT to_regclass(%s)", [fences]).fetchone() == (None,):
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [FENCES])
            connection.execute(create_fences(fences, postgresql=True))
        table = self.options.table
        return advance_fence(connection.execute, fences, table, batch, parameter="%s")

    def _write(
        self, connection: psycopg.Connection, stages: Sequence[str], columns: Sequence[str]
    ) -> None:
        rows = self._select_staged(connection, stages, columns)
        insert = f"{insert_into(self.options, columns)} {rows}"
        if self._is_empty(connection):
            # Looking for a row before inserting it costs nearly twice as much. If a key is there
            # twice after all, in the batch or by another writer, the upsert below does it.
            with contextlib.suppress(errors.UniqueViolation), connection.transaction():
                connection.execute(insert)
                return
        connection.execute(f"{insert} {on_conflict(self.options, columns)}")

    def _is_empty(self, connection: psycopg.Connection) -> bool:
        found = connection.execute(f"SELECT FROM {self.options.table} LIMIT 1")
        return found.fetchone() is None

    def _select_staged(
        self, connection: psycopg.Connection, stages: Sequence[str], columns: Sequence[str]
    ) -> str:
        types = self._types(connection)
        values = ", ".join(f"{quote_name(name)}::{types[name]}" for name in columns)
        keys, order = list_names(self.options.keys), self.options.order_by
        ranked = ", ".join(f"{quote_name(name)} DESC" for name in order)
        return (
            f"SELECT {f'DISTINCT ON ({keys}) ' if order else ''}{values}"
            f" FROM ({self._union(stages)}) AS staged"
            f"{f' ORDER BY {keys}, {ranked}' if order else ''}"
        )

    def _union(self, stages: Sequence[str]) -> str:
        return " UNION ALL ".join(f"SELECT * FROM {self._prefix}{name}" for name in stages)

    def _duplicate(self, connection: psycopg.Connection, stages: Sequence[str]) -> str:
        keys = list_names(self.options.keys)
        found = connection.execute(
            f"SELECT {keys}, count(*) FROM ({self._union(stages)}) AS staged"
            f" GROUP BY {keys} HAVING count(*) > 1 LIMIT 1"
        ).fetchone()
        return describe_duplicate(self.options, found or ("?", "several"))

    # --- leftovers ----------------------------------------------------------------------------

    def drop(self, stages: Sequence[str]) -> None:
        with self._connection() as connection:
            self._drop(connection, stages)

    def _drop(self, connection: psycopg.Connection, stages: Sequence[str]) -> None:
        if stages:
            names = ", ".join(f"{self._prefix}{name}" for name in stages)
            connection.execute(f"DROP TABLE IF EXISTS {names}")

    def sweep(self, marked: str, *, older_than: float | None = None) -> None:
        with self._connection() as connection:
            found = connection.execute(
                "SELECT tablename FROM pg_tables WHERE tablename LIKE %s"
                " AND schemaname = coalesce(%s, current_schema())",
                [f"{_PREFIX}\\_{marked}\\_%", self._schema],
            ).fetchall()
            border = time.time() - (older_than or 0)
            old = [name for (name,) in found if older_than is None or _read_time(name) < border]
            self._drop(connection, old)

    # --- the database ---------------------------------------------------------------------------

    def _types(self, connection: psycopg.Connection) -> dict[str, str]:
        """Return the types of the table's columns, without their lengths.

        A cast to varchar(3) would silently cut a text; an assignment refuses it.
        """
        rows = connection.execute(
            "SELECT attname, format_type(atttypid, -1) FROM pg_attribute"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
            " ORDER BY attnum",
            [self.options.table],
        )
        return {str(name): str(kind) for name, kind in rows.fetchall()}

    @contextlib.contextmanager
    def _connection(self) -> Iterator[psycopg.Connection]:
        """Yield a connection in a transaction that is committed at the end."""
        try:
            with psycopg.connect(self.database.url, application_name="conquiet-upsert") as open_:
                yield open_
        except errors.DeadlockDetected:
            raise
        except psycopg.Error as error:
            raise StoreError(f"{self.database.shown}: {_one_line(error):.500}") from error


def _one_line(error: psycopg.Error) -> str:
    return add_advice(" ".join(str(error).split()))


def _read_time(name: str) -> int:
    return int(name.split("_")[-2], 16)
