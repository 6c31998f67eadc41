"""Move delayed events into the outbox when they are due, by the clock of the database.

    row of outbox_delayed ──due──▶ deleted there and inserted into the outbox, in one transaction
                            └──cancel──▶ deleted

Each reader of an outbox does it between its reads: a relay, and a member of a group of the log. So
there is no process that must run, and none that must be elected: one of them promotes at a time,
the others go on reading. A crash before the commit leaves the event delayed, one after it leaves it
in the outbox.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from conquiet.sql import dialect
from conquiet.sql.claim import SQLITE_NOW
from conquiet.sql.notification import notify_relays
from conquiet.sql.schema import LOCK, OUTBOX_TABLE, delayed_table, outbox_table
from conquiet.sql.wal import COLUMNS

logger = logging.getLogger("conquiet.relay")

LOOK_SECONDS = 0.02
"""How often a reader looks for delayed events at most, unless it knows that one is due."""
POLL_SECONDS = 0.5
"""How often it looks on PostgreSQL if it was not notified of any; SQLite is asked in 20 µs."""
SHORTEST_SECONDS = 0.005
"""The least time between two promotions, unless more are due than one of them moves."""
BATCH_SIZE = 200
"""The events that one promotion moves at least, if so many are due."""
_MISSING_SECONDS = 5.0
"""How often a table that is missing is looked for."""
_REFUSED_SECONDS = 60.0
"""How long to wait after the database has refused it, for example because a right is missing."""

_NAMES = ", ".join(COLUMNS)

# One promotion at a time, so that events of one key enter the outbox in the order of their times.
# statement_timestamp() is the clock at the start of the statement, and may be used with an index,
# unlike clock_timestamp(). The time of the next event is read by the snapshot from before the
# deletion, hence the condition. By ctid, which the lock keeps as it is, no statistics can lead the
# planner to a join with all that waits.
_POSTGRESQL = """
WITH turn AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(
        {lock}, hashtext(CAST(CAST(CAST(CAST(:name AS text) AS regclass) AS oid) AS text))) AS ours
), picked AS MATERIALIZED (
    SELECT ctid FROM {delayed}
    WHERE (SELECT ours FROM turn) AND due_at <= statement_timestamp()
    ORDER BY due_at, id LIMIT :limit FOR UPDATE SKIP LOCKED
), due AS (
    DELETE FROM {delayed} WHERE ctid = ANY(ARRAY(SELECT ctid FROM picked))
    RETURNING id, due_at, {names}
), moved AS (
    INSERT INTO {outbox} ({names}) SELECT {names} FROM due ORDER BY due_at, id RETURNING 1
)
SELECT (SELECT ours FROM turn), (SELECT count(*) FROM moved), extract(epoch FROM (
    SELECT due_at FROM {delayed} WHERE due_at > statement_timestamp() ORDER BY due_at LIMIT 1
) - clock_timestamp())
"""

_SQLITE_NEXT = f"""
SELECT (julianday(min(due_at)) - julianday({SQLITE_NOW})) * 86400.0, min(due_at) <= {SQLITE_NOW}
FROM {{delayed}}
"""
_SQLITE_DUE = f"""
SELECT id FROM {{delayed}} WHERE due_at <= {SQLITE_NOW} ORDER BY due_at, id LIMIT :limit
"""
_SQLITE_MOVE = (
    "INSERT INTO {outbox} ({names}) SELECT {names} FROM {delayed}"
    " WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY due_at, id",
    "DELETE FROM {delayed} WHERE id IN (SELECT value FROM json_each(:ids))",
)


class Promotion(NamedTuple):
    """Says how many events became due, and in how many seconds the next one will be."""

    moved: int
    seconds_to_next: float


class Promoter:
    """Promotes the delayed events of one outbox for one of its readers, and knows the next time."""

    def __init__(
        self,
        engine: Engine,
        table: str = OUTBOX_TABLE,
        was_notified: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take `was_notified`, which says whether events were delayed since its last call."""
        self._engine = self._writer = engine
        self._table = outbox_table(table).fullname
        self._delayed = delayed_table(table)
        names = {
            "outbox": self._table,
            "delayed": self._delayed.fullname,
            "names": _NAMES,
            "lock": LOCK,
        }
        self._postgresql = text(_POSTGRESQL.format(**names))
        self._next, self._due = (text(sql.format(**names)) for sql in (_SQLITE_NEXT, _SQLITE_DUE))
        self._move = [text(sql.format(**names)) for sql in _SQLITE_MOVE]
        self._is_sqlite = dialect.is_sqlite(engine.dialect)
        if not self._is_sqlite:  # one statement: no round trips of BEGIN and COMMIT
            self._writer = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._exists = False
        self._was_notified = was_notified
        self._looked_at = -math.inf
        self._next_at = math.inf
        self.promoted = 0
        """How many events it has moved into the outbox."""

    def seconds_to_next(self) -> float:
        """Return the seconds until a known event is due; infinite if there is none."""
        return max(0.0, self._next_at - time.monotonic())

    def promote(self, limit: int = 1) -> int:
        """Promote what is due, unless it was looked for a moment ago; return how many events.

        If the database refuses it, that is logged and tried again later: what is in the outbox
        must not wait for it.
        """
        now = time.monotonic()
        if now < self._next_at and not self._must_look(now):
            return 0
        self._looked_at, self._next_at = now, math.inf
        try:
            moved, seconds = self._promote(max(limit, BATCH_SIZE))
        except SQLAlchemyError as error:
            if dialect.is_store_failure(error):
                raise dialect.store_error(self._engine, error) from error
            self._looked_at = now + _REFUSED_SECONDS
            self._exists = False
            logger.warning(
                "%s: delayed events could not be moved to the outbox, next try in %g s: %s",
                *(self._delayed.fullname, _REFUSED_SECONDS, dialect.one_line(error)),
            )
            return 0
        self._next_at = time.monotonic() + seconds
        if moved:
            self.promoted += moved
            notify_relays(self._engine, self._table)  # other readers may wait for them
        return moved

    def _must_look(self, now: float) -> bool:
        if math.isinf(self._looked_at):  # the only look of a reader that reads once
            return True
        if not self._is_sqlite and not self._was_notified():
            return now >= self._looked_at + POLL_SECONDS
        look_at = self._looked_at + LOOK_SECONDS
        self._next_at = min(self._next_at, look_at)
        return now >= look_at

    def _promote(self, limit: int) -> Promotion:
        with self._writer.connect() as connection:
            if not self._exists:
                self._exists = dialect.has_table(connection, self._delayed.fullname)
            if not self._exists:  # of an older conquiet; nothing can be delayed there
                self._looked_at += _MISSING_SECONDS
                return Promotion(0, math.inf)
            if self._is_sqlite:
                return self._promote_sqlite(connection, limit)
            given = {"name": self._delayed.fullname, "limit": limit}
            is_ours, moved, seconds = connection.execute(self._postgresql, given).one()
        if moved == limit:  # there may be more
            return Promotion(moved, 0.0)
        # If another reader promotes, its events will be there in a moment.
        return Promotion(moved, min(_seconds(seconds), math.inf if is_ours else LOOK_SECONDS))

    def _promote_sqlite(self, connection: Connection, limit: int) -> Promotion:
        seconds, is_due = connection.execute(self._next).one()
        if not is_due:
            return Promotion(0, _seconds(seconds))
        connection.rollback()
        dialect.begin_immediate(connection)
        ids: Sequence[Any] = connection.execute(self._due, {"limit": limit}).scalars().all()
        for statement in self._move:
            connection.execute(statement, {"ids": f"[{','.join(map(str, ids))}]"})
        connection.commit()
        return Promotion(len(ids), 0.0)  # the next call looks for more


def _seconds(value: Any) -> float:
    return math.inf if value is None else max(SHORTEST_SECONDS, float(value))
