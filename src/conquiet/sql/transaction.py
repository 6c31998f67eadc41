"""Run a batch in one database transaction, and let adapters find that transaction.

A `Unit` is one transaction, or one savepoint of it. A ContextVar holds it, so each thread and each
task has its own, and a coroutine in a copied context sees the transaction of its worker.

With an async engine the same code runs in a greenlet on the loop of an async worker: SQLAlchemy
then gives the loop back while it waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from contextvars import ContextVar
from functools import cache
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args
from weakref import WeakSet, ref

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    NestedTransaction,
    Pool,
    PoolProxiedConnection,
    event,
)
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.engine import Transaction as DatabaseTransaction
from sqlalchemy.exc import DBAPIError, InvalidRequestError, ResourceClosedError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from conquiet import bridge, transaction
from conquiet.acking import defer_settlements
from conquiet.errors import (
    ConfigError,
    Conflict,
    DeadlineExceeded,
    HandlerError,
    Interrupt,
    StoreError,
)
from conquiet.gate import FailedKeys
from conquiet.handler import Process, Result
from conquiet.message import Message
from conquiet.sql import dialect, handle
from conquiet.sql.dialect import control_error, refuse_control
from conquiet.sql.notification import notify_relays
from conquiet.stage import Middleware, Stage, stage_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )

    from conquiet.sql.statement_queue import StatementQueue

logger = logging.getLogger("conquiet.sql")

S = TypeVar("S", bound=Session)
A = TypeVar("A", bound="AsyncSession")

UNITS: ContextVar[tuple[Unit, ...]] = ContextVar("conquiet.sql.units", default=())
"""The transactions around the running code, innermost last."""


class TransactionEnded(HandlerError, ResourceClosedError):
    """A connection or a session was used after its transaction.

    It is also one of SQLAlchemy's errors, since SQLAlchemy passes those on unchanged.
    """


class OneTask:
    """Lets one task at a time use a connection, as a lock does for threads, but refuses others.

    A lock of threads would not keep two tasks of one thread apart, and a task that waited for the
    other could not be told from one that waits for ever.
    """

    def __init__(self) -> None:
        self._user: object | None = None
        self._depth = 0

    def __enter__(self) -> None:
        user = bridge.current()
        if self._user not in (None, user):
            raise HandlerError(
                "two tasks use the connection of one transaction at the same time, as by"
                " asyncio.gather; await one statement after the other, and all tasks of a handler"
                " before it returns"
            )
        self._user = user
        self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._user = None

    def wait(self, seconds: float) -> bool:
        """Wait until no other task uses the connection; return False if one still does."""
        end = time.monotonic() + seconds
        while self._user not in (None, bridge.current()):
            if time.monotonic() > end:
                return False
            bridge.sleep(_LOOK_SECONDS)
        return True


class TransactionConnection(Connection):
    """Refuses to commit, roll back or close: only the transaction that owns it may end it.

    Code inside may use savepoints, by `begin_nested()` or `begin()`. Other messages of the batch
    have their effects in the same transaction.
    """

    unit: Unit
    lock: RLock | OneTask
    """Held by each statement and by the end: a thread that outlives its handler must not write
    into the next transaction of this connection."""
    begun = False
    """Whether conquiet has sent its own BEGIN: from then on BEGIN and COMMIT are refused."""
    begun_by_asyncpg: dialect.AsyncpgTransaction | None = None
    """The transaction of the driver, if it was begun together with a statement of the inbox."""

    def begin(self) -> NestedTransaction:  # type: ignore[override]
        """Begin a savepoint: the transaction itself has begun."""
        if self.unit.ended:
            raise _ended_error("connection")
        if not self.in_transaction():  # SQLAlchemy would begin another, which is never committed
            raise HandlerError(
                "the transaction was rolled back inside, by session.rollback() or an error in a"
                " flush; do not catch SQL errors, or flush in begin_nested()"
            )
        return self.begin_nested()

    def commit(self) -> None:
        raise control_error("commit()")

    def rollback(self) -> None:
        raise control_error("rollback()")

    def close(self) -> None:
        raise control_error("close()")

    def note_failure(self, error: BaseException) -> None:
        """Remember the error of a statement of this connection."""
        if self.unit.failure is None or not dialect.is_consequence(error):
            self.unit.failure = error

    def execute(
        self, statement: Any, parameters: Any = None, *, execution_options: Any = None
    ) -> Any:
        """Execute a statement; queue an insert that is known, without SQLAlchemy."""
        queue = self.unit.queue
        if (
            queue is None
            or not queue.takes_compiled
            or type(parameters) is not dict
            or execution_options
        ):
            return super().execute(statement, parameters, execution_options=execution_options)
        result = self._queue_compiled(queue, statement, parameters)
        if result is None:
            result = super().execute(statement, parameters)
            _queue_module().learn_compiled(statement, parameters, result)
        return result

    def _queue_compiled(
        self, queue: StatementQueue, statement: Any, parameters: dict[str, Any]
    ) -> Any:
        """Queue a known insert; None if it is not known, or must be executed by SQLAlchemy."""
        module = _queue_module()
        known = module.find_compiled(statement, parameters, self.dialect)
        begun = self._transaction
        if known is None or begun is None or not begun.is_active:
            return None
        with self.lock:
            if any(unit.ended for unit in UNITS.get()) or self.unit.ended:
                return None
            given = parameters.copy()
            result = module.QueuedResult(queue, lambda: self._make_result(queue, statement, given))
            with queue.lock:
                try:
                    prepared = queue.prepare(known.query, (parameters,), ref(result))
                except self.dialect.loaded_dbapi.Error:
                    return None  # SQLAlchemy meets the same error, and adds the statement to it
                if prepared is None:
                    return None
                with dialect.translate_errors(self):
                    queue.append(prepared)
        return result

    def _make_result(
        self, queue: StatementQueue, statement: Any, parameters: dict[str, Any]
    ) -> Any:
        """Let SQLAlchemy make the result of an insert that is queued already."""
        with self.lock, queue.lock:
            queue.skips = True
            try:
                return super().execute(statement, parameters)
            finally:
                queue.skips = False

    def _execute_context(self, *arguments: Any, **options: Any) -> Any:
        # All statements of SQLAlchemy pass here.
        with self.lock:
            if self.unit.ended:
                raise _ended_error("connection")
            for unit in UNITS.get():
                if unit.ended:
                    raise _ended_error("connection")
            handle.execute_deferred(self)
            return super()._execute_context(*arguments, **options)

    def _revalidate_connection(self) -> Any:
        # Called when there is no driver connection any more: the transaction is over, or its
        # connection was lost, and then SQLAlchemy raises the right error.
        if self.unit.ended:
            raise _ended_error("connection")
        if self.unit.was_cancelled:
            raise _cancelled_error(self.unit)
        return super()._revalidate_connection()


class Unit:
    """Holds the state of one transaction, or of a savepoint inside one, and its sessions."""

    def __init__(self, connection: TransactionConnection, depth: int = 0) -> None:
        self.connection = connection
        self.engine = connection.engine
        self.depth = depth
        self.ended = False
        self.wrote = False
        """Whether inbox or outbox wrote; then the database must be in a transaction."""
        self.tables: set[str] = set()
        """The tables of inbox and outbox in use; without them no message can be handled."""
        self.is_shared = False
        """Whether several messages are in it."""
        self.must_be_alone = False
        """Whether a message changed a setting that would hold for the others."""
        self.filled: set[str] = set()
        """The outbox tables with new rows; their relays are notified after the commit."""
        self.failure: BaseException | None = None
        """The last error of a statement; if a handler swallows it, the commit is refused."""
        self.gave_driver = False
        """Whether a handler has got the connection of the driver, whose errors are not noted."""
        self.queue: StatementQueue | None = None
        self._sessions: list[Session] = []
        self._async_connection: AsyncConnection | None = None

    @property
    def was_cancelled(self) -> bool:
        """Return whether a statement was cancelled, and the connection closed with it."""
        return self.connection.invalidated and isinstance(self.failure, asyncio.CancelledError)

    def use_table(self, name: str) -> None:
        """Note a table of inbox or outbox, before it is used."""
        self.connection.unit.tables.add(name)

    def note_write(self, notify: str | None = None) -> None:
        """Note that inbox or outbox wrote; `notify` is a table whose relays are to be notified."""
        self.wrote = True
        self.connection.unit.gave_driver = False  # a failed transaction would have refused it
        if notify is not None:  # on the whole transaction: a savepoint commits nothing by itself
            self.connection.unit.filled.add(notify)

    def belongs_to(self, engine: Engine) -> bool:
        # Engines made by execution_options() share the pool of the one that they came from.
        return self.engine.pool is engine.pool

    def is_beside(self, engine: Engine) -> bool:
        """Return whether connections of this engine go to the database of this transaction."""
        return self.belongs_to(engine) or dialect.is_same_database(self.engine, engine)

    @contextmanager
    def session(self, factory: sessionmaker[S]) -> Iterator[S]:
        """Open a session in this transaction; flush it when the block ends and before commit."""
        # rollback_only: session.commit() flushes and leaves the commit to the transaction;
        # session.rollback() ends the transaction, which then refuses to commit.
        joined = factory(bind=self.connection, join_transaction_mode="rollback_only")
        try:
            yield joined
            joined.flush()
        except BaseException:
            joined.close()  # its unflushed changes must not be written later
            raise
        self._sessions.append(joined)

    @asynccontextmanager
    async def async_session(
        self, factory: async_sessionmaker[A], engine: AsyncEngine
    ) -> AsyncIterator[A]:
        """Open an async session in this transaction, as `session` does."""
        joined = factory(bind=self.async_connection(engine), join_transaction_mode="rollback_only")
        try:
            yield joined
            await joined.flush()
        except BaseException:
            await joined.close()
            raise
        self._sessions.append(joined.sync_session)

    def async_connection(self, engine: AsyncEngine) -> AsyncConnection:
        """Return this transaction's connection for async code; the same at each call."""
        whole = self.connection.unit
        if whole._async_connection is None:
            whole._async_connection = _async_connection_class()(engine, self.connection)
        return whole._async_connection

    def flush(self) -> None:
        """Flush all sessions of this transaction."""
        for joined in self._sessions:
            joined.flush()

    def finish_queueing(self) -> None:
        """Stop queueing; COMMIT executes what is queued. Raise if any of it has failed."""
        if self.queue is not None:
            self.queue.finish()

    def drop_queued(self) -> None:
        """Discard the queued statements; the transaction is not committed."""
        if self.queue is not None:
            self.queue.close()
            self.queue = None

    def end(self) -> None:
        self.ended = True
        self.drop_queued()  # before a commit the queue is finished
        for joined in self._sessions:
            joined.close()

    def forget_connection(self) -> None:
        """Forget the connection, which knows this unit: a garbage collection would free both."""
        del self.connection
        self._async_connection = None


@cache
def _async_connection_class() -> type[AsyncConnection]:
    from sqlalchemy.ext.asyncio import AsyncConnection  # needs greenlet

    class TransactionAsyncConnection(AsyncConnection):
        """Notes that a handler uses the driver, whose errors SQLAlchemy does not see."""

        async def get_raw_connection(self) -> PoolProxiedConnection:
            found = self.sync_connection
            assert isinstance(found, TransactionConnection), "it is made for one"
            found.unit.gave_driver = True
            pooled = found.connection
            if dialect.uses_asyncpg(found.dialect) and not dialect.has_begun(found):
                # Statements of the driver would be committed by themselves.
                await bridge.run(found.exec_driver_sql, "SELECT 1")
            elif found.begun_by_asyncpg is not None and found.begun_by_asyncpg.last:
                await bridge.run(handle.execute_deferred, found)
            return pooled

    return TransactionAsyncConnection


def current(who: str) -> Unit:
    """Return the innermost transaction; raise an error that names `who` if there is none."""
    units = UNITS.get()
    if not units:
        raise HandlerError(
            f"{who} was used outside a SQL transaction; put conquiet.sql.Transaction around it:"
            " router.use(Transaction(engine), Inbox(…), Outbox(…))"
        )
    if units[-1].ended:
        raise _ended_error(who)
    return units[-1]


def find(engine: Engine) -> Unit | None:
    """Return the innermost transaction on this engine, or None."""
    for unit in reversed(UNITS.get()):
        if unit.belongs_to(engine):
            if unit.ended:
                raise _ended_error("connection")
            if not engine.dialect.is_async:
                _warn_of_blocked_loop(engine)
            return unit
    for unit in UNITS.get():
        if not unit.ended and unit.is_beside(engine):
            raise HandlerError(
                "another engine of the same database was used inside a transaction, where its"
                " effects would be committed by themselves; give Transaction and the adapters one"
                " engine, or write engine.begin() for effects outside the transaction"
            )
    return None


class connection:  # noqa: N801 - a context manager, used as a function
    """Return the connection of the ambient transaction, or open a transaction for this block.

    The transaction of an async engine is for handlers without `async`, which run in threads.

    >>> from sqlalchemy import create_engine
    >>> engine = create_engine("sqlite://")
    >>> with connection(engine) as found:
    ...     found.exec_driver_sql("SELECT 1").scalar()
    1
    >>> engine.dispose()
    """

    __slots__ = ("_engine", "_own")

    def __init__(self, engine: Engine | AsyncEngine) -> None:
        self._engine = dialect.as_engine(engine)
        self._own: AbstractContextManager[Connection] | None = None

    def __enter__(self) -> Connection:
        _refuse_coroutines(self._engine, "connection", "async_connection(engine)")
        unit = find(self._engine)
        if unit is not None:
            return unit.connection
        self._own = self._engine.begin()
        return self._own.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._own is not None:
            self._own.__exit__(kind, error, trace)


class async_connection:  # noqa: N801 - a context manager, used as a function
    """Return the connection of the ambient transaction, or open a transaction for this block.

    One task at a time may use it: await one statement after the other. The transaction must be on
    the database of `engine`.
    """

    __slots__ = ("_engine", "_own")

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._own: AbstractAsyncContextManager[AsyncConnection] | None = None

    async def __aenter__(self) -> AsyncConnection:
        unit = find(_sync_engine(self._engine))
        if unit is not None:
            return unit.async_connection(self._engine)
        self._own = self._engine.begin()
        return await self._own.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._own is not None:
            await self._own.__aexit__(kind, error, trace)


def async_session(
    factory: async_sessionmaker[A] | async_scoped_session[A],
) -> AbstractAsyncContextManager[A]:
    """Open an async session of `factory` in the ambient transaction, or in one for this block.

    In an ambient transaction it is flushed and closed as by `session`. An `async_scoped_session`
    gives its factory.
    """
    given: Any = getattr(factory, "session_factory", factory)
    settings = getattr(given, "kw", None)
    if settings is None:
        raise ConfigError(
            f"async_session() takes an async_sessionmaker, or an async_scoped_session of one, not"
            f" {type(given).__name__}; as in async_session(async_sessionmaker(engine))"
        )
    bind: Any = settings.get("bind")
    if bind is None:
        unit = current("an async session without an engine of its own")
        return unit.async_session(given, _async_engine(unit.engine))
    found = find(_sync_engine(bind))
    return given.begin() if found is None else found.async_session(given, bind)


def _async_engine(engine: Engine) -> AsyncEngine:
    from sqlalchemy.ext.asyncio import AsyncEngine  # needs greenlet

    return AsyncEngine(engine)


def _sync_engine(engine: Any) -> Engine:
    found = getattr(engine, "sync_engine", None)
    if not isinstance(found, Engine):
        raise ConfigError(
            f"async_session() takes an async_sessionmaker of an AsyncEngine, async_connection() an"
            f" AsyncEngine, not {type(engine).__name__}; for a sync engine use session() and"
            " connection()"
        )
    return found


def session(factory: sessionmaker[S] | scoped_session[S]) -> AbstractContextManager[S]:
    """Open a session in the ambient transaction, or in a transaction for this block.

    In an ambient transaction the session is flushed when the block ends and again before the
    commit, and closed after it: objects that leave the block stay usable in the handler. A
    `scoped_session` gives its factory: the session of its thread has a transaction of its own.
    """
    given = factory.session_factory if isinstance(factory, scoped_session) else factory
    if not isinstance(given, sessionmaker):
        advice = (
            "use async with async_session(factory)"
            if hasattr(given, "configure")  # an async_sessionmaker
            else "as in session(sessionmaker(engine))"
        )
        raise ConfigError(
            f"session() takes a sessionmaker, or a scoped_session of one, not"
            f" {type(given).__name__}; {advice}"
        )
    factory = given
    bind = factory.kw.get("bind")
    bind = getattr(bind, "sync_engine", bind)
    if isinstance(bind, Engine):
        _refuse_coroutines(bind, "session", "async_session(factory)")
        unit = find(bind)
    else:
        unit = current("a session without an engine of its own")
    return factory.begin() if unit is None else unit.session(factory)


def _refuse_coroutines(engine: Engine, name: str, instead: str) -> None:
    """Refuse an async engine where its statements cannot be waited for."""
    if engine.dialect.is_async and not bridge.is_inside():
        raise ConfigError(
            f"{name}() of an async engine is for handlers without `async`, in an async worker; in a"
            f" coroutine use async with {instead}"
        )


def _ended_error(what: str) -> TransactionEnded:
    return TransactionEnded(
        f"{what}: its transaction has ended; finish all work before the handler returns, and"
        " call conquiet.sql.connection(engine) again each time"
    )


Isolate = Literal["batch", "savepoint"]
IsolationLevel = Literal["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
_LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
_ABORTED = "is aborted: a statement in it failed and its error was swallowed"
_SECONDS_TO_RETURN = 1.0
"""How long a rollback waits for a statement of another task; then the connection is dropped."""
_LOOK_SECONDS = 0.005
_watched: WeakSet[Engine] = WeakSet()
_warned: WeakSet[Pool] = WeakSet()
_warned_of_loop: WeakSet[Pool] = WeakSet()


class Transaction(transaction.Transaction):
    """Middleware: BEGIN before the chain, COMMIT after it, ROLLBACK after an exception.

    Inside another transaction on the same engine it is a savepoint. Adapters find it by
    `conquiet.sql.connection(engine)` or `conquiet.sql.session(factory)`.

    `queue_statements` sends statements that return nothing without waiting for their results; an
    error of one is raised later, at the latest before the commit (PostgreSQL with psycopg).

    `isolate` is how a failed message is kept from its neighbours in a batch: `batch` rolls all back
    and runs each again by itself; `savepoint` gives each a savepoint, so that the handlers of the
    others run once, at the price of more statements.

    An async engine is for an async worker, `await worker.run_async()`; adapters find its
    transaction by `conquiet.sql.async_connection(engine)` or `conquiet.sql.async_session(factory)`.

    `engine` is one of SQLAlchemy's, or a URL. `isolation_level` and `read_only` are set in BEGIN;
    without them the server's defaults hold.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine | str | URL,
        *,
        isolation_level: IsolationLevel | None = None,
        read_only: bool = False,
        queue_statements: bool = True,
        isolate: Isolate = "batch",
    ) -> None:
        if isolate not in get_args(Isolate):
            raise ConfigError(f"isolate={isolate!r}: choose one of {', '.join(get_args(Isolate))}")
        if isolation_level is not None and isolation_level not in _LEVELS:
            raise ConfigError(
                f"isolation_level={isolation_level!r}: choose one of {', '.join(_LEVELS)}"
            )
        self.engine = dialect.as_engine(engine)
        self.is_async = self.engine.dialect.is_async
        self.blocks = not self.is_async
        self.read_only = read_only
        self.isolate = isolate
        self.queue_statements = queue_statements and dialect.can_queue(self.engine.dialect)
        options: dict[str, Any] = {}
        if not dialect.is_sqlite(self.engine.dialect):  # SQLite is always serializable
            if isolation_level is not None:
                options["isolation_level"] = isolation_level
            if read_only:
                options["postgresql_readonly"] = True
        self._engine = self.engine.execution_options(**options) if options else self.engine
        self._is_sqlite = dialect.is_sqlite(self.engine.dialect)
        _watch(self.engine)

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        if dialect.is_sqlite(self.engine.dialect) and not self.read_only:
            return 1  # it has one writer at a time
        connections = dialect.max_connections(self.engine)
        # One is left over: if all were in transactions whose handlers wait for another, as for a
        # session of their own, none could end. Notifications of relays use it too.
        return None if connections is None else max(1, connections - 1)

    @property
    def pool(self) -> object:  # type: ignore[override]
        return self.engine.pool

    def _check_loop(self) -> None:
        if not self.blocks and not bridge.is_inside():
            raise ConfigError(
                "Transaction has an async engine, which needs the event loop of an async worker:"
                " use await worker.run_async(), or async with worker; a worker of threads takes"
                " sqlalchemy.create_engine()"
            )

    def scope(self, batch: Sequence[Message[Any]]) -> AbstractContextManager[Connection]:
        """Begin a transaction, or a savepoint inside a transaction on the same engine."""
        self._check_loop()
        outer = find(self.engine)
        return Whole(self, len(batch)) if outer is None else self._savepoint(outer)

    def run(self, next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        """Run a batch inside the transaction, or each message of it in a savepoint."""
        if self.isolate == "batch" or len(batch) == 1:
            return super().run(next, batch)
        failed_keys = FailedKeys()
        results: list[Result] = []
        for message in batch:
            result = failed_keys.blocking_error(message) or self._run_isolated(next, message)
            if isinstance(result, Exception):
                failed_keys.add(message)
            results.append(result)
        return results

    def _run_isolated(self, next: Process, message: Message[Any]) -> Result:
        unit = current("a savepoint")
        ackings = [message.acking] if message.acking is not None else []
        try:
            with defer_settlements(ackings), self._savepoint(unit):
                return super().run(next, (message,))[0]
        except StoreError:
            raise
        except Exception as error:
            if unit.connection.unit.must_be_alone:
                raise
            return error

    def check_chain(self, middlewares: Sequence[Middleware]) -> None:
        """Refuse a chain whose inbox or outbox has no table."""
        tables = {
            str(getattr(item, "table", "")): None
            for item in middlewares
            if stage_of(item) in (Stage.INBOX, Stage.OUTBOX)
        }
        self._check_loop()
        try:
            with connection(self._engine) as found:
                if dialect.is_in_autocommit(found):
                    raise _autocommit_error()
                missing = [name for name in tables if name and not dialect.has_table(found, name)]
        except self._connect_errors as error:
            if isinstance(error, ValueError):
                raise
            logger.warning(
                "could not look for the tables of inbox and outbox at start: %s",
                self._store_error(error),
            )
            return
        if missing:
            raise ConfigError(
                f"{dialect.display_url(self.engine.url)} has no table {' and no '.join(missing)};"
                " conquiet outbox migrate creates the tables, or schema.init(engine)"
            )

    def probe(self) -> None:
        with self.scope(()) as found:
            if dialect.is_postgresql(found.dialect) and not self.read_only:
                # With a transaction id, the commit is written to disk, and refused by a replica.
                found.exec_driver_sql("SELECT pg_current_xact_id()")
            else:
                found.exec_driver_sql("SELECT 1")

    def _connect(self) -> TransactionConnection:
        try:
            if not self.is_async or not dialect.is_about_to_connect(self.engine):
                return TransactionConnection(self._engine)
            with bridge.shield():  # asyncpg would leave a future behind that has failed
                return TransactionConnection(self._engine)
        except self._connect_errors as error:
            if isinstance(error, ValueError):  # asyncpg's error of a wrong setting
                raise
            raise self._store_error(error) from error

    @contextmanager
    def _savepoint(self, outer: Unit) -> Iterator[Connection]:
        connection = outer.connection
        unit = Unit(connection, outer.depth + 1)
        savepoint: DatabaseTransaction | None = None
        try:
            savepoint = connection.begin_nested()
            token = UNITS.set((*UNITS.get(), unit))
            try:
                yield connection
                self._flush(unit, savepoint)
            finally:
                UNITS.reset(token)
            savepoint.commit()
            outer.wrote = outer.wrote or unit.wrote
        except BaseException as error:
            if _breaks(connection, error):  # the whole transaction ends, and its connection
                raise
            blamed = self._own_failure(connection, error)
            if savepoint is not None and savepoint.is_active:
                try:
                    savepoint.rollback()
                except DBAPIError as failure:
                    raise self._store_error(failure) from error
            if blamed is not None and not isinstance(error, StoreError):
                raise self._store_error(blamed) from error
            raise
        finally:
            unit.end()

    def _begin(self, connection: TransactionConnection) -> DatabaseTransaction:
        root = Connection.begin(connection)
        if self._is_sqlite:
            if self.read_only:
                connection.exec_driver_sql("PRAGMA query_only=ON")
                connection.exec_driver_sql("BEGIN")
            else:
                dialect.begin_immediate(connection)
        elif dialect.is_in_autocommit(connection):
            raise _autocommit_error()
        return root

    def _flush(self, unit: Unit, began: DatabaseTransaction) -> None:
        """Flush and execute everything, then check that a COMMIT would commit it."""
        if unit.must_be_alone:
            raise _alone_error()
        unit.flush()
        connection = unit.connection
        if began.is_active and not connection.invalidated:
            unit.finish_queueing()
        if connection.unit.was_cancelled:
            raise _cancelled_error(connection.unit)
        if not began.is_active or connection.invalidated:
            raise _rolled_back_error(
                unit, "was rolled back inside, by session.rollback() or an error"
            )
        if connection.begun_by_asyncpg is not None and unit.depth == 0:
            is_over = connection.begun_by_asyncpg.is_over  # COMMIT says whether it was aborted
        else:
            may_have_failed = connection.unit.failure is not None or connection.unit.gave_driver
            if dialect.is_aborted(connection, may_have_failed=may_have_failed):
                raise _rolled_back_error(unit, _ABORTED)
            # psycopg sends BEGIN with the first statement: an idle connection may have had none.
            is_over = (unit.wrote or self._is_sqlite) and dialect.is_over(connection)
        if is_over:
            raise _rolled_back_error(unit, "was ended inside, by the driver or by the database")

    def _give_up(self, unit: Unit, error: BaseException) -> None:
        """Roll back; raise a `StoreError` if the store caused the failure."""
        connection = unit.connection
        unit.drop_queued()
        blamed = self._own_failure(connection, error)
        if isinstance(error, PoolTimeout) and dialect.is_full(self.engine):
            _warn_once(self.engine)  # the handler waited for a connection that no group gives back
        if dialect.is_lost(connection):
            _invalidate_pool(connection)
        try:
            if _breaks(connection, error):
                connection.invalidate(error)
            Connection.rollback(connection)
        except DBAPIError:
            connection.invalidate()
        if unit.must_be_alone and isinstance(error, Exception):
            raise _alone_error() from error
        if (
            blamed is not None
            and isinstance(error, Exception)
            and not isinstance(error, StoreError)
        ):
            raise self._store_error(blamed) from error
        if dialect.is_consequence(error):
            raise _rolled_back_error(unit, _ABORTED)

    def _release(self, connection: TransactionConnection) -> None:
        if self.read_only and self._is_sqlite and not connection.invalidated:
            dialect.execute(connection, "PRAGMA query_only=OFF")
        Connection.close(connection)

    @property
    def _connect_errors(self) -> tuple[type[Exception], ...]:
        if self.blocks:
            return DBAPIError, PoolTimeout
        # asyncpg raises what the socket does, and SQLAlchemy passes it on; 2.0 also asyncpg's own.
        return DBAPIError, PoolTimeout, OSError, *dialect.connect_errors(self.engine.dialect)

    def _own_failure(
        self, connection: TransactionConnection, error: BaseException
    ) -> BaseException | None:
        """Return the failure of the store behind an error, if this connection met one.

        A handler may use other connections; their errors are the message's fault. It may also
        have swallowed an error of this one, or met it by the driver, which notes nothing: then
        the connection is lost or its transaction aborted.
        """
        # The interrupt, or the cancellation, broke the connection.
        if isinstance(error, (DeadlineExceeded, asyncio.CancelledError)):
            return None
        noted = connection.unit.failure
        own = (noted, getattr(noted, "orig", None))
        candidates = [link for link in dialect.chain(error) if any(link is item for item in own)]
        if dialect.is_lost(connection) or dialect.is_aborted(connection):
            candidates += [error] if noted is None else [noted, error]
        if isinstance(noted, TimeoutError) and noted in candidates:  # asyncpg's command_timeout
            return noted
        for candidate in candidates:
            if dialect.is_store_failure(candidate, read_only=self.read_only) or dialect.names_table(
                candidate, connection.unit.tables
            ):
                return candidate
        return None

    def _store_error(self, error: BaseException) -> StoreError:
        kind = Conflict if dialect.is_conflict(error) else StoreError
        made = kind(f"{dialect.display_url(self.engine.url)}: {dialect.one_line(error):.300}")
        made.is_outage = dialect.is_missing_table(error)
        return made


class Whole:
    """Is the block of one transaction: begins it, and commits it or rolls it back."""

    __slots__ = ("_holds", "_owner", "_root", "_size", "_token", "_unit")

    def __init__(self, owner: Transaction, size: int) -> None:
        self._owner = owner
        self._size = size
        self._holds = False

    def __enter__(self) -> Connection:
        owner = self._owner
        connection = owner._connect()
        self._unit = unit = connection.unit = Unit(connection)
        unit.is_shared = self._size > 1
        connection.lock = RLock() if owner.blocks else OneTask()
        try:
            self._root = owner._begin(connection)
            connection.begun = True
            if owner.queue_statements:
                unit.queue = _statement_queue(connection)
        except BaseException as error:
            self._fail(error)
            raise
        self._token = UNITS.set((*UNITS.get(), unit))
        return connection

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            UNITS.reset(self._token)
            self._fail(error)
            return
        try:
            self._commit()
        except BaseException as failure:
            self._fail(failure)
            raise
        self._release()
        for table in self._unit.filled:
            notify_relays(self._owner.engine, table)

    def _commit(self) -> None:
        unit = self._unit
        connection = unit.connection
        try:
            connection.lock.__enter__()
            self._holds = True
            self._owner._flush(unit, self._root)
        finally:
            UNITS.reset(self._token)
        begun = connection.begun_by_asyncpg
        try:
            if begun is None or not begun.is_unbroken:
                with bridge.shield():  # a cancelled COMMIT may have committed
                    Connection.commit(connection)
            else:
                Connection.commit(connection)
        except TimeoutError as error:  # asyncpg's command_timeout
            connection.note_failure(error)
            raise
        if begun is not None and not begun.is_committed:
            raise _rolled_back_error(unit, _ABORTED)

    def _fail(self, error: BaseException) -> None:
        """Roll back and release; raise a `StoreError` if the store caused the failure."""
        try:
            with bridge.shield():
                self._hold()
                self._owner._give_up(self._unit, error)
        finally:
            self._release()

    def _hold(self) -> None:
        """Keep all others from the connection until it is released."""
        connection = self._unit.connection
        lock = connection.lock
        if isinstance(lock, OneTask):
            self._unit.ended = True  # another task of the handler begins no further statement
            if not lock.wait(_SECONDS_TO_RETURN):
                connection.invalidate()
                return
        if not self._holds:
            lock.__enter__()
            self._holds = True

    def _release(self) -> None:
        connection = self._unit.connection
        try:
            with bridge.shield():
                self._unit.end()
                self._owner._release(connection)
        finally:
            self._unit.forget_connection()
            if self._holds:
                connection.lock.__exit__(None, None, None)


def _breaks(connection: Connection, error: BaseException) -> bool:
    """Return whether a cancellation may have left a statement under way.

    asyncpg, for one, does not know then that its transaction has begun, and the next one would be a
    savepoint of it. aiosqlite executes what was sent, in order, also a ROLLBACK.
    """
    return isinstance(error, asyncio.CancelledError) and not dialect.is_sqlite(connection.dialect)


def _alone_error() -> transaction.RunAlone:
    return transaction.RunAlone(
        "SET LOCAL or set_config() in a transaction of several messages would hold for the others"
    )


def _autocommit_error() -> ConfigError:
    return ConfigError(
        "the engine is in AUTOCOMMIT, where nothing can be rolled back; give Transaction an engine"
        " without isolation_level='AUTOCOMMIT'"
    )


def _cancelled_error(unit: Unit) -> TransactionEnded:
    error = TransactionEnded(
        "the transaction ended inside, since one of its statements was cancelled, as by"
        " asyncio.timeout() around it: that closes the connection. Use SET LOCAL statement_timeout,"
        " or Deadline for the whole handler"
    )
    error.__cause__ = unit.failure
    return error


def _rolled_back_error(unit: Unit, how: str) -> HandlerError:
    cause = f": {unit.failure}" if unit.failure is not None else ""
    error = HandlerError(
        f"the transaction {how}, so a COMMIT would have committed nothing; do not catch SQL errors,"
        f" or run the statement in begin_nested(){cause:.500}"
    )
    error.__cause__ = unit.failure
    return error


@cache
def _queue_module() -> Any:
    from conquiet.sql import statement_queue  # imports psycopg

    return statement_queue


def _statement_queue(connection: Connection) -> StatementQueue | None:
    found: StatementQueue | None = _queue_module().open_queue(connection, _refuse_control)
    return found


def _invalidate_pool(connection: Connection) -> None:
    """Let SQLAlchemy detect the dead connection: it then drops the others of its pool too."""
    try:
        connection.exec_driver_sql("SELECT 1")
    except (DBAPIError, InvalidRequestError, HandlerError):  # the last: a session rolled it back
        pass


def _watch(engine: Engine) -> None:
    """Listen for statements before they are sent, and for errors before a handler sees them."""
    if not event.contains(Engine, "engine_connect", _warn_of_other):
        event.listen(Engine, "engine_connect", _warn_of_other)
    if engine not in _watched:
        event.listen(engine, "handle_error", _note)
        event.listen(engine, "before_cursor_execute", _refuse_control, retval=True)
        _watched.add(engine)


def _refuse_control(
    connection: Connection, cursor: Any, statement: str, parameters: Any, *unused: Any
) -> tuple[str, Any]:
    if isinstance(connection, TransactionConnection) and connection.begun:
        refuse_control(statement)
        unit = connection.unit
        if unit.is_shared and dialect.sets_locally(statement):
            unit.must_be_alone = True
            raise _alone_error()
    return statement, parameters


def _warn_of_other(connection: Connection) -> None:
    """Log, once for each engine, that a handler has a second connection to its database."""
    if connection.dialect.is_async:
        _refuse_other_loop(connection)
    units = UNITS.get()
    if not units or isinstance(connection, TransactionConnection):
        return
    engine = connection.engine
    if any(not unit.ended and unit.is_beside(engine) for unit in units):
        _warn_once(engine)


def _warn_once(engine: Engine) -> None:
    if engine.pool in _warned:
        return
    _warned.add(engine.pool)
    logger.warning(
        "%s: a second connection was opened inside a transaction on the same database; what it"
        " writes is committed by itself, and again if the message is redelivered, and if all"
        " transactions wait for one, the pool times out; use conquiet.sql.connection(engine) or"
        " conquiet.sql.session(factory) with the engine of Transaction; with an async one"
        " async_connection and async_session",
        dialect.display_url(engine.url),
    )


def _warn_of_blocked_loop(engine: Engine) -> None:
    """Log, once for each engine, that an async handler waits for its database by a sync one."""
    if engine.pool in _warned_of_loop:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if bridge.is_inside():  # a chain in a thread of its own, or in a greenlet
        return
    _warned_of_loop.add(engine.pool)
    logger.warning(
        "%s: an async handler uses a sync engine, which blocks its event loop; two handlers that"
        " wait for each other's rows would wait for ever. Use an async engine and"
        " worker.run_async(), or a handler without async",
        dialect.display_url(engine.url),
    )


def _refuse_other_loop(connection: Connection) -> None:
    """Refuse a connection of asyncpg that belongs to another event loop: it crashes the process."""
    owner = getattr(dialect.driver_connection(connection), "_loop", None)
    if isinstance(owner, asyncio.AbstractEventLoop) and owner is not bridge.current_loop():
        Connection.close(connection)  # back to its pool, unused
        raise HandlerError(
            f"{dialect.display_url(connection.engine.url)}: a connection of the pool belongs to"
            " another event loop. If that has ended, as of an earlier asyncio.run(), let it end by"
            " await engine.dispose(). A worker of threads has a loop of its own for async handlers:"
            " run it on the loop of the engine, by await worker.run_async() or async with worker"
        )


def _note(context: ExceptionContext) -> None:
    connection = context.connection
    if isinstance(connection, TransactionConnection):
        connection.note_failure(context.sqlalchemy_exception or context.original_exception)
    stops = isinstance(context.original_exception, (Interrupt, asyncio.CancelledError))
    if stops and dialect.is_sqlite(context.dialect):
        # SQLAlchemy would close the connection. SQLite keeps the lock of a closed one as long as a
        # statement of it lives, as in the traceback of the error; a rollback releases it.
        context.is_disconnect = False
