"""Execute statements of inbox and outbox by any handle: sessions and connections, sync or async.

    Session, Connection             ─┐
    AsyncSession, AsyncConnection    ├──▶ one statement, in the transaction that the handle is in
    psycopg, asyncpg, (aio)sqlite3  ─┘

A driver that would commit each statement by itself is refused: an inbox or outbox row must share
the transaction of the effects.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from sqlalchemy import Connection, Executable, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql import ClauseElement
from sqlalchemy.types import NullType

from conquiet import bridge
from conquiet.errors import ConfigError
from conquiet.sql import dialect

if TYPE_CHECKING:
    from conquiet.sql.statement_queue import StatementQueue

Rows: TypeAlias = Sequence[Any]
Query: TypeAlias = tuple[str, Any]
"""Text and parameters; a list of parameters executes the text once for each."""

_IDLE = 0  # transaction status of libpq: no transaction is open


class Handle(Protocol):
    """A Session or Connection of SQLAlchemy, or a connection of psycopg or sqlite3."""

    def close(self) -> None: ...


class AsyncHandle(Protocol):
    """An AsyncSession or AsyncConnection, or a connection of asyncpg, psycopg or aiosqlite."""

    def close(self) -> Coroutine[Any, Any, None]: ...


class Statement(Executable, ClauseElement):
    """Is one statement for all drivers: SQLAlchemy's sessions execute it as it is."""

    returns_rows = False
    is_single = False
    """Whether it inserts one row, and returns its parameters if it was new."""

    @abstractmethod
    def postgresql(self) -> Query:
        """Return the text with a mark `%s` or `%b` for each parameter, and the parameters."""

    @abstractmethod
    def sqlite(self) -> Query:
        """Return the text with a mark `?` for each parameter, and the parameters."""


@compiles(Statement, "postgresql")
def _compile_postgresql(element: Statement, compiler: Any, **options: Any) -> str:
    return _bind(*element.postgresql(), _mark, compiler)


@compiles(Statement, "sqlite")
def _compile_sqlite(element: Statement, compiler: Any, **options: Any) -> str:
    return _bind(*element.sqlite(), re.compile(r"\?"), compiler)


def _bind(text: str, parameters: Sequence[Any], mark: re.Pattern[str], compiler: Any) -> str:
    """Put SQLAlchemy's own marks into a text; without a type it leaves the values alone."""
    named = iter(enumerate(parameters))

    def name(found: re.Match[str]) -> str:
        number, value = next(named)
        bound = bindparam(f"conquiet_{number}", value, type_=NullType())
        return str(compiler.process(bound))

    return mark.sub(name, text)


def execute(connection: Connection, statement: Statement) -> Rows:
    """Execute a statement by a connection of SQLAlchemy and return its rows."""
    target = connection.dialect
    if dialect.is_sqlite(target):
        return _fetch(connection, statement.sqlite())
    if dialect.uses_psycopg(target):
        with dialect.translate_errors(connection):
            return _by_psycopg(dialect.driver_connection(connection), statement)
    text, parameters = statement.postgresql()
    if not target.is_async:
        return _fetch(connection, (text, parameters))
    with dialect.translate_errors(connection):
        if dialect.drives_asyncpg(connection):
            return bridge.wait_for(_by_asyncpg(connection, text, parameters))
        driver = dialect.driver_connection(connection)
        if _is_a(driver, _ASYNC_PSYCOPG):  # SQLAlchemy's cursor would switch greenlets three times
            return bridge.wait_for(run_async(driver, statement))
        return dialect.execute(connection, _numbered(text), parameters)


def execute_with_begin(connection: Connection, statement: Statement) -> Rows:
    """Execute a statement of a transaction that may be its first; return its rows.

    By psycopg it is sent together with BEGIN; its columns must be text. By asyncpg it is, if it
    inserts one row: the answer is then the number of rows, not the rows.
    """
    queue = _queue_of(connection)
    if queue is not None and queue.can_begin:
        with dialect.translate_errors(connection):
            return queue.begin(*statement.postgresql())
    if (
        statement.is_single
        and dialect.drives_asyncpg(connection)
        and not dialect.has_begun(connection)
    ):
        text, parameters = statement.postgresql()
        written = _write_parameters(text, parameters)
        if written is not None:
            begun = dialect.AsyncpgTransaction(connection)
            connection.begun_by_asyncpg = begun  # type: ignore[attr-defined]  # of ours
            with dialect.translate_errors(connection):
                status = bridge.wait_for(begun.start(written))
            return {"INSERT 0 1": (parameters,), "INSERT 0 0": ()}[status]
    return execute(connection, statement)


def execute_with_commit(connection: Connection, statement: Statement) -> None:
    """Execute a statement that may be the last of its transaction, and returns nothing.

    It waits for COMMIT, and is sent together with it, or before any other statement: by psycopg in
    the queue of the transaction, by asyncpg as part of COMMIT.
    """
    queue = _queue_of(connection)
    if queue is not None:
        text, parameters = statement.postgresql()
        with dialect.translate_errors(connection):
            if queue.add(text, (parameters,)):
                return
    begun = getattr(connection, "begun_by_asyncpg", None)
    if begun is not None and not begun.last and not connection.in_nested_transaction():
        written = _write_parameters(*statement.postgresql())
        if written is not None:
            begun.last = written
            return
    execute(connection, statement)


def _queue_of(connection: Connection) -> StatementQueue | None:
    unit = getattr(connection, "unit", None)  # of a TransactionConnection
    return None if unit is None else unit.queue


def execute_deferred(connection: Connection) -> None:
    """Execute the statement that waits for COMMIT, if there is one, before another."""
    begun = getattr(connection, "begun_by_asyncpg", None)
    if begun is not None and begun.last:
        with dialect.translate_errors(connection):
            bridge.wait_for(begun.send_last())


_MAX_WRITTEN_BYTES = 4_000
"""Larger parameters are sent as such: written into the text they need twice the bytes."""


def _write_parameters(text: str, parameters: Sequence[Any]) -> str | None:
    """Write parameters into a text, in a form that no value can break out of.

    ASCII without quotes and backslashes is written between quotes, anything else as hexadecimal
    digits. Return None if they are large, or other than text and bytes.
    """
    first, *others = _split(text)
    parts = [first]
    size = 0
    for value, part in zip(parameters, others, strict=True):
        if type(value) is str:
            if value.isascii() and not ("'" in value or "\\" in value or "\0" in value):
                size += len(value)
                parts += ("'", value, "'", part)
            else:
                try:
                    data = value.encode()
                except UnicodeEncodeError:
                    return None
                size += len(data)
                parts += ("convert_from(decode('", data.hex(), "', 'hex'), 'UTF8')", part)
        elif type(value) is bytes:
            size += len(value)
            parts += ("decode('", value.hex(), "', 'hex')", part)
        else:
            return None
        if size > _MAX_WRITTEN_BYTES:
            return None
    return "".join(parts)


async def _by_asyncpg(connection: Connection, text: str, parameters: Sequence[Any]) -> Rows:
    """Execute by asyncpg itself, which caches statements; SQLAlchemy's cursor takes as long again.

    SQLAlchemy's connection knows when to begin, and translates errors.
    """
    adapted: Any = connection.connection.dbapi_connection
    begun = adapted._transaction
    if begun is None:
        await adapted._start_transaction()
    elif isinstance(begun, dialect.AsyncpgTransaction) and begun.last:
        await begun.send_last()
    try:
        rows: Rows = await adapted.driver_connection.fetch(_numbered(text), *parameters)
    except Exception as error:
        adapted._handle_exception(error)  # raises it as one of SQLAlchemy's adapter
        raise
    return rows


def _fetch(connection: Connection, query: Query) -> Rows:
    result = connection.exec_driver_sql(*query)
    return result.all() if result.returns_rows else ()


def is_async(handle: Any, who: str) -> bool:
    """Return whether a handle is awaited; raise if `who` cannot use it, or not in a transaction."""
    if isinstance(handle, (Session, Connection)):
        return False
    if is_sqlalchemy_async(handle):
        return True
    if _is_a(handle, _PSYCOPG, _ASYNC_PSYCOPG):
        if handle.autocommit and int(handle.info.transaction_status) == _IDLE:
            raise _autocommit_error(handle, who, "with connection.transaction(): …")
        return _is_a(handle, _ASYNC_PSYCOPG)
    if _is_a(handle, *_ASYNCPG):
        if not handle.is_in_transaction():
            raise _autocommit_error(handle, who, "async with connection.transaction(): …")
        return True
    is_awaited = _is_a(handle, _AIOSQLITE)
    if is_awaited or isinstance(handle, sqlite3.Connection):
        commits = handle.isolation_level is None or getattr(handle, "autocommit", False) is True
        if commits and not handle.in_transaction:
            raise _autocommit_error(handle, who, "connection.execute('BEGIN IMMEDIATE')")
        return is_awaited
    raise ConfigError(
        f"{who} cannot use {type(handle).__name__}; it takes SQLAlchemy's Session, Connection,"
        " AsyncSession and AsyncConnection, and connections of psycopg, asyncpg, sqlite3 and"
        " aiosqlite"
    )


def is_sqlalchemy_async(handle: Any) -> bool:
    """Return whether a handle is an AsyncSession or an AsyncConnection."""
    return _is_a(handle, *_ASYNC_SQLALCHEMY)


def run(handle: Any, statement: Statement) -> Rows:
    """Execute a statement by a sync handle and return its rows."""
    if isinstance(handle, Session):
        return execute(handle.connection(), statement)
    if isinstance(handle, Connection):
        if not handle.in_transaction():
            handle.begin()  # SQLAlchemy does not see statements that the driver executes
        return execute(handle, statement)
    if isinstance(handle, sqlite3.Connection):
        text, parameters = statement.sqlite()
        many = isinstance(parameters, list)
        return (handle.executemany if many else handle.execute)(text, parameters).fetchall()
    return _by_psycopg(handle, statement)


async def run_async(handle: Any, statement: Statement) -> Rows:
    """Execute a statement by an async handle and return its rows."""
    rows: Rows = ()
    if is_sqlalchemy_async(handle):
        rows = await handle.run_sync(run, statement)
    elif _is_a(handle, _ASYNC_PSYCOPG):
        async with handle.cursor() as cursor:
            await cursor.execute(*statement.postgresql())
            if statement.returns_rows:
                rows = await cursor.fetchall()
    elif _is_a(handle, _AIOSQLITE):
        text, parameters = statement.sqlite()
        if isinstance(parameters, list):
            await handle.executemany(text, parameters)
        else:
            rows = await handle.execute_fetchall(text, parameters)
    else:
        text, parameters = statement.postgresql()
        rows = await handle.fetch(_numbered(text), *parameters)
    return rows


def _by_psycopg(connection: Any, statement: Statement) -> Rows:
    with connection.cursor() as cursor:
        cursor.execute(*statement.postgresql())
        rows: Rows = cursor.fetchall() if statement.returns_rows else ()
        return rows


_ASYNC_SQLALCHEMY = (
    "sqlalchemy.ext.asyncio.AsyncSession",
    "sqlalchemy.ext.asyncio.AsyncConnection",
)
_PSYCOPG = "psycopg.Connection"
_ASYNC_PSYCOPG = "psycopg.AsyncConnection"
_ASYNCPG = ("asyncpg.Connection", "asyncpg.pool.PoolConnectionProxy")
_AIOSQLITE = "aiosqlite.Connection"


def _is_a(handle: Any, *kinds: str) -> bool:
    """Compare with classes of packages that may be missing; one not loaded made no handle."""
    for kind in kinds:
        module, _, name = kind.rpartition(".")
        if module in sys.modules and isinstance(handle, getattr(sys.modules[module], name)):
            return True
    return False


def _autocommit_error(handle: Any, who: str, begin: str) -> ConfigError:
    driver = type(handle).__module__.partition(".")[0]
    return ConfigError(
        f"{who}: the connection of {driver} is in no transaction, so the row would be committed"
        f" without the effects; begin one: {begin}"
    )


_mark = re.compile("%[sb]")


@lru_cache(100)
def _split(text: str) -> Sequence[str]:
    return _mark.split(text)


@lru_cache(100)
def _numbered(text: str) -> str:
    """Write marks as asyncpg wants them: $1, $2, …"""
    first, *others = _split(text)
    return first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))
