"""Interrupts a call that takes too long, and never anything that comes after the call.

A timer thread raises an exception inside the thread that makes the call. Python delivers
it between two steps of bytecode, so there is a moment when it is under way: sent, and not
yet there. Whoever ends a call must end that moment too, or the exception hits a bystander,
such as the commit. Sending and ending therefore exclude each other by one lock, and ending
waits for what is still under way. It is never taken back: CPython 3.11 goes on looking for what
was taken back, and as soon as a tracer is on, in whatever thread, does nothing else any more.

Under a tracer (coverage, a debugger) the exception may arrive inside the tracer, or between
taking a lock and noting it. There a call is not interrupted; that it took too long is found when
it returns.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from conquiet.errors import Interrupt

T = TypeVar("T")

_STEPS = range(20)
"""Steps of bytecode, before each of which an exception that was sent arrives."""


class Alarm:
    """When to interrupt which thread."""

    __slots__ = ("at", "fired", "thread")

    def __init__(self, at: float) -> None:
        self.at = at
        self.thread = threading.get_ident()
        self.fired = False


class Timer:
    """One thread for all alarms.

    There are never more alarms than threads at work, so that looking at all of them is
    cheaper than keeping them sorted; and with limits of one length the thread wakes up once
    per limit, not once per call.
    """

    def __init__(self) -> None:
        # `with` on a bare lock is safe against an interrupt, being one step of bytecode; on a
        # Condition, which is written in Python, it is not: the lock could be taken for ever.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._armed: set[Alarm] = set()
        self._wakes_at = 0.0
        self._thread: threading.Thread | None = None

    def arm(self, alarm: Alarm) -> None:
        with self._lock:
            self._armed.add(alarm)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="conquiet-deadlines", daemon=True
                )
                self._thread.start()
            elif alarm.at < self._wakes_at:
                self._changed.notify()

    def disarm(self, alarm: Alarm) -> None:
        """After this the alarm sends nothing any more. May itself raise the interrupt."""
        with self._lock:
            self._armed.discard(alarm)

    def _serve(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for alarm in [alarm for alarm in self._armed if alarm.at <= now]:
                    self._armed.discard(alarm)
                    alarm.fired = True
                    _raise_in(alarm.thread, Interrupt)
                self._wakes_at = min((alarm.at for alarm in self._armed), default=float("inf"))
                idle = self._wakes_at == float("inf")
                self._changed.wait(None if idle else self._wakes_at - now)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Send an exception to a thread."""
    sent = ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), sent)


_timer = Timer()


def _forget_timer() -> None:
    """A fork copies the timer but not its thread, and perhaps a lock that nobody lets go of."""
    global _timer
    _timer = Timer()


os.register_at_fork(after_in_child=_forget_timer)


def limited(seconds: float, call: Callable[[], T], late: Callable[[], Exception]) -> T:
    """Make the call; if it takes longer, interrupt it and raise what `late` gives.

    >>> limited(60, lambda: "in time", TimeoutError)
    'in time'
    """
    timer = _timer
    alarm = Alarm(time.monotonic() + seconds)
    if sys.gettrace() is not None:
        result = call()
        if time.monotonic() > alarm.at:
            raise late()
        return result
    # An interrupt may arrive at any call in here, also at the first step of `disarm`; therefore
    # all of it stands in one frame, and nothing is left to a context manager in Python.
    try:
        try:
            timer.arm(alarm)
            result = call()
        finally:
            timer.disarm(alarm)
            for _ in _STEPS if alarm.fired else ():
                pass  # it arrives here, unless it has arrived
        return result
    except Interrupt as interrupt:
        try:
            timer.disarm(alarm)
            for _ in _STEPS:
                pass
        except Interrupt:  # our own on top of an outer one; both have arrived now
            timer.disarm(alarm)
        if not alarm.fired:  # an outer limit's
            raise
        raise late() from interrupt
