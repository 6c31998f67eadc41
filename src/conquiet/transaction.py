"""Run a batch in one transaction; the same state machine for every store.

batch ──▶ begin ──▶ chain ──▶ commit ──▶ results
  ▲                   │ a message fails: roll back; if there were several, one by one
  │                   │ the store fails: roll back, retry, then smaller groups, then one by one
  └──── groups ◀──────┘
            no transaction can begin, a table is missing: what is left is given back
            one fails alone, also after others have committed: it is to blame
            nothing commits: all are given back, and it costs no message an attempt
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from conquiet.acking import defer_settlements
from conquiet.errors import Conflict, ConquietError, HandlerError, StoreError
from conquiet.gate import FailedKeys
from conquiet.handler import Process, Result
from conquiet.message import Message, describe
from conquiet.shutdown import pause
from conquiet.stage import Stage

ATOMIC: ContextVar[bool] = ContextVar("conquiet.atomic", default=False)
"""True inside a transaction: the first failure there ends the batch at once."""

MAX_BLAMELESS = 20
"""How many deliveries of a message may fail as the store's before the store is probed."""

_RETRY_SECONDS = 0.05
_CONFLICT_SECONDS = 0.01
_CONFLICT_ATTEMPTS = 10
"""How often a single message is run while other transactions win; one of them commits each time."""
_PARTS = 4
"""A group that failed as the store's is cut into about this many."""
_CALM_COMMITS = 50
"""After so many commits without a conflict, groups may be twice as large. Each conflict doubles the
number: a deadlock costs a second."""
_MAX_CALM_COMMITS = 12_800
_MAX_LIMIT = 500
_MAX_SUSPECTS = 10_000


class RunAlone(ConquietError):
    """A message of this chain cannot share its transaction; from now on each has its own."""


class Transaction(ABC):
    """Middleware: commits a batch's effects, inbox and outbox together, or not at all."""

    stage = Stage.TRANSACTION
    blocks = True
    """Whether it blocks its thread while it waits: an async worker then runs its chain in threads.
    If not, it waits by `conquiet.bridge`."""
    is_async = False
    """Whether it has an async client, and needs an async worker."""
    capacity: int | None = None
    """How many transactions can be open at once; None if there is no limit."""
    pool: object = None
    """Where its connections come from: async workers on one pool share the capacity."""
    max_store_attempts = 3
    """How often a batch is run while the store fails, before it is cut into smaller groups."""

    @abstractmethod
    def scope(self, batch: Sequence[Message[Any]]) -> AbstractContextManager[object]:
        """Begin on enter; commit on exit, or roll back after an exception.

        A failure of the store itself is raised as `StoreError`.
        """

    def __call__(self, next: Process) -> Process:
        return Batches(self, next).process

    def probe(self) -> None:
        """Commit a transaction without messages; raise if the store fails."""
        with self.scope(()):
            pass

    def commit(self, next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        """Run a batch in one transaction, once."""
        begun = False
        ackings = [message.acking for message in batch if message.acking is not None]
        try:
            with defer_settlements(ackings), self.scope(batch):
                begun = True
                return self.run(next, batch)
        except StoreError as error:
            error.is_outage = error.is_outage or not begun
            raise

    def run(self, next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        """Run a batch inside the transaction; the first failure is raised."""
        return run_atomically(next, batch)


def run_atomically(next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
    """Run the rest of the chain; raise the first failure."""
    token = ATOMIC.set(True)
    try:
        results = next(batch)
    finally:
        ATOMIC.reset(token)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Batches:
    """Runs the batches of one chain, whole or in groups, and decides who is to blame.

    All threads of a worker share it.
    """

    def __init__(self, transaction: Transaction, next: Process) -> None:
        self._transaction = transaction
        self._next = next
        self._size = GroupSize()
        self._suspects = Suspects()
        self._commits = 0

    def process(self, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        """Run a batch and return one result per message."""
        commits = self._commits
        attempts = self._transaction.max_store_attempts
        groups: deque[tuple[Sequence[int], int]] = deque([(range(len(batch)), attempts)])
        results: dict[int, Result] = {}
        suspects: list[int] = []
        failed_keys = FailedKeys()
        while groups:
            group, attempts = groups.popleft()
            if self._size.is_exceeded(group):
                groups.extendleft((part, attempts) for part in reversed(self._size.cut(group)))
                continue
            if results:
                group = _without_blocked(group, batch, failed_keys, results)
                if not group:
                    continue
            messages = batch if len(group) == len(batch) else [batch[index] for index in group]
            try:
                done = self._commit(messages, 1 if suspects else attempts)
            except StoreError as error:
                if error.is_outage or not pause(0):
                    left = [*group, *(index for rest, _ in groups for index in rest)]
                    results.update(dict.fromkeys(left, error))
                    suspects.clear()
                    break
                if len(group) > 1:
                    groups.extendleft((part, 1) for part in reversed(_cut(group)))
                    continue
                suspects.append(group[0])
                done = [error]
            except Exception as error:  # noqa: BLE001 - any error was rolled back
                if len(group) > 1:
                    groups.extendleft(([index], attempts) for index in reversed(group))
                    continue
                done = [error]
            if len(group) == len(batch) and not suspects:
                return done
            for index, result in zip(group, done, strict=True):
                results[index] = result
                if isinstance(result, Exception):
                    failed_keys.add(batch[index])
        for index in suspects:
            results[index] = self._judge(batch[index], results[index], commits)
        return [results[index] for index in range(len(batch))]

    def _commit(self, messages: Sequence[Message[Any]], attempts: int) -> Sequence[Result]:
        """Run messages in one transaction, up to `attempts` times while the store fails."""
        attempt = 0
        while True:
            attempt += 1
            try:
                results = self._transaction.commit(self._next, messages)
            except RunAlone:
                self._size.run_alone()
                raise
            except Conflict as error:
                failure: StoreError = error
                self._size.shrink(len(messages))
                last = 1 if len(messages) > 1 else _CONFLICT_ATTEMPTS
                seconds = _CONFLICT_SECONDS
            except StoreError as error:
                failure = error
                last = self._transaction.max_store_attempts if error.is_outage else attempts
                seconds = _RETRY_SECONDS
            else:
                self._size.grow()
                self._suspects.remove(messages)
                for result in results:
                    if not isinstance(result, Exception):
                        self._commits += 1
                        break
                return results
            if attempt >= last or not pause(seconds * attempt * random.uniform(0.5, 1.5)):
                raise failure

    def _judge(self, message: Message[Any], error: Result, commits: int) -> Result:
        """Return the final result of a message that failed alone as the store's.

        If nothing has committed since it first failed, the store may be at fault. Else it runs
        again, since the store may have recovered in between.
        """
        suspect = self._suspects.add(message, commits)
        if suspect.commits == self._commits and suspect.failures >= MAX_BLAMELESS:
            try:
                self._transaction.probe()
            except Exception:  # noqa: BLE001 - the store fails, whatever it says
                return error
            self._commits += 1
        if suspect.commits == self._commits:
            return error
        try:
            return self._commit([message], self._transaction.max_store_attempts)[0]
        except StoreError as again:
            if again.is_outage or not pause(0):
                return again
            blamed = HandlerError(
                f"{describe(message.attributes)} fails alone while other messages are committed,"
                f" so that it counts as a failed attempt: {again}"
            )
            blamed.__cause__ = again
            return blamed
        except Exception as other:  # noqa: BLE001 - any error was rolled back
            return other


class GroupSize:
    """Limits how many messages share a transaction.

    A group holds all its locks until it commits: the smaller it is, the fewer conflicts with other
    transactions.
    """

    def __init__(self) -> None:
        self._limit = 0
        self._calm = 0
        self._needed = _CALM_COMMITS
        self._is_fixed = False

    def is_exceeded(self, group: Sequence[int]) -> bool:
        """Return whether a group must be cut."""
        return 0 < self._limit < len(group)

    def cut(self, group: Sequence[int]) -> list[Sequence[int]]:
        """Cut a group by the limit."""
        return _cut(group, self._limit or len(group))

    def shrink(self, size: int) -> None:
        """Note a conflict of a group of this size."""
        self._calm = 0
        if size > 1:
            smaller = max(1, size // _PARTS)
            self._limit = min(self._limit or smaller, smaller)
            self._needed = min(2 * self._needed, _MAX_CALM_COMMITS)

    def run_alone(self) -> None:
        """Let no messages share a transaction any more."""
        self._limit = 1
        self._is_fixed = True

    def grow(self) -> None:
        """Note a commit; after many of them without a conflict, double the limit."""
        if not self._limit or self._is_fixed:
            return
        self._calm += 1
        if self._calm < self._needed:
            return
        self._calm = 0
        if self._limit < _MAX_LIMIT:
            self._limit *= 2
        else:
            self._limit, self._needed = 0, _CALM_COMMITS


@dataclass(slots=True)
class Suspect:
    """Counts the failures of a message that failed alone as the store's."""

    commits: int
    """The commits of its chain before it first failed."""
    failures: int = 0


class Suspects:
    """Remembers messages that failed alone as the store's, until they are committed."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Suspect] = {}
        self._lock = threading.Lock()

    def add(self, message: Message[Any], commits: int) -> Suspect:
        """Count a failure; `commits` is kept from the first one."""
        key = _key(message)
        with self._lock:
            suspect = self._known.pop(key, None) or Suspect(commits)
            suspect.failures += 1
            self._known[key] = suspect
            if len(self._known) > _MAX_SUSPECTS:
                del self._known[next(iter(self._known))]
        return suspect

    def remove(self, messages: Sequence[Message[Any]]) -> None:
        """Forget messages that were committed."""
        if self._known:
            with self._lock:
                for message in messages:
                    self._known.pop(_key(message), None)


def _key(message: Message[Any]) -> tuple[str, str]:
    return message.identity, message.handler.name if message.handler is not None else ""


def _cut(group: Sequence[int], size: int = 0) -> list[Sequence[int]]:
    size = size or max(1, len(group) // _PARTS)
    return [group[start : start + size] for start in range(0, len(group), size)]


def _without_blocked(
    group: Sequence[int],
    batch: Sequence[Message[Any]],
    failed_keys: FailedKeys,
    results: dict[int, Result],
) -> Sequence[int]:
    """Return the messages of a group that need not wait for an earlier one of their key."""
    for index in group:
        blocked = failed_keys.blocking_error(batch[index])
        if blocked is not None:
            results[index] = blocked
    return [index for index in group if index not in results]
