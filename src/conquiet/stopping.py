"""Waiting that a stopping worker can cut short."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

STOPPING: ContextVar[threading.Event | None] = ContextVar("conquiet.stopping", default=None)
"""Set by a worker in its threads: the event that says it is stopping."""


def pause(seconds: float) -> bool:
    """Sleep; False if the worker began to stop meanwhile, and then at once."""
    stopping = STOPPING.get()
    if stopping is None:
        time.sleep(seconds)
        return True
    return not stopping.wait(seconds)
