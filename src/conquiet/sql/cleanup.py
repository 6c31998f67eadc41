"""Cleanup: takes away what has done its duty, in small steps, beside the work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import URL, Engine, Table, TextClause, text
from sqlalchemy.exc import SQLAlchemyError

from conquiet.backoff import Backoff
from conquiet.errors import ConfigError, StoreError
from conquiet.sql import dialect
from conquiet.sql.tables import INBOX_TABLE, OUTBOX_TABLE, inbox_table, outbox_table

logger = logging.getLogger("conquiet.cleanup")

RETENTION = timedelta(days=7)
INTERVAL_SECONDS = 60.0
BATCH_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class Removed:
    """How many rows one round took away."""

    inbox: int = 0
    outbox: int = 0


class Cleanup:
    """Deletes inbox rows by their age, and outbox rows by how long ago they were published.

    A message that is delivered again after its inbox row has gone runs again: `retention` must
    be longer than any source may take to deliver. Rows that wait or are parked stay, however
    old. Ages are told by the database's clock. Each batch is a short transaction of its own,
    and leaves alone what somebody else has locked.

    `inbox=None` or `outbox=None` leaves that table out.
    """

    def __init__(
        self,
        engine: Engine | str | URL,
        *,
        inbox: str | None = INBOX_TABLE,
        outbox: str | None = OUTBOX_TABLE,
        retention: timedelta = RETENTION,
        interval: float = INTERVAL_SECONDS,
        batch: int = BATCH_ROWS,
    ) -> None:
        if retention <= timedelta(0):
            raise ConfigError(f"retention={retention!r}: must be more than nothing")
        if not interval > 0:
            raise ConfigError(f"interval={interval!r}: must be more than 0 seconds")
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ConfigError(f"batch={batch!r}: must be a whole number from 1 on")
        self.engine = dialect.as_engine(engine)
        self.retention = retention
        self.interval = interval
        self.batch = batch
        self._inbox = self._outbox = None
        if inbox is not None:
            self._inbox = self._expired(inbox_table(inbox), "created_at")
        if outbox is not None:
            # A row has published_at or it waits: no other condition is needed to spare it.
            self._outbox = self._expired(outbox_table(outbox), "published_at")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def run_once(self, tell: Callable[[int], object] | None = None) -> Removed:
        """One round now: everything that is old enough, batch by batch; `tell` is told how many."""
        removed = {"inbox": 0, "outbox": 0}
        for name, statement in (("inbox", self._inbox), ("outbox", self._outbox)):
            while statement is not None and not self._stopping.is_set():
                began = time.monotonic()
                count = self._delete(statement)
                removed[name] += count
                if tell is not None:
                    tell(sum(removed.values()))
                if count < self.batch:
                    break
                # As long again for the others: on SQLite they could not write meanwhile.
                self._stopping.wait(min(time.monotonic() - began, 0.1))
        return Removed(**removed)

    def start(self) -> None:
        """Run a round every `interval` seconds, in a thread, until `stop()`."""
        if self._thread is not None:
            raise ConfigError("a cleanup is started once; make a new one")
        self._thread = threading.Thread(target=self.run, name="conquiet-cleanup", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """The same, in this thread."""
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
        """Stop after the batch that is under way."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Cleanup:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _expired(self, table: Table, column: str) -> TextClause:
        name = self.engine.dialect.identifier_preparer.format_table(table)
        template = _POSTGRESQL if dialect.is_postgresql(self.engine.dialect) else _SQLITE
        statement = text(template.format(table=name, column=column))
        seconds = self.retention.total_seconds()
        return statement.bindparams(seconds=seconds, batch=self.batch)

    def _delete(self, statement: TextClause) -> int:
        try:
            with self.engine.begin() as connection:
                if dialect.is_sqlite(connection.dialect):
                    dialect.begin_immediate(connection)
                return connection.execute(statement).rowcount
        except SQLAlchemyError as error:
            reason = " ".join(str(getattr(error, "orig", None) or error).split())
            raise StoreError(f"{dialect.shown(self.engine.url)}: {reason:.300}") from error


# By the place of a row, since the inbox has no short key. The lock keeps the row in its place,
# and SKIP LOCKED leaves alone what somebody is working on. The age again outside, since rows of
# several partitions have the same place; as CASE, or the planner would go by it.
_POSTGRESQL = """
DELETE FROM {table} WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM {table}
     WHERE {column} < now() - make_interval(secs => :seconds)
     ORDER BY {column} LIMIT :batch FOR UPDATE SKIP LOCKED))
   AND CASE WHEN {column} < now() - make_interval(secs => :seconds) THEN true ELSE false END
"""
_SQLITE = """
DELETE FROM {table} WHERE rowid IN (
    SELECT rowid FROM {table}
     WHERE {column} < datetime('now', '-' || :seconds || ' seconds')
     ORDER BY {column} LIMIT :batch)
"""
