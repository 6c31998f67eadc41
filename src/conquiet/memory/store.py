"""Keep state, inbox and outbox of a service in memory, changed by transactions."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

from conquiet import inbox, outbox, transaction
from conquiet.codec import encode_data
from conquiet.errors import ConfigError, Conflict, HandlerError, StoreError
from conquiet.inbox import Entry
from conquiet.memory.log import Log, LogSource
from conquiet.message import Message

Change: TypeAlias = tuple[Hashable, Callable[[Any], Any]]
"""A key and a function of its value, which is applied to the newest value at commit."""

UNITS: ContextVar[tuple[Unit, ...]] = ContextVar("conquiet.memory.units", default=())
"""The transactions around the running code, innermost last."""


def current_unit(who: str) -> Unit:
    """Return the innermost transaction; raise an error that names `who` if there is none."""
    units = UNITS.get()
    if not units:
        raise HandlerError(
            f"{who} was used outside a transaction; put memory.Transaction(store) around it:"
            " router.use(Transaction(store), Inbox(…), Outbox(…))"
        )
    return units[-1]


class Unit:
    """Buffers the writes of one transaction until its commit."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ended = False
        self.changes: list[Change] = []
        self.entries: list[Entry] = []
        self.events: list[Message[Any]] = []
        self.waits_for: Unit | None = None
        """The transaction that it waits for, because both remember the same message."""

    def belongs_to(self, store: Store) -> bool:
        return self._store is store

    def change(self, key: Hashable, function: Callable[[Any], Any]) -> None:
        self._check()
        self.changes.append((key, function))

    def value(self, key: Hashable, committed: Any) -> Any:
        """Apply this transaction's own changes to a committed value."""
        self._check()
        for changed, function in self.changes:
            if changed == key:
                committed = function(committed)
        return committed

    def remember(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Remember inbox entries and return the new ones; wait for transactions with the same."""
        self._check()
        return self._store.lock_entries(self, entries)

    def emit(self, events: Sequence[Message[Any]]) -> None:
        """Add events to the outbox."""
        self._check()
        self.events.extend(events)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo the changes of the block if it raises."""
        self._check()
        marks = len(self.changes), len(self.entries), len(self.events)
        try:
            yield
        except BaseException:
            changes, entries, events = marks
            self._store.unlock_entries(self.entries[entries:])
            del self.changes[changes:], self.entries[entries:], self.events[events:]
            raise

    def end(self) -> None:
        self._ended = True

    def _check(self) -> None:
        # Also for a thread that copied the context and outlived the handler: its writes would
        # be lost silently.
        if self._ended:
            raise HandlerError(
                "a store was used through a transaction that has ended; finish all work before"
                " the handler returns, and use the store again in the next one"
            )


Point = Literal["begin", "commit", "reply"]
_POINTS = ("begin", "commit", "reply")
_RELAY = "relay"
_RETENTION_SECONDS = 7 * 24 * 3600.0
_MISSING: Any = object()


class Store:
    """Stores values by key, with transactions, an inbox and an outbox.

    Inside a transaction, writes are buffered and applied together at its commit; outside, they are
    applied at once. Adapters use the store directly: it finds the transaction by itself.

    >>> store = Store()
    >>> with store.transaction():
    ...     store.put("order", 7)
    ...     store.add("orders")
    >>> store.get("order"), store.get("orders")
    (7, 1)

    `clock` measures the age of inbox entries, and tells when delayed events are due. `lock_timeout`
    is how long a transaction waits for another one that handles the same message.
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
        self._outbox = Log(calendar=lambda: self.clock())
        self._failures: Counter[str] = Counter()

    def get(self, key: Hashable, default: Any = None) -> Any:
        """Return the value of a key, or `default` if it has none."""
        unit = self._unit()
        with self._changed:
            value = self._values.get(key, _MISSING)
        if unit is not None:
            value = unit.value(key, value)
        return default if value is _MISSING else value

    def put(self, key: Hashable, value: Any) -> None:
        self._change(key, lambda old: value)

    def add(self, key: Hashable, amount: Any = 1) -> None:
        """Add `amount` to a number, list or str; concurrent additions are not lost."""
        self._change(key, lambda old: amount if old is _MISSING else old + amount)

    def delete(self, key: Hashable) -> None:
        self._change(key, lambda old: _MISSING)

    @contextmanager
    def transaction(self) -> Iterator[Unit]:
        """Run a transaction, rolled back if the block raises; inside another, a savepoint."""
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

    def fail_next(self, point: Point, times: int = 1) -> None:
        """Let the next `times` transactions fail with `StoreError` at this point; 0 ends it.

        `begin`: the store is unavailable. `commit`: it refuses, nothing is written. `reply`: it
        commits, and its reply is lost.
        """
        if point not in _POINTS:
            raise ConfigError(f"point={point!r}: choose one of {', '.join(_POINTS)}")
        self._failures[point] = times

    def outbox(self) -> list[Message[Any]]:
        """Return the events that are committed and not published yet."""
        return self._outbox.unsettled(_RELAY)

    def outbox_source(self, *, lease: float = 30.0, ordered: bool = False) -> LogSource:
        """Return a relay's source: ack marks an event published, nack leaves it in the outbox.

        `lease` and `ordered` are as for `Log.source`.
        """
        return self._outbox.source(_RELAY, lease=lease, ordered=ordered)

    def cancel(self, id: str) -> bool:
        """Drop a delayed event of the outbox; return whether it still waited."""
        return self._outbox.cancel(id)

    def clean_inbox(self, retention: float = _RETENTION_SECONDS) -> int:
        """Delete inbox entries older than `retention` seconds; return how many."""
        with self._changed:
            limit = self.clock() - retention
            old = [entry for entry, created in self._seen.items() if created < limit]
            for entry in old:
                del self._seen[entry]
            return len(old)

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
        """Apply all changes, or none if one of them raises."""
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
            encode_data(event)  # raises before anything is written
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
                raise StoreError(f"the store fails at {point} by fail_next")

    def lock_entries(self, unit: Unit, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Lock entries for the transaction `unit` and return the new ones.

        Wait while another transaction holds an entry: until it ends, the entry is neither new nor
        seen, as with a unique index in a database.
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
                        raise Conflict(f"deadlock: two transactions wait at {entry}")
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


class Transaction(transaction.Transaction):
    """Middleware: commits what handlers write to the store, or rolls it back."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def scope(self, batch: Sequence[Message[Any]]) -> AbstractContextManager[object]:
        return self._store.transaction()


class Inbox(inbox.Inbox):
    """Middleware: remembers handled messages in the store of the ambient transaction."""

    def remember(self, entries: Sequence[inbox.Entry]) -> Collection[inbox.Entry]:
        return current_unit("the inbox").remember(entries)


class Outbox(outbox.Outbox):
    """Middleware: stores outputs in the ambient transaction; `Store.outbox_source` reads them."""

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        current_unit("the outbox").emit(outputs)
