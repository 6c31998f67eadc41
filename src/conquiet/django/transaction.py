"""Run a batch in `transaction.atomic()`: effects of Django's models, inbox and outbox together.

BEGIN ──▶ inbox ──▶ handler: Model.objects.create(…) ──▶ outbox ──▶ COMMIT     one connection

Each thread of a worker has a connection of Django's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import connections
from django.db import transaction as django_transaction

from conquiet import inbox as base_inbox
from conquiet import transaction
from conquiet.errors import ConfigError, Conflict, DeadlineExceeded, HandlerError, StoreError
from conquiet.message import Message
from conquiet.sql import dialect, handle, inbox, outbox
from conquiet.sql.inbox import InsertEntries

VENDORS = ("postgresql", "sqlite")
_IDLE, _IN_ERROR = 0, 3  # transaction status of libpq


class Transaction(transaction.Transaction):
    """Middleware: `transaction.atomic()` around the chain, on the connection of an alias."""

    def __init__(self, using: str = "default", tables: Collection[str] = ()) -> None:
        self.using = using
        self._tables = tables
        self._is_sqlite = check_vendor(using) == "sqlite"

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        return 1 if self._is_sqlite else None  # SQLite has one writer at a time

    @contextmanager
    def scope(self, batch: Sequence[Message[Any]]) -> Iterator[object]:
        connection = connections[self.using]
        _drop_if_lost(connection)
        has_failed = True  # if BEGIN or COMMIT fails, it is this connection
        try:
            with django_transaction.atomic(self.using, durable=True):
                try:
                    yield connection
                    self._check(connection, begun=bool(batch))
                except Exception:
                    # Django notes which connection has failed, and forgets it if it reconnects to
                    # roll back. An error of another alias is not the store's.
                    has_failed = connection.errors_occurred
                    raise
        except (DeadlineExceeded, StoreError):  # a deadline may break the connection
            raise
        except Exception as error:
            blamed = self._store_error(error, has_failed)
            if blamed is None:
                raise
            raise blamed from error

    def probe(self) -> None:
        with self.scope(()) as connection, connection.cursor() as cursor:  # type: ignore[attr-defined]
            cursor.execute("SELECT 1" if self._is_sqlite else "SELECT pg_current_xact_id()")

    def _check(self, connection: Any, *, begun: bool) -> None:
        """Raise if a COMMIT would commit nothing, of which Django would say nothing."""
        if connection.needs_rollback:
            raise _rolled_back("was rolled back inside, by an atomic(savepoint=False) or by hand")
        driver = connection.connection
        if self._is_sqlite:
            is_over = not driver.in_transaction
        else:
            status = int(driver.info.transaction_status) if driver is not None else _IDLE
            if status == _IN_ERROR:
                raise _rolled_back("is aborted: a statement in it failed and its error was caught")
            is_over = begun and status == _IDLE  # psycopg sends BEGIN with the first statement
        if is_over:
            raise _rolled_back("was ended inside, by the driver or by the database")

    def _store_error(self, error: Exception, has_failed: bool) -> StoreError | None:
        """Return the error as the store's, if it is that of this connection."""
        is_missing = any(dialect.names_table(link, self._tables) for link in dialect.chain(error))
        if not is_missing and not (has_failed and dialect.is_store_failure(error)):
            return None
        kind = Conflict if dialect.is_conflict(error) else StoreError
        made = kind(f"database {self.using}: {error!s:.300}")
        made.is_outage = is_missing
        return made


class Inbox(inbox.Inbox):
    """Middleware: remembers handled messages by Django's connection."""

    def __init__(self, subscriber: str, using: str = "default") -> None:
        super().__init__(subscriber)
        self.using = using

    def remember(self, entries: Sequence[base_inbox.Entry]) -> Collection[base_inbox.Entry]:
        # Two workers with the same messages must lock them in the same order.
        new = _execute(self.using, InsertEntries(self, sorted(entries)))
        return entries if len(new) == len(entries) else [(name, id_) for name, id_ in new]


class Outbox(outbox.Outbox):
    """Middleware: stores events by Django's connection; `committed` is called after the commit.

    It is given each table that was written.
    """

    def __init__(
        self, topic: str, using: str, source: str, committed: Callable[[str], object]
    ) -> None:
        super().__init__(topic, source=source)
        self.using = using
        self._committed = committed

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        statements = self._inserts(outputs)
        for statement in statements:
            with self._explain(statement):
                _execute(self.using, statement)
            committed = partial(self._committed, statement.table)
            django_transaction.on_commit(committed, self.using, robust=True)


def check_vendor(using: str) -> str:
    """Return the vendor of a database of Django; raise if conquiet cannot use it."""
    vendor = str(connections[using].vendor)
    if vendor not in VENDORS:
        raise ConfigError(
            f"database {using} is {vendor}; conquiet needs one of {', '.join(VENDORS)}"
        )
    return vendor


def _execute(using: str, statement: handle.Statement) -> handle.Rows:
    """Execute a statement by the driver under Django's connection, with Django's errors."""
    connection = connections[using]
    connection.ensure_connection()
    with connection.wrap_database_errors:
        handle.is_async(connection.connection, "conquiet.django")  # refuses psycopg2
        return handle.run(connection.connection, statement)


def _drop_if_lost(connection: Any) -> None:
    """Close a connection that has failed, as Django does between requests."""
    if connection.errors_occurred:
        if connection.is_usable():
            connection.errors_occurred = False
        else:
            connection.close()


def _rolled_back(how: str) -> HandlerError:
    return HandlerError(
        f"the transaction {how}, so a COMMIT would have committed nothing; do not catch database"
        " errors, or run the statement in transaction.atomic() of its own"
    )
