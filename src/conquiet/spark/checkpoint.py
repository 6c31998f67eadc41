"""A lock per checkpoint: of the queries that use one, one runs at a time.

Spark's quick way to write a checkpoint on a local disk does not notice that another query writes it
too. This can, on one machine; elsewhere Spark's own check stays in force.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conquiet.errors import ConfigError

_LOCK_NAME = ".conquiet.lock"
_LETTING_GO_SECONDS = 1.0
"""So long after its end may a query of this process still hold its lock."""


@contextmanager
def lock_checkpoint(checkpoint: str) -> Iterator[None]:
    """Hold the checkpoint's lock; a checkpoint that is not a local directory has none.

    >>> with lock_checkpoint("checkpoint"):
    ...     print("one query at a time")
    one query at a time
    """
    directory = local_directory(checkpoint)
    if directory is None:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    file = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(file, checkpoint)
        yield
    finally:
        os.close(file)  # which releases the lock, as does the end of the process


def _lock(file: int, checkpoint: str) -> None:
    end = time.monotonic() + _LETTING_GO_SECONDS
    while not _is_locked(file):
        holder = os.pread(file, 20, 0).decode(errors="replace").strip() or "?"
        if holder != str(os.getpid()) or time.monotonic() > end:
            raise ConfigError(
                f"checkpoint {checkpoint!r} is in use by process {holder}: stop the query that"
                " runs there, or give this one a checkpoint of its own"
            )
        time.sleep(0.01)
    os.truncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def local_directory(checkpoint: str) -> Path | None:
    scheme, separator, path = checkpoint.partition(":")
    if not separator or "/" in scheme:
        return Path(checkpoint)
    return Path("/" + path.lstrip("/")) if scheme == "file" else None
