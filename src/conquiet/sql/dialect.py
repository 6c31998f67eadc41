"""Hide the differences of PostgreSQL and SQLite: connections, transactions, errors."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    QueuePool,
    StaticPool,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from conquiet import bridge
from conquiet.config import missing_extra, require
from conquiet.errors import ConfigError, HandlerError, StoreError
from conquiet.sql.tls import add_advice, is_near, verify_by_asyncpg, verify_server

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

BUSY_SECONDS = 10.0
"""How long a connection waits for SQLite's write lock before it fails."""

_IN_ERROR = 3  # transaction status of libpq: the transaction is aborted
_IDLE = 0
_SQLITE_LEGACY = -1  # sqlite3.LEGACY_TRANSACTION_CONTROL, which Python 3.11 does not name

# PostgreSQL error classes and codes that are failures of the store: connection, rollback by
# deadlock or serialization, resources, shutdown, system.
_STORE_CLASSES = ("08", "40", "53", "58")
_STORE_CODES = {"55P03", "57P01", "57P02", "57P03"}
# Idle and transaction timeouts: the handler's fault, although the connection is lost.
_HANDLER_CODES = {"25P03", "25P04"}
# PgBouncer in transaction pooling mixes up prepared statements; those of psycopg, ours and those of
# asyncpg have these prefixes.
_PREPARED_CODES = {"26000", "42P05"}
_OF_ASYNCPG = "__asyncpg_"
_PREPARED_NAMES = ("_pg3_", "_conquiet_", _OF_ASYNCPG)
_PREPARE = "prepare_threshold"
_UNPREPARED = {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
"""Settings of asyncpg, and of SQLAlchemy's adapter of it, that prepare no statement by name."""
_CONNECT_TIMEOUT = "connect_timeout"
_OF_ASYNCPG_ALONE = ("command_timeout", "prepared_statement_cache_size")
"""Parameters of a URL that psycopg does not know."""
_KNOWN_TO_ASYNCPG = (
    *("host", "port", "passfile", "target_session_attrs", "krbsrvname"),
    *_OF_ASYNCPG_ALONE,
)
_SQLITE_PARAMETERS = (
    *("timeout", "isolation_level", "detect_types"),
    *("check_same_thread", "cached_statements", "uri"),
)
_READ_ONLY = "25006"
_CONFLICT_CODES = {"40001", "40P01"}  # serialization failure, deadlock
_IN_FAILED_TRANSACTION = "25P02"
_UNDEFINED_TABLE = "42P01"
_CHECK_VIOLATION = "23514"
# Primary result codes of SQLite: busy, locked, no memory, interrupted, I/O, full, cannot open,
# lock protocol.
_SQLITE_STORE_CODES = {5, 6, 7, 9, 10, 13, 14, 15}


def engine(url: str | URL, **options: Any) -> Engine:
    """Create a SQLAlchemy engine for a database's `url`.

    PostgreSQL is opened by psycopg, and on another host by verified TLS unless the URL has another
    `sslmode`; SQLite with a write-ahead log and a busy timeout of `BUSY_SECONDS`. A URL of an async
    driver, such as `postgresql+asyncpg://`, opens the same database by the sync one. `options` go
    to `sqlalchemy.create_engine`. Behind PgBouncer, `?prepare_threshold=none` in the URL switches
    prepared statements off.
    """
    address = verify_server(_sync_url(make_url(url)), options.get("connect_args"))
    if address.get_backend_name() == "sqlite":
        arguments = {"timeout": BUSY_SECONDS, **options.pop("connect_args", {})}
        made = create_engine(address, connect_args=arguments, **options)
        event.listen(made, "connect", keep_wal)
        return made
    if _PREPARE in address.query:
        arguments = {_PREPARE: _prepare_threshold(address), **options.pop("connect_args", {})}
        options["connect_args"] = arguments
        address = address.difference_update_query([_PREPARE])
    with _name_missing_driver():
        return create_engine(address, **options)


def is_async_url(url: URL) -> bool:
    """Return whether a URL names an async driver that conquiet knows."""
    return url.drivername in _ASYNC_DRIVERS


def async_engine(url: URL, **options: Any) -> AsyncEngine:
    """Create an AsyncEngine for a URL of an async driver, as `engine` creates one of a sync driver.

    The URL has libpq's parameters also for asyncpg, since the same one is used for psycopg.
    `?prepare_threshold=none` switches prepared statements off; asyncpg has no other threshold.
    """
    require("greenlet", "async")
    from sqlalchemy.ext.asyncio import create_async_engine

    arguments: dict[str, Any] = {}
    if url.get_backend_name() == "sqlite":
        arguments["timeout"] = BUSY_SECONDS
    elif url.drivername == "postgresql+asyncpg":
        url, arguments = _translate_for_asyncpg(url)
    else:
        url = verify_server(url)
        if _PREPARE in url.query:
            arguments[_PREPARE] = _prepare_threshold(url)
            url = url.difference_update_query([_PREPARE])
    with _name_missing_driver():
        return create_async_engine(url, connect_args=arguments, **options)


def _translate_for_asyncpg(url: URL) -> tuple[URL, dict[str, Any]]:
    """Return a URL without the parameters of libpq, and what asyncpg has for them."""
    given = dict(url.query)
    bare, tls = verify_by_asyncpg(url)
    arguments: dict[str, Any] = {} if tls is None else {"ssl": tls}
    if "application_name" in given:
        arguments["server_settings"] = {"application_name": given["application_name"]}
    if _CONNECT_TIMEOUT in given:
        arguments["timeout"] = _seconds(url, str(given[_CONNECT_TIMEOUT]))
    if _PREPARE in given and _prepare_threshold(url) is None:
        arguments |= _UNPREPARED
    bare = bare.difference_update_query(["application_name", _CONNECT_TIMEOUT, _PREPARE])
    unknown = [name for name in bare.query if name not in _KNOWN_TO_ASYNCPG]
    if unknown:
        raise ConfigError(
            f"{display_url(url)}: asyncpg has no parameter {', '.join(unknown)}; give an"
            " AsyncEngine, which takes all settings as connect_args"
        )
    return bare, arguments


def _seconds(url: URL, given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise ConfigError(
            f"{display_url(url)}: {_CONNECT_TIMEOUT}={given!r:.40} is not a number of seconds"
        ) from None


@contextmanager
def _name_missing_driver() -> Iterator[None]:
    """Name the command that installs the driver which SQLAlchemy could not import."""
    try:
        yield
    except ImportError as error:
        is_in_no_extra = error.name in ("asyncpg", "aiosqlite")
        raise missing_extra(error, None if is_in_no_extra else "postgres") from error


_DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+asyncpg": "postgresql+psycopg",
    "postgresql+psycopg_async": "postgresql+psycopg",
    "sqlite+aiosqlite": "sqlite",
}


_ASYNC_DRIVERS = ("postgresql+asyncpg", "postgresql+psycopg_async", "sqlite+aiosqlite")


def _sync_url(url: URL) -> URL:
    """Name psycopg if no driver is named, and the sync driver in place of an async one."""
    if url.drivername == "postgresql+asyncpg":
        mode = url.query.get("ssl")  # asyncpg's name of sslmode
        url = url.difference_update_query(["ssl", *_OF_ASYNCPG_ALONE])
        if mode is not None:
            url = url.update_query_dict({"sslmode": str(mode)})
    return url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))


def unknown_parameters(url: URL) -> list[str]:
    """Return the parameters of a URL that neither `engine` nor its driver knows."""
    url = _sync_url(url)
    if url.get_backend_name() == "sqlite":
        if url.query.get("uri") == "true":  # the others are SQLite's own
            return []
        return [name for name in url.query if name not in _SQLITE_PARAMETERS]
    if url.drivername != "postgresql+psycopg":
        return []
    options = require("psycopg.pq", "postgres").Conninfo.get_defaults()
    known = {option.keyword.decode() for option in options} | {_PREPARE}
    return [name for name in url.query if name not in known]


def _prepare_threshold(address: URL) -> int | None:
    """Parse after how many runs psycopg prepares a statement; SQLAlchemy would pass text."""
    given = str(address.query[_PREPARE])
    if given.lower() == "none":
        return None
    if given.isdecimal():
        return int(given)
    raise ConfigError(
        f"{display_url(address)}: {_PREPARE}={given!r:.40} is neither a whole number nor none"
    )


def as_engine(given: Engine | AsyncEngine | str | URL) -> Engine:
    """Return the engine itself, the sync engine inside an async one, or create one for a URL."""
    if isinstance(given, (str, URL)):
        return engine(given)
    return given if isinstance(given, Engine) else given.sync_engine


def max_connections(engine: Engine) -> int | None:
    """Return how many transactions an engine can have open at once; None for any number.

    One waits for a connection of a full pool, and with an error after a time.
    """
    pool = engine.pool
    if isinstance(pool, StaticPool):
        return 1
    if not isinstance(pool, QueuePool):
        return None
    overflow = pool._max_overflow
    return None if overflow < 0 or pool.size() <= 0 else pool.size() + overflow


def is_full(engine: Engine) -> bool:
    """Return whether all connections of an engine's pool are in use."""
    pool, most = engine.pool, max_connections(engine)
    return isinstance(pool, QueuePool) and most is not None and pool.checkedout() >= most


def is_about_to_connect(engine: Engine) -> bool:
    """Return whether the next connection is a new one, and neither an idle one nor waited for."""
    pool = engine.pool
    return not isinstance(pool, QueuePool) or (not pool.checkedin() and not is_full(engine))


@contextmanager
def use_engine(given: Engine | str | URL) -> Iterator[Engine]:
    """Return the given engine, or one for a URL, which is disposed of after use."""
    made = as_engine(given)
    try:
        yield made
    finally:
        if made is not given:
            made.dispose()


def compile_ddl(element: Any, target: Dialect) -> str:
    """Compile a statement of a schema for a database, with lines for the eye."""
    lines = str(element.compile(dialect=target)).strip().splitlines()
    return "\n".join(line.rstrip().replace("\t", "    ") for line in lines)


def display_url(url: URL) -> str:
    """Format a URL for messages: without password, and without the query, which may hold one."""
    return url.set(query={}).render_as_string()


def is_postgresql(dialect: Dialect) -> bool:
    return dialect.name == "postgresql"


def is_sqlite(dialect: Dialect) -> bool:
    return dialect.name == "sqlite"


def is_in_memory(engine: Engine) -> bool:
    """Return whether a SQLite database is in memory."""
    path = _path(engine)
    return not path or path == ":memory:" or "mode=memory" in str(engine.url)


def path_of(engine: Engine) -> str:
    """Return the file of a SQLite database, with symbolic links resolved."""
    return os.path.realpath(_path(engine))


def _path(engine: Engine) -> str:
    return (engine.url.database or "").removeprefix("file:").partition("?")[0]


def is_same_database(one: Engine, other: Engine) -> bool:
    """Return whether the URLs of two engines name one database; aliases of a host are not known."""
    if is_sqlite(one.dialect) and is_sqlite(other.dialect):
        in_memory = is_in_memory(one) or is_in_memory(other)
        return not in_memory and path_of(one) == path_of(other)
    if is_postgresql(one.dialect) and is_postgresql(other.dialect):
        return _address(one.url) == _address(other.url)
    return False


def _address(url: URL) -> tuple[str, str, str]:
    environment = os.environ
    host = url.query.get("host") or url.host or environment.get("PGHOST", "")
    port = url.query.get("port") or url.port or environment.get("PGPORT", 5432)
    name = url.database or environment.get("PGDATABASE") or url.username or ""
    return "" if is_near(url) and not str(host).startswith("/") else str(host), str(port), name


def uses_psycopg(dialect: Dialect) -> bool:
    """Return whether hot statements can be sent to psycopg directly."""
    return dialect.name == "postgresql" and dialect.driver == "psycopg" and not dialect.is_async


def uses_asyncpg(dialect: Dialect) -> bool:
    return dialect.driver == "asyncpg"


def connect_errors(dialect: Dialect) -> tuple[type[Exception], ...]:
    """Return the errors of a server that refuses or closes a connection while it is opened.

    Those of asyncpg, if SQLAlchemy passes them on. Errors of settings are among them, and are also
    a ValueError.
    """
    if not uses_asyncpg(dialect):
        return ()
    asyncpg: Any = dialect.loaded_dbapi.asyncpg  # of its adapter
    return (asyncpg.PostgresError, asyncpg.InterfaceError)


def can_queue(dialect: Dialect) -> bool:
    """Return whether statements can be sent without waiting for each result."""
    if not uses_psycopg(dialect):
        return False
    from conquiet.sql.statement_queue import is_supported

    return is_supported()


def driver_connection(connection: Connection) -> Any:
    """Return the connection of the driver underneath."""
    return connection.connection.driver_connection


def is_in_autocommit(connection: Connection) -> bool:
    """Return whether PostgreSQL commits each statement by itself."""
    # sqlite3 of Python 3.12 has -1 there, which means that BEGIN and COMMIT are as before.
    return getattr(connection.connection.dbapi_connection, "autocommit", False) is True


def execute(connection: Connection, statement: str, parameters: Any = None) -> Sequence[Any]:
    """Execute a statement by a cursor of the driver, without SQLAlchemy; return its rows."""
    cursor = connection.connection.cursor()
    try:
        if parameters is None:
            cursor.execute(statement)
        else:
            cursor.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else ()
    finally:
        cursor.close()


def keep_wal(connection: Any, record: object = None) -> None:
    """Change the file of a connection of the driver to WAL, if it is not.

    Readers then never wait for the writer, nor it for them. While another connection does the
    same, SQLite fails at once, whatever its time-out for locks.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def begin_immediate(connection: Connection) -> None:
    """Take SQLite's write lock now: an upgrade of a read lock fails at once instead of waiting."""
    driver = driver_connection(connection)
    if getattr(driver, "autocommit", _SQLITE_LEGACY) != _SQLITE_LEGACY:
        raise ConfigError(
            "the engine opens SQLite with autocommit=…, which hides BEGIN and COMMIT from"
            " SQLAlchemy; leave the argument out"
        )
    if driver.in_transaction:  # the engine has a listener that begins, and not immediately
        connection.connection.rollback()
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def is_aborted(connection: Connection, *, may_have_failed: bool = True) -> bool:
    """Return whether a statement failed before, so that a COMMIT would commit nothing.

    asyncpg does not say; it is asked by a statement, if one `may_have_failed`.
    """
    if not is_postgresql(connection.dialect):
        return False
    driver = driver_connection(connection)
    if connection.dialect.driver != "asyncpg":
        return int(driver.info.transaction_status) == _IN_ERROR
    if not may_have_failed or not driver.is_in_transaction() or driver.is_closed():
        return False
    try:
        execute(connection, "SELECT 1")
    except connection.dialect.loaded_dbapi.Error as error:
        return _sqlstate(error) == _IN_FAILED_TRANSACTION
    return False


def is_over(connection: Connection) -> bool:
    """Return whether the driver or SQLite ended the transaction without SQLAlchemy."""
    driver = driver_connection(connection)
    if is_postgresql(connection.dialect):
        if connection.dialect.driver == "asyncpg":
            return not driver.is_in_transaction()
        return int(driver.info.transaction_status) == _IDLE
    if is_sqlite(connection.dialect):
        return not driver.in_transaction
    return False


def drives_asyncpg(connection: Connection) -> bool:
    """Return whether statements can be sent by asyncpg itself, around SQLAlchemy's adapter.

    That needs attributes that neither documents. Without one of them, in a later version, all
    statements go through the cursor of the adapter.
    """
    if connection.dialect.driver != "asyncpg":
        return False
    adapted: Any = connection.connection.dbapi_connection
    kinds: Any = type(adapted), type(adapted.driver_connection)
    return _has_parts(*kinds)


_ADAPTER_PARTS = (
    *("_transaction", "_start_transaction", "_handle_exception"),
    *("isolation_level", "readonly", "deferrable"),
)
_ASYNCPG_PARTS = ("_top_xact",)


@lru_cache(100)
def _has_parts(adapter: type, driver: type) -> bool:
    has_all = all(hasattr(adapter, name) for name in _ADAPTER_PARTS)
    return has_all and all(hasattr(driver, name) for name in _ASYNCPG_PARTS)


def has_begun(connection: Connection) -> bool:
    """Return whether BEGIN is known to be sent; SQLAlchemy sends it with the first statement."""
    adapted: Any = connection.connection.dbapi_connection
    return getattr(adapted, "_transaction", None) is not None


class AsyncpgTransaction:
    """Begins and commits by asyncpg, with a statement in the round trip of BEGIN or of COMMIT.

    SQLAlchemy's adapter ends it as it ends those that asyncpg makes. Statements are texts without
    parameters, which PostgreSQL takes several of at once.
    """

    def __init__(self, connection: Connection) -> None:
        adapted: Any = connection.connection.dbapi_connection
        self._adapted = adapted
        self._driver = adapted.driver_connection
        self._isolation = adapted.isolation_level  # asyncpg compares it with that of a savepoint
        self._begin = _begin_text(adapted.isolation_level, adapted.readonly, adapted.deferrable)
        self._greenlet = bridge.current()
        self.is_unbroken = bridge.can_be_unbroken(self._greenlet)
        """Whether a cancellation waits for the end of COMMIT."""
        self.last = ""
        """The statement that is sent together with COMMIT."""
        self.is_committed = False
        # Before BEGIN is sent: if the statement behind it fails, there is one to roll back.
        adapted._transaction = self
        if hasattr(adapted, "_started"):  # of SQLAlchemy 2.0
            adapted._started = True
        self._driver._top_xact = self  # asyncpg's own transaction() is then a savepoint

    @property
    def is_over(self) -> bool:
        """Return whether a statement of a handler has ended it."""
        return not self._driver.is_in_transaction()

    async def start(self, statement: str) -> str:
        """Send BEGIN and a statement; return the status of the statement."""
        return await self._send(f"{self._begin}; {statement}")

    async def send_last(self) -> None:
        """Send the last statement now, since another one follows."""
        statement, self.last = self.last, ""
        await self._send(statement)

    async def _send(self, text: str) -> str:
        return await _send(self._adapted, text)

    async def commit(self) -> None:
        self._driver._top_xact = None
        statement, self.last = self.last, ""
        sent = self._driver.execute(f"{statement}; COMMIT" if statement else "COMMIT")
        try:
            status = await (bridge.Unbroken(sent, self._greenlet) if self.is_unbroken else sent)
        except Exception:
            if self._driver.is_in_transaction():  # the statement before COMMIT has failed
                await self._driver.execute("ROLLBACK")
            raise
        self.is_committed = status == "COMMIT"  # in an aborted transaction it is ROLLBACK

    async def rollback(self) -> None:
        self._driver._top_xact = None
        await self._driver.execute("ROLLBACK")


async def execute_alone(connection: Connection, text: str) -> None:
    """Execute statements without parameters by asyncpg, which commits them, in one round trip."""
    try:
        await _send(connection.connection.dbapi_connection, text)
    except asyncio.CancelledError:
        connection.invalidate()  # the statement may be under way
        raise


async def _send(adapted: Any, text: str) -> str:
    try:
        return await adapted.driver_connection.execute(text)  # type: ignore[no-any-return]
    except Exception as error:
        adapted._handle_exception(error)  # raises it as one of SQLAlchemy's adapter
        raise


@lru_cache(100)
def _begin_text(isolation: str | None, read_only: bool, deferrable: bool) -> str:
    level = f" ISOLATION LEVEL {isolation.replace('_', ' ').upper()}" if isolation else ""
    return f"BEGIN{level}{' READ ONLY' * read_only}{' DEFERRABLE' * deferrable}"


def is_lost(connection: Connection) -> bool:
    """Return whether the connection to the server is closed."""
    if connection.closed or connection.invalidated:
        return True
    driver = driver_connection(connection)
    if connection.dialect.driver == "asyncpg":
        return bool(driver.is_closed())
    return bool(getattr(driver, "closed", False))


class translate_errors:  # noqa: N801 - a context manager, used as a function
    """Raise the driver's errors as SQLAlchemy's, as for statements sent through it."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        connection = self._connection
        note = getattr(connection, "note_failure", None)  # of a TransactionConnection
        driver = connection.dialect.loaded_dbapi
        if not isinstance(error, driver.Error):
            if note is not None and isinstance(error, TimeoutError):  # asyncpg's command_timeout
                note(error)
            return
        pooled = connection.connection.dbapi_connection
        lost = connection.dialect.is_disconnect(error, pooled, None)
        translated = DBAPIError.instance(
            None,
            None,
            error,
            driver.Error,
            connection_invalidated=lost,
            dialect=connection.dialect,
        )
        if note is not None:
            note(translated)
        raise translated from error


def one_line(error: BaseException) -> str:
    """Format a driver's error in one line, with advice where the cause is known."""
    original = _original(error)
    reason = " ".join(str(original).split()) or type(original).__name__
    if isinstance(original, TimeoutError) and not str(original):
        reason = "no answer within the command_timeout of asyncpg"
    if _is_mixed_up(original):
        reason, _, _ = reason.partition(" HINT:")  # of asyncpg, which is long
        settings = _UNPREPARED if _OF_ASYNCPG in reason else {_PREPARE: None}
        reason += (
            " (behind PgBouncer, switch prepared statements off:"
            f" ?prepare_threshold=none in the URL, or connect_args={settings})"
        )
    if is_missing_table(original):
        reason += " (conquiet outbox migrate creates the tables)"
    return add_advice(reason)


def write_epoch(target: Dialect) -> str:
    """Return the expression of the database's time, in seconds since 1970."""
    if is_postgresql(target):
        return "extract(epoch FROM clock_timestamp())::float8"
    return "((julianday('now') - 2440587.5) * 86400.0)"


@contextmanager
def begin_to_write(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that writes; on SQLite with its write lock from the start."""
    with engine.begin() as connection:
        if is_sqlite(connection.dialect):
            begin_immediate(connection)
        yield connection


@contextmanager
def raise_store_errors(engine: Engine) -> Iterator[None]:
    """Raise database errors as `StoreError`, in one line and without the password."""
    try:
        yield
    except SQLAlchemyError as error:
        raise store_error(engine, error) from error


def store_error(engine: Engine, error: BaseException) -> StoreError:
    """Return the error of a store: the URL without password, and the driver's reason."""
    return StoreError(f"{display_url(engine.url)}: {one_line(error):.300}")


def is_consequence(error: BaseException) -> bool:
    """Return whether a statement failed only because an earlier one had failed."""
    return _sqlstate(_original(error)) == _IN_FAILED_TRANSACTION


def has_table(connection: Connection, name: str) -> bool:
    """Return whether a table exists; its name may have a schema."""
    schema, _, table = name.rpartition(".")
    return inspect(connection).has_table(table, schema=schema or None)


def has_column(connection: Connection, table: str, column: str) -> bool:
    """Return whether a table has a column; the table's name may have a schema."""
    if is_sqlite(connection.dialect):
        query = "SELECT count(*) FROM pragma_table_info(:table) WHERE name = :column"
        table = table.rpartition(".")[2]
    else:
        query = (
            "SELECT count(*) FROM pg_attribute WHERE attrelid = to_regclass(:table)"
            " AND attname = :column AND NOT attisdropped"
        )
    found = connection.execute(text(query), {"table": table, "column": column})
    return bool(found.scalar_one())


def is_missing_table(error: BaseException) -> bool:
    """Return whether a statement failed because a table does not exist, or its day."""
    original = _original(error)
    return _lacks_table(original) or str(original).startswith("no such table")


def names_table(error: BaseException, tables: Collection[str]) -> bool:
    """Return whether a statement failed because one of these tables is missing."""
    original = _original(error)
    if _lacks_table(original):
        reason = str(original).partition("\n")[0]  # behind it is the statement
        return any(f'"{table}"' in reason for table in tables)
    return any(str(original) == f"no such table: {table}" for table in tables)


def _lacks_table(original: BaseException) -> bool:
    """Return whether PostgreSQL lacks a table, or the partition for a row."""
    state = _sqlstate(original)
    if state == _CHECK_VIOLATION:  # of a partitioned table, and of no constraint that has a name
        return getattr(getattr(original, "diag", original), "constraint_name", None) is None
    return state == _UNDEFINED_TABLE


def is_conflict(error: BaseException) -> bool:
    """Return whether another transaction won: a deadlock, or a serialization failure."""
    return any(_sqlstate(_original(link)) in _CONFLICT_CODES for link in chain(error))


def is_store_failure(error: BaseException, *, read_only: bool = False) -> bool:
    """Return whether the store failed, not the statement; causes of the error count too."""
    return any(_is_store_failure(link, read_only) for link in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _is_store_failure(error: BaseException, read_only: bool) -> bool:
    if isinstance(error, PoolTimeout):
        return True
    if isinstance(error, DBAPIError):
        original = error.orig
        if original is None:
            return error.connection_invalidated
        return _driver_blames_store(original, read_only) or (
            error.connection_invalidated and _sqlstate(original) not in _HANDLER_CODES
        )
    return _driver_blames_store(error, read_only)


def _driver_blames_store(error: BaseException, read_only: bool) -> bool:
    package = type(error).__module__.partition(".")[0]
    if package == "sqlite3":
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            return "closed database" in str(error)
        return code & 0xFF in _SQLITE_STORE_CODES
    if package not in ("psycopg", "psycopg2", "asyncpg"):
        return False
    state = _sqlstate(error)
    if state is None:
        # An error of psycopg, not of the server: the connection failed or is closed.
        name = type(error).__name__
        return name == "OperationalError" or "connection is " in str(error)
    if state == _READ_ONLY:
        return not read_only  # not configured: a failover is under way
    if _is_mixed_up(error):
        return True
    return state.startswith(_STORE_CLASSES) or state in _STORE_CODES


def _is_mixed_up(error: BaseException) -> bool:
    return _sqlstate(error) in _PREPARED_CODES and any(
        name in str(error) for name in _PREPARED_NAMES
    )


def _original(error: BaseException) -> BaseException:
    return getattr(error, "orig", None) or error


def _sqlstate(error: BaseException) -> str | None:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state if isinstance(state, str) else None


# Matches the first word behind comments. ROLLBACK TO SAVEPOINT does not end the transaction.
_control = re.compile(
    r"(?:\s|;|--[^\n]*\n|/\*.*?\*/)*"
    r"(COMMIT|END|ABORT|BEGIN|(?:START|PREPARE)\s+TRANSACTION"
    r"|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b))\b",
    re.IGNORECASE | re.DOTALL,
)


_local = re.compile(r"\bSET\s+LOCAL\b|\bset_config\s*\(", re.IGNORECASE)


@lru_cache(1000)
def sets_locally(statement: str) -> bool:
    """Return whether a statement may change a setting until the end of the transaction."""
    return _local.search(statement) is not None


def refuse_control(statement: str) -> None:
    """Raise if a statement would begin or end the transaction of the chain.

    A COMMIT by a handler would commit its effects without their events.
    """
    word = _control_word(statement)
    if word:
        raise control_error(word)


@lru_cache(1000)
def _control_word(statement: str) -> str:
    found = _control.match(statement)
    return "" if found is None else found[1].upper()


def control_error(what: str) -> HandlerError:
    return HandlerError(
        f"{what} on the connection of a conquiet transaction, which the transaction alone may"
        " end; raise an exception to roll back, use begin_nested() for a savepoint"
    )
