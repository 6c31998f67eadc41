"""emit: an event becomes a row in the caller's transaction.

Everything is checked before the first statement is sent: a refused event leaves the transaction
as it was, and the caller may go on with it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Engine, Insert, Table, insert
from sqlalchemy import event as hooks
from sqlalchemy.orm import Session

from conquiet.errors import ConfigError
from conquiet.events.catalog import Catalog
from conquiet.events.check import MAX_PAYLOAD_BYTES, check
from conquiet.events.event import Event
from conquiet.events.table import EVENTS_TABLE, events_table
from conquiet.sql.wakeup import written

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

_WRITTEN = "conquiet.events.written"


def emit(
    session: Session | Connection,
    *events: Event,
    table: str = EVENTS_TABLE,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> list[UUID]:
    """Store events in the caller's transaction; their ids, in order. Nothing is committed.

    Raises `InvalidEvent` before anything is sent. After the commit of a `Session`, relays are
    woken; without one they find the rows when they look next.
    """
    if not isinstance(session, (Session, Connection)):
        raise ConfigError(
            f"emit() takes a Session or a Connection, not {type(session).__name__};"
            " for asyncio there is emit_async()"
        )
    made = statement(*events, table=table, max_bytes=max_bytes)
    session.execute(made)
    if isinstance(session, Session):
        _wake_after_commit(session, table)
    return [event.id for event in events]


async def emit_async(
    session: AsyncSession | AsyncConnection,
    *events: Event,
    table: str = EVENTS_TABLE,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> list[UUID]:
    """The same for `AsyncSession` and `AsyncConnection`."""
    await session.execute(statement(*events, table=table, max_bytes=max_bytes))
    return [event.id for event in events]


def statement(
    *events: Event, table: str = EVENTS_TABLE, max_bytes: int = MAX_PAYLOAD_BYTES
) -> Insert:
    """The checked INSERT, for whatever executes one."""
    if not events:
        raise ConfigError("emit at least one event")
    catalog = events[0].catalog
    rows: list[dict[str, Any]] = []
    for event in events:
        if event.catalog is not catalog:
            raise ConfigError("events of two catalogs; emit those of each by themselves")
        row = check(event, max_bytes)._asdict()
        row["payload_json"] = msgspec.json.decode(row["payload_json"])
        rows.append(row)
    return insert(_table(catalog, table)).values(rows)


@lru_cache(maxsize=64)
def _table(catalog: Catalog, name: str) -> Table:
    return events_table(catalog, name)


def _wake_after_commit(session: Session, table: str) -> None:
    tables: set[str] = session.info.setdefault(_WRITTEN, set())
    tables.add(table)
    if not hooks.contains(session, "after_commit", _wake):
        hooks.listen(session, "after_commit", _wake)


def _wake(session: Session) -> None:
    bind = session.bind
    engine = bind.engine if isinstance(bind, (Engine, Connection)) else None
    tables: set[str] = session.info.get(_WRITTEN, set())
    while tables:
        table = tables.pop()
        if engine is not None:
            written(engine, table)
