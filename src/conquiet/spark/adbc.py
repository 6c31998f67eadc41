"""ADBC connections in Spark's Python workers, which live for many tasks.

Opening one to PostgreSQL makes its driver read the catalog of types, which takes ten times as long
as connecting: a connection that was used without an error waits for the next task of its worker.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from conquiet.errors import ConfigError, StoreError
from conquiet.spark.address import Database
from conquiet.sql.tls import advised

_idle: dict[tuple[int, str], Any] = {}


@atexit.register
def _close_all() -> None:
    """Before the interpreter takes the modules away that closing needs."""
    for (process, _), connection in list(_idle.items()):
        if process == os.getpid():
            with contextlib.suppress(Exception):
                connection.close()
    _idle.clear()


@contextlib.contextmanager
def connected(database: Database) -> Iterator[Any]:
    """A connection in a transaction that the caller commits, or else is rolled back."""
    key = os.getpid(), database.url  # by process: Spark forks its workers
    connection = _idle.pop(key, None)
    if connection is None or not _answers(connection):
        connection = _open(database)
    try:
        yield connection
        connection.rollback()
    except BaseException as error:
        with contextlib.suppress(Exception):
            connection.close()
        if isinstance(error, driver(database).Error):
            raise StoreError(f"{database.shown}: {one_line(error):.500}") from error
        raise
    _idle[key] = connection


def ingest(
    cursor: Any, table: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch], **how: Any
) -> None:
    """Write batches into a table; an error of theirs is raised as it is.

    The driver, which is written in C, would tell of it only as a text in an error of its own.
    """
    failures: list[Exception] = []

    def rows() -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except Exception as error:
            failures.append(error)
            raise

    try:
        cursor.adbc_ingest(table, pa.RecordBatchReader.from_batches(schema, rows()), **how)
    except Exception as error:
        if failures:
            raise failures[0] from error
        raise


def driver(database: Database) -> Any:
    """The module of the driver, whose errors it raises."""
    try:
        if database.is_postgresql:
            import adbc_driver_postgresql.dbapi as module
        else:
            import adbc_driver_sqlite.dbapi as module
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed: pip install 'conquiet[spark]'"
        ) from error
    return module


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _open(database: Database) -> Any:
    where = database.url if database.is_postgresql else f"file:{quote(str(database.file))}"
    module = driver(database)
    try:
        return module.connect(where)
    except module.Error as error:
        raise StoreError(f"{database.shown}: {advised(one_line(error)[:300])}") from error


def _answers(connection: Any) -> bool:
    """Whether a connection that waited is still good."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            cursor.fetchone()
        connection.rollback()
    except Exception:  # noqa: BLE001 - whatever it is, a new connection is the answer
        with contextlib.suppress(Exception):
            connection.close()
        return False
    return True
