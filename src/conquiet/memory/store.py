"""Store: state, inbox and outbox of a service, in this process, changed by transactions."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from conquiet.codec import encode_data
from conquiet.errors import ConfigError, StoreError
from conquiet.inbox import Entry
from conquiet.memory.log import Log
from conquiet.memory.source import LogSource
from conquiet.memory.unit import UNITS, Change, Unit
from conquiet.message import Message

Point = Literal["begin", "commit", "reply"]
_POINTS = ("begin", "commit", "reply")
_RELAY = "relay"
_RETENTION_SECONDS = 7 * 24 * 3600.0
_MISSING: Any = object()


class Store:
    """A dict with transactions, an inbox and an outbox.

    Inside a transaction, writes are buffered and applied together at its commit; outside, at
    once. Adapters just use the store: it finds the transaction by itself.

    >>> store = Store()
    >>> with store.transaction():
    ...     store.put("order", 7)
    ...     store.add("orders")
    >>> store.get("order"), store.get("orders")
    (7, 1)

    `clock` tells the age of inbox entries. `lock_timeout` is how long a transaction waits for
    another one that handles the same message.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.time, lock_timeout: float = 30.0
    ) -> None:
        self.clock = clock
        self.lock_timeout = lock_timeout
        self._changed = threading.Condition(threading.RLock())
        self._values: dict[Hashable, Any] = {}
        self._seen: dict[Entry, float] = {}
        self._locks: dict[Entry, Unit] = {}
        self._outbox = Log()
        self._failures: Counter[str] = Counter()

    # --- what adapters use ------------------------------------------------------------------

    def get(self, key: Hashable, default: Any = None) -> Any:
        unit = self._unit()
        with self._changed:
            value = self._values.get(key, _MISSING)
        if unit is not None:
            value = unit.value(key, value)
        return default if value is _MISSING else value

    def put(self, key: Hashable, value: Any) -> None:
        self._change(key, lambda old: value)

    def add(self, key: Hashable, amount: Any = 1) -> None:
        """Add to a number, or to a list or str of the same kind; nothing is lost to others."""
        self._change(key, lambda old: amount if old is _MISSING else old + amount)

    def delete(self, key: Hashable) -> None:
        self._change(key, lambda old: _MISSING)

    @contextmanager
    def transaction(self) -> Iterator[Unit]:
        """BEGIN … COMMIT, or ROLLBACK if an exception passes; inside another, a savepoint."""
        outer = self._unit()
        if outer is not None:
            with outer.savepoint():
                yield outer
            return
        self._maybe_fail("begin")
        unit = Unit(self)
        token = UNITS.set((*UNITS.get(), unit))
        try:
            yield unit
            self._commit(unit)
        finally:
            UNITS.reset(token)
            unit.end()
            self.unlock_entries(unit.entries)

    # --- what tests use ---------------------------------------------------------------------

    def fail_next(self, point: Point, times: int = 1) -> None:
        """Let the next `times` transactions fail with `StoreError` at this point; 0 ends it.

        `begin`: the store cannot be reached. `commit`: it refuses, nothing is written.
        `reply`: it commits, and its answer is lost.
        """
        if point not in _POINTS:
            raise ConfigError(f"point={point!r}: choose one of {', '.join(_POINTS)}")
        self._failures[point] = times

    def outbox(self) -> list[Message[Any]]:
        """The events that are committed and not yet published."""
        return self._outbox.unsettled(_RELAY)

    def outbox_source(self, *, lease: float = 30.0, ordered: bool = False) -> LogSource:
        """What a relay reads: ack marks an event published, nack leaves it for the next."""
        return self._outbox.source(_RELAY, lease=lease, ordered=ordered)

    def clean_inbox(self, retention: float = _RETENTION_SECONDS) -> int:
        """Forget messages that took effect more than `retention` seconds ago; says how many."""
        with self._changed:
            limit = self.clock() - retention
            old = [entry for entry, created in self._seen.items() if created < limit]
            for entry in old:
                del self._seen[entry]
            return len(old)

    # --- the inside of a transaction --------------------------------------------------------

    def _unit(self) -> Unit | None:
        for unit in reversed(UNITS.get()):
            if unit.belongs_to(self):
                return unit
        return None

    def _change(self, key: Hashable, function: Callable[[Any], Any]) -> None:
        unit = self._unit()
        if unit is not None:
            unit.change(key, function)
        else:
            with self._changed:
                self._apply([(key, function)])

    def _apply(self, changes: Sequence[Change]) -> None:
        """All of the changes or, if one cannot be applied, none."""
        values: dict[Hashable, Any] = {}
        for key, function in changes:
            values[key] = function(values.get(key, self._values.get(key, _MISSING)))
        for key, value in values.items():
            if value is _MISSING:
                self._values.pop(key, None)
            else:
                self._values[key] = value

    def _commit(self, unit: Unit) -> None:
        for event in unit.events:
            encode_data(event)  # what cannot be written must fail before anything is
        with self._changed:
            self._maybe_fail("commit")
            self._apply(unit.changes)
            now = self.clock()
            self._seen.update((entry, now) for entry in unit.entries)
            self._outbox.append(unit.events)
            self._maybe_fail("reply")

    def _maybe_fail(self, point: Point) -> None:
        with self._changed:
            if self._failures[point] > 0:
                self._failures[point] -= 1
                raise StoreError(f"the store was told to fail at {point} (fail_next)")

    # --- the inbox --------------------------------------------------------------------------

    def lock_entries(self, unit: Unit, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Note entries for a transaction and return the new ones.

        An entry that another transaction has noted is neither new nor seen before that one
        ended: wait for it, as a unique index in a database does.
        """
        fresh: list[Entry] = []
        with self._changed:
            for entry in entries:
                self._wait_for_others(unit, entry)
                if entry not in self._seen and entry not in self._locks:
                    self._locks[entry] = unit
                    unit.entries.append(entry)
                    fresh.append(entry)
        return fresh

    def _wait_for_others(self, unit: Unit, entry: Entry) -> None:
        deadline = time.monotonic() + self.lock_timeout
        try:
            while (holder := self._locks.get(entry, unit)) is not unit:
                unit.waits_for = other = holder
                while other.waits_for is not None:
                    other = other.waits_for
                    if other is unit:
                        raise StoreError(f"deadlock: two transactions wait at {entry}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreError(f"waited {self.lock_timeout:g} s for {entry}, held elsewhere")
                self._changed.wait(left)
        finally:
            unit.waits_for = None

    def unlock_entries(self, entries: Sequence[Entry]) -> None:
        with self._changed:
            for entry in entries:
                self._locks.pop(entry, None)
            self._changed.notify_all()
