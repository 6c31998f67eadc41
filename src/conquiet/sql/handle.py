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
from typing import Any, Protocol, TypeAlias

from sqlalchemy import Connection, Executable, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql import ClauseElement
from sqlalchemy.types import NullType

from conquiet import bridge
from conquiet.errors import ConfigError
from conquiet.sql import dialect

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
        if target.driver == "asyncpg":
            return bridge.wait_for(_by_asyncpg(connection, _numbered(text), parameters))
        return dialect.execute(connection, text, parameters)


async def _by_asyncpg(connection: Connection, text: str, parameters: Sequence[Any]) -> Rows:
    """Execute by asyncpg itself, which caches statements; SQLAlchemy's cursor takes as long again.

    SQLAlchemy's connection knows when to begin, and translates errors.
    """
    adapted: Any = connection.connection.dbapi_connection
    try:
        if adapted._transaction is None:
            await adapted._start_transaction()
        rows: Rows = await adapted.driver_connection.fetch(text, *parameters)
    except Exception as error:
        adapted._handle_exception(error)
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
def _numbered(text: str) -> str:
    """Write marks as asyncpg wants them: $1, $2, …"""
    first, *others = _mark.split(text)
    return first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))
