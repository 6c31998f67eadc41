"""Trace: one event by its id, from the outbox to the log to its consumers.

    outbox ──published──▶ entries of the log ──▶ groups: unread, pending or acked
                                           └──▶ inboxes that remember it
                                           └──▶ dead letters

The log has no index by event id. It is searched around the time of publication, which the outbox
stores, or from the creation of the event, which a UUIDv7 contains; in full only on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from conquiet.errors import ConfigError, StoreError
from conquiet.message import Message
from conquiet.operations.text import moment

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Table

    from conquiet.operations.log_search import Buried, Logged, Searched

WINDOW_SECONDS = 60.0
"""How far the clocks of database and Redis, and a publication, may differ."""

_STATEMENT_MS = 5_000
_SUBSCRIBERS = 1_000
"""Names of subscribers that are looked up, each by the index."""


@dataclass(frozen=True, slots=True)
class Written:
    """A row of an outbox."""

    table: str
    id: str
    event_type: str
    source: str
    state: str
    attempts: int
    created_at: str
    published_at: str | None
    last_error: str | None
    due_at: str | None = None
    """When it is moved to the outbox, if its state is `delayed`."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The record of an inbox that knows the event."""

    where: str
    """The table, or the key in Redis."""
    subscriber: str
    state: str
    """`done`, or `processing` while a consumer handles it."""
    time: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything that was found about one event."""

    event_id: str
    written: tuple[Written, ...]
    logged: tuple[Logged, ...]
    buried: tuple[Buried, ...]
    remembered: tuple[Remembered, ...]
    searched: tuple[Searched, ...]
    """Streams that were searched in part, and which part."""
    notes: tuple[str, ...]
    """Places that could not be searched, and the reason."""

    @property
    def found(self) -> bool:
        return bool(self.written or self.logged or self.buried or self.remembered)


def trace_event(
    event_id: str,
    *,
    client: Any = None,
    engine: Engine | None = None,
    outboxes: Sequence[str] = ("outbox", "outbox_events"),
    inbox: str = "processed_messages",
    streams: str = "*",
    window: float = WINDOW_SECONDS,
    full: bool = False,
) -> Trace:
    """Find an event in outboxes, log, consumer groups, inboxes and dead letters.

    >>> from conquiet.operations import trace
    >>> trace.trace_event("e-1", client=client).found
    False

    `client` is a Redis client, `engine` a database; a server that is not given is not searched.
    `full` searches whole streams, and all keys for those of inboxes.
    """
    if client is None and engine is None:
        raise ConfigError("a trace needs a Redis client or a database engine")
    notes: list[str] = []
    written = _find_rows(engine, outboxes, event_id, notes) if engine is not None else ()
    logged: tuple[Logged, ...] = ()
    buried: tuple[Buried, ...] = ()
    searched: tuple[Searched, ...] = ()
    remembered: tuple[Remembered, ...] = ()
    if client is not None:
        from conquiet.operations.log_search import LogSearch

        span = None if full else _span(event_id, written, window)
        if span is None and not full:
            notes.append(
                "the log was not searched: no outbox knows the time; --full searches all of it"
            )
        search = LogSearch(client, event_id, streams)
        if span is not None or full:
            logged, searched = search.find_entries(span)
        buried = search.find_dead_letters()
        remembered += search.find_inbox_keys(logged, full)
        if not full:
            notes.append("inboxes in Redis were searched by the names of groups; --full finds all")
    if engine is not None:
        known = [row.source for row in written] + [entry.source for entry in logged]
        sources = {source for source in (*known, *(letter.source for letter in buried)) if source}
        remembered += _find_in_inbox(engine, inbox, event_id, sources, notes)
    return Trace(event_id, written, logged, buried, remembered, searched, tuple(notes))


def _find_rows(
    engine: Engine, tables: Sequence[str], event_id: str, notes: list[str]
) -> tuple[Written, ...]:
    from sqlalchemy import inspect

    from conquiet.relay.inspection import Inspection
    from conquiet.sql.schema import split_name

    found: list[Written] = []
    for table in tables:
        schema, plain = split_name(table)
        try:
            if not inspect(engine).has_table(plain, schema=schema):
                continue
        except Exception as error:
            from conquiet.sql import dialect

            raise dialect.store_error(engine, error) from error
        inspection = Inspection(engine, table)
        try:
            shown = inspection.show(event_id)
            waiting = inspection.delayed(1, id=event_id) if shown is None else []
        except StoreError as error:  # no index by event id: a long table may take too long
            notes.append(f"{table} could not be searched: {error}")
            continue
        found += [
            Written(
                *(table, "", item.event_type, "", "delayed", 0, item.created_at),
                *(None, None, item.due_at),
            )
            for item in waiting
        ]
        if shown is None:
            continue
        entry, more = shown
        source = "/outbox_events" if inspection.is_events else ""
        if not inspection.is_events:
            source = _source(more["attributes"])
        found.append(
            Written(
                *(table, entry.id, entry.event_type, source, entry.state, entry.attempts),
                *(entry.created_at, entry.published_at, entry.last_error),
            )
        )
    if not found:
        notes.append(f"no row of {' or '.join(tables)} has it: never written, or pruned")
    return tuple(found)


def _source(attributes: str) -> str:
    """Return the source of a row; empty if its attributes are not those of an outbox."""
    import msgspec

    try:
        found = msgspec.json.decode(attributes)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return str(found.get("source", "")) if isinstance(found, dict) else ""


def _span(
    event_id: str, written: Sequence[Written], window: float
) -> tuple[int, int | None] | None:
    """Return the time span to search, in milliseconds; None if it is unknown."""
    slack = timedelta(seconds=window)
    if written:
        row = written[0]
        if row.published_at is not None:
            published = datetime.fromisoformat(row.published_at)
            return _ms(published - slack), _ms(published + slack)
        return _ms(datetime.fromisoformat(row.created_at) - slack), None
    try:
        made = UUID(event_id)
    except ValueError:
        return None
    if made.version != 7:
        return None
    return max(0, (made.int >> 80) - round(window * 1000)), None


def _ms(at: datetime) -> int:
    return max(0, int(at.timestamp() * 1000))


def _find_in_inbox(
    engine: Engine, name: str, event_id: str, sources: Iterable[str], notes: list[str]
) -> tuple[Remembered, ...]:
    """Find the event in the table of an inbox; its source is part of the key."""
    from sqlalchemy import inspect, select
    from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

    from conquiet.sql import dialect
    from conquiet.sql.schema import inbox_table, split_name

    schema, plain = split_name(name)
    identities = [
        Message(b"", {"source": source, "id": event_id}).identity for source in sorted(sources)
    ]
    if not identities:
        notes.append(f"{name} was not searched: the source of the event is unknown")
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
    except ProgrammingError as error:  # a role may read the outbox and not the inbox
        notes.append(f"{name} was not searched: {dialect.one_line(error):.300}")
        return ()
    except SQLAlchemyError as error:
        raise dialect.store_error(engine, error) from error
    return tuple(Remembered(name, row.subscriber, "done", _time(row.created_at)) for row in rows)


def _time(value: datetime) -> str:
    aware = value if value.tzinfo else value.replace(tzinfo=UTC)
    return moment(aware.timestamp() * 1000)


def _subscribers(connection: Connection, table: Table) -> list[str]:
    """List subscribers by skipping through the primary key, which begins with them."""
    from sqlalchemy import func, select

    found: list[str] = []
    query = select(func.min(table.c.subscriber))
    name = connection.execute(query).scalar()
    while name is not None and len(found) < _SUBSCRIBERS:
        found.append(name)
        name = connection.execute(query.where(table.c.subscriber > name)).scalar()
    return found
