"""Look: asks a store no more often than is good for it, however many pages are open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")

_REST = 10
"""A look that takes long is not repeated before ten times as long."""


class Look(Generic[Found]):
    """What `take` gave last, if it is fresh; who comes while it is taken anew gets the former.

    >>> count = iter(range(9))
    >>> look = Look(lambda: next(count), seconds=60)
    >>> look(), look()
    (0, 0)
    """

    def __init__(self, take: Callable[[], Found], seconds: float) -> None:
        self._take = take
        self._seconds = seconds
        self._busy = threading.Lock()
        self._last: tuple[Found] | None = None
        self._until = 0.0

    def __call__(self) -> Found:
        last = self._last
        if last is not None and time.monotonic() < self._until:
            return last[0]
        if not self._busy.acquire(blocking=last is None):
            assert last is not None
            return last[0]
        try:
            if self._last is None or time.monotonic() >= self._until:
                began = time.monotonic()
                self._last = (self._take(),)
                ended = time.monotonic()
                self._until = began + max(self._seconds, _REST * (ended - began))
            return self._last[0]
        finally:
            self._busy.release()
