"""Databases of a query, and ADBC connections to them in Spark's Python workers.

Opening a connection to PostgreSQL makes its driver read the catalog of types, which takes ten times
as long as connecting. Workers live for many tasks: a connection that was used without an error is
kept for the next task.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from conquiet.errors import ConfigError, StoreError
from conquiet.spark.options import DATABASE, Address
from conquiet.sql import dialect
from conquiet.sql.tls import add_advice, verify_server_text


@dataclass(frozen=True, slots=True)
class Database:
    """A PostgreSQL, by the URL that libpq takes, or the file of a SQLite."""

    url: str = field(repr=False)
    """The URL for SQLAlchemy and psycopg."""
    file: str | None
    """The absolute path of a SQLite database."""
    shown: str
    """The URL without its password, and without a query that may hold one."""

    @classmethod
    def of(cls, address: Address) -> Database:
        """Return the database of a query's options."""
        return cls.at(address.resolve())

    @classmethod
    def at(cls, url: str) -> Database:
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):  # a port that is no number, which may be a password
            raise ConfigError(
                f"the option url is not the URL of a database; write {DATABASE[1]}"
            ) from None
        if "@" in (parsed.host or ""):  # the end of a password, which no message may show
            raise ConfigError("the option url is not a URL: write @ in a user or password as %40")
        if "/" in (parsed.password or "") and "/" in url.partition("://")[2].partition("@")[0]:
            # libpq would take what is before it for a port, and quote it.
            raise ConfigError("the option url is not a URL: write / in a user or password as %2F")
        kind = parsed.get_backend_name()
        shown = dialect.display_url(parsed)
        if kind in ("postgresql", "postgres"):
            _, _, rest = url.partition("://")  # as written: libpq decodes by its own rules
            return cls(verify_server_text(f"postgresql://{rest}"), None, shown)
        if kind != "sqlite":
            raise ConfigError(f"{shown}: this works on PostgreSQL and SQLite; write {DATABASE[1]}")
        file = (parsed.database or "").removeprefix("file:").partition("?")[0]
        if not file or file == ":memory:" or "mode=memory" in url:
            raise ConfigError(f"{shown}: Spark's processes share no memory; name a SQLite file")
        path = os.path.abspath(unquote(urlsplit(file).path) if parsed.query.get("uri") else file)
        return cls(f"sqlite:///{path}", path, shown)

    @property
    def is_postgresql(self) -> bool:
        return self.file is None


_idle: dict[tuple[int, str], Any] = {}


@atexit.register
def _close_all() -> None:
    """Close while the modules still exist that closing needs."""
    for (process, _), connection in list(_idle.items()):
        if process == os.getpid():
            with contextlib.suppress(Exception):
                connection.close()
    _idle.clear()


@contextlib.contextmanager
def begin(database: Database) -> Iterator[Any]:
    """Yield a connection in a transaction, which is rolled back unless the caller commits."""
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
    """Write batches into a table; raise an error of the batches as it is.

    The driver, which is written in C, would only put its text into an error of its own.
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
    """Return the module of the driver."""
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
        raise StoreError(f"{database.shown}: {add_advice(one_line(error)[:300])}") from error


def _answers(connection: Any) -> bool:
    """Return whether an idle connection still works."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            cursor.fetchone()
        connection.rollback()
    except Exception:  # noqa: BLE001 - after any error a new connection is opened
        with contextlib.suppress(Exception):
            connection.close()
        return False
    return True
