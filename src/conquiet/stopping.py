"""Stopping: the signals that ask for it, and waiting that it cuts short."""

from __future__ import annotations

import signal
import threading
import time
from contextvars import ContextVar
from types import FrameType
from typing import Any

STOPPING: ContextVar[threading.Event | None] = ContextVar("conquiet.stopping", default=None)
"""Set by a worker in its threads: the event that says it is stopping."""


def pause(seconds: float) -> bool:
    """Sleep; False if the worker began to stop meanwhile, and then at once."""
    stopping = STOPPING.get()
    if stopping is None:
        time.sleep(seconds)
        return True
    return not stopping.wait(seconds)


class Signals:
    """Counts SIGTERM and SIGINT while it is open, if this is the main thread.

    The handler only counts: taking a lock in it could wait for the very code it interrupted.
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
