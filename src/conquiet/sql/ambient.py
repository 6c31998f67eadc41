"""The ambient transaction: how adapters find the one that they run in.

A `Unit` is one transaction, or one savepoint of it. It stands in a ContextVar, so each thread
has its own, and a coroutine that runs in a copied context sees the one of its worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, Engine, NestedTransaction
from sqlalchemy.exc import ResourceClosedError
from sqlalchemy.orm import Session, sessionmaker

from conquiet.errors import HandlerError
from conquiet.sql.control import not_yours

if TYPE_CHECKING:
    from conquiet.sql.pipeline import Pipeline

S = TypeVar("S", bound=Session)

UNITS: ContextVar[tuple[Unit, ...]] = ContextVar("conquiet.sql.units", default=())
"""The transactions around the running code, innermost last."""


class TransactionEnded(HandlerError, ResourceClosedError):
    """A connection or a session was used after its transaction.

    Also one of SQLAlchemy's errors, which SQLAlchemy lets pass as they are.
    """


class TransactionConnection(Connection):
    """The connection of a transaction that somebody else ends.

    Code inside may use savepoints, by `begin_nested()` or `begin()`; it may not commit, roll
    back or close, since the effects of its neighbours hang on the same transaction.
    """

    unit: Unit
    begun = False
    """Whether conquiet has sent its own BEGIN: nobody may send another, or a COMMIT."""

    def begin(self) -> NestedTransaction:  # type: ignore[override]
        """A savepoint: the transaction itself has begun."""
        if self.unit.ended:
            raise _ended("connection")
        if not self.in_transaction():  # SQLAlchemy would begin another, which nobody commits
            raise HandlerError(
                "the transaction was rolled back inside, by session.rollback() or an error in a"
                " flush; let SQL errors pass, or flush in begin_nested()"
            )
        return self.begin_nested()

    def commit(self) -> None:
        raise not_yours("commit()")

    def rollback(self) -> None:
        raise not_yours("rollback()")

    def close(self) -> None:
        raise not_yours("close()")

    def _revalidate_connection(self) -> Any:
        # Reached when there is no driver connection any more: the transaction is over, or its
        # connection was lost, in which case SQLAlchemy knows what to say.
        if self.unit.ended:
            raise _ended("connection")
        return super()._revalidate_connection()


class Unit:
    """One transaction, or a savepoint inside one, and the sessions that joined it."""

    def __init__(self, connection: TransactionConnection, depth: int = 0) -> None:
        self.connection = connection
        self.depth = depth
        self.ended = False
        self.wrote = False
        """Whether inbox or outbox wrote, so that the database must be in a transaction."""
        self.filled: set[str] = set()
        """The outbox tables that have new rows; their relays are told after the commit."""
        self.failure: BaseException | None = None
        """The last error of a statement, in case that a handler swallows it (S2)."""
        self.pipeline: Pipeline | None = None
        self._sessions: list[Session] = []

    def belongs_to(self, engine: Engine) -> bool:
        # Engines made by execution_options() share the pool of the one that they came from.
        return self.connection.engine.pool is engine.pool

    @contextmanager
    def session(self, factory: sessionmaker[S]) -> Iterator[S]:
        """A session of this transaction; flushed when the block ends and before the commit."""
        # rollback_only: session.commit() flushes and leaves the commit to the transaction;
        # session.rollback() ends the transaction, which then refuses to commit.
        joined = factory(bind=self.connection, join_transaction_mode="rollback_only")
        try:
            yield joined
            joined.flush()
        except BaseException:
            joined.close()  # what it had not written yet must not be written later
            raise
        self._sessions.append(joined)

    def flush(self) -> None:
        """Write what the sessions still hold."""
        for joined in self._sessions:
            joined.flush()

    def finish_queueing(self) -> None:
        """Execute what is queued, and queue no more; raises if any of it was lost."""
        if self.pipeline is not None:
            self.pipeline.finish()
            self.pipeline = None

    def drop_queued(self) -> None:
        """Forget what is queued; the transaction is not committed."""
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None

    def end(self) -> None:
        self.ended = True
        self.drop_queued()  # if there was a commit, the queue was finished before it
        for joined in self._sessions:
            joined.close()


def current(who: str) -> Unit:
    """The innermost transaction; `who` needs it."""
    units = UNITS.get()
    if not units:
        raise HandlerError(
            f"{who} was used outside a SQL transaction; put conquiet.sql.Transaction around it:"
            " router.use(Transaction(engine), Inbox(…), Outbox(…))"
        )
    if units[-1].ended:
        raise _ended(who)
    return units[-1]


def find(engine: Engine) -> Unit | None:
    """The innermost transaction on this engine, if there is one."""
    for unit in reversed(UNITS.get()):
        if unit.belongs_to(engine):
            if unit.ended:
                raise _ended("connection")
            return unit
    return None


@contextmanager
def connection(engine: Engine) -> Iterator[Connection]:
    """The connection of the ambient transaction; outside one, a transaction for this block.

    >>> from sqlalchemy import create_engine
    >>> engine = create_engine("sqlite://")
    >>> with connection(engine) as found:
    ...     found.exec_driver_sql("SELECT 1").scalar()
    1
    >>> engine.dispose()
    """
    unit = find(engine)
    if unit is not None:
        yield unit.connection
        return
    with engine.begin() as own:
        yield own


def session(factory: sessionmaker[S]) -> AbstractContextManager[S]:
    """A session in the ambient transaction; outside one, in a transaction for this block.

    Inside, it is flushed when the block ends, flushed again before the commit, and closed
    after it, so that objects which left the block are still of use to the handler.
    """
    bind = factory.kw.get("bind")
    if isinstance(bind, Engine):
        unit = find(bind)
    else:
        unit = current("a session without an engine of its own")
    return factory.begin() if unit is None else unit.session(factory)


def _ended(what: str) -> TransactionEnded:
    return TransactionEnded(
        f"{what}: its transaction has ended; finish all work before the handler returns, and"
        " ask conquiet.sql.connection(engine) anew each time"
    )
