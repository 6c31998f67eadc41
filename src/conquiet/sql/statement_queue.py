"""Queue statements that return nothing, and send them together in one round trip.

    BEGIN, inbox ──▶ sent
    INSERT ──▶ queued ┐
    INSERT ──▶ queued ├──▶ executed before any other statement, or together with COMMIT
    INSERT ──▶ queued ┘

Adapters need not know: a read (SELECT, RETURNING, a row count) executes the queue first. An error
of a queued statement is raised by the next call that waits, at the latest by COMMIT, which
PostgreSQL then skips.

A queue belongs to the first thread that queues a statement. A statement of another thread executes
the queue and switches it off, before libpq's pipeline mode can mix up the results of the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from threading import RLock, get_ident
from typing import Any, NamedTuple, Protocol, TypeAlias, overload
from weakref import WeakKeyDictionary, ref

import psycopg
from psycopg import IsolationLevel, generators
from psycopg.abc import Params, PQGen
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from sqlalchemy import Connection, CursorResult, Dialect, Executable, Insert
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert

from conquiet.errors import HandlerError
from conquiet.sql.dialect import control_error, refuse_control, sets_locally

MAX_QUEUED = 1000
"""The results of this many statements are awaited at the latest."""

SENT_EARLY = 25
"""So many are sent at once, without waiting: PostgreSQL executes them while the handlers go on."""

_HARMLESS_OPTIONS = {"isolation_level", "postgresql_readonly"}
"""Options of a connection that change no statement."""

_ERRORS = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE)


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
    for listeners in (
        of_cursors.before_cursor_execute,
        of_cursors.after_cursor_execute,
        of_dialect.do_execute,
        of_dialect.do_execute_no_params,
        of_dialect.do_executemany,
    ):
        for listener in listeners:
            if listener is not own_listener:
                return None
    queue = StatementQueue(driver, connection.in_nested_transaction)
    queue.takes_compiled = not (
        of_cursors.before_execute
        or of_cursors.after_execute
        or connection.get_execution_options().keys() - _HARMLESS_OPTIONS
    )
    return queue


class Noting(Protocol):
    """Takes the result of a queued statement: a cursor, or a result of SQLAlchemy."""

    def note(self, result: PGresult) -> None: ...


class Statement(NamedTuple):
    """Is a statement as libpq takes it: its parameters are bytes, and can change no more."""

    text: bytes
    values: Sequence[Any] | None = None
    types: tuple[int, ...] = ()
    formats: Sequence[int] | None = None
    cursor: ref[Noting] | None = None
    """Where to note the row count, if that is still wanted."""


_COMMIT = Statement(b"COMMIT")


class Rows(Sequence[tuple[Any, ...]]):
    """Reads the rows of a result when they are asked for; all columns are text."""

    def __init__(self, result: PGresult, encoding: str) -> None:
        self._result = result
        self._encoding = encoding

    def __len__(self) -> int:
        return self._result.ntuples

    @overload
    def __getitem__(self, index: int) -> tuple[Any, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Any, ...]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        result = self._result
        values = (result.get_value(index, column) for column in range(result.nfields))
        return tuple(None if value is None else value.decode(self._encoding) for value in values)


class StatementQueue:
    """Queues statements of one connection during one transaction."""

    def __init__(
        self, connection: psycopg.Connection[Any], in_savepoint: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._in_savepoint = in_savepoint
        self._waiting: list[Statement] = []
        self._exchange: Exchange | None = None
        """The statements that were sent, and whose results are not awaited yet."""
        self._count = 0
        self._transformer = Transformer(connection)
        self.lock = RLock()
        """Held by each call that uses the connection: pipeline mode is the connection's."""
        self._thread: int | None = None
        self._finished = False
        self._is_open = True
        self.takes_compiled = False
        """Whether a known insert may pass SQLAlchemy by: nothing listens for it or changes it."""
        self.skips = False
        """Whether the next statement is queued already."""
        self._failure: BaseException | None = None
        self._blocks = 0
        self._former = connection.cursor_factory, connection.server_cursor_factory
        connection.cursor_factory = self._cursor  # type: ignore[assignment]
        connection.server_cursor_factory = self._server_cursor  # type: ignore[assignment]
        # These methods bypass the cursors, and so the queue.
        connection.transaction = self._transaction  # type: ignore[method-assign]
        connection.pipeline = self._pipeline  # type: ignore[method-assign]
        connection.commit = self._refuse_commit  # type: ignore[method-assign]
        connection.rollback = self._rollback  # type: ignore[method-assign]

    # --- the ends of the transaction ----------------------------------------------------------

    @property
    def can_begin(self) -> bool:
        """Return whether the transaction has not begun, so that `begin` may."""
        return (
            not self._finished
            and self._connection.pgconn.transaction_status == TransactionStatus.IDLE
            and self._connection.pgconn.pipeline_status == PipelineStatus.OFF
        )

    def begin(self, query: str, params: Params) -> Rows:
        """Execute BEGIN and a statement whose columns are text; return its rows."""
        with self.lock:
            self.check_thread()
            prepared = self._prepare(query, params)
            assert prepared is not None, "its parameters fit"
            both = Statement(_begin_text(self._connection)), prepared
            try:
                results = Exchange(self._connection).finish(both)
            except psycopg.errors.InvalidSqlStatementName:  # DISCARD ALL, when it was given back
                type(self._connection).rollback(self._connection)
                results = Exchange(self._connection).finish(both)
            return Rows(results[1], self._transformer.encoding)

    def finish(self) -> None:
        """Queue nothing more, and let the queue be executed together with COMMIT.

        Raises if a queued statement ever failed, also if a handler caught that error: the
        statements behind it were dropped, and PostgreSQL may not know of them.
        """
        self._finished = True
        if isinstance(self._failure, HandlerError):
            raise self._failure
        if self._failure is not None:
            raise HandlerError(
                "a queued statement failed and its error was swallowed, so a COMMIT would"
                " commit only a part; do not catch SQL errors, or run the statement in"
                f" begin_nested(): {self._failure!s:.300}"
            ) from self._failure
        self._connection.commit = self._commit  # type: ignore[method-assign]

    def _commit(self) -> None:
        with self.lock:
            driver = self._connection
            if (
                self._exchange is None
                and driver.pgconn.transaction_status == TransactionStatus.IDLE
            ):
                self.close()  # nothing was ever sent
                return
            try:
                self._finish_exchange(_COMMIT)
            except psycopg.Error:
                if driver.pgconn.transaction_status == TransactionStatus.INERROR:
                    # SQLAlchemy rolls nothing back after a COMMIT.
                    with suppress(psycopg.Error):
                        type(driver).rollback(driver)
                raise
            self.close()

    def close(self) -> None:
        """Discard what is queued, and restore the connection."""
        with self.lock:
            self._finished = True
            if not self._is_open:
                return
            self._is_open = False
            self._drop()
            connection = self._connection
            if connection.pgconn.pipeline_status != PipelineStatus.OFF:
                # The next user of a pooled connection would get the results of other statements.
                connection.close()
            connection.cursor_factory, connection.server_cursor_factory = self._former
            own = vars(connection)
            for name in ("transaction", "pipeline", "commit", "rollback"):
                own.pop(name, None)  # the class has its own

    def _refuse_commit(self) -> None:
        raise control_error("commit()")

    def _rollback(self) -> None:
        # Called by SQLAlchemy after a failed flush, or by a handler. Queued statements would
        # begin another transaction.
        self._drop()
        self._failure = self._failure or control_error("rollback()")
        type(self._connection).rollback(self._connection)

    # --- what psycopg offers beside cursors ---------------------------------------------------

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

    @contextmanager
    def _pipeline(self) -> Iterator[psycopg.Pipeline]:
        """Enter psycopg's own pipeline mode, in which nothing is queued here."""
        self.wait()
        self._blocks += 1
        try:
            with type(self._connection).pipeline(self._connection) as mode:
                yield mode
        finally:
            self._blocks -= 1

    def _cursor(self, *arguments: Any, **options: Any) -> QueueingCursor:
        cursor = QueueingCursor(*arguments, **options)
        cursor.queue = self
        return cursor

    def _server_cursor(self, *arguments: Any, **options: Any) -> Any:
        self.wait()
        return self._former[1](*arguments, **options)

    # --- queueing -----------------------------------------------------------------------------

    @property
    def may_queue(self) -> bool:
        # In a failed transaction the error must be raised now. A savepoint catches errors, so they
        # must be raised inside it.
        if self._finished or self._blocks or self._in_savepoint():
            return False
        if self._waiting or self._exchange is not None:
            return True
        return self._connection.pgconn.transaction_status == TransactionStatus.INTRANS

    def add(self, query: str, rows: Iterable[Params], cursor: ref[Noting] | None = None) -> bool:
        """Queue a statement once for each row of parameters.

        Return False if it must not wait, or its parameters do not fit: psycopg says why.
        """
        with self.lock:
            prepared = self.prepare(query, rows, cursor)
            if prepared is None:
                return False
            self.append(prepared)
            return True

    def prepare(
        self, query: str, rows: Iterable[Params], cursor: ref[Noting] | None = None
    ) -> list[Statement] | None:
        """Return a statement for each row, to be appended; None if it must not be queued."""
        self.check_thread()
        if not self.may_queue:
            return None
        prepared = []
        for params in rows:
            statement = self._prepare(query, params, cursor)
            if statement is None:
                return None
            prepared.append(statement)
        return prepared

    def append(self, statements: Sequence[Statement]) -> None:
        """Queue statements; the queue then is this thread's."""
        self._thread = get_ident()
        self._waiting += statements
        self._count += len(statements)
        if self._count >= MAX_QUEUED:
            self.wait()
        elif len(self._waiting) >= SENT_EARLY:
            self._send_early()

    def _prepare(
        self, query: str, params: Params, cursor: ref[Noting] | None = None
    ) -> Statement | None:
        """Convert parameters to bytes now: a handler may change what it has passed."""
        transformer = self._transformer
        parsed = parse(query, transformer.encoding)
        if parsed is None:
            return None
        text, formats, names = parsed
        if names is None:
            if not isinstance(params, (tuple, list)) or len(params) != len(formats):
                return None
            values: Sequence[Any] = params
        else:
            if not isinstance(params, Mapping):
                return None
            try:
                values = [params[name] for name in names]
            except KeyError:
                return None
        dumped = transformer.dump_sequence(values, formats)
        return Statement(text, dumped, transformer.types or (), transformer.formats, cursor)

    def check_thread(self) -> None:
        """Execute the queue and switch it off if another thread has queued statements."""
        if self._thread not in (None, get_ident()) and not self._finished:
            self._finished = True
            self.wait()

    # --- sending ------------------------------------------------------------------------------

    def wait(self) -> None:
        """Execute the queue; raise the first error."""
        with self.lock:
            if self._waiting or self._exchange is not None:
                self._finish_exchange()

    def _send_early(self) -> None:
        """Let PostgreSQL execute what is queued, while the handlers go on."""
        waiting, self._waiting = self._waiting, []
        try:
            if self._exchange is None:
                self._exchange = Exchange(self._connection)
            self._exchange.send(waiting)
        except BaseException as error:
            self._failure = error
            raise

    def _finish_exchange(self, *last: Statement) -> None:
        waiting, self._waiting = self._waiting, []
        exchange, self._exchange = self._exchange, None
        try:
            if exchange is None:
                exchange = Exchange(self._connection)
            exchange.finish((*waiting, *last))
        except BaseException as error:
            self._failure = error
            raise
        self._count = 0
        self._transformer = Transformer(self._connection)  # adapters may have been registered

    def _drop(self) -> None:
        """Discard what is queued, and wait for what was sent early."""
        self._waiting.clear()
        if self._exchange is not None:
            with suppress(psycopg.Error):  # it is rolled back
                self._finish_exchange()


class Prepared:
    """Knows which statements a connection has prepared, over all of its transactions.

    As psycopg does: a statement is prepared when it was executed more than `prepare_threshold`
    times, and `prepared_max` of them at most. To plan the statements of a small transaction
    costs PostgreSQL as much as to execute them. Where they are deallocated again and again, as
    by a DISCARD ALL when a connection is given back, no more of them are prepared.
    """

    def __init__(self) -> None:
        self.names: dict[Key, bytes] = {}
        self._counts: dict[Key, int] = {}
        self._number = 0
        self._losses = 0

    def lose(self) -> None:
        """Forget the names, since the connection knows one of them no more."""
        self.names.clear()
        self._losses += 1

    def new_name(self, connection: psycopg.Connection[Any], key: Key) -> bytes | None:
        """Count an execution; return the name to prepare the statement by, if it is time."""
        threshold, most = connection.prepare_threshold, connection.prepared_max
        if threshold is None or self._losses >= _MOST_LOSSES:
            return None
        if most is not None and len(self.names) >= most:
            return None
        count = self._counts.get(key, 0)
        if count < threshold:
            if len(self._counts) >= MAX_QUEUED:  # of texts that do not come again
                self._counts.clear()
            self._counts[key] = count + 1
            return None
        self._number += 1
        return b"_conquiet_%d" % self._number


Key: TypeAlias = tuple[bytes, tuple[int, ...]]
"""The text of a statement, and the types of its parameters."""
_prepared: WeakKeyDictionary[psycopg.Connection[Any], Prepared] = WeakKeyDictionary()
_MOST_LOSSES = 3


class Exchange:
    """Sends statements without waiting, and then waits for all of them: one round trip.

    PostgreSQL executes them meanwhile. It parses a statement once for a run of equal ones; one that
    comes back after others gets a name, until the end of the exchange; one that comes back in
    later transactions gets one that stays.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._sent: list[Statement] = []
        self._owners: list[int] = []
        """The statement that each answer belongs to."""
        self._names: dict[Key, bytes] = {}
        self._seen: set[Key] = set()
        self._last: Key | None = None
        self._prepared = _prepared.setdefault(connection, Prepared())
        self._new: dict[int, tuple[Key, bytes]] = {}
        """Statements that are being prepared to stay, by the place of their answer."""
        self._pgconn.enter_pipeline_mode()

    def send(self, statements: Iterable[Statement]) -> None:
        """Send statements, which PostgreSQL then executes, and wait for no result."""
        with self._connection.lock:
            self._add(statements)
            self._connection.wait(generators.send(self._pgconn))

    def finish(self, statements: Iterable[Statement] = ()) -> list[PGresult]:
        """Send the last statements, wait, and return the results; raise the first error."""
        with self._connection.lock:
            answers = self._connection.wait(self._finish(statements))
            self._pgconn.exit_pipeline_mode()
        found: dict[int, PGresult] = {}
        for place, (key, name) in self._new.items():
            if place < len(answers) and answers[place].status == ExecStatus.COMMAND_OK:
                self._prepared.names[key] = name
        for owner, answer in zip(self._owners, answers, strict=False):
            if answer.status in _ERRORS:
                error = error_from_result(answer, encoding=self._connection.info.encoding)
                if isinstance(error, psycopg.errors.InvalidSqlStatementName):
                    self._prepared.lose()
                text = self._sent[owner].text.decode(errors="replace")
                error.add_note(f"raised late by this statement, which was queued: {text:.300}")
                raise error
            found[owner] = answer  # that of an Execute comes after that of its Parse
        for owner, result in found.items():
            noted = self._sent[owner].cursor
            cursor = None if noted is None else noted()
            if cursor is not None:
                cursor.note(result)
        return list(found.values())

    def _add(self, statements: Iterable[Statement]) -> None:
        """Give statements to libpq, which sends them with the next that is flushed."""
        pgconn = self._pgconn
        for statement in statements:
            text, values, types, formats, _ = statement
            place = len(self._sent)
            self._sent.append(statement)
            self._owners.append(place)
            key = text, types
            if key == self._last:
                pgconn.send_query_prepared(b"", values, formats)
                continue
            name = self._prepared.names.get(key) or self._names.get(key)
            if name is None and values is not None:  # not BEGIN and COMMIT
                name = self._prepare_to_stay(key)
            if name is None and key in self._seen and _can_close():
                name = self._names[key] = b"conquiet_%d" % len(self._names)
                pgconn.send_prepare(name, text, types)
                self._owners.append(place)
            if name is not None:
                pgconn.send_query_prepared(name, values, formats)
            else:
                pgconn.send_query_params(text, values, types, formats)
                self._seen.add(key)
                self._last = key

    def _prepare_to_stay(self, key: Key) -> bytes | None:
        for known, chosen in self._new.values():
            if known == key:
                return chosen
        name = self._prepared.new_name(self._connection, key)
        if name is not None:
            self._new[len(self._owners) - 1] = key, name
            self._owners.append(self._owners[-1])
            self._pgconn.send_prepare(name, *key)
        return name

    def _finish(self, statements: Iterable[Statement]) -> PQGen[list[PGresult]]:
        pgconn = self._pgconn
        # In one write with the Sync: behind a proxy with Nagle's algorithm a second small write
        # would wait for the ACK of the first, which PostgreSQL delays by 40 ms.
        self._add(statements)
        pgconn.pipeline_sync()
        if self._names:  # behind a Sync: PostgreSQL skips what is between an error and the next one
            for name in self._names.values():
                pgconn.send_close_prepared(name)
            pgconn.pipeline_sync()
        yield from generators.send(pgconn)
        answers: list[PGresult] = []
        left = 2 if self._names else 1
        while left:
            try:
                found = yield from generators.fetch_many(pgconn)
            except psycopg.OperationalError:
                # The server may have said why before it closed the connection.
                if any(answer.status in _ERRORS for answer in answers):
                    return answers
                raise
            if found and found[0].status == ExecStatus.PIPELINE_SYNC:
                left -= 1
            else:
                answers += found
        return answers


@cache
def _can_close() -> bool:
    """Return whether libpq can close a statement that has a name (17 and later)."""
    return psycopg.capabilities.has_send_close_prepared()


def _begin_text(connection: psycopg.Connection[Any]) -> bytes:
    """Return the BEGIN that psycopg would send."""
    level, read_only, deferrable = (
        connection.isolation_level,
        connection.read_only,
        connection.deferrable,
    )
    parts = ["BEGIN"]
    if level is not None:
        parts.append(f"ISOLATION LEVEL {IsolationLevel(level).name.replace('_', ' ')}")
    if read_only is not None:
        parts.append("READ ONLY" if read_only else "READ WRITE")
    if deferrable is not None:
        parts.append("DEFERRABLE" if deferrable else "NOT DEFERRABLE")
    return " ".join(parts).encode()


class QueueingCursor(psycopg.Cursor[Any]):
    """Queues statements that return nothing, and executes the queue before any other."""

    queue: StatementQueue
    _is_queued = False
    _noted: PGresult | None = None
    _affected = 0

    def execute(self, query: Any, params: Params | None = None, **options: Any) -> Any:
        queue = self.queue
        with queue.lock:
            if queue.skips:
                return self
            # Without parameters psycopg reads no % as a placeholder.
            if type(query) is str and params is not None and not options and is_silent(query):
                self._begin_queued()
                if queue.add(query, (params,), ref(self)):
                    return self
            self._is_queued = False
            self._noted = None
            queue.check_thread()
            if type(query) is str:
                refuse_control(query)
            queue.wait()
            return super().execute(query, params, **options)

    def executemany(self, query: Any, params_seq: Iterable[Params], **options: Any) -> None:
        queue = self.queue
        with queue.lock:
            rows = list(params_seq)
            if type(query) is str and rows and not options and is_silent(query):
                self._begin_queued()
                if queue.add(query, rows, ref(self)):
                    return
            self._is_queued = False
            self._noted = None
            queue.check_thread()
            queue.wait()
            super().executemany(query, rows, **options)

    def _begin_queued(self) -> None:
        self._is_queued = True
        self._noted = None
        self._affected = 0

    def note(self, result: PGresult) -> None:
        """Take the result of a statement that this cursor has queued."""
        self._noted = result
        self._affected += result.command_tuples or 0

    def _wait(self) -> None:
        if self._is_queued:
            with self.queue.lock:
                self._is_queued = False
                self.queue.wait()

    @property
    def rowcount(self) -> int:
        self._wait()
        return super().rowcount if self._noted is None else self._affected

    @property
    def statusmessage(self) -> str | None:
        self._wait()
        if self._noted is None:
            return super().statusmessage
        return (self._noted.command_status or b"").decode()

    def copy(self, *arguments: Any, **options: Any) -> Any:
        self.queue.wait()
        return super().copy(*arguments, **options)

    def stream(self, *arguments: Any, **options: Any) -> Any:
        self.queue.wait()
        return super().stream(*arguments, **options)


class QueuedResult(CursorResult[Any]):
    """Is the result of an insert that was queued without SQLAlchemy, which makes it when asked."""

    def __init__(self, queue: StatementQueue, make: Callable[[], CursorResult[Any]]) -> None:
        self._soft_closed = True
        self._queue = queue
        self._make = make
        self._affected: int | None = None

    def note(self, result: PGresult) -> None:
        """Take the result of the statement."""
        self._affected = result.command_tuples or 0

    @property
    def rowcount(self) -> int:
        if self._affected is None:
            self._queue.wait()
        return -1 if self._affected is None else self._affected

    def __getattr__(self, name: str) -> Any:
        if name not in _MADE:
            raise AttributeError(name)
        made = self._make()
        for each in _MADE:
            setattr(self, each, getattr(made, each))
        return getattr(self, name)


_MADE = ("context", "dialect", "cursor", "cursor_strategy", "_echo", "connection", "_metadata")
"""What SQLAlchemy gives to each result of a cursor."""


class CompiledInsert(NamedTuple):
    """Remembers how SQLAlchemy has compiled an insert, if only its parameters can change."""

    query: str
    names: Set[str]
    dialect: Dialect


_compiled: WeakKeyDictionary[Executable, CompiledInsert | None] = WeakKeyDictionary()
"""The inserts that were executed; None for one that SQLAlchemy must see each time."""


def find_compiled(
    statement: Executable, parameters: Mapping[str, Any], dialect: Dialect
) -> CompiledInsert | None:
    """Return an insert that has been learned, with parameters of the same names."""
    known = _compiled.get(statement)
    if known is None or known.dialect is not dialect or parameters.keys() != known.names:
        return None
    return known


def learn_compiled(
    statement: Executable, parameters: Mapping[str, Any], result: CursorResult[Any]
) -> None:
    """Remember an insert after SQLAlchemy has executed it, unless it does more than compile it."""
    if statement in _compiled or type(statement) not in (Insert, PostgresInsert):
        return
    context: Any = result.context
    compiled = context.compiled
    is_plain = (
        is_silent(context.statement)
        and not sets_locally(context.statement)
        and not statement.get_execution_options()
        and not statement._propagate_attrs  # of the ORM
        and not context.executemany
        and not compiled.insert_prefetch
        and not compiled.update_prefetch
        and not compiled.effective_returning
        and not compiled.literal_execute_params
        and not compiled.post_compile_params
        and not compiled.escaped_bind_names
        and not compiled._bind_processors
        and context.compiled_parameters[0].keys() == parameters.keys()
    )
    _compiled[statement] = (
        CompiledInsert(context.statement, frozenset(parameters), context.dialect)
        if is_plain
        else None
    )


_MAX_KNOWN = 1000
"""Statements that are remembered; those with values in their text are without number."""


@lru_cache(_MAX_KNOWN)
def is_silent(query: str) -> bool:
    """Return whether a statement is an INSERT without RETURNING, whose result is not read.

    SQLAlchemy reads the row count of UPDATE and DELETE, so these are executed at once.
    """
    begins = query.lstrip()[:7].upper()
    return begins.split() == ["INSERT"] and "returning" not in query.lower()


_placeholder = re.compile(r"%(?:\(([^)]*)\))?(.?)", re.DOTALL)
_FORMATS = {"s": PyFormat.AUTO, "b": PyFormat.BINARY, "t": PyFormat.TEXT}


@lru_cache(_MAX_KNOWN)
def parse(query: str, encoding: str) -> tuple[bytes, list[PyFormat], list[str] | None] | None:
    """Return a statement with marks $1, $2, … , the formats of its parameters, and their names.

    Names are None if parameters go by their place. Return None for marks that psycopg refuses.

    >>> parse("VALUES (%(a)s, %(b)s, %(a)s, '50 %%')", "utf-8")[::2]
    (b"VALUES ($1, $2, $1, '50 %')", ['a', 'b'])
    """
    formats: list[PyFormat] = []
    places: dict[str, int] = {}
    wrong = False

    def number(found: re.Match[str]) -> str:
        nonlocal wrong
        name, kind = found.groups()
        if kind == "%" and name is None:
            return "%"
        format_ = _FORMATS.get(kind)
        if format_ is None:
            wrong = True
            return ""
        if name is None or name not in places:
            formats.append(format_)
            if name is None:
                return f"${len(formats)}"
            places[name] = len(formats)
        wrong = wrong or formats[places[name] - 1] is not format_
        return f"${places[name]}"

    text = _placeholder.sub(number, query).encode(encoding)
    if wrong or len(places) not in (0, len(formats)):
        return None
    return text, formats, list(places) if places else None
