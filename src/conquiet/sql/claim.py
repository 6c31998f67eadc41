"""Claim rows of an outbox table, and mark them when they are settled.

    PostgreSQL   SELECT … FOR UPDATE SKIP LOCKED; the rows stay locked in the claiming transaction
                 until the last of them is settled; then one UPDATE and COMMIT
    SQLite       one relay at a time holds a lock on a file beside the database, since the single
                 writer must not wait for a broker; marks are short writes under BEGIN IMMEDIATE

A crash releases the lock: there is no marker column that it could leave behind. `Layout` describes
the table: the generic outbox parks a row by `parked_at`, `outbox_events` by its attempt count.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Dialect,
    Engine,
    Select,
    Table,
    Text,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from conquiet.acking import Error
from conquiet.errors import StoreError
from conquiet.sql import dialect, wal

logger = logging.getLogger("conquiet.relay")

SQLITE_NOW = "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"
"""SQLite's clock to the millisecond, as SQLAlchemy writes a time."""


class ClaimedRow(Protocol):
    """Names the columns that a claim reads; other fields are read when the message is built."""

    @property
    def id(self) -> Any: ...
    @property
    def key(self) -> str | None: ...
    @property
    def attempts(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """Describes a table of events: which rows are claimable, their order, how they are marked."""

    table: Table
    row: Any
    """A NamedTuple, whose fields are the columns of a claim."""
    order: tuple[str, ...]
    """The columns that rows are published in the order of; the last is `id`."""
    start: tuple[str, ...]
    """Values that sort before every row."""
    key: str
    """The column whose order is kept in an ordered claim."""
    first_key: str
    attempts: str
    as_text: frozenset[str] = frozenset()
    """Columns that are read as text, whatever they are in the database."""
    max_attempts: int | None = None
    """Rows with this many attempts are parked; None: rows with `parked_at` are."""
    reads_uuids_as_text: bool = False
    """Whether psycopg gives UUIDs as `str`, which costs a fifth of `UUID`s that become text."""
    only: str = ""
    """A further condition of claimable rows, if the others are not for claims."""

    @property
    def is_guarded(self) -> bool:
        """Return whether claims stop while the table is published from the write-ahead log."""
        return not self.only and "xid" in self.table.c

    def setting(self, name: str) -> str:
        """Return the statement that prepares a claiming transaction on PostgreSQL.

        The transaction idles while the sink publishes. If an idle timeout ended it, its rows
        would be published again and again.
        """
        # By the order of an index, of each day if there are days. With statistics from a short
        # backlog, the planner would read all unpublished rows for each claim, and sort them.
        more = ", set_config('enable_sort', 'off', true)"
        if self.is_guarded:
            more += f", pg_advisory_xact_lock_shared({wal.lock_key(name)})::text"
        return f"SELECT set_config('idle_in_transaction_session_timeout', '0', true){more}"

    @property
    def columns(self) -> tuple[Column[Any], ...]:
        return tuple(self.table.c[name] for name in self.row._fields)

    @property
    def has_unkeyed(self) -> bool:
        return bool(self.table.c[self.key].nullable)

    @property
    def claimable(self) -> str:
        """Return the condition of a row that is neither published nor parked."""
        only = f" AND {self.only}" if self.only else ""
        if self.max_attempts is None:
            return f"published_at IS NULL AND parked_at IS NULL{only}"
        return f"published_at IS NULL AND {self.attempts} < {self.max_attempts:d}{only}"

    @property
    def keyed(self) -> str:
        """Return the condition of rows in an ordered claim, as the partial index has it."""
        if self.max_attempts is None:
            return f"{self.claimable} AND {self.key} IS NOT NULL"
        return "published_at IS NULL"

    def stuck(self, table: str, key: str) -> str:
        """Return the condition of a key that is blocked by a parked row."""
        if self.max_attempts is None:
            return (
                f"EXISTS (SELECT 1 FROM {table} AS stuck"
                f" WHERE stuck.parked_at IS NOT NULL AND stuck.{self.key} = {key})"
            )
        # The oldest unpublished row, by the index on (key, order): one step for any backlog.
        return (
            f"(SELECT head.{self.attempts} >= {self.max_attempts:d} FROM {table} AS head"
            f" WHERE head.published_at IS NULL AND head.{self.key} = {key}"
            f" ORDER BY {', '.join(f'head.{name}' for name in self.order)} LIMIT 1)"
        )

    def type_of(self, column: str, dialect: Dialect) -> str:
        return str(self.table.c[column].type.compile(dialect))

    def select_list(self) -> str:
        """Return the select list of a claim on PostgreSQL."""
        names = self.row._fields
        return ", ".join(f"{name}::text" if name in self.as_text else name for name in names)

    def rows(self, found: Iterable[Sequence[Any]]) -> list[Any]:
        return [self.row._make(values) for values in found]

    def sort(self, rows: list[Any]) -> None:
        rows.sort(key=attrgetter(*self.order))

    def position(self, row: Any) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in self.order)

    def not_overtaking(self, rows: Sequence[Any]) -> list[Any]:
        """Drop rows behind a parked row of the same key; `rows` must be in order."""
        if self.max_attempts is None:
            return list(rows)
        kept: list[Any] = []
        stuck: set[str | None] = set()
        for row in rows:
            if row.attempts >= self.max_attempts:
                stuck.add(row.key)
            elif row.key not in stuck:
                kept.append(row)
        return kept


MAX_ERROR_CHARACTERS = 2_000
"""The longest text that `last_error` keeps."""


class Failure(NamedTuple):
    """Carries what a nack writes into a row."""

    id: Any
    error: str
    parks: bool


def error_text(error: Error) -> str:
    """Format an error for `last_error`: bounded, and valid text for every database."""
    if error is None:
        return "nacked without a reason"
    reason = str(error) or type(error).__name__
    if not isinstance(error, Exception) or type(error).__module__.partition(".")[0] != "conquiet":
        reason = f"{type(error).__name__}: {error}"
    reason = reason[: MAX_ERROR_CHARACTERS + 1].replace("\0", "\ufffd")
    reason = reason.encode("utf-8", "replace").decode()  # lone surrogates are not text
    if len(reason) > MAX_ERROR_CHARACTERS:
        reason = reason[: MAX_ERROR_CHARACTERS - 1] + "…"
    return reason


_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 300.0
_MAX_OUTAGE_DELAY_SECONDS = 10.0
"""The longest delay after a blameless failure: how late the end of an outage may be noticed."""
_MAX_DELAYED_ROWS = 10_000


class RowBackoff:
    """Delays the retry of failed rows; claims skip them until their delay is over.

    Delays are kept in memory: a restart may be the cure. Rows with a blameless failure are retried
    as soon as any row is published again, spread over a second, so that rows which fail by
    themselves share a batch with rows that do not.
    """

    def __init__(self, *, by_key: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_key = by_key
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[Hashable, _Delay] = {}
        self._blameless = 0

    def add(self, id_: Hashable, key: str | None, attempts: int, *, costs: bool) -> None:
        with self._lock:
            former = self._pop(id_)
            times = max(attempts, former.times + 1 if former else 0)
            longest = _MAX_DELAY_SECONDS if costs else _MAX_OUTAGE_DELAY_SECONDS
            seconds = min(longest, _FIRST_DELAY_SECONDS * 2.0 ** min(times, 60))
            until = self._clock() + seconds * random.uniform(0.5, 1.0)
            if len(self._rows) >= _MAX_DELAYED_ROWS:
                self._pop(next(iter(self._rows)))
            self._rows[id_] = _Delay(until, times, key, costs)
            self._blameless += not costs

    def forget(self, published: Iterable[Hashable]) -> None:
        """Drop the delays of published rows, and end the delays of blameless failures soon."""
        if not self._rows:
            return
        with self._lock:
            for id_ in published:
                self._pop(id_)
            if self._blameless:
                soon = self._clock()
                for id_, delay in self._rows.items():
                    if not delay.costs:
                        until = min(delay.until, soon + random.uniform(0, _FIRST_DELAY_SECONDS))
                        self._rows[id_] = delay._replace(until=until, costs=True)
                self._blameless = 0

    def _pop(self, id_: Hashable) -> _Delay | None:
        delay = self._rows.pop(id_, None)
        if delay is not None:
            self._blameless -= not delay.costs
        return delay

    def ids(self) -> list[Any]:
        """Return the ids that a claim must skip now."""
        if not self._rows:
            return []
        now = self._clock()
        with self._lock:
            return [
                id_
                for id_, delay in self._rows.items()
                if delay.until > now and not (self._by_key and delay.key is not None)
            ]

    def keys(self) -> list[str]:
        """Return the keys that an ordered claim must skip now."""
        if not self._rows:
            return []
        now = self._clock()
        with self._lock:
            delayed = (delay for delay in self._rows.values() if delay.until > now)
            return list({delay.key for delay in delayed if delay.key is not None})

    def seconds_to_next(self) -> float:
        if not self._rows:
            return math.inf
        now = self._clock()
        with self._lock:
            times = (delay.until - now for delay in self._rows.values() if delay.until > now)
            return min(times, default=math.inf)


class _Delay(NamedTuple):
    until: float
    times: int
    key: str | None
    costs: bool


class RelayLock:
    """Lets one relay at a time publish from a SQLite file, by a lock on a file beside it.

    The kernel releases the lock when the process dies. A database in memory belongs to one engine,
    and its lock does too.
    """

    def __init__(self, path: str | None, in_memory: threading.Lock) -> None:
        self._path = path
        self._in_memory = in_memory
        self._release: Callable[[], object] | None = None

    def take(self) -> bool:
        if self._path is None:
            taken = self._in_memory.acquire(blocking=False)
            self._release = self._in_memory.release if taken else self._release
            return taken
        try:
            # A new file description each time: flock() distinguishes them within one process.
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(
                f"{self._path}: {error.strerror}; a relay keeps a lock there, beside the database"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._release = partial(os.close, file)
        return True

    def release(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


_in_memory: WeakKeyDictionary[Engine, threading.Lock] = WeakKeyDictionary()


def relay_lock(engine: Engine, table: Table) -> RelayLock:
    if dialect.is_in_memory(engine):
        return RelayLock(None, _in_memory.setdefault(engine, threading.Lock()))
    return RelayLock(f"{dialect.path_of(engine)}-{table.name}-relay", threading.Lock())


# Step from one key to the next by the index on (key, order): a key costs one step for any backlog.
# Skip keys with a parked row and keys that another relay has locked. CASE guarantees the order of
# evaluation, and keeps the planner from joining instead of stepping. Keys are passed as text, which
# every driver supports. The lock belongs to the table, by whatever name a relay knows it.
_LOCK_KEYS = """
WITH RECURSIVE waiting (key) AS (
    (SELECT {key} FROM {table}
      WHERE {keyed}{guard} AND {key} {beyond} CAST(CAST({after} AS text) AS {type})
      ORDER BY {key}, {order} LIMIT 1)
    UNION ALL
    SELECT following.key FROM waiting CROSS JOIN LATERAL (
        SELECT {key} AS key FROM {table}
         WHERE {keyed} AND {key} > waiting.key
         ORDER BY {key}, {order} LIMIT 1) AS following
)
SELECT CAST(key AS text) FROM waiting
WHERE CASE
    WHEN key = ANY(CAST(CAST({held} AS text[]) AS {type}[])) THEN false
    WHEN {stuck} THEN false
    ELSE pg_try_advisory_xact_lock(
        hashtextextended(CAST(key AS text), CAST(CAST(CAST({name} AS text) AS regclass) AS bigint)))
    END
LIMIT {count}
"""

# A separate statement, so that it sees what the last holder of the key has committed: its marks,
# and a row that it may have parked.
# A row that another transaction has locked is skipped, and rows behind it must wait: keep only rows
# that have the same place among all rows of their key and among those that are not locked.
_OF_KEYS = """
SELECT {names} FROM (
    SELECT key, ARRAY(
        SELECT id FROM {table} WHERE {keyed} AND {key} = given.key
        ORDER BY {order} LIMIT {each}) AS ids
    FROM unnest(CAST(CAST({keys} AS text[]) AS {type}[])) AS given (key)
    WHERE CASE WHEN {stuck} THEN false ELSE true END) AS mine
CROSS JOIN LATERAL (
    SELECT free.*, row_number() OVER () AS place FROM (
        SELECT {columns} FROM {table} WHERE {keyed} AND {key} = mine.key
        ORDER BY {order} LIMIT {each} FOR UPDATE SKIP LOCKED) AS free) AS o
WHERE o.id = mine.ids[o.place]
"""


def lock_keys(
    layout: Layout,
    table: str,
    dialect: Dialect,
    *,
    beyond: str,
    placeholder: str = ":{}",
    guard: str = "",
) -> str:
    """Build the query that locks free keys until the transaction ends; `beyond` is `>` or `>=`.

    Its parameters are `after`, `held`, `name` and `count`; without `guard`, no key is found.
    """
    return _LOCK_KEYS.format(
        **_parts(layout, table, dialect),
        **{name: placeholder.format(name) for name in ("after", "held", "name", "count")},
        stuck=layout.stuck(table, "waiting.key"),
        beyond=beyond,
        guard=f" AND {guard}" if guard else "",
    )


def of_keys(layout: Layout, table: str, dialect: Dialect, *, keys: str, each: str) -> str:
    """Build the query for rows of locked keys; `keys` and `each` are placeholders."""
    return _OF_KEYS.format(
        **_parts(layout, table, dialect),
        stuck=layout.stuck(table, "given.key"),
        names=", ".join(f"o.{name}" for name in layout.row._fields),
        columns=layout.select_list(),
        keys=keys,
        each=each,
    )


def _parts(layout: Layout, table: str, dialect: Dialect) -> dict[str, str]:
    return {
        "table": table,
        "key": layout.key,
        "keyed": layout.keyed,
        "order": ", ".join(layout.order),
        "type": layout.type_of(layout.key, dialect),
    }


class ClaimedRows:
    """Holds the rows of one claim until it is settled."""

    def __init__(
        self, rows: Sequence[ClaimedRow], store: Claimer, connection: Connection | None
    ) -> None:
        self.rows = rows
        self.connection = connection
        self._store = store

    def settle(self, published: Sequence[Any], failures: Sequence[Failure]) -> Sequence[Any]:
        """Mark the rows and commit; return the ids that could not be marked."""
        return self._store.settle(self, published, failures)


class Claimer:
    """Claims and marks rows by SQLAlchemy, with any driver of PostgreSQL."""

    def __init__(self, engine: Engine, layout: Layout, ordered: bool) -> None:
        self.engine = engine
        self.layout = layout
        self.table = layout.table
        self.ordered = ordered
        self.name = engine.dialect.identifier_preparer.format_table(layout.table)
        self._errors = (SQLAlchemyError, engine.dialect.loaded_dbapi.Error)
        self._after = layout.first_key
        self._unkeyed_at = 0.0
        self._setting = layout.setting(self.name)
        # A statement of its own: it must see what was committed before the lock was given.
        self._guard = f"SELECT {wal.entered(self.name)}"
        id_, attempts = self.table.c.id, self.table.c[layout.attempts]
        self._order = [self.table.c[name] for name in layout.order]
        self._wanted = [
            cast(column, Text).label(column.name) if column.name in layout.as_text else column
            for column in layout.columns
        ]
        self._publish = (
            update(self.table)
            .values(published_at=self.clock())
            .where(id_.in_(bindparam("ids", expanding=True)))
        )
        failed: dict[Column[Any], Any] = {
            attempts: attempts + 1,
            self.table.c.last_error: bindparam("error"),
        }
        parks = bindparam("parks", type_=Boolean)
        if layout.max_attempts is None:
            failed[self.table.c.parked_at] = case((parks, self.clock()), else_=None)
        else:
            failed[attempts] = case((parks, layout.max_attempts), else_=attempts + 1)
        self._fail = update(self.table).where(id_ == bindparam("row")).values(failed)

    def clock(self) -> Any:
        # Not now(), the start of the claiming transaction: the row was published after it.
        return func.clock_timestamp()

    def close(self) -> None:
        """Release what is held between claims: nothing on PostgreSQL."""

    def claim(self, limit: int, backoff: RowBackoff) -> ClaimedRows | None:
        connection = self._connect()
        try:
            self._set(connection)
            rows = self._select(connection, limit, backoff)
        except self._errors as error:
            self._drop(connection)
            raise self._store_error(error) from error
        except BaseException:
            self._drop(connection)
            raise
        if not rows:
            self._drop(connection)
            return None
        return ClaimedRows(rows, self, connection)

    def _connect(self) -> Connection:
        try:
            # At a stricter level, rows that another relay has just marked would raise errors.
            level = {"isolation_level": "READ COMMITTED"}
            return self.engine.connect().execution_options(**level)
        except self._errors as error:
            raise self._store_error(error) from error

    def _set(self, connection: Connection) -> None:
        connection.exec_driver_sql(self._setting)
        if self.layout.is_guarded and connection.exec_driver_sql(self._guard).scalar():
            raise wal.refusal(self.name)

    def _select(self, connection: Connection, limit: int, backoff: RowBackoff) -> list[ClaimedRow]:
        if not self.ordered:
            return self._any(connection, limit, backoff.ids(), unkeyed=False)
        rows: list[ClaimedRow] = []
        now = time.monotonic()
        if self.layout.has_unkeyed and now >= self._unkeyed_at:
            # Slow behind a long backlog of keyed rows: after an empty result, skip half a second.
            rows = self._any(connection, (limit + 1) // 2, backoff.ids(), unkeyed=True)
            self._unkeyed_at = 0.0 if rows else now + 0.5
        wanted = limit - len(rows)
        keys = self._lock_keys(connection, wanted, backoff.keys())
        if keys:
            each = max(1, wanted // len(keys))
            rows.extend(self._of_keys(connection, keys, each))
            self.layout.sort(rows)
        return self.layout.not_overtaking(rows)

    def _lock_keys(self, connection: Connection, count: int, held: Collection[str]) -> list[str]:
        """Lock up to `count` keys until the transaction ends, going on behind the last claim."""
        if count < 1:
            return []
        found: list[str] = []
        first, start = self.layout.first_key, self._after
        for after in (start, first) if start != first else (first,):
            missing = count - len(found)
            given = {"after": after, "held": list(held), "count": missing, "name": self.name}
            new = self._lock_some(connection, ">=" if after == first else ">", given)
            found.extend(key for key in new if key not in found)
            self._after = new[-1] if new else first
            if len(new) >= missing:
                break
            self._after = first
        return found

    def _lock_some(
        self, connection: Connection, beyond: str, given: Mapping[str, Any]
    ) -> list[str]:
        sql = lock_keys(self.layout, self.name, self.engine.dialect, beyond=beyond)
        return list(connection.execute(text(sql), given).scalars())

    def _any(
        self, connection: Connection, limit: int, held: Sequence[Any], unkeyed: bool
    ) -> list[ClaimedRow]:
        query = self._query(self.layout.claimable, held).limit(limit)
        if unkeyed:
            query = query.where(self.table.c[self.layout.key].is_(None))
        return self.layout.rows(connection.execute(query.with_for_update(skip_locked=True)))

    def _query(self, condition: str, held: Sequence[Any]) -> Select[Any]:
        query = select(*self._wanted).where(text(condition)).order_by(*self._order)
        return query.where(self.table.c.id.not_in(held)) if held else query

    def _of_keys(self, connection: Connection, keys: Sequence[str], each: int) -> list[ClaimedRow]:
        sql = of_keys(self.layout, self.name, self.engine.dialect, keys=":keys", each=":each")
        # With column types: drivers return UUIDs differently.
        statement = text(sql).columns(*self._wanted)
        given = {"keys": list(keys), "each": each}
        return self.layout.rows(connection.execute(statement, given))

    def settle(
        self, opened: ClaimedRows, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        connection = opened.connection
        assert connection is not None
        try:
            unmarked = self._mark(connection, published, failures)
            self._commit(connection)
        except self._errors as error:
            raise self._store_error(error) from error
        finally:
            self._drop(connection)
        return unmarked

    def _mark(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        if not published and not failures:
            return ()
        try:
            with connection.begin_nested():
                self._mark_all(connection, published, failures)
        except self._errors as error:
            if dialect.is_lost(connection) or dialect.is_store_failure(error):
                raise
            logger.warning(
                "marking a batch of rows failed, marking them one by one: %s",
                dialect.one_line(error),
            )
            return self._mark_each(connection, published, failures)
        return ()

    def _commit(self, connection: Connection) -> None:
        connection.commit()

    def _mark_all(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> None:
        if published:
            connection.execute(self._publish, {"ids": published})
        if failures:
            rows = [{"row": f.id, "error": f.error, "parks": f.parks} for f in failures]
            connection.execute(self._fail, rows)

    def _mark_each(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        """Mark each row in its own savepoint, so that a failing row costs only its own mark."""
        unmarked: list[Any] = []
        refused: list[Failure] = []
        for id_ in published:
            error = self._try_mark(connection, (id_,), ())
            if error is not None:
                unmarked.append(id_)
                reason = error_text(error)
                logger.error(
                    "row %s of %s was published but not marked: %s", id_, self.name, reason
                )
                refused.append(Failure(id_, f"published, but not marked: {reason}"[:2000], False))
        for failure in (*failures, *refused):
            error = self._try_mark(connection, (), (failure,))
            if error is not None:
                logger.error(
                    "row %s of %s: could not store its failure: %s",
                    failure.id,
                    self.name,
                    error_text(error),
                )
        return unmarked

    def _try_mark(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Exception | None:
        try:
            with connection.begin_nested():
                self._mark_all(connection, published, failures)
        except self._errors as error:
            if dialect.is_lost(connection):
                raise
            return error
        return None

    def _drop(self, connection: Connection) -> None:
        if not connection.invalidated and dialect.is_lost(connection):
            connection.invalidate()
        with contextlib.suppress(*self._errors):
            connection.close()

    def _store_error(self, error: BaseException) -> StoreError:
        return dialect.store_error(self.engine, error)


_START_OVER_SECONDS = 1.0
_UNSET = "conquiet claim"
"""Marks a connection whose transaction is not prepared for a claim yet."""


class PsycopgClaimer(Claimer):
    """Sends the statements of a claim directly to psycopg: two round trips, three if ordered.

    The first statement of a claim finds nothing while the outbox is published from the log.
    """

    def __init__(self, engine: Engine, layout: Layout, ordered: bool) -> None:
        super().__init__(engine, layout, ordered)
        self._can_pipeline: bool = engine.dialect.loaded_dbapi.Pipeline.is_supported()
        from psycopg.types.string import TextLoader

        self._text_loader = TextLoader
        self._behind: tuple[Any, ...] = layout.start
        self._start_over_at = 0.0
        types = [layout.type_of(name, engine.dialect) for name in layout.order]
        order = ", ".join(layout.order)
        free = f"NOT {wal.entered(self.name)}" if layout.is_guarded else ""
        guard = f" AND {free}" if free else ""
        query = (
            f"SELECT {layout.select_list()} FROM {self.name} WHERE {layout.claimable}"
            f" AND ({order}) > ({', '.join(f'%s::{type_}' for type_ in types)}){guard}{{}}{{}}"
            f" ORDER BY {order} LIMIT %s FOR UPDATE SKIP LOCKED"
        )
        ids = types[-1]
        self._queries = {
            (unkeyed, held): query.format(
                f" AND {layout.key} IS NULL" if unkeyed else "",
                f" AND id <> ALL(%s::{ids}[])" if held else "",
            )
            for unkeyed in (False, True)
            for held in (False, True)
        }
        self._publish_sql = (
            f"UPDATE {self.name} SET published_at = clock_timestamp() WHERE id = ANY(%s::{ids}[])"
        )
        attempts, most = f"o.{layout.attempts} + 1", layout.max_attempts
        if most is None:
            attempts += ", parked_at = CASE WHEN f.parks THEN clock_timestamp() END"
        else:
            attempts = f"CASE WHEN f.parks THEN {most:d} ELSE {attempts} END"
        self._fail_sql = (
            f"UPDATE {self.name} AS o SET last_error = f.error, {layout.attempts} = {attempts}"
            f" FROM unnest(%s::{ids}[], %s::text[], %s::boolean[]) AS f (id, error, parks)"
            " WHERE o.id = f.id"
        )
        self._of_keys_sql = of_keys(
            layout, self.name, engine.dialect, keys="%s", each="%s::integer"
        )
        self._lock_sql = {
            beyond: lock_keys(
                layout,
                self.name,
                engine.dialect,
                beyond=beyond,
                placeholder="%({})s",
                guard=free,
            )
            for beyond in (">", ">=")
        }

    def _pipeline(self, driver: Any) -> contextlib.AbstractContextManager[object]:
        return driver.pipeline() if self._can_pipeline else contextlib.nullcontext()

    def _set(self, connection: Connection) -> None:
        """Leave it to `_fetch`, for the round trip of the first statement."""
        connection.info[_UNSET] = True

    def _select(self, connection: Connection, limit: int, backoff: RowBackoff) -> list[ClaimedRow]:
        rows = super()._select(connection, limit, backoff)
        if not rows and self.layout.is_guarded:
            refused = dialect.driver_connection(connection).execute(self._guard).fetchone()
            if refused is not None and refused[0]:
                raise wal.refusal(self.name)
        return rows

    def _any(
        self, connection: Connection, limit: int, held: Sequence[Any], unkeyed: bool
    ) -> list[ClaimedRow]:
        # While an old snapshot is open anywhere, vacuum keeps the index entries of published
        # rows, and a claim from the start would scan all of them. So go on behind the last claim,
        # and once a second start over, for rows that failed or committed late.
        now = time.monotonic()
        start = self.layout.start
        behind = self._behind if now < self._start_over_at else start
        if behind == start:
            self._start_over_at = now + _START_OVER_SECONDS
        sql = self._queries[unkeyed, bool(held)]
        more = (held,) if held else ()
        rows = self.layout.rows(self._fetch(connection, sql, (*behind, *more, limit)))
        if not rows and behind != start:
            rows = self.layout.rows(self._fetch(connection, sql, (*start, *more, limit)))
        self._behind = self.layout.position(rows[-1]) if len(rows) == limit else start
        return rows

    def _lock_some(
        self, connection: Connection, beyond: str, given: Mapping[str, Any]
    ) -> list[str]:
        return [key for (key,) in self._fetch(connection, self._lock_sql[beyond], given)]

    def _of_keys(self, connection: Connection, keys: Sequence[str], each: int) -> list[ClaimedRow]:
        return self.layout.rows(self._fetch(connection, self._of_keys_sql, (each, keys, each)))

    def _fetch(
        self, connection: Connection, sql: str, given: Sequence[Any] | Mapping[str, Any]
    ) -> list[Any]:
        driver = dialect.driver_connection(connection)
        as_text = self.layout.reads_uuids_as_text
        # One round trip for BEGIN, which psycopg sends first, and the statements.
        with self._pipeline(driver), driver.cursor(binary=not as_text) as cursor:
            if connection.info.pop(_UNSET, False):
                driver.execute(self._setting)
            if as_text:
                cursor.adapters.register_loader("uuid", self._text_loader)
            cursor.execute(sql, given)
            return list(cursor.fetchall())

    def _mark(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        """Send savepoint, marks and COMMIT in one round trip; a failed mark prevents the commit."""
        if not published and not failures:
            return ()
        driver = dialect.driver_connection(connection)
        try:
            with self._pipeline(driver):
                driver.execute("SAVEPOINT marks")
                self._mark_all(connection, published, failures)
                driver.commit()
        except self._errors as error:
            if dialect.is_lost(connection) or dialect.is_store_failure(error):
                raise
            logger.warning(
                "marking a batch of rows failed, marking them one by one: %s",
                dialect.one_line(error),
            )
            driver.execute("ROLLBACK TO SAVEPOINT marks")
            return self._mark_each(connection, published, failures)
        return ()

    def _commit(self, connection: Connection) -> None:
        # By the driver: SQLAlchemy has not seen the statements that were sent directly.
        dialect.driver_connection(connection).commit()

    def _mark_all(
        self, connection: Connection, published: Sequence[Any], failures: Sequence[Failure]
    ) -> None:
        with dialect.driver_connection(connection).cursor() as cursor:
            if published:
                cursor.execute(self._publish_sql, (list(published),))
            if failures:
                cursor.execute(self._fail_sql, [list(part) for part in zip(*failures, strict=True)])


class SqliteClaimer(Claimer):
    """Claims under the lock of a file beside the database, and marks rows in short writes."""

    def __init__(self, engine: Engine, layout: Layout, ordered: bool) -> None:
        super().__init__(engine, layout, ordered)
        self._relay_lock = relay_lock(engine, layout.table)
        self._changing = threading.Lock()
        self._in_flight: dict[Any, ClaimedRow] = {}
        self._stuck = layout.stuck(self.name, f"{self.name}.{layout.key}")

    def clock(self) -> Any:
        return literal_column(SQLITE_NOW)

    def close(self) -> None:
        self._relay_lock.release()

    def claim(self, limit: int, backoff: RowBackoff) -> ClaimedRows | None:
        with self._changing:
            if not self._in_flight and not self._relay_lock.take():
                return None
            try:
                with self.engine.connect() as connection:
                    rows = self._select(connection, limit, backoff)
                self._in_flight.update((row.id, row) for row in rows)
            except self._errors as error:
                raise self._store_error(error) from error
            finally:
                if not self._in_flight:
                    self._relay_lock.release()
        return ClaimedRows(rows, self, None) if rows else None

    def _select(self, connection: Connection, limit: int, backoff: RowBackoff) -> list[ClaimedRow]:
        layout = self.layout
        held = [*backoff.ids(), *self._in_flight]
        if not self.ordered:
            return layout.rows(connection.execute(self._query(layout.claimable, held).limit(limit)))
        key = self.table.c[layout.key]
        condition = layout.claimable if layout.has_unkeyed else layout.keyed
        keys = {*backoff.keys(), *(row.key for row in self._in_flight.values())} - {None}
        query = self._query(condition, held).where(text(f"NOT {self._stuck}")).limit(limit)
        if keys:
            query = query.where(or_(key.is_(None), key.not_in(keys)))
        return layout.not_overtaking(layout.rows(connection.execute(query)))

    def settle(
        self, opened: ClaimedRows, published: Sequence[Any], failures: Sequence[Failure]
    ) -> Sequence[Any]:
        try:
            if not published and not failures:
                return ()
            with self.engine.connect() as own, own.begin():
                dialect.begin_immediate(own)
                return self._mark(own, published, failures)
        except self._errors as error:
            raise self._store_error(error) from error
        finally:
            with self._changing:
                for row in opened.rows:
                    self._in_flight.pop(row.id, None)
                if not self._in_flight:
                    self._relay_lock.release()
