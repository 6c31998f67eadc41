"""Store events in `outbox_events`, in the caller's transaction, and notify relays after it.

    handler's events ──▶ checked ──▶ one INSERT in the transaction ──▶ EventSource, relay

Everything is checked before the first statement is sent: a refused event leaves the transaction
intact, and the caller may go on with it. Relays are notified after the commit, off the writer's
path and at most once per interval: by a thread, or by a task of the loop for asyncio sessions.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID
from weakref import WeakKeyDictionary

import msgspec
from sqlalchemy import Connection, Engine, Insert, Pool, Table, insert, text
from sqlalchemy import event as hooks
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from conquiet import outbox
from conquiet.errors import ConfigError, HandlerError
from conquiet.events.catalog import Catalog, Event
from conquiet.events.check import MAX_PAYLOAD_BYTES, check
from conquiet.events.source import TOPIC
from conquiet.events.table import EVENTS_TABLE, events_table
from conquiet.message import Message, describe
from conquiet.sql import dialect
from conquiet.sql.notification import NOTIFY_INTERVAL_SECONDS, notify_relays, notify_statement
from conquiet.sql.transaction import current

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

_MAX_PER_STATEMENT = 5_000
"""An event has 5 parameters: SQLite takes 32,766 of them, PostgreSQL 65,535."""


def emit(
    session: Session | Connection,
    *events: Event,
    table: str = EVENTS_TABLE,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> list[UUID]:
    """Store events in the caller's transaction and return their ids, in order.

    Raises `InvalidEvent` before anything is sent; commits nothing. Relays are notified after the
    commit of a `Session`. The commit of a `Connection` cannot be seen: relays find the rows at
    their next poll, or when `conquiet.sql.notify_relays(engine, table)` is called.
    """
    if not isinstance(session, (Session, Connection)):
        raise ConfigError(
            f"emit() takes a Session or a Connection, not {type(session).__name__};"
            " use emit_async() for asyncio"
        )
    into, rows = _check_all(events, table, max_bytes)
    session.execute(into, rows)  # compiled once for any number of rows
    if isinstance(session, Session):
        notify_after_commit(session, table)
    return [event.id for event in events]


async def emit_async(
    session: AsyncSession | AsyncConnection,
    *events: Event,
    table: str = EVENTS_TABLE,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> list[UUID]:
    """Store events as `emit` does, in an `AsyncSession` or an `AsyncConnection`."""
    if not inspect.iscoroutinefunction(getattr(session, "execute", None)):
        raise ConfigError(
            f"emit_async() takes an AsyncSession or an AsyncConnection, not"
            f" {type(session).__name__}; use emit() for sync ones"
        )
    for made in _statements(events, table, max_bytes):
        await session.execute(made)
    sync_session = getattr(session, "sync_session", None)
    if sync_session is not None:
        notify_after_commit(sync_session, table)
    return [event.id for event in events]


def statement(
    *events: Event, table: str = EVENTS_TABLE, max_bytes: int = MAX_PAYLOAD_BYTES
) -> Insert:
    """Return the checked INSERT of up to 5,000 events as a SQLAlchemy statement."""
    if len(events) > _MAX_PER_STATEMENT:
        raise ConfigError(
            f"{len(events)} events in one statement; {_MAX_PER_STATEMENT} are allowed"
        )
    [made] = _statements(events, table, max_bytes)
    return made


def _statements(events: Sequence[Event], table: str, max_bytes: int) -> list[Insert]:
    """Split the INSERT: databases limit the parameters of one statement."""
    into, rows = _check_all(events, table, max_bytes)
    most = _MAX_PER_STATEMENT
    return [into.values(rows[first : first + most]) for first in range(0, len(rows), most)]


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


logger = logging.getLogger("conquiet.events")

_WRITTEN = "conquiet.events.written"


def notify_after_commit(session: Session, table: str) -> None:
    """Notify the relays of a table when this session commits; takes the sync part of async ones."""
    tables: set[str] = session.info.setdefault(_WRITTEN, set())
    tables.add(table)
    if not hooks.contains(session, "after_commit", _notify_now):
        hooks.listen(session, "after_commit", _notify_now)
        hooks.listen(session, "after_rollback", _forget_tables)


def _notify_now(session: Session) -> None:
    if session.in_nested_transaction():
        return  # a savepoint was released; nothing is committed yet
    bind = session.bind
    engine = bind.engine if isinstance(bind, (Engine, Connection)) else None
    tables: set[str] = session.info.get(_WRITTEN, set())
    while tables:
        table = tables.pop()
        if engine is None:
            continue
        if engine.dialect.is_async:
            _notify_in_loop(engine, table)
        else:
            notify_relays(engine, table)


def _forget_tables(session: Session) -> None:
    if not session.in_nested_transaction():
        session.info.get(_WRITTEN, set()).clear()


_waiting: WeakKeyDictionary[Engine, set[str]] = WeakKeyDictionary()
_tasks: set[asyncio.Task[None]] = set()


def _notify_in_loop(engine: Engine, table: str) -> None:
    if not dialect.is_postgresql(engine.dialect):
        return  # relays watch a SQLite file by themselves
    tables = _waiting.setdefault(engine, set())
    is_first = not tables
    tables.add(table)
    if is_first:
        task = asyncio.get_running_loop().create_task(_notify(engine, engine.pool))
        _tasks.add(task)  # a loop holds only weak references to its tasks
        task.add_done_callback(_tasks.discard)


async def _notify(engine: Engine, pool: Pool) -> None:
    from sqlalchemy.ext.asyncio import AsyncEngine

    try:
        await asyncio.sleep(NOTIFY_INTERVAL_SECONDS)
    finally:  # also if the loop ends: the next commit starts a new task
        tables = _waiting.pop(engine, set())
    try:
        async with AsyncEngine(engine).connect() as connection:
            for table in tables:
                await connection.execute(text(notify_statement(table)))
            await connection.commit()
            if engine.pool is not pool:  # disposed of since: the new pool would not close this one
                await connection.invalidate()
    except (SQLAlchemyError, OSError) as error:
        logger.warning("could not notify relays; they will find the rows by polling: %s", error)
