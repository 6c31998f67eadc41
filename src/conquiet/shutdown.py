"""Count stop signals, and wait in a way that a stop interrupts."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any, ClassVar

from conquiet import bridge

logger = logging.getLogger("conquiet.worker")


class Stop(threading.Event):
    """An event that threads and tasks of any event loop can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        super().set()
        for waiter in tuple(self._waiters):
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def wait_async(self, seconds: float) -> bool:
        """Wait on an event loop; return whether it is set."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            if not self.is_set():  # after the registration: it may be set in another thread
                await asyncio.wait((waiter,), timeout=seconds)
        finally:
            self._waiters.discard(waiter)
        return self.is_set()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


STOPPING: ContextVar[Stop | None] = ContextVar("conquiet.shutdown", default=None)
"""The stop event of the worker, in each of its threads and tasks."""


def pause(seconds: float) -> bool:
    """Sleep; return False at once when the worker stops."""
    stopping = STOPPING.get()
    if stopping is not None:
        if seconds <= 0 or not bridge.is_on_loop():
            return not stopping.wait(seconds)
        return not bridge.wait_for(stopping.wait_async(seconds))
    if bridge.is_on_loop():
        bridge.sleep(seconds)
    else:
        time.sleep(seconds)
    return True


class Signals:
    """Counts SIGTERM and SIGINT while it is open, in the main thread.

    Several may be open, as of two workers on one event loop; a signal counts for each of them, and
    when the last one closes, the former handlers are restored.
    """

    _open: ClassVar[list[Signals]] = []
    _former: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._open.append(self)
            if len(self._open) == 1:
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._former[number] = signal.signal(number, _count)
        return self

    def warn_of_replaced(self) -> None:
        """Log if a handler of a web server is replaced: its process would not end by a signal."""
        replaced = {
            getattr(handler, "__qualname__", repr(handler))
            for handler in self._former.values()
            if self in self._open and _is_foreign(handler)
        }
        if replaced:
            logger.warning(
                "SIGTERM and SIGINT stop this worker now, and do not reach %s any more; inside a"
                " web server use `async with worker` in its lifespan, which leaves signals alone",
                " and ".join(sorted(replaced)),
            )

    def __exit__(self, *exc_info: object) -> None:
        if self not in self._open:
            return
        self._open.remove(self)
        if not self._open:
            for number, handler in self._former.items():
                signal.signal(number, handler)


def _is_foreign(handler: Any) -> bool:
    """Return whether a handler is neither Python's own nor that of an event loop."""
    function = handler.func if isinstance(handler, partial) else handler
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    # Handlers of loop.add_signal_handler() are called by the loop all the same.
    return callable(handler) and package not in ("_signal", "signal", "asyncio", "uvloop")


def _count(number: int, frame: FrameType | None) -> None:
    """Only count: a lock in a signal handler could wait for the code that it interrupted."""
    for signals in Signals._open:
        signals.count += 1
