"""Transaction: one BEGIN … COMMIT around a batch. The stores differ; this state machine does not.

batch ──▶ begin ──▶ chain ──▶ commit ──▶ results
                      │ a message fails: roll back; then, if there were several,
                      │ each one again by itself, in a transaction of its own
                      └ the store fails: roll back, try the batch again, then give it
                        back whole; no message is blamed
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from conquiet.errors import StoreError
from conquiet.handler import Process, Result
from conquiet.message import Message
from conquiet.ordering import Turns
from conquiet.stage import Stage
from conquiet.stopping import pause

ATOMIC: ContextVar[bool] = ContextVar("conquiet.atomic", default=False)
"""True inside a transaction: the first failure there ends the batch at once."""

_SECONDS_BETWEEN_TRIES = 0.05


class Transaction(ABC):
    """Middleware: commits a batch's effects, inbox and outbox together, or not at all."""

    stage = Stage.TRANSACTION
    store_tries = 3
    """How often a batch is tried while the store fails, before it is given back."""

    @abstractmethod
    def scope(self, batch: Sequence[Message[Any]]) -> AbstractContextManager[object]:
        """BEGIN on enter; COMMIT on exit, or ROLLBACK if an exception passes.

        A failure of the store itself is raised as `StoreError`.
        """

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            try:
                return self._commit(next, batch)
            except StoreError as error:
                return [error] * len(batch)
            except Exception as error:  # noqa: BLE001 - whatever it was, it was rolled back
                if len(batch) == 1:
                    return [error]
            # Outside the except, or the batch's error would be the context of each of theirs.
            return _one_by_one(process, batch)

        return process

    def _commit(self, next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        for attempt in range(1, self.store_tries + 1):
            try:
                with self.scope(batch):
                    return _atomically(next, batch)
            except StoreError:
                if attempt == self.store_tries:
                    raise
                if not pause(_SECONDS_BETWEEN_TRIES * attempt * random.uniform(0.5, 1.5)):
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
    turns = Turns()
    results: list[Result] = []
    for message in batch:
        result: Result = turns.lost(message) or process((message,))[0]
        if isinstance(result, Exception):
            turns.failed(message)
        results.append(result)
        if isinstance(result, StoreError):  # it would fail for the rest as well
            results += [result] * (len(batch) - len(results))
            break
    return results
