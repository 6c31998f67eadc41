"""Transaction over a SQLAlchemy engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.engine import Transaction as DatabaseTransaction
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from conquiet import transaction
from conquiet.errors import ConfigError, HandlerError, StoreError
from conquiet.message import Message
from conquiet.sql import dialect
from conquiet.sql.ambient import UNITS, TransactionConnection, Unit, find
from conquiet.sql.control import refuse_control
from conquiet.sql.wakeup import written

IsolationLevel = Literal["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
_LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
_ABORTED = "is aborted: a statement in it failed and nobody raised"
_watched: WeakSet[Engine] = WeakSet()


class Transaction(transaction.Transaction):
    """Middleware: BEGIN before the chain, COMMIT after it, ROLLBACK if an exception passes.

    Inside another transaction on the same engine it is a savepoint. Adapters find it by
    `conquiet.sql.connection(engine)` or `conquiet.sql.session(factory)`.

    `pipeline` sends statements that return nothing without waiting for their answers; an error
    of one is raised later, at the latest before the commit (PostgreSQL with psycopg).
    """

    def __init__(
        self,
        engine: Engine | str | URL,
        *,
        isolation_level: IsolationLevel | None = None,
        read_only: bool = False,
        pipeline: bool = True,
    ) -> None:
        if isolation_level is not None and isolation_level not in _LEVELS:
            raise ConfigError(
                f"isolation_level={isolation_level!r}: choose one of {', '.join(_LEVELS)}"
            )
        self.engine = dialect.as_engine(engine)
        if self.engine.dialect.is_async:
            raise ConfigError(
                "Transaction takes a sync Engine, since handlers run in threads; make one from"
                " the same URL. An AsyncSession puts events into an outbox by"
                " outbox.statement(events)"
            )
        self.read_only = read_only
        self.pipeline = pipeline and dialect.can_queue(self.engine.dialect)
        options: dict[str, Any] = {}
        if not dialect.is_sqlite(self.engine.dialect):  # SQLite is serializable, whatever is asked
            if isolation_level is not None:
                options["isolation_level"] = isolation_level
            if read_only:
                options["postgresql_readonly"] = True
        self._engine = self.engine.execution_options(**options) if options else self.engine
        _watch(self.engine)

    def scope(self, batch: Sequence[Message[Any]]) -> AbstractContextManager[Connection]:
        """One transaction, or a savepoint if there is one on this engine already."""
        outer = find(self.engine)
        return self._whole() if outer is None else self._savepoint(outer)

    @contextmanager
    def _whole(self) -> Iterator[Connection]:
        try:
            connection = TransactionConnection(self._engine)
        except (DBAPIError, PoolTimeout) as error:
            raise self._store_error(error) from error
        unit = connection.unit = Unit(connection)
        try:
            root = self._begin(connection)
            connection.begun = True
            if self.pipeline:
                unit.pipeline = _pipeline(connection)
            with self._entered(unit):
                yield connection
                self._flush(unit, root)
            Connection.commit(connection)
        except BaseException as error:
            self._give_up(unit, error)
            raise
        finally:
            unit.end()
            self._release(connection)
        for table in unit.filled:
            written(self.engine, table)

    @contextmanager
    def _savepoint(self, outer: Unit) -> Iterator[Connection]:
        connection = outer.connection
        unit = Unit(connection, outer.depth + 1)
        savepoint: DatabaseTransaction | None = None
        try:
            savepoint = connection.begin_nested()
            with self._entered(unit):
                yield connection
                self._flush(unit, savepoint)
            savepoint.commit()
            outer.wrote = outer.wrote or unit.wrote
        except BaseException as error:
            if savepoint is not None and savepoint.is_active:
                try:
                    savepoint.rollback()
                except DBAPIError as failure:
                    raise self._store_error(failure) from error
            if dialect.is_store_failure(error, read_only=self.read_only):
                raise self._store_error(error) from error
            raise
        finally:
            unit.end()

    @contextmanager
    def _entered(self, unit: Unit) -> Iterator[None]:
        token = UNITS.set((*UNITS.get(), unit))
        try:
            yield
        finally:
            UNITS.reset(token)

    def _begin(self, connection: TransactionConnection) -> DatabaseTransaction:
        root = Connection.begin(connection)
        if dialect.is_sqlite(connection.dialect):
            if self.read_only:
                connection.exec_driver_sql("PRAGMA query_only=ON")
                connection.exec_driver_sql("BEGIN")
            else:
                dialect.begin_immediate(connection)
        elif getattr(dialect.driver_connection(connection), "autocommit", False):
            raise ConfigError(
                "the engine is in AUTOCOMMIT, where nothing can be rolled back; give Transaction"
                " an engine without isolation_level='AUTOCOMMIT'"
            )
        return root

    def _flush(self, unit: Unit, began: DatabaseTransaction) -> None:
        """Write what is still held, then make sure that a commit would commit it."""
        unit.flush()
        connection = unit.connection
        if began.is_active and not connection.invalidated:
            with dialect.translated(connection):
                unit.finish_queueing()
        if not began.is_active or connection.invalidated:
            raise _lost_inside(unit, "was rolled back inside, by session.rollback() or an error")
        if dialect.is_aborted(connection):
            raise _lost_inside(unit, _ABORTED)
        # psycopg sends BEGIN with the first statement: an idle one may just have had none.
        begun = unit.wrote or dialect.is_sqlite(connection.dialect)
        if begun and dialect.is_over(connection):
            raise _lost_inside(unit, "was ended inside, by the driver or by the database")

    def _give_up(self, unit: Unit, error: BaseException) -> None:
        """Roll back, and say so if it was the store that failed."""
        connection = unit.connection
        unit.drop_queued()
        blamed, store = error, dialect.is_store_failure(error, read_only=self.read_only)
        if not store:
            blamed = _first_failure(unit, error)
            store = dialect.is_store_failure(blamed, read_only=self.read_only)
        if dialect.is_lost(connection):
            _tell_pool(connection)
        try:
            Connection.rollback(connection)
        except DBAPIError:
            connection.invalidate()
        if store and isinstance(error, Exception) and not isinstance(error, StoreError):
            raise self._store_error(blamed) from error
        if dialect.is_consequence(error):
            raise _lost_inside(unit, _ABORTED)

    def _release(self, connection: TransactionConnection) -> None:
        if self.read_only and dialect.is_sqlite(connection.dialect) and not connection.invalidated:
            dialect.driver_connection(connection).execute("PRAGMA query_only=OFF")
        Connection.close(connection)

    def _store_error(self, error: BaseException) -> StoreError:
        told = dialect.one_line(error)
        return StoreError(f"{dialect.shown(self.engine.url)}: {told:.300}")


def _first_failure(unit: Unit, error: BaseException) -> BaseException:
    """What went wrong: what was raised, or an earlier error that a handler swallowed."""
    connection = unit.connection
    if unit.failure is None:
        return error
    gone = dialect.is_lost(connection) or dialect.is_aborted(connection)
    return unit.failure if gone else error


def _lost_inside(unit: Unit, how: str) -> HandlerError:
    cause = f": {unit.failure}" if unit.failure is not None else ""
    error = HandlerError(
        f"the transaction {how}, so a COMMIT would have committed nothing; let SQL errors pass,"
        f" or run the statement in begin_nested(){cause:.500}"
    )
    error.__cause__ = unit.failure
    return error


def _pipeline(connection: Connection) -> Any:
    from conquiet.sql.pipeline import Pipeline  # psycopg is not needed before this

    return Pipeline(dialect.driver_connection(connection), connection.in_nested_transaction)


def _tell_pool(connection: Connection) -> None:
    """Let SQLAlchemy find out that the connection is dead: it then drops the others as well."""
    try:
        connection.exec_driver_sql("SELECT 1")
    except (DBAPIError, InvalidRequestError):
        pass


def _watch(engine: Engine) -> None:
    """See each statement before it is sent, and its error before a handler can swallow it."""
    if engine not in _watched:
        event.listen(engine, "handle_error", _note)
        event.listen(engine, "before_cursor_execute", _refuse_control, retval=True)
        _watched.add(engine)


def _refuse_control(
    connection: Connection, cursor: Any, statement: str, parameters: Any, *unused: Any
) -> tuple[str, Any]:
    if isinstance(connection, TransactionConnection) and connection.begun:
        refuse_control(statement)
    return statement, parameters


def _note(context: ExceptionContext) -> None:
    connection = context.connection
    if isinstance(connection, TransactionConnection):
        connection.unit.failure = context.sqlalchemy_exception or context.original_exception
