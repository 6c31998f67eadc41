"""Let synchronous code wait for an event loop without blocking it.

    task ──▶ await run(chain) ──▶ greenlet: the chain, unchanged ──▶ result
               ▲   awaits it          │ wait_for(awaitable)
               └──────────────────────┘

The chain is written once, as plain functions. In an async worker it runs in a greenlet for each
group of messages; where it waits for the network, the greenlet gives the loop back. SQLAlchemy's
asyncio does the same, and greenlets of either can wait by the functions of the other.

What blocks (a sync handler, a client without asyncio) runs in a thread by `call`. There `wait_for`
hands its awaitable over to the loop.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

from conquiet.config import require
from conquiet.errors import ConquietError

P = ParamSpec("P")
T = TypeVar("T")

_PROVIDER = "__sqlalchemy_greenlet_provider__"
"""The attribute by which SQLAlchemy knows a greenlet that it may wait in."""

_kind: Any = None
_current: Any = None


def _greenlet() -> Any:
    """Return the class of our greenlets; greenlet is imported when async is first used."""
    global _kind, _current
    if _kind is None:
        module = require("greenlet", "async")

        # greenlet is optional, so its class is known at run time only.
        class Bridge(module.greenlet):  # type: ignore[misc,name-defined]
            loop: asyncio.AbstractEventLoop | None = None  # of a thread's caller
            shields = 0
            cancelled = False

            def __init__(self, function: Callable[..., Any]) -> None:
                parent = module.getcurrent()
                super().__init__(function, parent)
                self.gr_context = parent.gr_context  # the chain and its handlers share contextvars

        setattr(Bridge, _PROVIDER, True)
        _current = module.getcurrent
        _kind = Bridge
    return _kind


def check_installed() -> None:
    """Raise an error that names the extra if greenlet is missing."""
    _greenlet()


def is_inside() -> bool:
    """Return whether `wait_for` can be used: the running code was called by `run` or `call`.

    So it can in functions that SQLAlchemy runs, as by `AsyncSession.run_sync`.
    """
    if _kind is None:
        if sys.modules.get("greenlet") is None:  # not loaded: there are no greenlets
            return False
        _greenlet()
    return getattr(_current(), _PROVIDER, False)


def is_on_loop() -> bool:
    """Return whether the running code is inside, in the thread of the loop, and must not block."""
    return is_inside() and getattr(_current(), "loop", None) is None


def current_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that `wait_for` waits for; in a thread, that of its caller."""
    return (is_inside() and getattr(_current(), "loop", None)) or asyncio.get_running_loop()


def current() -> object:
    """Return what identifies the running code: its greenlet."""
    if _current is None:
        _greenlet()
    return _current()


def is_cancelled() -> bool:
    """Return whether the task that runs this code was asked to end."""
    if not is_on_loop():
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def run(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function that may use `wait_for`, on the running loop."""
    bridge = _greenlet()(function)
    result = bridge.switch(*arguments, **options)
    while not bridge.dead:
        try:
            if bridge.shields or bridge.cancelled:
                value = await _await_later_cancelled(bridge, result)
            else:
                value = await result
        except BaseException:  # noqa: BLE001 - the function gets it, as from a call that blocks
            result = bridge.throw(*sys.exc_info())
        else:
            result = bridge.switch(value)
    if bridge.cancelled:
        raise asyncio.CancelledError
    return result  # type: ignore[no-any-return]  # a greenlet returns Any


async def _await_later_cancelled(bridge: Any, awaitable: Awaitable[Any]) -> Any:
    """Await inside a shield, or raise the cancellation that had to wait for its end."""
    if not bridge.shields:
        bridge.cancelled = False
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise asyncio.CancelledError
    task = asyncio.ensure_future(awaitable)
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            bridge.cancelled = True
            if task.done():  # it ended just before the cancellation came
                return task.result()


def wait_for(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable inside `run` or `call`; other code of the loop runs meanwhile."""
    if not is_inside():
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise ConquietError(
            "an async client or engine was used where no event loop can be waited for; use it in"
            " an async worker: await worker.run_async(), or async with worker"
        )
    # A greenlet returns Any.
    return _current().parent.switch(awaitable)  # type: ignore[no-any-return]


class shield:  # noqa: N801 - a context manager, used as a function
    """Let a cancellation wait: it is raised by the next `wait_for` after the block."""

    __slots__ = ("_bridge",)

    def __enter__(self) -> None:
        bridge = _current() if _kind is not None else None
        self._bridge = bridge if _kind is not None and isinstance(bridge, _kind) else None
        if self._bridge is not None:
            self._bridge.shields += 1

    def __exit__(self, *exc_info: object) -> None:
        if self._bridge is not None:
            self._bridge.shields -= 1


class Unbroken(Awaitable[T]):
    """Awaits something to its end; a cancellation of its task waits, as in `shield`.

    It needs no task of its own, as `shield` does. So nothing inside may cancel the running task,
    as `asyncio.timeout` does: that would wait too. `greenlet` is the one that `run` has made for
    the code that waits.
    """

    __slots__ = ("_awaitable", "_greenlet")

    def __init__(self, awaitable: Awaitable[T], greenlet: Any) -> None:
        self._awaitable = awaitable
        self._greenlet = greenlet

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._awaitable.__await__()
        step: Callable[[Any], Any] = inner.send
        argument: Any = None
        while True:
            try:
                future = step(argument)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # a generator's value is Any
            step, argument = inner.send, None
            try:
                yield None if future is None else _Uncancelled(future, self._greenlet)
            except BaseException as error:  # noqa: BLE001 - the one who waits gets it
                if future is None and isinstance(error, asyncio.CancelledError):
                    self._greenlet.cancelled = True
                else:
                    step, argument = inner.throw, error


class _Uncancelled:
    """Takes the place of a future that a task waits for, and only notes a cancellation."""

    __slots__ = ("_asyncio_future_blocking", "_future", "_greenlet")

    def __init__(self, future: Any, greenlet: Any) -> None:
        future._asyncio_future_blocking = False  # as a task does
        self._asyncio_future_blocking = True
        self._future = future
        self._greenlet = greenlet

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()  # type: ignore[no-any-return]  # any kind of future

    def add_done_callback(self, callback: Any, *, context: Any = None) -> None:
        self._future.add_done_callback(callback, context=context)

    def cancel(self, msg: object = None) -> bool:
        self._greenlet.cancelled = True
        return True


def can_be_unbroken(greenlet: object) -> bool:
    """Return whether `Unbroken` can be awaited for code in this greenlet: it is one of `run`."""
    return _kind is not None and isinstance(greenlet, _kind) and greenlet.loop is None


def sleep(seconds: float) -> None:
    """Sleep inside `run`, where `time.sleep` would block the loop."""
    wait_for(asyncio.sleep(seconds))


def call(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function that may block; on a loop, in a thread.

    A method of an object whose `is_async` is True waits by `wait_for`, and is called directly.
    """
    owner = getattr(function, "__self__", None)
    if not is_on_loop() or getattr(owner, "is_async", False):
        return function(*arguments, **options)
    return wait_for(run_in_thread(function, *arguments, **options))


async def run_in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function in a thread, in a copy of the context; it may use `wait_for`."""
    kind, loop, context = _greenlet(), asyncio.get_running_loop(), copy_context()

    def drive() -> T:
        bridge = kind(function)
        bridge.loop = loop
        result = bridge.switch(*arguments, **options)
        while not bridge.dead:
            try:
                value = asyncio.run_coroutine_threadsafe(_await(result), loop).result()
            except BaseException:  # noqa: BLE001 - the function gets it
                result = bridge.throw(*sys.exc_info())
            else:
                result = bridge.switch(value)
        return result  # type: ignore[no-any-return]  # a greenlet returns Any

    return await asyncio.wrap_future(_threads.submit(lambda: context.run(drive)))


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


class Threads:
    """Runs calls in daemon threads, a thread for each call at a time; idle ones end by themselves.

    An executor of the standard library waits for its threads when the process ends: a handler that
    does not return would keep it.
    """

    _IDLE_SECONDS = 10.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = 0
        self._started = 0

    def submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            starts = self._idle == 0
            self._idle -= not starts
            self._started += starts
            name = f"conquiet-thread-{self._started}"
        self._calls.put((future, function))
        if starts:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            try:
                future, function = self._calls.get(timeout=self._IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:  # else a call was submitted just now
                        self._idle -= 1
                        return
                continue
            if future.set_running_or_notify_cancel():
                _settle(future, function)
            del future, function
            with self._lock:
                self._idle += 1


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - raised by the one who waits
        future.set_exception(error)
    else:
        future.set_result(result)


_threads = Threads()


def _forget_threads() -> None:
    """Replace the threads in a forked child, which has none of them and maybe a held lock."""
    global _threads
    _threads = Threads()


os.register_at_fork(after_in_child=_forget_threads)
