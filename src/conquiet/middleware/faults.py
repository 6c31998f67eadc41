"""Inject faults in tests: duplicates, random failures and delays."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from conquiet.errors import ConfigError, ConquietError
from conquiet.gate import FailedKeys, next_result
from conquiet.handler import AROUND, Process, Result
from conquiet.message import Message, describe
from conquiet.shutdown import pause


class InjectedFault(ConquietError):
    """Raised by `FailAtRandom`, unless it is given another error."""


class Duplicate:
    """Delivers some of the successful messages a second time.

    Put it first, outside the inbox, in the place of a broker. Without an inbox, the second
    delivery may add outputs.

    `probability` is that of each message; `dice` replaces the random numbers, for the same faults
    in every run.
    """

    def __init__(self, probability: float = 0.5, dice: random.Random | None = None) -> None:
        self._probability = _check_probability(probability)
        self._dice = dice or random.Random()

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results = list(next(batch))
            chosen = [
                index
                for index, result in enumerate(results)
                if not isinstance(result, Exception) and self._dice.random() < self._probability
            ]
            if not chosen:
                return results
            repeated = next([_second_delivery(batch[index]) for index in chosen])
            for index, second in zip(chosen, repeated, strict=True):
                first = results[index]
                if isinstance(second, Exception):
                    results[index] = second
                elif second and not isinstance(first, Exception):
                    results[index] = [*first, *second]
            return results

        return process


class FailAtRandom:
    """Fails some of the messages, before they run or after their effects.

    `error` is an exception class, or a function that creates the error from a text. With `after`,
    they fail when they have been handled, so that their effects have to be rolled back.

    `probability` is that of each message; `dice` replaces the random numbers, for the same faults
    in every run.
    """

    def __init__(
        self,
        probability: float = 0.5,
        error: Callable[[str], Exception] = InjectedFault,
        *,
        after: bool = False,
        dice: random.Random | None = None,
    ) -> None:
        self._probability = _check_probability(probability)
        self._error = error
        self._after = after
        self._dice = dice or random.Random()

    def __call__(self, next: Process) -> Process:
        def before(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results: list[Result | None] = []
            failed_keys = FailedKeys()
            for message in batch:
                fault = failed_keys.blocking_error(message) or self._fault(message)
                if fault is not None:
                    failed_keys.add(message)
                results.append(fault)
            spared = [m for m, fault in zip(batch, results, strict=True) if fault is None]
            passed = iter(next(spared) if spared else ())
            return [fault if fault is not None else next_result(passed) for fault in results]

        def after(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            return [
                result if isinstance(result, Exception) else self._fault(message) or result
                for message, result in zip(batch, next(batch), strict=True)
            ]

        return after if self._after else before

    def _fault(self, message: Message[Any]) -> Exception | None:
        if self._dice.random() >= self._probability:
            return None
        return self._error(f"injected fault on {describe(message.attributes)}")


class Delay:
    """Delays each call of a handler, by between `least` and `most` seconds.

    Without `most` it is always `least`. `dice` replaces the random numbers, for the same delays in
    every run, and `sleep` the function that waits, for tests without a wait.
    """

    def __init__(
        self,
        least: float,
        most: float | None = None,
        *,
        dice: random.Random | None = None,
        sleep: Callable[[float], object] = pause,
    ) -> None:
        self._least = least
        self._most = least if most is None else most
        if not 0 <= self._least <= self._most < float("inf"):
            raise ConfigError(f"Delay({least}, {most}): give seconds, the smaller number first")
        self._dice = dice or random.Random()
        self._sleep = sleep

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            token = AROUND.set((*AROUND.get(), self._delay))
            try:
                return next(batch)
            finally:
                AROUND.reset(token)

        return process

    def _delay(
        self, messages: Sequence[Message[Any]], call: Callable[[], Sequence[Result]]
    ) -> Sequence[Result]:
        self._sleep(self._dice.uniform(self._least, self._most))
        return call()


def _check_probability(probability: float) -> float:
    if not 0 <= probability <= 1:
        raise ConfigError(f"a probability lies between 0 and 1, not at {probability!r}")
    return probability


def _second_delivery(message: Message[Any]) -> Message[Any]:
    twin = message.copy()
    twin.handler = message.handler
    twin.deliveries += 1
    return twin
