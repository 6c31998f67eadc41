"""Deadline: late messages do not run, and handlers that take too long are interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from conquiet.errors import ConfigError, DeadlineExceeded, ExpiredMessage
from conquiet.handler import AROUND, Process, Result
from conquiet.loop import UNTIL
from conquiet.message import Message, describe
from conquiet.middleware.interrupt import limited

Call = Callable[[], Sequence[Result]]


class Deadline:
    """Limits the time of each call of a handler, each try anew.

    `seconds` is for one message: a batch handler gets that much for every message of its
    call. A message with an `expirytime` is refused when it comes after that, and interrupted
    when its time runs out on the way; a batch handler, when the last of its messages expires.

    Only the handler is interrupted, never the commit, the inbox or the outbox. It sees an
    exception that is no `Exception`, at the next step of Python code: a blocking call in C
    (`time.sleep`, a socket without timeout) has to return first. An `async def` handler is
    cancelled.

    >>> Deadline(30).seconds
    30
    """

    def __init__(self, seconds: float | None = None) -> None:
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ConfigError(
                f"Deadline(seconds={seconds!r}): give a time above 0,"
                " or none to heed expirytime alone"
            )
        self.seconds = seconds

    def admit(self, message: Message[Any]) -> None:
        """Called by the router for every message and every try, outside the transaction."""
        if "expirytime" in message.attributes:
            remaining = _remaining(message)
            if remaining is not None and remaining <= 0:
                raise _expired(message, remaining)

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
        return limited(seconds, call, lambda: _exceeded(seconds, messages))

    def _seconds_for(self, messages: Sequence[Message[Any]]) -> float | None:
        seconds = None if self.seconds is None else self.seconds * len(messages)
        last = 0.0
        for message in messages:
            if "expirytime" not in message.attributes:
                return seconds
            remaining = _remaining(message)
            if remaining is None:
                return seconds
            if remaining <= 0 and len(messages) == 1:
                raise _expired(message, remaining)
            last = max(last, remaining)
        return last if seconds is None else min(seconds, last)


def _limit_coroutine(
    seconds: float, call: Call, messages: Sequence[Message[Any]]
) -> Sequence[Result]:
    """A thread that waits for a coroutine runs no bytecode: let the event loop look out."""
    until = time.monotonic() + seconds
    token = UNTIL.set(until)
    try:
        return call()
    except DeadlineExceeded as error:
        if time.monotonic() < until:  # the handler's own
            raise
        raise _exceeded(seconds, messages) from error
    finally:
        UNTIL.reset(token)


def _remaining(message: Message[Any]) -> float | None:
    expiry = message.expirytime
    return None if expiry is None else (expiry - datetime.now(UTC)).total_seconds()


def _expired(message: Message[Any], remaining: float) -> ExpiredMessage:
    return ExpiredMessage(
        f"{describe(message.attributes)}: expired {-remaining:.3f} s ago,"
        f" at {message.attributes['expirytime']}"
    )


def _exceeded(seconds: float, messages: Sequence[Message[Any]]) -> DeadlineExceeded:
    handler = messages[0].handler
    others = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return DeadlineExceeded(
        f"handler {handler.name if handler is not None else '-'} did not end within"
        f" {seconds:.3f} s on {describe(messages[0].attributes)}{others}"
    )
