"""Refuse expired messages, and interrupt handlers that exceed their time limit.

A timer thread raises an exception inside the thread that makes the call. Python delivers it between
two steps of bytecode, so there is a moment when it is sent and has not arrived yet. The end of a
call must end that moment too, or the exception would hit other code, such as the commit. So one
lock covers sending and ending, and ending waits for an exception that was sent. It is never
withdrawn: CPython 3.11 keeps looking for a withdrawn exception, and as soon as any thread has a
tracer, does nothing else any more.

Under a tracer (coverage, a debugger) the exception could arrive inside the tracer, or between
taking a lock and noting it. Then a call is not interrupted; an exceeded limit is found when it
returns.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from conquiet.errors import ConfigError, DeadlineExceeded, ExpiredMessage, Interrupt
from conquiet.handler import AROUND, UNTIL, Process, Result
from conquiet.message import Message, describe

Call = Callable[[], Sequence[Result]]


class Deadline:
    """Limits the time of each call of a handler; each retry has the full time.

    `seconds` is for one message: a batch handler gets that much for every message of its call. A
    message is refused after its `expirytime`, and its handler is interrupted at that time; a batch
    handler, when the last of its messages expires.

    Only the handler is interrupted, never the commit, the inbox or the outbox. A `BaseException`
    is raised in it at the next step of Python code: a blocking call in C (`time.sleep`, a socket
    without timeout) has to return first. A handler that goes on all the same is interrupted again
    after 5 seconds. An `async def` handler is cancelled.

    >>> Deadline(30).seconds
    30
    """

    def __init__(self, seconds: float | None = None) -> None:
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ConfigError(
                f"Deadline(seconds={seconds!r}): give a time above 0,"
                " or none to apply expirytime alone"
            )
        self.seconds = seconds

    def admit(self, message: Message[Any]) -> None:
        """Refuse an expired message; the router calls it outside the transaction."""
        if "expirytime" in message.attributes:
            remaining = _remaining_seconds(message)
            if remaining is not None and remaining <= 0:
                raise _expired_error(message, remaining)

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            token = AROUND.set((*AROUND.get(), self._limit))
            try:
                return next(batch)
            finally:
                AROUND.reset(token)

        return process

    def _limit(self, messages: Sequence[Message[Any]], call: Call) -> Sequence[Result]:
        seconds = self._seconds_for(messages)
        if seconds is None:
            return call()
        handler = messages[0].handler
        if handler is not None and handler.is_async:
            return _limit_coroutine(seconds, call, messages)
        return call_with_limit(seconds, call, lambda: _exceeded_error(seconds, messages))

    def _seconds_for(self, messages: Sequence[Message[Any]]) -> float | None:
        seconds = None if self.seconds is None else self.seconds * len(messages)
        last = 0.0
        for message in messages:
            if "expirytime" not in message.attributes:
                return seconds
            remaining = _remaining_seconds(message)
            if remaining is None:
                return seconds
            if remaining <= 0 and len(messages) == 1:
                raise _expired_error(message, remaining)
            last = max(last, remaining)
        return last if seconds is None else min(seconds, last)


def _limit_coroutine(
    seconds: float, call: Call, messages: Sequence[Message[Any]]
) -> Sequence[Result]:
    """Let the event loop apply the limit: a thread that waits for it runs no bytecode."""
    until = time.monotonic() + seconds
    token = UNTIL.set(until)
    try:
        return call()
    except DeadlineExceeded as error:
        if time.monotonic() < until:  # raised by the handler itself
            raise
        raise _exceeded_error(seconds, messages) from error
    finally:
        UNTIL.reset(token)


def _remaining_seconds(message: Message[Any]) -> float | None:
    expiry = message.expirytime
    return None if expiry is None else (expiry - datetime.now(UTC)).total_seconds()


def _expired_error(message: Message[Any], remaining: float) -> ExpiredMessage:
    return ExpiredMessage(
        f"{describe(message.attributes)}: expired {-remaining:.3f} s ago,"
        f" at {message.attributes['expirytime']}"
    )


def _exceeded_error(seconds: float, messages: Sequence[Message[Any]]) -> DeadlineExceeded:
    handler = messages[0].handler
    others = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return DeadlineExceeded(
        f"handler {handler.name if handler is not None else '-'} did not end within"
        f" {seconds:.3f} s on {describe(messages[0].attributes)}{others}"
    )


T = TypeVar("T")

_STEPS = range(20)
"""Steps of bytecode, at one of which a sent exception arrives."""


_SECONDS_TO_END = 5.0
"""How long an interrupted call may clean up. After that it is interrupted again: Python drops an
exception that arrives in a `__del__`, and the call goes on."""


class Alarm:
    """Holds when to interrupt which thread."""

    __slots__ = ("at", "fired", "thread")

    def __init__(self, at: float) -> None:
        self.at = at
        self.thread = threading.get_ident()
        self.fired = False


class Timer:
    """Fires all alarms from one thread.

    There are never more alarms than working threads, so scanning them is cheaper than sorting;
    with limits of one length the thread wakes up once per limit, not once per call.
    """

    def __init__(self) -> None:
        # `with` on a lock is one step of bytecode, so an interrupt cannot leave it locked; a
        # Condition is written in Python, where an interrupt could.
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
        """Stop an alarm: it sends nothing any more. May raise the interrupt itself."""
        with self._lock:
            self._armed.discard(alarm)

    def _serve(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for alarm in [alarm for alarm in self._armed if alarm.at <= now]:
                    alarm.fired = True
                    alarm.at = now + _SECONDS_TO_END
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
    """Replace the timer in a forked child, which has no thread for it and maybe a held lock."""
    global _timer
    _timer = Timer()


os.register_at_fork(after_in_child=_forget_timer)


def call_with_limit(seconds: float, call: Callable[[], T], late: Callable[[], Exception]) -> T:
    """Make the call; if it takes longer, interrupt it and raise the error of `late`.

    >>> call_with_limit(60, lambda: "in time", TimeoutError)
    'in time'
    """
    timer = _timer
    alarm = Alarm(time.monotonic() + seconds)
    if sys.gettrace() is not None:
        result = call()
        if time.monotonic() > alarm.at:
            raise late()
        return result
    # An interrupt may arrive at any call in here, also at the first step of `disarm`; so all of
    # it is in one frame, without a context manager written in Python.
    try:
        try:
            timer.arm(alarm)
            result = call()
        finally:
            timer.disarm(alarm)
            for _ in _STEPS if alarm.fired else ():
                pass  # the exception arrives here, if it has not yet
        return result
    except Interrupt as interrupt:
        try:
            timer.disarm(alarm)
            for _ in _STEPS:
                pass
        except Interrupt:  # our own after one of an outer limit; both have arrived now
            timer.disarm(alarm)
        if not alarm.fired:  # the interrupt of an outer limit
            raise
        raise late() from interrupt
    except Exception as error:
        if alarm.fired:  # raised while the call was cleaning up, as by an interrupted driver
            raise late() from error
        raise
