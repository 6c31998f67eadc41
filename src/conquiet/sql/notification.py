"""Notify waiting relays of new rows, between their polls.

    writer:  COMMIT ──▶ notify_relays(engine) ──▶ [at most one NOTIFY per interval, in a thread]
    relay:   wait(seconds) ◀── LISTEN on a connection of its own, or PRAGMA data_version
             look()        ◀── the same, of the table of delayed events, without waiting

A NOTIFY inside the writing transaction serializes commits. So a thread sends it after the commit,
once for all rows written since the last one. A notification is a hint and may be lost: the relay
polls every `poll` seconds as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Pool
from sqlalchemy import event as hooks
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from conquiet import bridge
from conquiet.backoff import Backoff
from conquiet.errors import HandlerError
from conquiet.sql import dialect
from conquiet.sql.schema import OUTBOX_TABLE, delayed_table, split_name

logger = logging.getLogger("conquiet.relay")

NOTIFY_INTERVAL_SECONDS = 0.002
"""The least time between two notifications of one process about one table."""

_IDLE_SECONDS = 1.0
"""How long the notifying thread keeps its connection while there is nothing to send."""
_LOOK_SECONDS = 0.01
"""How often SQLite is asked for its data version, which costs 10 µs."""


class Wakeup(Protocol):
    """Waits for new rows."""

    def wait(self, seconds: float) -> bool:
        """Return True if there may be new rows; False after `seconds` or `close`."""

    def look(self) -> bool:
        """Return, at once, whether delayed events were announced since the last call."""

    def close(self) -> None:
        """End the current wait and every later one at once."""


def wakeup_of(engine: Engine, table: str = OUTBOX_TABLE, *, enabled: bool = True) -> Wakeup:
    """Choose LISTEN, SQLite's data version or plain polling, as the engine allows."""
    if enabled and dialect.uses_psycopg(engine.dialect):
        return Listener(engine, table)
    if enabled and dialect.is_sqlite(engine.dialect) and not dialect.is_in_memory(engine):
        return Watcher(engine)  # needs a second connection, which an in-memory database cannot have
    return Timer()


class Timer:
    """Waits for the time to pass: plain polling."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def wait(self, seconds: float) -> bool:
        self._closed.wait(seconds)
        return False

    def look(self) -> bool:
        return False

    def close(self) -> None:
        self._closed.set()


class Watcher:
    """Watches SQLite's data version, which changes when another connection commits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connection: Any = None
        self._version: int | None = None

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._closed.is_set():
            version = self._current_version()
            # The first version counts as a change: earlier rows were not looked for yet.
            if version != self._version:
                self._version = version
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._closed.wait(min(left, _LOOK_SECONDS))
        return False

    def look(self) -> bool:
        return True

    def _current_version(self) -> int | None:
        with self._lock:
            if self._closed.is_set():
                return self._version
            try:
                if self._connection is None:
                    self._connection = _connect(self._engine.pool)
                version: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
            except (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error):
                self._disconnect()
                return self._version  # polling remains
            return version

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Listener:
    """LISTENs on a connection of its own; PgBouncer must pool by session for it."""

    def __init__(self, engine: Engine, table: str) -> None:
        self._engine = engine
        self._channel = channel(table)
        self._later = channel(delayed_table(table).fullname)
        self._is_notified = False
        """Whether `look` has taken notifications, so that the next wait must not wait for them."""
        self._may_be_later = True
        self._lock = threading.Lock()
        self._connection: Any = None
        self._retries = Backoff(first=0.5, cap=30.0)
        self._retry_at = 0.0
        self._closed = False
        self._closing = threading.Lock()
        self._wake, self._woken = socket.socketpair()

    def wait(self, seconds: float) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._connection is None and time.monotonic() >= self._retry_at and self._listen():
                return True  # rows written before LISTEN were not announced
            is_notified, self._is_notified = self._is_notified, False
            return is_notified or self._wait(seconds)

    def look(self) -> bool:
        if not self._lock.acquire(blocking=False):  # another thread waits
            return False
        try:
            if self._closed:
                return False
            if self._connection is None and time.monotonic() >= self._retry_at:
                self._listen()
            if self._connection is not None:
                self._is_notified = self._wait(0) or self._is_notified
            found, self._may_be_later = self._may_be_later, False
            return found
        finally:
            self._lock.release()

    def _listen(self) -> bool:
        try:
            self._connection = _connect(self._engine.pool)
            self._connection.autocommit = True
            for name in (self._channel, self._later):
                self._connection.execute(f'LISTEN "{name}"')
        except (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error) as error:
            wait = self._retries.next()
            self._retry_at = time.monotonic() + wait
            logger.warning("LISTEN failed, polling; next try in %.1f s: %s", wait, error)
            self._disconnect()
            return False
        self._retries.reset()
        self._may_be_later = True
        return True

    def _wait(self, seconds: float) -> bool:
        connection = self._connection
        poller = select.poll()  # unlike select(), it takes any number of open files
        poller.register(self._woken, select.POLLIN)
        if connection is not None:
            poller.register(connection.fileno(), select.POLLIN)
        ready = [file for file, _ in poller.poll(seconds * 1000)]
        if connection is None or ready != [connection.fileno()]:
            return False
        try:
            # Take all pending notifications: a hundred of them are one reason to poll.
            channels = {notified.channel for notified in connection.notifies(timeout=0)}
        except self._engine.dialect.loaded_dbapi.Error as error:
            logger.warning("the LISTEN connection was lost, polling: %s", error)
            self._disconnect()
            return False
        self._may_be_later |= self._later in channels
        return len(channels) > 0

    def close(self) -> None:
        with self._closing:  # the waiting thread and another may close it at the same time
            if self._closed:
                return
            self._wake.send(b".")  # ends the wait that holds the lock
            with self._lock:
                self._closed = True
                self._disconnect()
                self._wake.close()
                self._woken.close()

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(self._engine.dialect.loaded_dbapi.Error):
                self._connection.close()
            self._connection = None


def channel(table: str) -> str:
    """Return the channel of a table; tables of one name in several schemas share it."""
    return f"conquiet_{split_name(table)[1]}"


def notify_relays(engine: Engine, table: str = OUTBOX_TABLE) -> None:
    """Notify relays that rows of the outbox `table` were committed; call it after the commit.

    The caller only sets a flag; a thread sends one notification per interval, or a task of the
    running loop if the engine is that of an AsyncEngine. On SQLite, and with sync drivers other
    than psycopg, it does nothing.
    """
    if engine.dialect.is_async:
        _notify_in_loop(engine, table)
        return
    if not dialect.uses_psycopg(engine.dialect):
        return
    notifier = _notifiers.get(engine)
    if notifier is None:
        with _notifiers_lock:
            notifier = _notifiers.setdefault(engine, Notifier(engine))
    notifier.notify(table)


def notify_statement(table: str = OUTBOX_TABLE) -> str:
    """Return the statement that notifies the relays of `table`, for a driver other than psycopg."""
    return f"SELECT pg_notify('{channel(table)}', '')"


_WRITTEN = "conquiet.outbox.written"


def notify_after_commit(session: Session, table: str) -> None:
    """Notify the relays of a table when this session commits; takes the sync part of async ones."""
    tables: set[str] = session.info.setdefault(_WRITTEN, set())
    tables.add(table)
    if not hooks.contains(session, "after_commit", _notify_now):
        hooks.listen(session, "after_commit", _notify_now)
        hooks.listen(session, "after_rollback", _forget_tables)


def _notify_now(session: Session) -> None:
    if session.in_nested_transaction():
        return  # a savepoint was released; nothing is committed yet
    bind = session.bind
    engine = bind.engine if isinstance(bind, (Engine, Connection)) else None
    tables: set[str] = session.info.get(_WRITTEN, set())
    while tables:
        table = tables.pop()
        if engine is not None:
            notify_relays(engine, table)


def _forget_tables(session: Session) -> None:
    if not session.in_nested_transaction():
        session.info.get(_WRITTEN, set()).clear()


_waiting: WeakKeyDictionary[Engine, set[str]] = WeakKeyDictionary()
_tasks: set[asyncio.Task[None]] = set()


def _notify_in_loop(engine: Engine, table: str) -> None:
    if not dialect.is_postgresql(engine.dialect):
        return  # relays watch a SQLite file by themselves
    tables = _waiting.setdefault(engine, set())
    is_first = not tables
    tables.add(table)
    if is_first:
        loop = bridge.current_loop()
        loop.call_soon_threadsafe(_begin_to_notify, loop, engine)  # a handler may be in a thread


def _begin_to_notify(loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
    task = loop.create_task(_notify(engine, engine.pool))
    _tasks.add(task)  # a loop holds only weak references to its tasks
    task.add_done_callback(_tasks.discard)


async def _notify(engine: Engine, pool: Pool) -> None:
    try:
        await asyncio.sleep(NOTIFY_INTERVAL_SECONDS)
    finally:  # also if the loop ends: the next commit starts a new task
        tables = _waiting.pop(engine, set())
    # The last: the pool belongs to another loop.
    errors: tuple[type[Exception], ...] = dialect.connect_errors(engine.dialect)
    errors += (SQLAlchemyError, OSError, HandlerError)
    try:
        await bridge.run(_send, engine, pool, tables)
    except errors as error:
        logger.warning("could not notify relays; they will find the rows by polling: %s", error)


def _send(engine: Engine, pool: Pool, tables: Iterable[str]) -> None:
    channels = [f"pg_notify('{channel(table)}', '')" for table in sorted(tables)]
    # A hint needs no durable commit.
    statement = f"SELECT set_config('synchronous_commit', 'off', true), {', '.join(channels)}"
    with engine.connect() as connection:
        if dialect.drives_asyncpg(connection):
            with dialect.translate_errors(connection):
                bridge.wait_for(dialect.execute_alone(connection, statement))
        else:
            connection.exec_driver_sql(statement)
            connection.commit()
        if engine.pool is not pool:  # disposed of since: the new pool would not close this one
            connection.invalidate()


class Notifier:
    """Sends at most one notification per table and interval, from a thread."""

    def __init__(self, engine: Engine, interval: float = NOTIFY_INTERVAL_SECONDS) -> None:
        # Not the engine: the weak dictionary of notifiers would then keep it alive for ever.
        self._pool = engine.pool
        self._error = engine.dialect.loaded_dbapi.Error
        self._interval = interval
        self._changed = threading.Condition()
        self._tables: set[str] = set()
        self._thread: threading.Thread | None = None
        self.sent = 0

    def notify(self, table: str) -> None:
        with self._changed:
            self._tables.add(table)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="conquiet-notify", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError as error:  # out of threads; the caller has committed
                    logger.warning(
                        "could not notify relays; they will find the rows by polling: %s", error
                    )
            else:
                self._changed.notify()

    def _run(self) -> None:
        connection: Any = None
        try:
            while tables := self._next():
                try:
                    if connection is None:
                        connection = _connect(self._pool)
                        connection.autocommit = True
                    for table in tables:
                        # A hint needs no durable commit.
                        connection.execute(
                            "SELECT set_config('synchronous_commit', 'off', true),"
                            " pg_notify(%s, '')",
                            (channel(table),),
                        )
                    self.sent += len(tables)
                except (SQLAlchemyError, self._error) as error:
                    logger.warning(
                        "could not notify relays; they will find the rows by polling: %s", error
                    )
                    _close(connection)
                    connection = None
                time.sleep(self._interval)
        finally:
            _close(connection)

    def _next(self) -> list[str]:
        """Return the tables written since the last call; none after an idle time."""
        with self._changed:
            if not self._tables:
                self._changed.wait(_IDLE_SECONDS)
            if not self._tables:
                self._thread = None  # under the lock: the next write starts a new thread
            tables = sorted(self._tables)
            self._tables.clear()
            return tables


_notifiers: WeakKeyDictionary[Engine, Notifier] = WeakKeyDictionary()
_notifiers_lock = threading.Lock()


def _forget_notifiers() -> None:
    """Drop notifiers in a forked child: it has no such threads, and a lock may be held."""
    global _notifiers_lock
    _notifiers_lock = threading.Lock()
    _notifiers.clear()


os.register_at_fork(after_in_child=_forget_notifiers)


def _connect(pool: Pool) -> Any:
    """Open a driver connection as the pool does, and detach it from the pool."""
    pooled = pool.connect()
    connection = pooled.driver_connection
    pooled.detach()
    return connection


def _close(connection: Any) -> None:
    if connection is not None:
        with contextlib.suppress(Exception):
            connection.close()
