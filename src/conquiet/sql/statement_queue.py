"""Queue statements that return nothing, and send them together in one round trip.

    INSERT ──▶ queued ┐
    INSERT ──▶ queued ├──▶ any other statement, or COMMIT: the queue is executed before it
    INSERT ──▶ queued ┘

Adapters need not know: a read (SELECT, RETURNING, a row count) executes the queue first. An error
of a queued statement is raised by the next call that waits, at the latest before COMMIT.

A queue belongs to the first thread that queues a statement. A statement of another thread executes
the queue and switches it off, before psycopg's pipeline mode can mix up the results of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from threading import RLock, get_ident
from typing import Any
from uuid import UUID
from weakref import ref

import psycopg
from psycopg.abc import Params
from psycopg.pq import PipelineStatus, TransactionStatus
from sqlalchemy import Connection

from conquiet.errors import HandlerError
from conquiet.sql.dialect import control_error, refuse_control

MAX_QUEUED = 1000
"""The queue is sent when it holds this many statements."""

MIN_PIPELINED = 3
"""Fewer are executed one by one: entering and leaving psycopg's pipeline mode costs as much."""

_FROZEN = frozenset(
    (str, int, float, bool, bytes, type(None), Decimal, UUID, date, datetime, time, timedelta)
)
"""Immutable types; statements with parameters of other types are sent at once."""


def is_supported() -> bool:
    """Return whether libpq supports pipeline mode (14 and later)."""
    return psycopg.Pipeline.is_supported()


def open_queue(connection: Connection, own_listener: object) -> StatementQueue | None:
    """Open the queue of a transaction's connection, or return None if statements must not wait.

    A cursor factory and listeners of cursors expect that a statement was executed; `own_listener`
    does not.
    """
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection) or driver.cursor_factory is not psycopg.Cursor:
        return None
    of_cursors, of_dialect = connection.dispatch, connection.dialect.dispatch
    listeners = (
        *of_cursors.before_cursor_execute,
        *of_cursors.after_cursor_execute,
        *of_dialect.do_execute,
        *of_dialect.do_execute_no_params,
        *of_dialect.do_executemany,
    )
    if any(listener is not own_listener for listener in listeners):
        return None
    return StatementQueue(driver, connection.in_nested_transaction)


class StatementQueue:
    """Queues statements of one connection during one transaction."""

    def __init__(
        self, connection: psycopg.Connection[Any], in_savepoint: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._in_savepoint = in_savepoint
        self._mode: AbstractContextManager[psycopg.Pipeline] | None = None
        self._waiting: list[tuple[str, Any, ref[QueueingCursor]]] = []
        self._sent: set[str] = set()
        self.lock = RLock()
        """Held by each call that uses the connection: pipeline mode is the connection's."""
        self._thread: int | None = None
        self._finished = False
        self._failure: BaseException | None = None
        self._blocks = 0
        self._former = connection.cursor_factory, connection.server_cursor_factory
        connection.cursor_factory = self._cursor  # type: ignore[assignment]
        connection.server_cursor_factory = self._server_cursor  # type: ignore[assignment]
        # These methods bypass the cursors, and so the queue.
        connection.transaction = self._transaction  # type: ignore[method-assign]
        connection.commit = self._commit  # type: ignore[method-assign]
        connection.rollback = self._rollback  # type: ignore[method-assign]

    def finish(self) -> None:
        """Execute the queue before COMMIT, and queue nothing more.

        Raises if a queued statement ever failed, also if a handler caught that error: the
        statements behind it were dropped, and PostgreSQL may not know of them.
        """
        with self.lock:
            self._finished = True
            self.wait()
        if isinstance(self._failure, HandlerError):
            raise self._failure
        if self._failure is not None:
            raise HandlerError(
                "a queued statement failed and its error was swallowed, so a COMMIT would"
                " commit only a part; do not catch SQL errors, or run the statement in"
                f" begin_nested(): {self._failure!s:.300}"
            ) from self._failure
        self._restore()

    def close(self) -> None:
        """Discard the queue before ROLLBACK, and restore the connection."""
        with self.lock:
            self._finished = True
            self._waiting.clear()
            with suppress(psycopg.Error):  # errors of sent statements, which are rolled back
                self.wait()
        self._restore()

    def _restore(self) -> None:
        if self._connection.pgconn.pipeline_status != PipelineStatus.OFF:
            # The next user of a pooled connection would get the results of other statements.
            self._connection.close()
        self._connection.cursor_factory, self._connection.server_cursor_factory = self._former
        for name in ("transaction", "commit", "rollback"):
            vars(self._connection).pop(name, None)  # the class has its own

    @contextmanager
    def _transaction(self, *arguments: Any, **options: Any) -> Iterator[psycopg.Transaction]:
        """Begin a psycopg savepoint; queued statements come before it and survive its rollback."""
        self.wait()
        if self._connection.info.transaction_status is TransactionStatus.IDLE:
            # psycopg would treat the block as the whole transaction, and commit.
            psycopg.Cursor(self._connection).execute("SELECT 1")
        self._blocks += 1
        try:
            with type(self._connection).transaction(
                self._connection, *arguments, **options
            ) as block:
                yield block
        finally:
            self._blocks -= 1

    def _commit(self) -> None:
        raise control_error("commit()")

    def _rollback(self) -> None:
        # Called by SQLAlchemy after a failed flush, or by a handler. Queued statements would
        # begin another transaction.
        self._waiting.clear()
        self._failure = self._failure or control_error("rollback()")
        type(self._connection).rollback(self._connection)

    def add(self, query: str, params: Any, cursor: QueueingCursor) -> None:
        """Queue a statement; the queue then belongs to this thread."""
        self._thread = get_ident()
        if len(self._waiting) >= MAX_QUEUED:
            self.wait()
        self._waiting.append((query, params, ref(cursor)))

    def take_back(self, cursor: QueueingCursor) -> tuple[Any, Any] | None:
        """Remove and return the last queued statement if this cursor queued it."""
        if self._waiting and self._waiting[-1][2]() is cursor:
            return self._waiting.pop()[:2]
        return None

    def send(self) -> None:
        """Send the queue in order, without waiting for results."""
        self._thread = get_ident()
        try:
            self._send()
        except BaseException as error:
            self._failure = error
            raise

    def _send(self) -> None:
        if self._mode is None:
            self._mode = self._connection.pipeline()
            self._mode.__enter__()
        waiting, self._waiting = self._waiting, []
        runs: list[Any] = []
        last = ""
        for query, params, cursor in waiting:
            holder = cursor()
            if runs and (query != last or holder is not None):
                self._send_runs(last, runs)
                runs = []
            if holder is not None:  # its row count may still be read
                self._sent.add(query)
                holder.send(query, params)
            else:
                last = query
                runs.append(params)
        if runs:
            self._send_runs(last, runs)

    def _execute_plainly(self) -> None:
        waiting, self._waiting = self._waiting, []
        for query, params, cursor in waiting:
            self._sent.add(query)
            holder = cursor()
            if holder is not None:
                holder.send(query, params)
            else:
                self._send_runs(query, [params])

    def _send_runs(self, query: Any, runs: list[Any]) -> None:
        self._sent.add(query)
        cursor = psycopg.Cursor(self._connection)
        if len(runs) == 1:
            cursor.execute(query, runs[0])
        else:
            cursor.executemany(query, runs)

    def wait(self) -> None:
        """Send the queue and read the results; raise the first error."""
        with self.lock:
            self._wait()

    def _wait(self) -> None:
        try:
            if self._mode is None and len(self._waiting) < MIN_PIPELINED:
                self._execute_plainly()
            elif self._waiting:
                self._send()
            mode, self._mode = self._mode, None
            if mode is not None:
                mode.__exit__(None, None, None)
        except BaseException as error:
            self._failure = error
            if isinstance(error, psycopg.Error):
                self.explain(error)
            raise
        finally:
            self._sent.clear()

    def explain(self, error: BaseException) -> None:
        """Note on an error which queued statements may have caused it."""
        for query in self._sent:
            error.add_note(
                f"raised late, perhaps by this statement, which was queued: {query:.300}"
            )

    def check_thread(self) -> None:
        """Execute the queue and switch it off if another thread has queued statements."""
        if self._thread not in (None, get_ident()) and not self._finished:
            self._finished = True
            self.wait()

    @property
    def may_queue(self) -> bool:
        # Before BEGIN psycopg waits anyway; in a failed transaction the error must be raised now.
        # A savepoint catches errors, so they must be raised inside it.
        if self._finished or self._blocks or self._in_savepoint():
            return False
        if self._waiting or self._mode is not None:
            return True
        return self._connection.info.transaction_status is TransactionStatus.INTRANS

    def _cursor(self, *arguments: Any, **options: Any) -> QueueingCursor:
        cursor = QueueingCursor(*arguments, **options)
        cursor.queue = self
        return cursor

    def _server_cursor(self, *arguments: Any, **options: Any) -> Any:
        self.wait()
        return self._former[1](*arguments, **options)


class QueueingCursor(psycopg.Cursor[Any]):
    """Queues statements that return nothing, and executes the queue before any other."""

    queue: StatementQueue
    _queued = False

    def execute(self, query: Any, params: Params | None = None, **options: Any) -> Any:
        queue = self.queue
        with queue.lock:
            silent = (
                type(query) is str
                and params is not None  # else psycopg would read each % as a placeholder
                and is_silent(query)
                and not options
            )
            queue.check_thread()
            self._queued = silent and queue.may_queue
            if not self._queued:
                if type(query) is str:
                    refuse_control(query)
                queue.wait()
                return super().execute(query, params, **options)
            frozen = _frozen(params)
            if frozen is not None:
                queue.add(query, frozen, self)
            else:
                queue.send()
                super().execute(query, params)
            return self

    def send(self, query: Any, params: Any) -> None:
        """Execute a statement that this cursor queued."""
        super().execute(query, params)

    @property
    def rowcount(self) -> int:
        if self._queued:
            with self.queue.lock:
                self._queued = False
                own = self.queue.take_back(self)
                self.queue.wait()
                if own is not None:
                    super().execute(*own)
        return super().rowcount

    def close(self) -> None:
        if not self._queued:  # a closed cursor could not execute it later
            super().close()

    def executemany(self, query: Any, params_seq: Iterable[Params], **options: Any) -> None:
        with self.queue.lock:
            self.queue.check_thread()
            self.queue.wait()
            super().executemany(query, params_seq, **options)

    def copy(self, *arguments: Any, **options: Any) -> Any:
        self.queue.wait()
        return super().copy(*arguments, **options)

    def stream(self, *arguments: Any, **options: Any) -> Any:
        self.queue.wait()
        return super().stream(*arguments, **options)


_silent: dict[str, bool] = {}
_MAX_KNOWN = 1000


def is_silent(query: str) -> bool:
    """Return whether a statement is an INSERT without RETURNING, whose result is not read.

    SQLAlchemy reads the row count of UPDATE and DELETE, so these are executed at once.
    """
    known = _silent.get(query)
    if known is None:
        if len(_silent) >= _MAX_KNOWN:  # statements with values in their text are without number
            _silent.clear()
        begins = query.lstrip()[:7].upper()
        known = begins.split() == ["INSERT"] and "returning" not in query.lower()
        _silent[query] = known
    return known


def _frozen(params: Any) -> Any:
    """Copy parameters so that they cannot change; None if a value is mutable."""
    if type(params) is dict:
        for value in params.values():
            if type(value) not in _FROZEN:
                return None
        return params.copy()
    if type(params) is tuple or type(params) is list:
        for value in params:
            if type(value) not in _FROZEN:
                return None
        return tuple(params)
    return None
