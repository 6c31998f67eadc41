"""LeaseKeeper: one thread that renews leases while their holders are busy.

A thread, because the holder cannot renew while its handler runs, and an event loop cannot while a
callback blocks it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from typing import Protocol

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

    Invariants, all guarded by one lock: a lease has a due time if and only if it is registered;
    the due time of a lease whose `renew` is running is infinite unless `hurry` lowered it; the
    thread wakes no later than the earliest due time.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._reset()
        _keepers.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Renewable, float] = {}
        self._every: dict[Renewable, float] = {}
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None

    def add(self, lease: Renewable, every: float) -> None:
        """Renew a lease for the first time in `every` seconds, and that long after an error.

        A lease that is registered already keeps the sooner of its two due times.
        """
        with self._changed:
            self._every[lease] = min(every, self._every.get(lease, math.inf))
            self._advance(lease, time.monotonic() + every)
            # A thread that is not alive ended at the interpreter's exit or was lost in a fork.
            if self._thread is None or not self._thread.is_alive():
                self._wakes_at = 0.0
                self._thread = threading.Thread(target=self._keep, name=self.name, daemon=True)
                self._thread.start()

    def remove(self, lease: Renewable) -> None:
        """Stop renewing a lease; a call of its `renew` that is running is not waited for.

        Takes a lock, so a finalizer must not call it: let `renew` return None instead.
        """
        with self._changed:
            self._due.pop(lease, None)
            self._every.pop(lease, None)

    def hurry(self, lease: Renewable, within: float = 0.0) -> None:
        """Call `renew` of a registered lease within so many seconds; cheap if it is due by then."""
        at = time.monotonic() + within
        with self._changed:
            if lease in self._due:
                self._advance(lease, at)

    def __contains__(self, lease: object) -> bool:
        with self._changed:
            return lease in self._due

    def __len__(self) -> int:
        with self._changed:
            return len(self._due)

    def _advance(self, lease: Renewable, at: float) -> None:
        self._due[lease] = min(at, self._due.get(lease, math.inf))
        if at < self._wakes_at:
            self._wakes_at = at
            self._changed.notify()

    # --- the thread -------------------------------------------------------------------------

    def _keep(self) -> None:
        while due := self._wait():
            for lease in due:
                self._renew(lease)

    def _wait(self) -> list[Renewable]:
        """Wait for leases that are due; return none when there is nothing left to keep."""
        with self._changed:
            while True:
                now = time.monotonic()
                due = [lease for lease, at in self._due.items() if at <= now]
                if due:
                    for lease in due:
                        self._due[lease] = math.inf
                    self._wakes_at = 0.0  # awake: nothing needs to be notified
                    return due
                earliest = min(self._due.values(), default=math.inf)
                self._wakes_at = min(earliest, now + _LINGER_SECONDS)
                self._changed.wait(self._wakes_at - now)
                if not self._due:
                    self._thread = None
                    return []

    def _renew(self, lease: Renewable) -> None:
        seconds: float | None
        try:
            seconds = lease.renew()
        except Exception as error:  # noqa: BLE001 - the leases of others must be renewed
            with self._changed:
                seconds = self._every.get(lease)
            if seconds is not None:
                logger.warning(
                    "%s: could not renew %r, trying again in %.3g s: %r",
                    *(self.name, lease, seconds, error),
                )
        with self._changed:
            if lease not in self._due:
                return
            if seconds is not None:
                self._due[lease] = min(self._due[lease], time.monotonic() + seconds)
            elif self._due[lease] == math.inf:  # else work came while it decided to end
                self.remove(lease)


_keepers: weakref.WeakSet[LeaseKeeper] = weakref.WeakSet()


def _forget_leases_of_parent() -> None:
    for keeper in _keepers:
        keeper._reset()  # also the lock, which the parent's thread may have held


os.register_at_fork(after_in_child=_forget_leases_of_parent)
