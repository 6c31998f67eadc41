"""Count stop signals, and wait in a way that a stop interrupts."""

from __future__ import annotations

import signal
import threading
import time
from contextvars import ContextVar
from types import FrameType
from typing import Any

STOPPING: ContextVar[threading.Event | None] = ContextVar("conquiet.shutdown", default=None)
"""The stop event of the worker, in each of its threads."""


def pause(seconds: float) -> bool:
    """Sleep; return False at once when the worker stops."""
    stopping = STOPPING.get()
    if stopping is None:
        time.sleep(seconds)
        return True
    return not stopping.wait(seconds)


class Signals:
    """Counts SIGTERM and SIGINT while it is open, in the main thread.

    The handler only counts: a lock in it could wait for the code that it interrupted.
    """

    def __init__(self) -> None:
        self.count = 0
        self._former: dict[int, Any] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
