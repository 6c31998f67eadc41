"""Statements that return nothing wait, and are sent together, without a round trip for each.

    INSERT ──▶ queued ┐
    INSERT ──▶ queued ├──▶ anything else, or COMMIT: they are sent and answered before it
    INSERT ──▶ queued ┘

Adapters notice nothing: what reads (a SELECT, RETURNING, a row count) finds them done. An error of
a queued statement is raised by whatever waits for it, at the latest before COMMIT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID
from weakref import ref

import psycopg
from psycopg.abc import Params
from psycopg.pq import TransactionStatus

from conquiet.errors import HandlerError
from conquiet.sql.control import not_yours, refuse_control
from conquiet.sql.dialect import Own

MOST_QUEUED = 1000
"""They are sent after this many, so that they never pile up."""

FEWEST_TOGETHER = 3
"""Fewer are executed one by one: entering and leaving psycopg's pipeline costs as much."""

_FROZEN = frozenset(
    (str, int, float, bool, bytes, type(None), Decimal, UUID, date, datetime, time, timedelta)
)
"""What nobody can change between queueing and sending; other parameters are sent at once."""


def is_supported() -> bool:
    """Whether the libpq in use can do it (14 and later)."""
    return psycopg.Pipeline.is_supported()


class Pipeline:
    """The queue of one connection, for the time of one transaction."""

    def __init__(
        self, connection: psycopg.Connection[Any], in_savepoint: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._in_savepoint = in_savepoint
        self._mode: AbstractContextManager[psycopg.Pipeline] | None = None
        self._waiting: list[tuple[str, Any, ref[QueueingCursor]]] = []
        self._sent: set[str] = set()
        self._finished = False
        self._failure: BaseException | None = None
        self._blocks = 0
        self._former = connection.cursor_factory, connection.server_cursor_factory
        connection.cursor_factory = self._cursor  # type: ignore[assignment]
        connection.server_cursor_factory = self._server_cursor  # type: ignore[assignment]
        # These send their statements past the cursors, and so past what waits.
        connection.transaction = self._transaction  # type: ignore[method-assign]
        connection.commit = self._commit  # type: ignore[method-assign]
        connection.rollback = self._rollback  # type: ignore[method-assign]

    def finish(self) -> None:
        """Execute what waits, before COMMIT; from now on nothing is queued.

        Raises if a queued statement ever failed, also if somebody caught that error since: the
        statements behind it were lost with it, and PostgreSQL need not know of them.
        """
        self._finished = True
        self.wait()
        if isinstance(self._failure, HandlerError):
            raise self._failure
        if self._failure is not None:
            raise HandlerError(
                "a queued statement failed and nobody raised its error, so that a COMMIT would"
                " commit only a part; let SQL errors pass, or run the statement in"
                f" begin_nested(): {self._failure!s:.300}"
            ) from self._failure
        self._restore()

    def close(self) -> None:
        """Forget what waits, before ROLLBACK, and leave the connection as it was."""
        self._finished = True
        self._waiting.clear()
        with suppress(psycopg.Error):  # of what was sent; it is rolled back
            self.wait()
        self._restore()

    def _restore(self) -> None:
        self._connection.cursor_factory, self._connection.server_cursor_factory = self._former
        for name in ("transaction", "commit", "rollback"):
            vars(self._connection).pop(name, None)  # the class has its own

    @contextmanager
    def _transaction(self, *arguments: Any, **options: Any) -> Iterator[psycopg.Transaction]:
        """A savepoint by psycopg: what waits was asked for before it, and outlives its rollback."""
        self.wait()
        if self._connection.info.transaction_status is TransactionStatus.IDLE:
            # psycopg would take it for the whole transaction, and commit.
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
        raise not_yours("commit()")

    def _rollback(self) -> None:
        # By SQLAlchemy after a failed flush, or by a handler. What waits would begin anew.
        self._waiting.clear()
        self._failure = self._failure or not_yours("rollback()")
        type(self._connection).rollback(self._connection)

    def add(self, query: str, params: Any, cursor: QueueingCursor) -> None:
        """Queue a statement."""
        if len(self._waiting) >= MOST_QUEUED:
            self.wait()
        self._waiting.append((query, params, ref(cursor)))

    def take_back(self, cursor: QueueingCursor) -> tuple[Any, Any] | None:
        """The statement that this cursor has just queued, if it is the last."""
        if self._waiting and self._waiting[-1][2]() is cursor:
            return self._waiting.pop()[:2]
        return None

    def send(self) -> None:
        """Send what waits, in order, and do not wait for the answers."""
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
            if holder is not None:  # somebody may still ask it for its row count
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
        """Send what waits and take the answers; raises the first error among them."""
        try:
            if self._mode is None and len(self._waiting) < FEWEST_TOGETHER:
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
        """Say which statements an error may belong to that another statement raised."""
        for query in self._sent:
            error.add_note(
                f"raised late, perhaps by this statement, which was queued: {query:.300}"
            )

    @property
    def may_queue(self) -> bool:
        # Before BEGIN psycopg has to wait anyway; in a failed transaction an error is due now. A
        # savepoint is there to catch errors, so they must come up inside it.
        if self._finished or self._blocks or self._in_savepoint():
            return False
        if self._waiting or self._mode is not None:
            return True
        return self._connection.info.transaction_status is TransactionStatus.INTRANS

    def _cursor(self, *arguments: Any, **options: Any) -> QueueingCursor:
        cursor = QueueingCursor(*arguments, **options)
        cursor.pipeline = self
        return cursor

    def _server_cursor(self, *arguments: Any, **options: Any) -> Any:
        self.wait()
        return self._former[1](*arguments, **options)


class QueueingCursor(psycopg.Cursor[Any]):
    """A cursor that queues what returns nothing, and waits before all else."""

    pipeline: Pipeline
    _queued = False

    def execute(self, query: Any, params: Params | None = None, **options: Any) -> Any:
        pipeline = self.pipeline
        self._queued = (
            type(query) is str
            and params is not None  # or psycopg would read each % in it as a placeholder
            and is_silent(query)
            and not options
            and pipeline.may_queue
        )
        if not self._queued:
            if type(query) is str:
                refuse_control(query)
            pipeline.wait()
            return super().execute(query, params, **options)
        frozen = _frozen(params)
        if frozen is not None:
            pipeline.add(query, frozen, self)
        else:
            pipeline.send()
            super().execute(query, params)
        return self

    def send(self, query: Any, params: Any) -> None:
        """Execute what was queued."""
        super().execute(query, params)

    @property
    def rowcount(self) -> int:
        if self._queued:
            self._queued = False
            own = self.pipeline.take_back(self)
            self.pipeline.wait()
            if own is not None:
                super().execute(*own)
        return super().rowcount

    def close(self) -> None:
        if not self._queued:  # or it could not be executed any more
            super().close()

    def executemany(self, query: Any, params_seq: Iterable[Params], **options: Any) -> None:
        self.pipeline.wait()
        super().executemany(query, params_seq, **options)

    def copy(self, *arguments: Any, **options: Any) -> Any:
        self.pipeline.wait()
        return super().copy(*arguments, **options)

    def stream(self, *arguments: Any, **options: Any) -> Any:
        self.pipeline.wait()
        return super().stream(*arguments, **options)


_silent: dict[str, bool] = {}
_MOST_KNOWN = 1000


def is_silent(query: str) -> bool:
    """Whether a statement returns nothing that SQLAlchemy or anybody must see at once.

    An INSERT without RETURNING. Of UPDATE and DELETE, SQLAlchemy reads the row count, and also of
    what it gets as text: those are executed at once.
    """
    known = _silent.get(query)
    if known is None:
        if len(_silent) >= _MOST_KNOWN:  # texts with values in them would fill it for ever
            _silent.clear()
        begins = query.lstrip()[:7].upper()
        known = begins.split() == ["INSERT"] and "returning" not in query.lower()
        _silent[query] = known
    return known


def _frozen(params: Any) -> Any:
    """A copy of parameters that nobody can change any more; None if some value can be."""
    if type(params) is Own:
        return params
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
