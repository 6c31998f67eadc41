"""Run a batch in one transaction; the same state machine for every store.

batch ──▶ begin ──▶ chain ──▶ commit ──▶ results
                      │ a message fails: roll back; then, if there were several,
                      │ run each again in a transaction of its own
                      └ the store fails: roll back, retry the batch, then give it
                        back whole; it costs no message an attempt
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from conquiet.acking import defer_settlements
from conquiet.errors import StoreError
from conquiet.gate import FailedKeys
from conquiet.handler import Process, Result
from conquiet.message import Message
from conquiet.shutdown import pause
from conquiet.stage import Stage

ATOMIC: ContextVar[bool] = ContextVar("conquiet.atomic", default=False)
"""True inside a transaction: the first failure there ends the batch at once."""

_RETRY_SECONDS = 0.05


class Transaction(ABC):
    """Middleware: commits a batch's effects, inbox and outbox together, or not at all."""

    stage = Stage.TRANSACTION
    max_store_attempts = 3
    """How often a batch is run while the store fails, before it is given back."""

    @abstractmethod
    def scope(self, batch: Sequence[Message[Any]]) -> AbstractContextManager[object]:
        """Begin on enter; commit on exit, or roll back after an exception.

        A failure of the store itself is raised as `StoreError`.
        """

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            try:
                return self._commit(next, batch)
            except StoreError as error:
                return [error] * len(batch)
            except Exception as error:  # noqa: BLE001 - any error was rolled back
                if len(batch) == 1:
                    return [error]
            # Outside the except, so that the batch's error is not the context of later errors.
            return _one_by_one(process, batch)

        return process

    def _commit(self, next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        ackings = [message.acking for message in batch if message.acking is not None]
        for attempt in range(1, self.max_store_attempts + 1):
            try:
                with defer_settlements(ackings), self.scope(batch):
                    return _atomically(next, batch)
            except StoreError:
                if attempt == self.max_store_attempts:
                    raise
                if not pause(_RETRY_SECONDS * attempt * random.uniform(0.5, 1.5)):
                    raise  # the worker stops
        raise AssertionError("unreachable")


def _atomically(next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
    token = ATOMIC.set(True)
    try:
        results = next(batch)
    finally:
        ATOMIC.reset(token)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _one_by_one(process: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
    failed_keys = FailedKeys()
    results: list[Result] = []
    for message in batch:
        result: Result = failed_keys.blocking_error(message) or process((message,))[0]
        if isinstance(result, Exception):
            failed_keys.add(message)
        results.append(result)
        if isinstance(result, StoreError):  # the rest would fail as well
            results += [result] * (len(batch) - len(results))
            break
    return results
