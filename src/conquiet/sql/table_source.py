"""TableSource: what a relay reads. It claims rows, and settles them where it claimed them.

    stored ──claim──▶ claimed ──ack──▶ published_at set
                         │ nack: one attempt more, and last_error; the last attempt parks the row,
                         │       and so does a PermanentError at once
                         │ nack with a Blameless error: as before, costs nothing
                         └ crash: as before, at once; the lock went with the connection

What the tables differ in is their `Layout`, and the message that is made of a row. How the
databases claim is in `claim_rows`, `claim_psycopg` and `claim_sqlite`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine

from conquiet.acking import Acking, Error
from conquiet.errors import (
    Blameless,
    ConfigError,
    GivenBack,
    InvalidMessage,
    PermanentError,
    StoreError,
)
from conquiet.message import Message, printable
from conquiet.sql import dialect
from conquiet.sql.claim_psycopg import PsycopgRows
from conquiet.sql.claim_rows import Opened, Rows
from conquiet.sql.claim_sqlite import SqliteRows
from conquiet.sql.claimed import Failure, error_text
from conquiet.sql.layout import Layout, Row
from conquiet.sql.resting import Resting
from conquiet.sql.wakeup import Wakeup, wakeup_of

logger = logging.getLogger("conquiet.relay")


class TableSource(ABC):
    """Claims rows of a table as messages; ack marks one published, nack leaves it."""

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        *,
        max_attempts: int,
        ordered: bool,
        poll: float,
        wakeup: bool,
        hold: float,
    ) -> None:
        for name, seconds in (("poll", poll), ("hold", hold)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds!r}: must be more than 0 seconds")
        self.engine = engine
        self.table = layout.table
        self.max_attempts = max_attempts
        self.ordered = ordered
        self.poll = poll
        self.hold = hold
        self.late = 0
        """Settlements that came after their claim had ended; they do nothing."""
        self.resting = Resting(by_key=ordered)
        self._rows = self._rows_of(layout)
        self._wakeup: Wakeup = wakeup_of(self.engine, self.table.fullname, enabled=wakeup)
        self._claims: set[Claim] = set()
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _message(self, row: Any, acking: Acking) -> Message[bytes]:
        """The message of a row; whatever it raises parks that row."""

    @abstractmethod
    def named(self, row: Any) -> dict[str, str]:
        """What the logs call a row: `event_id`, `event_type` and the like."""

    def read(self, limit: int, timeout: float) -> Sequence[Message[bytes]]:
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        deadline = time.monotonic() + timeout
        while not self._closed:
            self._give_up_old_claims()
            messages = self._claim(limit)
            left = deadline - time.monotonic()
            if messages or left <= 0:
                return messages
            self._wakeup.wait(min(left, self.poll, self.resting.seconds_to_next()))
        return ()

    def stop(self) -> None:
        """No more rows: a `read` that waits ends at once. What was read can still be settled."""
        self._closed = True
        self._wakeup.close()

    def close(self) -> None:
        """Mark what was settled and let go of the rest, which is claimable at once."""
        self.stop()
        with self._lock:
            claims = list(self._claims)
        for claim in claims:
            try:
                claim.release()
            except StoreError as error:
                logger.warning("a claim ended by itself: %s", error)
        self._rows.close()

    def _claim(self, limit: int) -> list[Message[bytes]]:
        opened = self._rows.claim(limit, self.resting)
        if opened is None:
            return []
        claim = Claim(self, opened)
        with self._lock:
            self._claims.add(claim)
        try:
            if self._closed:  # close() may have come while we waited for the database
                claim.release()
                return []
            return self._messages(opened.rows, claim)
        except BaseException:
            claim.release()  # nobody else will: its messages were given to nobody
            raise

    def _messages(self, rows: Sequence[Row], claim: Claim) -> list[Message[bytes]]:
        """Rows that cannot be read fail alone; in order, what is behind them waits."""
        messages: list[Message[bytes]] = []
        broken: list[tuple[Any, Error]] = []
        broken_keys: set[str] = set()
        for row in rows:
            if row.key in broken_keys:
                broken.append((row.id, GivenBack("an earlier row of its key failed")))
                continue
            try:
                messages.append(self._message(row, Acking(claim, row.id)))
            except Exception as error:  # noqa: BLE001 - whatever it is, its neighbours go on
                reason = InvalidMessage(f"the row cannot be read: {error}")
                broken.append((row.id, reason))
                self.log(logging.WARNING, "not published", row, reason)
                if self.ordered and row.key is not None:
                    broken_keys.add(row.key)
        if broken:
            claim.settle((), broken)
        return messages

    def log(self, level: int, what: str, row: Row, reason: object) -> None:
        about = {**self.named(row), "attempt": row.attempts + 1}
        told = " ".join(f"{name}={value}" for name, value in about.items())
        logger.log(level, "%s: %s: %s", what, printable(told), printable(str(reason)), extra=about)

    def _give_up_old_claims(self) -> None:
        limit = time.monotonic() - self.hold
        with self._lock:
            old = [claim for claim in self._claims if claim.since < limit]
        for claim in old:
            logger.warning(
                "%d rows of %s were not settled within %g s; they will be published again",
                claim.waiting,
                self.table.fullname,
                self.hold,
            )
            claim.release()

    def ended(self, claim: Claim) -> None:
        with self._lock:
            self._claims.discard(claim)

    def _rows_of(self, layout: Layout) -> Rows:
        kind = self.engine.dialect
        if dialect.is_sqlite(kind):
            return SqliteRows(self.engine, layout, self.ordered)
        if not dialect.is_postgresql(kind) or kind.is_async:
            raise ConfigError(
                f"{type(self).__name__} takes a sync Engine of PostgreSQL or SQLite, not"
                f" {kind.name}+{kind.driver}; make one from the same URL"
            )
        rows = PsycopgRows if dialect.uses_psycopg(kind) else Rows
        return rows(self.engine, layout, self.ordered)


class Claim:
    """The settler of the rows of one transaction; ends it when each of them is settled."""

    def __init__(self, source: TableSource, opened: Opened) -> None:
        self.since = time.monotonic()
        self._source = source
        self._opened = opened
        self._lock = threading.Lock()
        self._rows = {row.id: row for row in opened.rows}
        self._waiting = dict(self._rows)
        self._acked: list[Any] = []
        self._nacked: list[tuple[Row, Error]] = []
        self._ended = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Error]]) -> None:
        with self._lock:
            if self._ended:
                self._source.late += len(acked) + len(nacked)
                return
            for id_ in acked:
                if self._waiting.pop(id_, None) is not None:
                    self._acked.append(id_)
            for id_, error in nacked:
                row = self._waiting.pop(id_, None)
                if row is not None:
                    self._nacked.append((row, error))
            if not self._waiting:
                self._end()

    def release(self) -> None:
        """End now: what was settled is marked, the rest is claimable again."""
        with self._lock:
            if not self._ended:
                self._end()

    def _end(self) -> None:
        self._ended = True
        self._source.ended(self)
        resting = self._source.resting
        failures = [self._failure(row, error) for row, error in self._nacked if _costs(error)]
        unmarked = self._opened.settle(self._acked, failures)
        if self._acked:
            resting.forget(self._acked)
        parked = {failure.id for failure in failures if failure.parks}
        for row, error in self._nacked:
            # What is parked is not claimed, and goes at once when an operator sends it again.
            if not isinstance(error, GivenBack) and row.id not in parked:
                resting.add(row.id, row.key, row.attempts, costs=_costs(error))
        for id_ in unmarked:
            row = self._rows[id_]
            resting.add(id_, row.key, row.attempts, costs=True)

    def _failure(self, row: Row, error: Error) -> Failure:
        is_last = row.attempts + 1 >= self._source.max_attempts
        parks = is_last or isinstance(error, PermanentError)
        reason = error_text(error)
        if parks:
            self._source.log(logging.ERROR, "parked", row, reason)
        return Failure(row.id, reason, parks)


def checked_attempts(count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"max_attempts={count!r}: must be a whole number from 1 on")
    return count


def _costs(error: Error) -> bool:
    return not isinstance(error, Blameless)
