"""An event loop in a thread of its own, for handlers that are `async def`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from conquiet.errors import DeadlineExceeded

T = TypeVar("T")

UNTIL: ContextVar[float | None] = ContextVar("conquiet.until", default=None)
"""When (by `time.monotonic`) a coroutine must have ended; it is cancelled then."""

_SECONDS_TO_CANCEL = 5.0


class LoopThread:
    """One event loop for all threads of a worker, started when first needed.

    Async clients belong to the loop they were made on, so handlers must always meet the
    same one. A coroutine runs in a copy of the caller's context: the ambient transaction is
    visible in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and give back what it returned or raised."""
        loop = self._running()
        context = copy_context()
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(coroutine, context=context)
            tasks.append(task)
            task.add_done_callback(lambda task: _hand_over(task, done))

        until = UNTIL.get()
        loop.call_soon_threadsafe(begin)
        try:
            if until is not None and not wait((done,), until - time.monotonic()).done:
                raise DeadlineExceeded("the coroutine did not end in time")
            return done.result()
        except BaseException:
            # An interrupt of the waiting thread must end the handler as well.
            if not done.done():
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                if until is not None:  # what it cleans up may still need the transaction
                    wait((done,), _SECONDS_TO_CANCEL)
            raise

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=5)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="conquiet-loop", daemon=True
                )
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        _run(loop)
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run until the loop is stopped by us, and by nobody else."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            # asyncio gives it to the task that raised it, and ends the loop as well: whoever
            # waits for that task, or for another one, would wait for ever.
            continue


def _hand_over(task: asyncio.Task[T], done: Future[T]) -> None:
    if done.done():
        return
    if task.cancelled():
        done.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
