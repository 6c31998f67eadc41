"""Delete expired inbox rows and published outbox rows, in small batches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import URL, Connection, Engine, Table, TextClause, text
from sqlalchemy.exc import SQLAlchemyError

from conquiet.backoff import Backoff
from conquiet.config import has_events_layout
from conquiet.errors import ConfigError, StoreError
from conquiet.sql import days, dialect, wal
from conquiet.sql.schema import (
    INBOX_TABLE,
    OUTBOX_TABLE,
    inbox_table,
    lock_tables,
    outbox_table,
    positions_table,
    retries_table,
    split_name,
)

logger = logging.getLogger("conquiet.cleanup")

RETENTION_SECONDS = 7 * 24 * 3600.0
INTERVAL_SECONDS = 60.0
BATCH_SIZE = 1_000


@dataclass(frozen=True, slots=True)
class Removed:
    """Counts the rows that one round deleted."""

    inbox: int = 0
    outbox: int = 0


class Cleanup:
    """Deletes inbox rows by age, and outbox rows by how long ago they were published.

    A message that is redelivered after its inbox row was deleted runs again: `retention`, in
    seconds, must be longer than any source may take to redeliver. Unpublished and parked rows are
    kept, and so are rows that a group of a `LogSource` has not read or may still retry. Ages are
    measured by the database's clock. Each batch is a short transaction of its own and skips locked
    rows.

    Of an outbox that is published from the write-ahead log, rows go by their age, once they are
    behind the confirmed position of its slot.

    `relayed=False` is for an outbox that no relay publishes: its rows go by their age, once every
    group of their topic has passed them. Rows of a topic without a group stay.

    Of an outbox that is divided by day, whole days are dropped, when a day ended longer ago than
    `retention` and no row of it is needed; rows are deleted only from a day that has to stay for
    others. Each round adds the days to come. Both take the owner of the table.

    `inbox=None` or `outbox=None` leaves that table out.

    `engine` is one of SQLAlchemy's, or a URL. As a context manager it runs every `interval`
    seconds, in batches of `batch_size` rows.
    """

    def __init__(
        self,
        engine: Engine | str | URL,
        *,
        inbox: str | None = INBOX_TABLE,
        outbox: str | None = OUTBOX_TABLE,
        relayed: bool = True,
        retention: float = RETENTION_SECONDS,
        interval: float = INTERVAL_SECONDS,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        for name, seconds in (("retention", retention), ("interval", interval)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds!r}: must be more than 0 seconds")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r}: must be a whole number from 1 on")
        for table in (inbox, outbox):
            if table is not None:
                split_name(table)
        self.engine = dialect.as_engine(engine)
        self.retention = retention
        self.interval = interval
        self.batch_size = batch_size
        self.relayed = relayed
        self._inbox = inbox
        self._outbox = outbox
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def run_once(self, progress: Callable[[int], object] | None = None) -> Removed:
        """Delete all expired rows, batch by batch; call `progress` with the count so far."""
        removed = {"inbox": 0, "outbox": 0}

        def delete(name: str, statement: TextClause) -> None:
            while not self._stopping.is_set():
                began = time.monotonic()
                count = self._delete(statement)
                removed[name] += count
                if progress is not None:
                    progress(sum(removed.values()))
                if count < self.batch_size:
                    break
                # Pause for as long as the batch took: on SQLite other writers had to wait.
                self._stopping.wait(min(time.monotonic() - began, 0.1))

        if self._inbox is not None:
            delete("inbox", self._statement(inbox_table(self._inbox), "created_at", ""))
        if self._outbox is not None:
            removed["outbox"] += self._drop_days(self._outbox)
            for statement in self._outbox_statements(self._outbox):
                delete("outbox", statement)
        return Removed(**removed)

    def start(self) -> None:
        """Run a round every `interval` seconds, in a thread, until `stop()`."""
        if self._thread is not None:
            raise ConfigError("a cleanup can be started once; create a new one")
        self._thread = threading.Thread(target=self.run, name="conquiet-cleanup", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Run a round every `interval` seconds, in this thread, until `stop()`."""
        failures = Backoff(first=1.0, cap=self.interval)
        wait = 0.0
        while not self._stopping.wait(wait):
            wait = self.interval
            try:
                removed = self.run_once()
            except StoreError as error:
                wait = failures.next()
                logger.warning("cleanup failed, next try in %.1f s: %s", wait, error)
                continue
            failures.reset()
            if removed.inbox or removed.outbox:
                logger.info(
                    "removed %d rows of the inbox, %d of the outbox", removed.inbox, removed.outbox
                )

    def stop(self) -> None:
        """Stop after the current batch."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Cleanup:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _outbox_statements(self, name: str) -> Iterator[TextClause]:
        try:
            with self.engine.connect() as connection:
                has_groups = dialect.has_table(connection, positions_table(name).fullname)
                slot = self._slot(connection)
                is_divided = days.is_divided(connection, name)
                end = days.passed(connection, name, self.retention) if is_divided else None
        except SQLAlchemyError as error:
            raise dialect.store_error(self.engine, error) from error
        if not has_groups:  # of an earlier release, or another layout
            if self.relayed:
                yield self._statement(outbox_table(name), "published_at", "")
            return
        if is_divided and end is None:  # each day goes as a whole, later
            return
        quote = self.engine.dialect.identifier_preparer.format_table
        needs = _PASSED if self.relayed else _PASSED + _READ
        if end is not None:
            needs += f"\n       AND o.created_at < '{end}'::timestamptz"
        xid = "o.xid::text::bigint" if dialect.is_postgresql(self.engine.dialect) else "o.xid"
        needs = needs.format(
            positions=quote(positions_table(name)),
            retries=quote(retries_table(name)),
            xid=xid,
        )
        # Unpublished rows have no published_at, so no other condition is needed.
        column = "published_at" if self.relayed else "created_at"
        yield self._statement(outbox_table(name), column, needs)
        if slot is not None and self.relayed:
            table = quote(outbox_table(name))
            behind = text(_BEHIND.format(table=table, unmarked=wal.UNMARKED, needs=needs))
            yield behind.bindparams(
                seconds=float(self.retention), batch=self.batch_size, horizon=str(slot.horizon)
            )

    def _drop_days(self, table: str) -> int:
        """Add the days to come, and drop those that are done; return how many rows they had."""
        if has_events_layout(table):
            return 0
        with dialect.raise_store_errors(self.engine):
            if not dialect.is_postgresql(self.engine.dialect):
                return 0
            with self.engine.connect() as connection:
                if not days.is_divided(connection, table):
                    return 0
                slot = self._slot(connection) if self.relayed else None
            with lock_tables(self.engine) as connection:
                days.add(connection, table)
            quote = self.engine.dialect.identifier_preparer.format_table
            published = _PUBLISHED if slot is None else _BEHIND_THE_SLOT
            needs = (_HELD + (published if self.relayed else _UNREAD)).format(
                day="{day}",
                positions=quote(positions_table(table)),
                retries=quote(retries_table(table)),
                unmarked=wal.UNMARKED,
                deferred=wal.DEFERRED,
                horizon=0 if slot is None else slot.horizon,
                seconds=float(self.retention),
            )

            def is_needed(connection: Connection, day: str) -> bool:
                query = f"SELECT {needs.format(day=day)}"
                return bool(connection.exec_driver_sql(query).scalar())

            return days.drop(
                self.engine, table, self.retention, is_needed, lambda: not self._stopping.is_set()
            )

    def _slot(self, connection: Connection) -> wal.Slot | None:
        """Describe the slot of the outbox, if it is published from the write-ahead log."""
        assert self._outbox is not None
        table = outbox_table(self._outbox)
        if not dialect.uses_psycopg(connection.dialect) or has_events_layout(self._outbox):
            return None
        name = connection.dialect.identifier_preparer.format_table(table)
        return wal.find_slot(connection, name) if dialect.has_table(connection, name) else None

    def _statement(self, table: Table, column: str, needs: str) -> TextClause:
        name = self.engine.dialect.identifier_preparer.format_table(table)
        template = _POSTGRESQL if dialect.is_postgresql(self.engine.dialect) else _SQLITE
        statement = text(template.format(table=name, column=column, needs=needs))
        return statement.bindparams(seconds=float(self.retention), batch=self.batch_size)

    def _delete(self, statement: TextClause) -> int:
        with (
            dialect.raise_store_errors(self.engine),
            dialect.begin_to_write(self.engine) as connection,
        ):
            return connection.execute(statement).rowcount


# By ctid, since the inbox has no short key. The lock keeps the row's ctid, and SKIP LOCKED skips
# rows in use. The age is checked again outside, since rows of several partitions share a ctid; in
# a CASE, so that the planner does not choose a plan by it.
_POSTGRESQL = """
DELETE FROM {table} WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM {table} AS o
     WHERE {column} < now() - make_interval(secs => :seconds){needs}
     ORDER BY {column} LIMIT :batch FOR UPDATE SKIP LOCKED))
   AND CASE WHEN {column} < now() - make_interval(secs => :seconds) THEN true ELSE false END
"""
_SQLITE = """
DELETE FROM {table} WHERE rowid IN (
    SELECT rowid FROM {table} AS o
     WHERE {column} < datetime('now', '-' || :seconds || ' seconds'){needs}
     ORDER BY {column} LIMIT :batch)
"""
# The oldest rows behind the position, of which those that are old enough go. In the order of
# transactions, which has an index; were age the condition, all rows would be read in vain.
_BEHIND = """
DELETE FROM {table} WHERE id IN (
    SELECT oldest.id FROM (
        SELECT o.id, o.created_at FROM {table} AS o
         WHERE {unmarked} AND o.xid < CAST(:horizon AS xid8){needs}
         ORDER BY o.xid, o.id LIMIT :batch FOR UPDATE SKIP LOCKED) AS oldest
     WHERE oldest.created_at < now() - make_interval(secs => :seconds))
"""
# No group has still to read the row, or to retry it.
_PASSED = """
       AND NOT EXISTS (SELECT 1 FROM {positions} AS p WHERE p.topic = o.topic
                          AND (p.xid, p.id) < ({xid}, o.id))
       AND NOT EXISTS (SELECT 1 FROM {retries} AS r WHERE r.id = o.id)"""
_READ = """
       AND parked_at IS NULL AND o.topic IN (SELECT topic FROM {positions})"""
# Whether a day must stay: each part ends at the first such row, found by an index.
_HELD = """
EXISTS (SELECT 1 FROM {day} AS o WHERE parked_at IS NOT NULL)
OR EXISTS (SELECT 1 FROM {positions} AS p JOIN {day} AS o ON o.topic = p.topic
              AND (o.xid, o.id) > (p.xid::text::xid8, p.id))
OR EXISTS (SELECT 1 FROM {retries} AS r JOIN {day} AS o ON o.id = r.id)"""
_PUBLISHED = """
OR EXISTS (SELECT 1 FROM {day} AS o WHERE published_at IS NULL AND parked_at IS NULL)
OR EXISTS (SELECT 1 FROM {day} AS o
            WHERE published_at >= now() - make_interval(secs => {seconds}))"""
_BEHIND_THE_SLOT = """
OR EXISTS (SELECT 1 FROM {day} AS o
            WHERE published_at IS NULL AND parked_at IS NULL AND {deferred})
OR EXISTS (SELECT 1 FROM {day} AS o WHERE {unmarked} AND xid >= '{horizon}'::xid8)
OR EXISTS (SELECT 1 FROM {day} AS o
            WHERE published_at >= now() - make_interval(secs => {seconds}))"""
_UNREAD = """
OR EXISTS (SELECT 1 FROM {day} AS o WHERE o.topic NOT IN (SELECT topic FROM {positions}))"""
