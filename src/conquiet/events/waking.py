"""Waking relays: after the commit of a session that emitted, off its path, and coalesced (S13).

A session of asyncio has no thread to send the notification from; a task of its loop does it, by a
connection of the same pool, once for all that was committed within a moment.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Pool, text
from sqlalchemy import event as hooks
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from conquiet.sql import dialect
from conquiet.sql.notification import NOTIFY_INTERVAL_SECONDS, notify_relays, notify_statement

logger = logging.getLogger("conquiet.events")

_WRITTEN = "conquiet.events.written"


def wake_after_commit(session: Session, table: str) -> None:
    """Tell the relays of a table when this session commits; the sync part of an `AsyncSession`."""
    tables: set[str] = session.info.setdefault(_WRITTEN, set())
    tables.add(table)
    if not hooks.contains(session, "after_commit", _wake):
        hooks.listen(session, "after_commit", _wake)
        hooks.listen(session, "after_rollback", _forget)


def _wake(session: Session) -> None:
    if session.in_nested_transaction():
        return  # a savepoint was released, and nothing is committed yet
    bind = session.bind
    engine = bind.engine if isinstance(bind, (Engine, Connection)) else None
    tables: set[str] = session.info.get(_WRITTEN, set())
    while tables:
        table = tables.pop()
        if engine is None:
            continue
        if engine.dialect.is_async:
            _written_in_loop(engine, table)
        else:
            notify_relays(engine, table)


def _forget(session: Session) -> None:
    if not session.in_nested_transaction():
        session.info.get(_WRITTEN, set()).clear()


_waiting: WeakKeyDictionary[Engine, set[str]] = WeakKeyDictionary()
_tasks: set[asyncio.Task[None]] = set()


def _written_in_loop(engine: Engine, table: str) -> None:
    if not dialect.is_postgresql(engine.dialect):
        return  # relays see for themselves that a SQLite file has changed
    tables = _waiting.setdefault(engine, set())
    is_first = not tables
    tables.add(table)
    if is_first:
        task = asyncio.get_running_loop().create_task(_notify(engine, engine.pool))
        _tasks.add(task)  # a loop keeps no hold of its tasks
        task.add_done_callback(_tasks.discard)


async def _notify(engine: Engine, pool: Pool) -> None:
    from sqlalchemy.ext.asyncio import AsyncEngine

    try:
        await asyncio.sleep(NOTIFY_INTERVAL_SECONDS)
    finally:  # also if the loop ends: the next commit begins anew
        tables = _waiting.pop(engine, set())
    try:
        async with AsyncEngine(engine).connect() as connection:
            for table in tables:
                await connection.execute(text(notify_statement(table)))
            await connection.commit()
            if engine.pool is not pool:  # disposed of meanwhile: nobody would close this one
                await connection.invalidate()
    except (SQLAlchemyError, OSError) as error:
        logger.warning("relays were not notified; they find it by polling: %s", error)
