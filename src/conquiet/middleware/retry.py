"""Retry: failed messages run again, after a pause that grows; the others are not touched."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from conquiet.errors import Blameless, ConfigError, GivenBack, NoHandler, PermanentError
from conquiet.handler import Process, Result
from conquiet.message import Message, describe
from conquiet.stage import Stage
from conquiet.stopping import pause

logger = logging.getLogger("conquiet.middleware")

Kinds: TypeAlias = type[Exception] | tuple[type[Exception], ...]
Exhausted: TypeAlias = Callable[[Message[Any], Exception, int], object]

_FUTILE = (PermanentError, NoHandler, Blameless)
"""Never tried again here: hopeless, or not the message's fault and tried again elsewhere."""


class Retry:
    """Tries failed messages again, up to `attempts` times in all within one delivery.

    The pause after the n-th failure is `first` seconds, then `factor` times more each time, up
    to `cap`; with `jitter`, anything between nothing and that, so that those who failed
    together do not come back together.

    >>> [Retry(first=1, cap=10, jitter=False).seconds(failures) for failures in (1, 2, 3, 9)]
    [1, 2, 4, 10]

    `on` and `never` say which errors; errors that are permanent, that nobody handles, or that
    are not the message's fault are never tried again here. `exhausted(message, error, attempts)`
    is called when the last try failed; the message is then nacked, and its source delivers it
    again. The failed messages of a batch wait once, together, and run as one smaller batch;
    meanwhile the whole batch waits for its acks, so keep pauses shorter than a lease.

    In an ordered worker, the messages that wait for a failed one of their key go along with
    it, so that order by key holds.
    """

    stage = Stage.RETRY

    def __init__(
        self,
        attempts: int = 3,
        *,
        first: float = 0.1,
        factor: float = 2,
        cap: float = 10,
        jitter: bool = True,
        on: Kinds = Exception,
        never: Kinds = (),
        exhausted: Exhausted | None = None,
        dice: random.Random | None = None,
    ) -> None:
        if attempts < 1:
            raise ConfigError(f"Retry(attempts={attempts}): there is at least 1")
        self.attempts = attempts
        if not (0 <= first < float("inf") and 0 <= cap < float("inf")):
            raise ConfigError(f"Retry(first={first}, cap={cap}): give seconds, 0 or more")
        if not 1 <= factor < float("inf"):
            raise ConfigError(f"Retry(factor={factor}): a pause does not shrink; 1 or more")
        self._first = first
        self._factor = factor
        self._cap = cap
        self._jitter = jitter
        self._on = on
        self._never = never
        self._exhausted = exhausted
        self._dice = dice or random.Random()

    def seconds(self, failures: int) -> float:
        """The pause after this many failures."""
        try:
            longest = min(self._cap, self._first * self._factor ** (failures - 1))
        except OverflowError:
            longest = self._cap
        return self._dice.uniform(0, longest) if self._jitter else longest

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results = list(_run(next, batch))
            if not any(isinstance(result, Exception) for result in results):
                return results
            failures = [0] * len(batch)
            tried: Sequence[int] = range(len(batch))
            while again := self._again(batch, results, failures, tried):
                if not pause(self.seconds(max(failures[index] for index in again))):
                    return _given_back(again, results)
                rerun = _run(next, [batch[index] for index in again])
                for index, result in zip(again, rerun, strict=True):
                    results[index] = result
                tried = again
            return results

        return process

    def _again(
        self,
        batch: Sequence[Message[Any]],
        results: Sequence[Result],
        failures: list[int],
        tried: Sequence[int],
    ) -> list[int]:
        """Count the failures among those that were just tried; say which to try again."""
        again: list[int] = []
        retried: set[str | None] = set()
        blocked: set[str] = set()
        for index in tried:
            message, result = batch[index], results[index]
            if not isinstance(result, Exception):
                continue
            key = message.order_key
            waits = isinstance(result, GivenBack) and key is not None and key in retried
            if key in blocked or not (waits or self._may_retry(message, result, failures, index)):
                if key is not None:
                    blocked.add(key)
                continue
            again.append(index)
            if key is not None:
                retried.add(key)
        return again

    def _may_retry(
        self, message: Message[Any], error: Exception, failures: list[int], index: int
    ) -> bool:
        if isinstance(error, (_FUTILE, self._never)):
            return False
        if not isinstance(error, self._on):
            return False
        failures[index] += 1
        if failures[index] < self.attempts:
            return True
        self._tell(message, error)
        return False

    def _tell(self, message: Message[Any], error: Exception) -> None:
        if self._exhausted is None:
            return
        try:
            self._exhausted(message, error, self.attempts)
        except Exception:
            logger.exception("the hook `exhausted` failed on %s", describe(message.attributes))


def _run(next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
    try:
        return next(batch)
    except Exception as error:  # noqa: BLE001 - what the chain raises fails them all
        return [error] * len(batch)


def _given_back(again: Sequence[int], results: list[Result]) -> Sequence[Result]:
    for index in again:
        cause = results[index]
        waiting = GivenBack(f"the worker stops before the next try; so far: {cause!r:.200}")
        waiting.__cause__ = cause if isinstance(cause, Exception) else None
        results[index] = waiting
    return results
