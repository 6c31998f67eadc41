"""Turn a generator function of one message into a middleware; batches stay batches."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import update_wrapper
from typing import Any, TypeAlias, cast, overload

from conquiet.errors import Blameless, ConfigError, HandlerError
from conquiet.gate import FailedKeys
from conquiet.handler import NOTHING, Outputs, Process, Result
from conquiet.message import Message, describe
from conquiet.stage import Stage
from conquiet.transaction import ATOMIC

logger = logging.getLogger("conquiet.middleware")

Steps: TypeAlias = Generator[None, Outputs, Outputs | None]
"""Code before the rest of the chain, a bare `yield`, code after it."""

Function: TypeAlias = Callable[[Message[Any]], Steps | Iterator[None]]
"""A generator function; one that uses no value of its `yield` may be hinted `Iterator[None]`."""


class PerMessage:
    """Runs a generator function per message around the chain; see `per_message`."""

    def __init__(self, function: Function, stage: Stage | None = None) -> None:
        update_wrapper(self, function)
        self.name = getattr(function, "__qualname__", repr(function))
        if not inspect.isgeneratorfunction(function):
            raise ConfigError(
                f"{self.name} has no yield (or is async): a function for @per_message yields once,"
                " where the rest of the chain runs"
            )
        self.function = function
        self.stage = stage

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results: list[Result] = [NOTHING] * len(batch)
            running: list[tuple[int, Steps]] = []
            try:
                self._begin(batch, results, running)
                if running:
                    self._finish(batch, results, running, self._rest(next, batch, running))
            except BaseException:
                for _, steps in running:
                    self._close(steps)
                raise
            return results

        return process

    def _begin(
        self,
        batch: Sequence[Message[Any]],
        results: list[Result],
        running: list[tuple[int, Steps]],
    ) -> None:
        """Run every generator up to its yield; one that ends or fails earlier has a result."""
        atomic = ATOMIC.get()
        failed_keys = FailedKeys()
        for index, message in enumerate(batch):
            blocked = failed_keys.blocking_error(message)
            if blocked is not None:
                results[index] = blocked
                continue
            try:
                steps = cast(Steps, self.function(message))
                steps.send(None)  # type: ignore[arg-type]
                running.append((index, steps))
            except StopIteration as stop:
                results[index] = self._result_of(stop.value, NOTHING, message)
            except Exception as error:
                if atomic:  # the transaction is rolled back anyway
                    raise
                results[index] = error
                failed_keys.add(message)

    def _rest(
        self, next: Process, batch: Sequence[Message[Any]], running: list[tuple[int, Steps]]
    ) -> Sequence[Result]:
        """Run the rest of the chain once, for all messages whose generator has yielded."""
        try:
            return next([batch[index] for index, _ in running])
        except Exception as error:
            # A transaction runs a failed batch again, one by one, which shows whose error it is.
            if ATOMIC.get() and len(batch) > 1:
                raise
            return [error] * len(running)

    def _finish(
        self,
        batch: Sequence[Message[Any]],
        results: list[Result],
        running: list[tuple[int, Steps]],
        passed: Sequence[Result],
    ) -> None:
        for (index, steps), result in zip(running, passed, strict=True):
            results[index] = self._resume(steps, result, batch[index])

    def _resume(self, steps: Steps, result: Result, message: Message[Any]) -> Result:
        try:
            if isinstance(result, Exception):
                steps.throw(result)
            else:
                steps.send(result)
        except StopIteration as stop:
            after = self._result_of(stop.value, result, message)
        except Exception as error:  # noqa: BLE001 - becomes this message's result
            after = error
        else:
            self._close(steps)
            after = HandlerError(
                f"{self.name} yielded twice for {describe(message.attributes)}; the rest of the"
                " chain runs once, at the first yield"
            )
        # A message that was not handled must not be acked (lost) or blamed (an attempt).
        return result if isinstance(result, Blameless) else after

    def _result_of(self, returned: Any, result: Result, message: Message[Any]) -> Result:
        if returned is None or returned is result:
            return result
        if isinstance(returned, (list, tuple)) and all(isinstance(r, Message) for r in returned):
            return returned
        return HandlerError(
            f"{self.name} returned {returned!r:.80} for {describe(message.attributes)};"
            " return a list of messages, or nothing to keep what the chain gave"
        )

    def _close(self, steps: Steps) -> None:
        try:
            steps.close()
        except Exception:
            logger.exception("%s failed while it was closed", self.name)


@overload
def per_message(function: Function, /) -> PerMessage: ...


@overload
def per_message(*, stage: Stage | None = None) -> Callable[[Function], PerMessage]: ...


def per_message(
    function: Function | None = None, /, *, stage: Stage | None = None
) -> PerMessage | Callable[[Function], PerMessage]:
    """Make a middleware from a generator function that takes one message.

    The code before `yield` runs before the rest of the chain; `yield` returns the outputs, or
    raises the message's error.

    >>> @per_message
    ... def announce(message):
    ...     print("in ", message.id)
    ...     outputs = yield
    ...     print("out", message.id, len(outputs))
    >>> process = announce(lambda batch: [NOTHING for _ in batch])
    >>> process([Message(b"", {"id": "1"}), Message(b"", {"id": "2"})])
    in  1
    in  2
    out 1 0
    out 2 0
    [(), ()]

    A returned list of messages replaces the outputs or the error; without a return value both are
    kept; an exception fails the message. A return before the `yield` skips the rest of the chain.
    A `Blameless` error (the message was not handled) is raised here too, but cannot be swallowed or
    replaced.

    `stage` is where it has to be in the chain; by default anywhere. `function` is the decorated
    one.

    In a transaction, a batch of several that fails closes the generators at their `yield`
    (`finally` blocks run) and is run again one by one, each message with its own result.
    """
    if function is not None:
        return PerMessage(function)
    return lambda decorated: PerMessage(decorated, stage)
