"""LeaseKeeper: one thread that renews leases while their holders are busy.

A thread, because the holder cannot renew while its handler runs, and an event loop cannot while a
callback blocks it. Only leases whose connections belong to an event loop are renewed there, by a
LoopLeaseKeeper.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger("conquiet.lease")

_LINGER_SECONDS = 1.0
"""How long the thread stays when there is nothing to renew: short transactions share one thread."""


class Renewable(Protocol):
    """A lease, or several that are renewed together. Compared and hashed by the keeper."""

    def renew(self) -> float | None:
        """Renew the lease. Return the seconds until the next call, or None for no more calls.

        None is ignored if `add` or `hurry` was called meanwhile.
        """


class LeaseKeeper:
    """Calls `renew` of every registered lease when it is due, from a daemon thread called `name`.

    The thread starts with the first lease and ends about a second after the last was removed. An
    exception of one lease is logged, the lease is tried again after its interval, and the others
    are renewed meanwhile. Leases are called one after another: give each server its own keeper if
    one that hangs must not delay the rest.

    A forked child starts without leases, since they and their connections belong to the parent;
    its first `add` starts a thread of its own.

    With `native`, the thread is one of the operating system also where gevent replaces threads by
    greenlets, which a handler that does not yield would stop. The leases must then use connections
    that no greenlet uses: a socket of gevent belongs to the thread that opened it.

    Invariants, all guarded by one lock: a lease has a due time if and only if it is registered;
    the due time of a lease whose `renew` is running is infinite unless `hurry` lowered it; the
    thread wakes no later than the earliest due time.
    """

    def __init__(self, name: str, native: bool = False) -> None:
        self.name = name
        self._native = native
        self._reset()
        _keepers.add(self)

    def _reset(self) -> None:
        new_lock: Callable[[], Any] = native_lock if self._native else threading.Lock
        self._lock = new_lock()
        self._sleep = new_lock()  # held, except for a moment when the thread shall wake
        self._sleep.acquire()
        self._due: dict[Renewable, float] = {}
        self._every: dict[Renewable, float] = {}
        self._wakes_at = math.inf
        self._thread: threading.Thread | _NativeThread | None = None

    def add(self, lease: Renewable, every: float) -> None:
        """Renew a lease for the first time in `every` seconds, and that long after an error.

        A lease that is registered already keeps the sooner of its two due times.
        """
        with self._lock:
            # A thread that is not alive ended at the interpreter's exit or was lost in a fork.
            is_running = self._thread is not None and self._thread.is_alive()
            if not is_running:
                self._wakes_at = 0.0  # a wake-up would end the new thread's first wait at once
            self._every[lease] = min(every, self._every.get(lease, math.inf))
            self._advance(lease, time.monotonic() + every)
            if is_running:
                return
            if self._native and _has_greenlets_for_threads():
                thread: threading.Thread | _NativeThread = _NativeThread(self._keep)
            else:
                thread = threading.Thread(target=self._keep, name=self.name, daemon=True)
            self._thread = thread
            thread.start()  # under the lock, or two callers would start one each

    def remove(self, lease: Renewable) -> None:
        """Stop renewing a lease; a call of its `renew` that is running is not waited for.

        Takes a lock, so a finalizer must not call it: let `renew` return None instead.
        """
        with self._lock:
            self._remove(lease)

    def _remove(self, lease: Renewable) -> None:
        self._due.pop(lease, None)
        self._every.pop(lease, None)

    def hurry(self, lease: Renewable, within: float = 0.0) -> None:
        """Call `renew` of a registered lease within so many seconds; cheap if it is due by then."""
        at = time.monotonic() + within
        with self._lock:
            if lease in self._due:
                self._advance(lease, at)

    def __contains__(self, lease: object) -> bool:
        with self._lock:
            return lease in self._due

    def __len__(self) -> int:
        with self._lock:
            return len(self._due)

    def _advance(self, lease: Renewable, at: float) -> None:
        self._due[lease] = min(at, self._due.get(lease, math.inf))
        if at < self._wakes_at:
            self._wakes_at = at
            if self._sleep.locked():
                self._sleep.release()

    # --- the thread -------------------------------------------------------------------------

    def _keep(self) -> None:
        while due := self._wait():
            for lease in due:
                self._renew(lease)

    def _wait(self) -> list[Renewable]:
        """Wait for leases that are due; return none when there is nothing left to keep."""
        has_waited = False
        while True:
            with self._lock:
                now = time.monotonic()
                due = [lease for lease, at in self._due.items() if at <= now]
                if due:
                    for lease in due:
                        self._due[lease] = math.inf
                    self._wakes_at = 0.0  # awake: nothing needs to be notified
                    return due
                if has_waited and not self._due:
                    self._thread = None
                    return []
                earliest = min(self._due.values(), default=math.inf)
                self._wakes_at = min(earliest, now + _LINGER_SECONDS)
                seconds = self._wakes_at - now
            self._sleep.acquire(timeout=seconds)
            has_waited = True

    def _renew(self, lease: Renewable) -> None:
        seconds: float | None
        try:
            seconds = lease.renew()
        except Exception as error:  # noqa: BLE001 - the leases of others must be renewed
            with self._lock:
                seconds = self._every.get(lease)
            if seconds is not None:
                logger.warning(
                    "%s: could not renew %r, trying again in %.3g s: %r",
                    *(self.name, lease, seconds, error),
                )
        with self._lock:
            if lease not in self._due:
                return
            if seconds is not None:
                self._due[lease] = min(self._due[lease], time.monotonic() + seconds)
            elif self._due[lease] == math.inf:  # else work came while it decided to end
                self._remove(lease)


L = TypeVar("L")


class LoopLeaseKeeper(Generic[L]):
    """Calls `renew(lease)` of every registered lease when it is due, on the running event loop.

    An exception of one lease is logged, and the lease is tried again after its interval. `renew`
    returns the seconds until the next call, or None for no more calls.
    """

    def __init__(self, name: str, renew: Callable[[L], Coroutine[Any, Any, float | None]]) -> None:
        self.name = name
        self._call = renew
        self._timers: dict[L, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, lease: L, every: float) -> None:
        """Renew a lease for the first time in `every` seconds, and that long after an error.

        A lease that is registered already keeps the sooner of its two due times.
        """
        loop = asyncio.get_running_loop()
        known = self._timers.get(lease)
        if known is not None:
            if loop.time() < known.when() <= loop.time() + every:
                return
            known.cancel()
        self._timers[lease] = loop.call_later(every, self._start, lease, every)

    def remove(self, lease: L) -> None:
        """Stop renewing a lease; a call of `renew` that is running is not waited for."""
        timer = self._timers.pop(lease, None)
        if timer is not None:
            timer.cancel()

    def __len__(self) -> int:
        return len(self._timers)

    def _start(self, lease: L, every: float) -> None:
        task = asyncio.get_running_loop().create_task(self._renew(lease, every))
        self._tasks.add(task)  # the loop alone would let it be collected
        task.add_done_callback(self._tasks.discard)

    async def _renew(self, lease: L, every: float) -> None:
        timer = self._timers.get(lease)
        seconds: float | None = every
        try:
            seconds = await self._call(lease)
        except Exception as error:  # noqa: BLE001 - it may succeed next time
            logger.warning(
                "%s: could not renew %r, trying again in %.3g s: %r",
                *(self.name, lease, every, error),
            )
        if self._timers.get(lease) is not timer:  # removed or added meanwhile
            return
        if seconds is None:
            del self._timers[lease]
            return
        loop = asyncio.get_running_loop()
        self._timers[lease] = loop.call_later(seconds, self._start, lease, every)


def native_lock() -> Any:
    """Create a lock of threads, also where gevent replaces locks by its own.

    Hold it for moments only: a greenlet that waits for it blocks all others of its thread.
    """
    return _originals()[0]()


def _originals() -> Any:
    """Return the functions that create locks and start threads, as they were before gevent."""
    names = ["allocate_lock", "start_new_thread"]
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is None:
        return [getattr(_thread, name) for name in names]
    return monkey.get_original("_thread", names)


def _has_greenlets_for_threads() -> bool:
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


class _NativeThread:
    """Runs a function in a thread of the operating system although gevent replaced threads."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target
        self._is_alive = True

    def start(self) -> None:
        _originals()[1](self._run, ())

    def is_alive(self) -> bool:
        return self._is_alive

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._is_alive = False
            import gevent  # type: ignore[import-untyped]  # it ships none that mypy finds

            gevent.get_hub().destroy(destroy_loop=True)  # that of this thread, for its sockets


_keepers: weakref.WeakSet[LeaseKeeper] = weakref.WeakSet()


def _forget_leases_of_parent() -> None:
    for keeper in _keepers:
        keeper._reset()  # also the lock, which the parent's thread may have held


os.register_at_fork(after_in_child=_forget_leases_of_parent)
