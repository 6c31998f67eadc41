"""Store events in `outbox_events`, in the caller's transaction, and notify relays after it.

    handler's events ──▶ checked ──▶ one INSERT in the transaction ──▶ EventSource, relay

Everything is checked before the first statement is sent: a refused event leaves the transaction
intact, and the caller may go on with it. Relays are notified after the commit, off the writer's
path and at most once per interval: by a thread, or by a task of the loop for asyncio sessions.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, overload
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Insert, Table, insert
from sqlalchemy.orm import Session

from conquiet import outbox
from conquiet.config import EVENTS_TABLE
from conquiet.errors import ConfigError, HandlerError
from conquiet.events.catalog import Catalog, Event
from conquiet.events.check import MAX_PAYLOAD_BYTES, check
from conquiet.events.source import TOPIC
from conquiet.events.table import events_table
from conquiet.message import Message, describe
from conquiet.sql import handle
from conquiet.sql.notification import notify_after_commit
from conquiet.sql.transaction import current

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

_MAX_PER_STATEMENT = 5_000
"""An event has 5 parameters: SQLite takes 32,766 of them, PostgreSQL 65,535."""


@overload
def emit(
    session: Session | Connection, *events: Event, table: str = ..., max_bytes: int = ...
) -> list[UUID]: ...


@overload
def emit(
    session: AsyncSession | AsyncConnection, *events: Event, table: str = ..., max_bytes: int = ...
) -> Coroutine[Any, Any, list[UUID]]: ...


def emit(
    session: Any,
    *events: Event,
    table: str = EVENTS_TABLE,
    max_bytes: int = MAX_PAYLOAD_BYTES,
    at: None = None,
    after: None = None,
) -> Any:
    """Store events in the caller's transaction and return their ids, in order.

    Await the result if the session is an `AsyncSession` or an `AsyncConnection`. Raises
    `InvalidEvent` before anything is sent, also for a payload of more than `max_bytes` (256 KiB);
    commits nothing. `table` is that of the outbox; `at` and `after` are refused.
    Relays are notified after the commit of
    a session. The commit of a connection cannot be seen: relays find the rows at their next poll,
    or when `conquiet.sql.notify_relays(engine, table)` is called.
    """
    if at is not None or after is not None:
        raise ConfigError(
            f"emit() of conquiet.events takes neither at= nor after=: {table} holds no delayed"
            " events; an outbox does, by app.emit(session, event, after=…)"
        )
    is_sync = isinstance(session, (Session, Connection))
    if not is_sync and not handle.is_sqlalchemy_async(session):
        raise ConfigError(
            "emit() takes SQLAlchemy's Session, Connection, AsyncSession or AsyncConnection, not"
            f" {type(session).__name__}"
        )
    into, rows = _check_all(events, table, max_bytes)
    ids = [event.id for event in events]
    if is_sync:
        return _store(session, into, rows, table, ids)
    stored: Coroutine[Any, Any, list[UUID]] = session.run_sync(_store, into, rows, table, ids)
    return stored


def _store(
    session: Session | Connection,
    into: Insert,
    rows: list[dict[str, Any]],
    table: str,
    ids: list[UUID],
) -> list[UUID]:
    session.execute(into, rows)  # compiled once for any number of rows
    if isinstance(session, Session):
        notify_after_commit(session, table)
    return ids


def statement(
    *events: Event, table: str = EVENTS_TABLE, max_bytes: int = MAX_PAYLOAD_BYTES
) -> Insert:
    """Return the checked INSERT of up to 5,000 events as a SQLAlchemy statement."""
    if len(events) > _MAX_PER_STATEMENT:
        raise ConfigError(
            f"{len(events)} events in one statement; {_MAX_PER_STATEMENT} are allowed"
        )
    into, rows = _check_all(events, table, max_bytes)
    return into.values(rows)


def _check_all(
    events: Sequence[Event], table: str, max_bytes: int
) -> tuple[Insert, list[dict[str, Any]]]:
    """Check all events; return the INSERT and its rows."""
    if not events:
        raise ConfigError("emit at least one event")
    checked = [check(event, max_bytes) for event in events]
    catalog = events[0].catalog
    if any(event.catalog is not catalog for event in events):
        raise ConfigError(
            "events of two catalogs; emit the events of each catalog in a call of its own"
        )
    if len({one.id for one in checked}) < len(checked):
        raise ConfigError("the same event twice; each is emitted once")
    rows: list[dict[str, Any]] = []
    for one in checked:
        row: dict[str, Any] = one._asdict()
        row["payload_json"] = msgspec.json.decode(row["payload_json"])
        rows.append(row)
    return insert(_table(catalog, table)), rows


@lru_cache(maxsize=64)
def _table(catalog: Catalog, name: str) -> Table:
    return events_table(catalog, name)


class EventsOutbox(outbox.Outbox):
    """Middleware: stores the `Event`s that handlers return, those of a batch in one statement.

    Use it in place of `conquiet.sql.Outbox`, inside a `Transaction`:

    >>> from conquiet import Router
    >>> from conquiet.sql import Inbox, Transaction
    >>> router = Router()
    >>> router.use(Transaction("sqlite:///shop.sqlite"), Inbox("shop"), EventsOutbox())

    The topic of the events is set by `EventSource`, not by handlers.

    `table` is that of the events.
    """

    def __init__(self, table: str = EVENTS_TABLE) -> None:
        super().__init__(TOPIC)
        self.table = table

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        events = [_event(output) for output in outputs]
        unit = current("the outbox of events")
        unit.use_table(self.table)
        emit(unit.connection, *events, table=self.table)
        unit.note_write(self.table)


def _event(output: Message[Any]) -> Event:
    if not isinstance(output.data, Event):
        raise HandlerError(
            f"{describe(output.attributes)}: a handler before EventsOutbox returns events that"
            f" CATALOG.event(…) made, not {type(output.data).__name__}"
        )
    return output.data
