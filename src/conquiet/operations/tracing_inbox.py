"""The half of a trace that lies in the inbox's table."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Table, func, inspect, select
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

from conquiet.errors import StoreError
from conquiet.message import Message
from conquiet.operations.text import moment
from conquiet.operations.tracing import Remembered
from conquiet.sql import dialect
from conquiet.sql.tables import checked_name, inbox_table

if TYPE_CHECKING:
    from sqlalchemy import Engine

_STATEMENT_MS = 5_000
_SUBSCRIBERS = 1_000
"""Names of subscribers that are looked up, each by the index."""


def remembered_in_table(
    engine: Engine, name: str, event_id: str, sources: Iterable[str], notes: list[str]
) -> tuple[Remembered, ...]:
    """Rows of the inbox for the event; its source is part of the key, and must be known."""
    schema, plain = checked_name(name)
    identities = [
        Message(b"", {"source": source, "id": event_id}).identity for source in sorted(sources)
    ]
    if not identities:
        notes.append(f"{name} was not looked at: the source of the event is not known")
        return ()
    table = inbox_table(name)
    try:
        if not inspect(engine).has_table(plain, schema=schema):
            return ()
        with engine.connect() as connection:
            if dialect.is_postgresql(connection.dialect):
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = {_STATEMENT_MS}")
            subscribers = _subscribers(connection, table)
            rows = connection.execute(
                select(table).where(
                    table.c.subscriber.in_(subscribers), table.c.message_id.in_(identities)
                )
            ).all()
    except ProgrammingError as error:  # whoever may look at the outbox need not see the inbox
        notes.append(f"{name} was not looked at: {dialect.one_line(error):.300}")
        return ()
    except SQLAlchemyError as error:
        where = dialect.shown(engine.url)
        raise StoreError(f"{where}: {dialect.one_line(error):.300}") from error
    return tuple(Remembered(name, row.subscriber, "done", _time(row.created_at)) for row in rows)


def _time(value: datetime) -> str:
    aware = value if value.tzinfo else value.replace(tzinfo=UTC)
    return moment(aware.timestamp() * 1000)


def _subscribers(connection: Connection, table: Table) -> list[str]:
    """Step by step through the primary key, which begins with them: rows cost nothing."""
    found: list[str] = []
    query = select(func.min(table.c.subscriber))
    name = connection.execute(query).scalar()
    while name is not None and len(found) < _SUBSCRIBERS:
        found.append(name)
        name = connection.execute(query.where(table.c.subscriber > name)).scalar()
    return found
