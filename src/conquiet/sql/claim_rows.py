"""How rows of an outbox are claimed and marked, in each database.

PostgreSQL: the rows stay locked (FOR UPDATE SKIP LOCKED) in the transaction that claimed them
until the last of them is settled; then one UPDATE and COMMIT. There is no marker column that a
crash could leave behind. SQLite has one writer, and holding its lock while a broker answers
would stop the application: a claim there is a lock on a file beside the database, one relay
has it at a time, and only the marks are written, under BEGIN IMMEDIATE.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import (
    Boolean,
    Connection,
    Engine,
    Select,
    Table,
    Text,
    bindparam,
    case,
    cast,
    func,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from conquiet.acking import Error
from conquiet.errors import ConfigError, StoreError
from conquiet.sql import dialect
from conquiet.sql.resting import Resting

logger = logging.getLogger("conquiet.relay")

MAX_ERROR_CHARACTERS = 2_000
"""How much of an error is kept in `last_error`."""

_START_OVER_SECONDS = 1.0
_COLUMNS = (
    *("id", "topic", "event_type", "event_id", "key", "content_type", "data"),
    *("attributes", "attempts"),
)


class Row(NamedTuple):
    """A claimed row of the outbox."""

    id: int
    topic: str
    event_type: str
    event_id: str
    key: str | None
    content_type: str
    data: bytes
    attributes: str
    attempts: int


class Failure(NamedTuple):
    """What a nack leaves in a row."""

    id: int
    error: str
    parks: bool


class Opened:
    """Rows that are claimed, and how their claim ends."""

    def __init__(self, rows: Sequence[Row], store: Rows, connection: Connection | None) -> None:
        self.rows = rows
        self.connection = connection
        self._store = store

    def settle(self, published: Sequence[int], failures: Sequence[Failure]) -> Sequence[int]:
        """Mark and commit; returns the rows that could not be marked."""
        return self._store.settle(self, published, failures)


class Rows:
    """The statements of a claim by SQLAlchemy, for any driver of PostgreSQL."""

    def __init__(self, engine: Engine, table: Table, ordered: bool) -> None:
        self.engine = engine
        self.table = table
        self.ordered = ordered
        self.name = engine.dialect.identifier_preparer.format_table(table)
        self._errors = (SQLAlchemyError, engine.dialect.loaded_dbapi.Error)
        self._after = ""
        self._unkeyed_at = 0.0
        id_, attempts = table.c.id, table.c.attempts
        self._claimable = table.c.published_at.is_(None) & table.c.parked_at.is_(None)
        self._wanted = [
            cast(column, Text).label(column.name) if column.name == "attributes" else column
            for column in (table.c[name] for name in _COLUMNS)
        ]
        self._publish = (
            update(table)
            .values(published_at=self.clock())
            .where(id_.in_(bindparam("ids", expanding=True)))
        )
        self._fail = (
            update(table)
            .where(id_ == bindparam("row"))
            .values(
                attempts=attempts + 1,
                last_error=bindparam("error"),
                parked_at=case((bindparam("parks", type_=Boolean), self.clock()), else_=None),
            )
        )

    def clock(self) -> Any:
        # Not now(), which is when the claim began: the row was not published yet.
        return func.clock_timestamp()

    def close(self) -> None:
        """Nothing is held between claims."""

    # --- claiming

    def claim(self, limit: int, resting: Resting) -> Opened | None:
        connection = self._connect()
        try:
            rows = self._select(connection, limit, resting)
        except self._errors as error:
            self._drop(connection)
            raise self._store_error(error) from error
        except BaseException:
            self._drop(connection)
            raise
        if not rows:
            self._drop(connection)
            return None
        return Opened(rows, self, connection)

    def _connect(self) -> Connection:
        try:
            # Under a stricter level, rows that another relay has just marked would be errors.
            level = {"isolation_level": "READ COMMITTED"}
            return self.engine.connect().execution_options(**level)
        except self._errors as error:
            raise self._store_error(error) from error

    def _select(self, connection: Connection, limit: int, resting: Resting) -> list[Row]:
        if not self.ordered:
            return self._any(connection, limit, resting.ids(), unkeyed=False)
        rows: list[Row] = []
        now = time.monotonic()
        if now >= self._unkeyed_at:
            # Behind a long backlog of keys this is the costly part: not in every round.
            rows = self._any(connection, (limit + 1) // 2, resting.ids(), unkeyed=True)
            self._unkeyed_at = 0.0 if rows else now + 0.5
        keys = self._lock_keys(connection, limit - len(rows), resting.keys())
        if keys:
            each = max(1, (limit - len(rows)) // len(keys))
            rows.extend(self._of_keys(connection, keys, each))
            rows.sort(key=lambda row: row.id)
        return rows

    def _lock_keys(self, connection: Connection, count: int, held: Collection[str]) -> list[str]:
        """Keys that are ours until the transaction ends, each time from where we stopped."""
        if count < 1:
            return []
        found: list[str] = []
        start = self._after
        for after in (start, "") if start else ("",):
            statement = text(_LOCK_KEYS.format(table=self.name, beyond=">" if after else ">="))
            missing = count - len(found)
            seed = zlib.crc32(self.name.encode())
            given = {"after": after, "held": list(held), "count": missing, "seed": seed}
            new = [key for (key,) in connection.execute(statement, given)]
            found.extend(key for key in new if key not in found)
            self._after = new[-1] if new else ""
            if len(new) >= missing:
                break
            self._after = ""
        return found

    def _any(
        self, connection: Connection, limit: int, held: Sequence[int], unkeyed: bool
    ) -> list[Row]:
        query = self._query(held, unkeyed).limit(limit).with_for_update(skip_locked=True)
        return _as_rows(connection.execute(query))

    def _query(self, held: Sequence[int], unkeyed: bool) -> Select[Any]:
        query = select(*self._wanted).where(self._claimable).order_by(self.table.c.id)
        if held:
            query = query.where(self.table.c.id.not_in(held))
        return query.where(self.table.c.key.is_(None)) if unkeyed else query

    def _of_keys(self, connection: Connection, keys: Sequence[str], each: int) -> list[Row]:
        statement = text(
            _OF_KEYS.format(table=self.name, keys="CAST(:keys AS text[])", each=":each")
        )
        return _as_rows(connection.execute(statement, {"keys": list(keys), "each": each}))

    # --- settling

    def settle(
        self, opened: Opened, published: Sequence[int], failures: Sequence[Failure]
    ) -> Sequence[int]:
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
        self, connection: Connection, published: Sequence[int], failures: Sequence[Failure]
    ) -> Sequence[int]:
        if not published and not failures:
            return ()
        try:
            with connection.begin_nested():
                self._mark_all(connection, published, failures)
        except self._errors as error:
            if dialect.is_lost(connection) or dialect.is_store_failure(error):
                raise
            logger.warning("marking a batch failed, now row by row: %s", _one_line(error))
            return self._mark_each(connection, published, failures)
        return ()

    def _commit(self, connection: Connection) -> None:
        connection.commit()

    def _mark_all(
        self, connection: Connection, published: Sequence[int], failures: Sequence[Failure]
    ) -> None:
        if published:
            connection.execute(self._publish, {"ids": published})
        if failures:
            rows = [{"row": f.id, "error": f.error, "parks": f.parks} for f in failures]
            connection.execute(self._fail, rows)

    def _mark_each(
        self, connection: Connection, published: Sequence[int], failures: Sequence[Failure]
    ) -> Sequence[int]:
        """One row that cannot be marked must not cost its neighbours their marks."""
        unmarked: list[int] = []
        refused: list[Failure] = []
        for id_ in published:
            error = self._try_mark(connection, (id_,), ())
            if error is not None:
                unmarked.append(id_)
                reason = error_text(error)
                logger.error("row %d of %s is published and %s", id_, self.name, reason)
                refused.append(Failure(id_, f"published, but not marked: {reason}"[:2000], False))
        for failure in (*failures, *refused):
            error = self._try_mark(connection, (), (failure,))
            if error is not None:
                logger.error("row %d of %s: %s", failure.id, self.name, error_text(error))
        return unmarked

    def _try_mark(
        self, connection: Connection, published: Sequence[int], failures: Sequence[Failure]
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
        return StoreError(f"{self.engine.url.render_as_string()}: {_one_line(error):.300}")


class PsycopgRows(Rows):
    """The hot statements straight to psycopg."""

    def __init__(self, engine: Engine, table: Table, ordered: bool) -> None:
        super().__init__(engine, table, ordered)
        self._can_pipeline: bool = engine.dialect.loaded_dbapi.Pipeline.is_supported()
        self._behind = 0
        self._start_over_at = 0.0
        columns = ", ".join(
            "attributes::text" if name == "attributes" else name for name in _COLUMNS
        )
        query = (
            f"SELECT {columns} FROM {self.name}"
            " WHERE published_at IS NULL AND parked_at IS NULL AND id > %s::bigint{}{}"
            " ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED"
        )
        rested = " AND id <> ALL(%s::bigint[])"
        self._queries = {
            (unkeyed, held): query.format(
                " AND key IS NULL" if unkeyed else "", rested if held else ""
            )
            for unkeyed in (False, True)
            for held in (False, True)
        }
        self._publish_sql = (
            f"UPDATE {self.name} SET published_at = clock_timestamp() WHERE id = ANY(%s::bigint[])"
        )
        self._fail_sql = (
            f"UPDATE {self.name} AS o SET attempts = o.attempts + 1, last_error = f.error,"
            " parked_at = CASE WHEN f.parks THEN clock_timestamp() END"
            " FROM unnest(%s::bigint[], %s::text[], %s::boolean[]) AS f (id, error, parks)"
            " WHERE o.id = f.id"
        )
        self._of_keys_sql = _OF_KEYS.format(table=self.name, keys="%s::text[]", each="%s::integer")

    def _pipeline(self, driver: Any) -> contextlib.AbstractContextManager[object]:
        return driver.pipeline() if self._can_pipeline else contextlib.nullcontext()

    def _any(
        self, connection: Connection, limit: int, held: Sequence[int], unkeyed: bool
    ) -> list[Row]:
        # While an old snapshot is open anywhere, vacuum leaves the index entries of published
        # rows, and a claim from the start would walk over all of them. So go on behind the last
        # claim, and once a second look from the start, for what failed or committed late.
        now = time.monotonic()
        behind = self._behind if now < self._start_over_at else 0
        if not behind:
            self._start_over_at = now + _START_OVER_SECONDS
        sql = self._queries[unkeyed, bool(held)]
        rows = self._fetch(connection, sql, (behind, *((held,) if held else ()), limit))
        if not rows and behind:
            rows = self._fetch(connection, sql, (0, *((held,) if held else ()), limit))
        self._behind = rows[-1].id if len(rows) == limit else 0
        return rows

    def _of_keys(self, connection: Connection, keys: Sequence[str], each: int) -> list[Row]:
        return self._fetch(connection, self._of_keys_sql, (keys, each))

    def _fetch(self, connection: Connection, sql: str, given: Sequence[Any]) -> list[Row]:
        driver = dialect.driver_connection(connection)
        # BEGIN, which psycopg sends first, and the statement in one round trip.
        with self._pipeline(driver), driver.cursor(binary=True) as cursor:
            cursor.execute(sql, given)
            return _as_rows(cursor.fetchall())

    def _mark(
        self, connection: Connection, published: Sequence[int], failures: Sequence[Failure]
    ) -> Sequence[int]:
        """Savepoint, marks and COMMIT in one round trip; a failed mark keeps it from committing."""
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
            logger.warning("marking a batch failed, now row by row: %s", _one_line(error))
            driver.execute("ROLLBACK TO SAVEPOINT marks")
            return self._mark_each(connection, published, failures)
        return ()

    def _commit(self, connection: Connection) -> None:
        # By the driver: SQLAlchemy has not seen the statements that went past it.
        dialect.driver_connection(connection).commit()

    def _mark_all(
        self, connection: Connection, published: Sequence[int], failures: Sequence[Failure]
    ) -> None:
        with dialect.driver_connection(connection).cursor() as cursor:
            if published:
                cursor.execute(self._publish_sql, (list(published),))
            if failures:
                cursor.execute(self._fail_sql, [list(part) for part in zip(*failures, strict=True)])


class SqliteRows(Rows):
    """One claimer at a time, by a lock that dies with its process; marks in short writes."""

    def __init__(self, engine: Engine, table: Table, ordered: bool) -> None:
        super().__init__(engine, table, ordered)
        self._turn = _turn_of(engine, table)
        self._changing = threading.Lock()
        self._in_flight: dict[int, Row] = {}
        parked = table.alias("parked")
        stuck = select(parked.c.id).where(
            parked.c.parked_at.is_not(None), parked.c.key == table.c.key
        )
        self._not_stuck = or_(table.c.key.is_(None), ~stuck.exists())

    def clock(self) -> Any:
        return func.current_timestamp()

    def close(self) -> None:
        self._turn.release()

    def claim(self, limit: int, resting: Resting) -> Opened | None:
        with self._changing:
            if not self._in_flight and not self._turn.take():
                return None
            try:
                with self.engine.connect() as connection:
                    rows = self._select(connection, limit, resting)
                self._in_flight.update((row.id, row) for row in rows)
            except self._errors as error:
                raise self._store_error(error) from error
            finally:
                if not self._in_flight:
                    self._turn.release()
        return Opened(rows, self, None) if rows else None

    def _select(self, connection: Connection, limit: int, resting: Resting) -> list[Row]:
        held = [*resting.ids(), *self._in_flight]
        query = self._query(held, unkeyed=False).limit(limit)
        if self.ordered:
            key = self.table.c.key
            keys = {*resting.keys(), *(row.key for row in self._in_flight.values())} - {None}
            query = query.where(self._not_stuck)
            if keys:
                query = query.where(or_(key.is_(None), key.not_in(keys)))
        return _as_rows(connection.execute(query))

    def settle(
        self, opened: Opened, published: Sequence[int], failures: Sequence[Failure]
    ) -> Sequence[int]:
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
                    self._turn.release()


class _Turn:
    """Whose turn it is to publish from a SQLite file: a lock on another file beside it.

    The kernel lets go of it when the process dies, whatever it dies of. A database in memory
    belongs to one engine, and so does the lock then.
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
        # A new description each time: flock() tells those apart, also within one process.
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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


def _turn_of(engine: Engine, table: Table) -> _Turn:
    path = (engine.url.database or "").removeprefix("file:").partition("?")[0]
    if not path or path == ":memory:" or "mode=memory" in str(engine.url):
        return _Turn(None, _in_memory.setdefault(engine, threading.Lock()))
    return _Turn(f"{path}-{table.name}-relay", threading.Lock())


# From one key to the next by the index on (key, id): a key costs one step, however many rows of
# it wait. A key with a parked row, or one that another relay has, is passed over. CASE, since it
# alone promises an order of evaluation, and keeps the planner from joining instead of stepping.
_LOCK_KEYS = """
WITH RECURSIVE waiting (key) AS (
    (SELECT key FROM {table}
      WHERE published_at IS NULL AND parked_at IS NULL AND key IS NOT NULL
        AND key {beyond} :after
      ORDER BY key, id LIMIT 1)
    UNION ALL
    SELECT following.key FROM waiting CROSS JOIN LATERAL (
        SELECT key FROM {table}
         WHERE published_at IS NULL AND parked_at IS NULL AND key IS NOT NULL
           AND key > waiting.key
         ORDER BY key, id LIMIT 1) AS following
)
SELECT key FROM waiting
WHERE CASE
    WHEN key = ANY(CAST(:held AS text[])) THEN false
    WHEN EXISTS (SELECT FROM {table} AS stuck
                  WHERE stuck.parked_at IS NOT NULL AND stuck.key = waiting.key) THEN false
    ELSE pg_try_advisory_xact_lock(hashtextextended(key, :seed)) END
LIMIT :count
"""

# A statement of its own, so that it sees what the last holder of the key has committed.
_OF_KEYS = (
    "SELECT o.* FROM unnest({keys}) AS mine (key) CROSS JOIN LATERAL (SELECT "
    + ", ".join("attributes::text" if name == "attributes" else name for name in _COLUMNS)
    + " FROM {table} WHERE published_at IS NULL AND parked_at IS NULL AND key IS NOT NULL"
    " AND key = mine.key ORDER BY id LIMIT {each} FOR UPDATE SKIP LOCKED) AS o"
)


def _as_rows(found: Iterable[Sequence[Any]]) -> list[Row]:
    return [Row._make(row) for row in found]


def rows_of(engine: Engine, table: Table, ordered: bool) -> Rows:
    if dialect.is_sqlite(engine.dialect):
        return SqliteRows(engine, table, ordered)
    if not dialect.is_postgresql(engine.dialect) or engine.dialect.is_async:
        raise ConfigError(
            f"OutboxSource takes a sync Engine of PostgreSQL or SQLite, not {engine.dialect.name}"
            f"+{engine.dialect.driver}; make one from the same URL"
        )
    kind = PsycopgRows if dialect.uses_psycopg(engine.dialect) else Rows
    return kind(engine, table, ordered)


def error_text(error: Error) -> str:
    """An error as `last_error` keeps it: bounded, and text that every database takes."""
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


def _one_line(error: BaseException) -> str:
    original = getattr(error, "orig", None) or error
    return " ".join(str(original).split()) or type(original).__name__
