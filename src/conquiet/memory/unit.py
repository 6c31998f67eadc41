"""Unit: one transaction of a `Store`, and how code inside it finds it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

from conquiet.errors import HandlerError
from conquiet.inbox import Entry
from conquiet.message import Message

if TYPE_CHECKING:
    from conquiet.memory.store import Store

Change: TypeAlias = tuple[Hashable, Callable[[Any], Any]]
"""A key, and what becomes of its value; applied to the newest value at commit."""

UNITS: ContextVar[tuple[Unit, ...]] = ContextVar("conquiet.memory.units", default=())
"""The transactions around the running code, innermost last."""


def ambient(who: str) -> Unit:
    """The innermost transaction; `who` needs it."""
    units = UNITS.get()
    if not units:
        raise HandlerError(
            f"{who} was used outside a transaction; put memory.Transaction(store) around it:"
            " router.use(Transaction(store), Inbox(…), Outbox(…))"
        )
    return units[-1]


class Unit:
    """What one transaction wants to write; nobody else sees it before the commit."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ended = False
        self.changes: list[Change] = []
        self.entries: list[Entry] = []
        self.events: list[Message[Any]] = []
        self.waits_for: Unit | None = None
        """Whose end it waits for, at a message that both want to remember."""

    def belongs_to(self, store: Store) -> bool:
        return self._store is store

    def change(self, key: Hashable, function: Callable[[Any], Any]) -> None:
        self._check()
        self.changes.append((key, function))

    def value(self, key: Hashable, committed: Any) -> Any:
        """The value as this transaction sees it: its own changes on top of what is committed."""
        self._check()
        for changed, function in self.changes:
            if changed == key:
                committed = function(committed)
        return committed

    def remember(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Note inbox entries; returns the new ones. Waits for others that note the same."""
        self._check()
        return self._store.lock_entries(self, entries)

    def emit(self, events: Sequence[Message[Any]]) -> None:
        """Add events to the outbox."""
        self._check()
        self.events.extend(events)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what was done inside if an exception passes, and only that."""
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
        # Also met by a thread that copied the context and outlived the handler: its writes
        # would otherwise be lost without a word.
        if self._ended:
            raise HandlerError(
                "a store was used through a transaction that has ended; finish all work before"
                " the handler returns, and ask the store anew in the next one"
            )
