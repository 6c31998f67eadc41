"""emit: an event becomes a row in the caller's transaction.

Everything is checked before the first statement is sent: a refused event leaves the transaction
as it was, and the caller may go on with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Insert, Table, insert
from sqlalchemy.orm import Session

from conquiet.errors import ConfigError
from conquiet.events.catalog import Catalog
from conquiet.events.check import MAX_PAYLOAD_BYTES, check
from conquiet.events.event import Event
from conquiet.events.table import EVENTS_TABLE, events_table
from conquiet.events.waking import wake_after_commit

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

_MOST_PER_STATEMENT = 5_000
"""5 parameters each: SQLite takes 32,766 of them, PostgreSQL 65,535."""


def emit(
    session: Session | Connection,
    *events: Event,
    table: str = EVENTS_TABLE,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> list[UUID]:
    """Store events in the caller's transaction; their ids, in order. Nothing is committed.

    Raises `InvalidEvent` before anything is sent. After the commit of a `Session`, relays are
    woken; with a `Connection`, whose commit nobody sees, they find the rows when they look next,
    or when `conquiet.sql.notify_relays(engine, table)` tells them.
    """
    if not isinstance(session, (Session, Connection)):
        raise ConfigError(
            f"emit() takes a Session or a Connection, not {type(session).__name__};"
            " for asyncio there is emit_async()"
        )
    into, rows = _checked(events, table, max_bytes)
    session.execute(into, rows)  # compiled once, whatever their number
    if isinstance(session, Session):
        wake_after_commit(session, table)
    return [event.id for event in events]


async def emit_async(
    session: AsyncSession | AsyncConnection,
    *events: Event,
    table: str = EVENTS_TABLE,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> list[UUID]:
    """The same for `AsyncSession` and `AsyncConnection`."""
    if not inspect.iscoroutinefunction(getattr(session, "execute", None)):
        raise ConfigError(
            f"emit_async() takes an AsyncSession or an AsyncConnection, not"
            f" {type(session).__name__}; for the others there is emit()"
        )
    for made in _statements(events, table, max_bytes):
        await session.execute(made)
    sync_session = getattr(session, "sync_session", None)
    if sync_session is not None:
        wake_after_commit(sync_session, table)
    return [event.id for event in events]


def statement(
    *events: Event, table: str = EVENTS_TABLE, max_bytes: int = MAX_PAYLOAD_BYTES
) -> Insert:
    """The checked INSERT, for whatever executes one; of 5,000 events at most."""
    if len(events) > _MOST_PER_STATEMENT:
        raise ConfigError(
            f"{len(events)} events in one statement; {_MOST_PER_STATEMENT} are allowed"
        )
    [made] = _statements(events, table, max_bytes)
    return made


def _statements(events: Sequence[Event], table: str, max_bytes: int) -> list[Insert]:
    """Each with its rows in it; databases limit the parameters of one."""
    into, rows = _checked(events, table, max_bytes)
    most = _MOST_PER_STATEMENT
    return [into.values(rows[first : first + most]) for first in range(0, len(rows), most)]


def _checked(
    events: Sequence[Event], table: str, max_bytes: int
) -> tuple[Insert, list[dict[str, Any]]]:
    """The INSERT and its rows: all is checked before the first is sent."""
    if not events:
        raise ConfigError("emit at least one event")
    checked = [check(event, max_bytes) for event in events]
    catalog = events[0].catalog
    if any(event.catalog is not catalog for event in events):
        raise ConfigError("events of two catalogs; emit those of each by themselves")
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
