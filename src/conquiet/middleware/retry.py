"""Retry failed messages: within one delivery, or later, while they wait at their source."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from conquiet.errors import (
    Blameless,
    ConfigError,
    GivenBack,
    NoHandler,
    PermanentError,
    RetriesExhausted,
    TryLater,
)
from conquiet.gate import FailedKeys
from conquiet.handler import Process, Result
from conquiet.message import Message, describe
from conquiet.shutdown import pause
from conquiet.stage import Stage

logger = logging.getLogger("conquiet.middleware")

Kinds: TypeAlias = type[Exception] | tuple[type[Exception], ...]
Exhausted: TypeAlias = Callable[[Message[Any], Exception, int], object]

_FUTILE = (PermanentError, NoHandler, Blameless, TryLater)
"""Never retried here: permanent, or not the message's fault and retried elsewhere."""


class Retry:
    """Retries failed messages, with up to `max_attempts` attempts within one delivery.

    The pause after the first failure is `first` seconds, then `factor` times longer each time, up
    to `cap`; with `jitter`, a random time up to that, so that messages which failed together are
    not retried together.

    >>> [Retry(first=1, cap=10, jitter=False).seconds(failures) for failures in (1, 2, 3, 9)]
    [1, 2, 4, 10]

    `on` and `never` choose the errors; permanent errors, `NoHandler` and `Blameless` ones are never
    retried here. `exhausted(message, error, attempts)` is called when the last attempt failed; the
    message is then nacked, and its source delivers it again. The failed messages of a batch wait
    together and run as one smaller batch; meanwhile the whole batch waits for its acks, so keep
    pauses shorter than a lease.

    In an ordered worker, messages that wait for a failed one of their key are retried with it, so
    that order by key holds.

    With `delays`, as in `Retry(delays=[1, 60, 3600])`, a failed message leaves the worker at once:
    it waits in the store for so many seconds after its first, second, … failure, and then comes
    back to its group. After the last one it is a dead letter. Other messages flow; in an ordered
    worker, those of its key wait for it. Its source must be able to keep it: a Redis stream, the
    log of a database or of `conquiet.memory`.

    `dice` replaces the random numbers of the jitter, for tests.
    """

    stage = Stage.RETRY

    def __init__(
        self,
        max_attempts: int = 3,
        *,
        first: float = 0.1,
        factor: float = 2,
        cap: float = 10,
        jitter: bool = True,
        on: Kinds = Exception,
        never: Kinds = (),
        exhausted: Exhausted | None = None,
        dice: random.Random | None = None,
        delays: Sequence[float] = (),
    ) -> None:
        for seconds in delays:
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"Retry(delays=…): {seconds!r:.40} is not a number of seconds")
        self.delays = tuple(delays)
        """How long a message waits at its source after each failure, in seconds."""
        if self.delays:
            max_attempts = len(self.delays) + 1
        if max_attempts < 1:
            raise ConfigError(f"Retry(max_attempts={max_attempts}): must be 1 or more")
        self.max_attempts = max_attempts
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
        """Return the pause after this many failures."""
        try:
            longest = min(self._cap, self._first * self._factor ** (failures - 1))
        except OverflowError:
            longest = self._cap
        return self._dice.uniform(0, longest) if self._jitter else longest

    def __call__(self, next: Process) -> Process:
        if self.delays:
            return lambda batch: self._try_later(batch, _run(next, batch))

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

    def _try_later(
        self, batch: Sequence[Message[Any]], results: Sequence[Result]
    ) -> Sequence[Result]:
        """Return the results with errors that say when their messages are tried again, if ever."""
        if not any(isinstance(result, Exception) for result in results):
            return results
        return [
            self._judge(message, result) if isinstance(result, Exception) else result
            for message, result in zip(batch, results, strict=True)
        ]

    def _judge(self, message: Message[Any], error: Exception) -> Exception:
        if isinstance(error, (_FUTILE, self._never)) or not isinstance(error, self._on):
            return error
        if message.deliveries <= len(self.delays):
            return TryLater(self.delays[message.deliveries - 1], error)
        self._call_hook(message, error)
        given_up = RetriesExhausted(
            f"failed {message.deliveries} times, at last with {type(error).__name__}: {error}"
        )
        given_up.__cause__ = error
        return given_up

    def _again(
        self,
        batch: Sequence[Message[Any]],
        results: Sequence[Result],
        failures: list[int],
        tried: Sequence[int],
    ) -> list[int]:
        """Count the failures of the last attempt; return the indexes to retry."""
        again: list[int] = []
        retried: set[str | None] = set()
        given_up = FailedKeys()
        for index in tried:
            message, result = batch[index], results[index]
            if not isinstance(result, Exception) or given_up.blocking_error(message) is not None:
                continue
            key = message.order_key
            waits = isinstance(result, GivenBack) and key is not None and key in retried
            if not (waits or self._may_retry(message, result, failures, index)):
                given_up.add(message)
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
        if failures[index] < self.max_attempts:
            return True
        self._call_hook(message, error)
        return False

    def _call_hook(self, message: Message[Any], error: Exception) -> None:
        if self._exhausted is None:
            return
        try:
            self._exhausted(message, error, self.max_attempts)
        except Exception:
            logger.exception("the hook `exhausted` failed on %s", describe(message.attributes))


def _run(next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
    try:
        return next(batch)
    except Exception as error:  # noqa: BLE001 - an error of the chain fails the whole batch
        return [error] * len(batch)


def _given_back(again: Sequence[int], results: list[Result]) -> Sequence[Result]:
    for index in again:
        cause = results[index]
        waiting = GivenBack(
            f"the worker stops before the next attempt; the last error: {cause!r:.200}"
        )
        waiting.__cause__ = cause if isinstance(cause, Exception) else None
        results[index] = waiting
    return results
