"""Turn: one relay at a time publishes from a SQLite file."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, Table

from conquiet.errors import StoreError
from conquiet.sql import dialect


class Turn:
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
        try:
            # A new description each time: flock() tells those apart, also within one process.
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


def turn_of(engine: Engine, table: Table) -> Turn:
    if dialect.is_in_memory(engine):
        return Turn(None, _in_memory.setdefault(engine, threading.Lock()))
    return Turn(f"{dialect.path_of(engine)}-{table.name}-relay", threading.Lock())
