"""Wake-up: how a relay that waits learns of new rows before it looks again by itself.

    writer:  COMMIT ──▶ written(engine) ──▶ [at most one NOTIFY per interval, in a thread]
    relay:   wait(seconds) ◀── LISTEN on a connection of its own, or PRAGMA data_version

A NOTIFY inside the writing transaction makes commits queue up behind each other; so it is sent
after the commit, off the writer's path, once for all that was written meanwhile. It is a hint
and may be lost: the relay looks by itself every `poll` seconds as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, Pool
from sqlalchemy.exc import SQLAlchemyError

from conquiet.backoff import Backoff
from conquiet.sql import dialect
from conquiet.sql.tables import OUTBOX_TABLE, checked_name

logger = logging.getLogger("conquiet.relay")

NOTIFY_INTERVAL_SECONDS = 0.02
"""The least time between two notifications of one process about one table."""

_IDLE_SECONDS = 1.0
"""How long the thread that notifies keeps its connection with nothing to say."""
_LOOK_SECONDS = 0.01
"""How often SQLite is asked whether somebody has written: 10 µs each."""


class Wakeup(Protocol):
    """Waits for rows."""

    def wait(self, seconds: float) -> bool:
        """True if rows may have come; False when the time is over or after `close`."""

    def close(self) -> None:
        """End the wait that is under way, and every later one at once."""


def wakeup_of(engine: Engine, table: str = OUTBOX_TABLE, *, enabled: bool = True) -> Wakeup:
    """What fits the engine; plain polling where there is nothing better, or it is not wanted."""
    if enabled and dialect.uses_psycopg(engine.dialect):
        return Listener(engine, table)
    if enabled and dialect.is_sqlite(engine.dialect) and not dialect.is_in_memory(engine):
        return Watcher(engine)  # by a connection of its own, which a database in memory has not
    return Timer()


class Timer:
    """Waits for the time to pass, and no more."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def wait(self, seconds: float) -> bool:
        self._closed.wait(seconds)
        return False

    def close(self) -> None:
        self._closed.set()


class Watcher:
    """Looks whether another connection has changed a SQLite file, without reading it."""

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
            # The first answer is no news: what was written before it was not looked for.
            if version != self._version:
                self._version = version
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._closed.wait(min(left, _LOOK_SECONDS))
        return False

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
    """LISTENs on a connection of its own, which PgBouncer must hand out for a session."""

    def __init__(self, engine: Engine, table: str) -> None:
        self._engine = engine
        self._channel = channel(table)
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
                return True  # what was written before we listened was not announced to us
            return self._wait(seconds)

    def _listen(self) -> bool:
        try:
            self._connection = _connect(self._engine.pool)
            self._connection.autocommit = True
            self._connection.execute(f'LISTEN "{self._channel}"')
        except (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error) as error:
            wait = self._retries.next()
            self._retry_at = time.monotonic() + wait
            logger.warning("LISTEN failed, polling; next try in %.1f s: %s", wait, error)
            self._disconnect()
            return False
        self._retries.reset()
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
            # All that has come by now: a hundred notifications are one reason to look.
            return len(list(connection.notifies(timeout=0))) > 0
        except self._engine.dialect.loaded_dbapi.Error as error:
            logger.warning("the connection that listens was lost, polling: %s", error)
            self._disconnect()
            return False

    def close(self) -> None:
        with self._closing:  # who waits may close it too, when it is told to end
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
    """The channel of a table; those of the same name in several schemas share it, harmlessly."""
    return f"conquiet_{checked_name(table)[1]}"


def written(engine: Engine, table: str = OUTBOX_TABLE) -> None:
    """Tell the relays, soon and once, that rows of this table were committed.

    To be called after the commit. It costs the caller a flag; a thread sends the notification.
    On SQLite, and for drivers other than psycopg, it does nothing.
    """
    if not dialect.uses_psycopg(engine.dialect) or engine.dialect.is_async:
        return
    notifier = _notifiers.get(engine)
    if notifier is None:
        with _notifiers_lock:
            notifier = _notifiers.setdefault(engine, Notifier(engine))
    notifier.written(table)


def notify_statement(table: str = OUTBOX_TABLE) -> str:
    """The statement that wakes the relays, for those who commit by a driver of their own."""
    return f"SELECT pg_notify('{channel(table)}', '')"


class Notifier:
    """Sends what was written meanwhile as one notification per table and interval."""

    def __init__(self, engine: Engine, interval: float = NOTIFY_INTERVAL_SECONDS) -> None:
        # Not the engine itself: the dictionary of notifiers would keep it alive for ever.
        self._pool = engine.pool
        self._error = engine.dialect.loaded_dbapi.Error
        self._interval = interval
        self._changed = threading.Condition()
        self._tables: set[str] = set()
        self._thread: threading.Thread | None = None
        self.sent = 0

    def written(self, table: str) -> None:
        with self._changed:
            self._tables.add(table)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="conquiet-notify", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads; the caller has committed
                    logger.warning("relays were not notified; they find it by polling: %s", error)
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
                        # No disk has to wait for a hint.
                        connection.execute(
                            "SELECT set_config('synchronous_commit', 'off', true),"
                            " pg_notify(%s, '')",
                            (channel(table),),
                        )
                    self.sent += len(tables)
                except (SQLAlchemyError, self._error) as error:
                    logger.warning("relays were not notified; they find it by polling: %s", error)
                    _close(connection)
                    connection = None
                time.sleep(self._interval)
        finally:
            _close(connection)

    def _next(self) -> list[str]:
        """What was written since; nothing if that was nothing for a while."""
        with self._changed:
            if not self._tables:
                self._changed.wait(_IDLE_SECONDS)
            if not self._tables:
                self._thread = None  # under the lock: the next write starts another
            tables = sorted(self._tables)
            self._tables.clear()
            return tables


_notifiers: WeakKeyDictionary[Engine, Notifier] = WeakKeyDictionary()
_notifiers_lock = threading.Lock()


def _forget_notifiers() -> None:
    """In a forked child their threads are missing, and a lock may be held for ever."""
    global _notifiers_lock
    _notifiers_lock = threading.Lock()
    _notifiers.clear()


os.register_at_fork(after_in_child=_forget_notifiers)


def _connect(pool: Pool) -> Any:
    """A driver's connection, made as the pool makes them, which it then forgets."""
    pooled = pool.connect()
    connection = pooled.driver_connection
    pooled.detach()
    return connection


def _close(connection: Any) -> None:
    if connection is not None:
        with contextlib.suppress(Exception):
            connection.close()
