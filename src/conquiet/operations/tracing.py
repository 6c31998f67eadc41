"""Tracing: one event by its id, from the outbox to the log to whoever took it.

    outbox ──published──▶ entries of the log ──▶ groups: unread, pending or acked
                                           └──▶ inboxes: who remembers it
                                           └──▶ dead letters

The log has no index by event id. It is searched around the time when the event was published, which
the outbox knows, or from when it was made, which a UUIDv7 tells; all of it only when asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from conquiet.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from conquiet.operations.tracing_log import Buried, Logged, Searched

WINDOW_SECONDS = 60.0
"""How far the clocks of the database and of Redis, and a publication, may be apart."""


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


@dataclass(frozen=True, slots=True)
class Remembered:
    """An inbox knows the event."""

    where: str
    """The table, or the key in Redis."""
    subscriber: str
    state: str
    """`done`, or `processing` while somebody is at it."""
    time: str


@dataclass(frozen=True, slots=True)
class Trace:
    """All that was found of one event."""

    event_id: str
    written: tuple[Written, ...]
    logged: tuple[Logged, ...]
    buried: tuple[Buried, ...]
    remembered: tuple[Remembered, ...]
    searched: tuple[Searched, ...]
    """Streams that were searched in part only, and which part."""
    notes: tuple[str, ...]
    """What could not be looked at, and why."""

    @property
    def found(self) -> bool:
        return bool(self.written or self.logged or self.buried or self.remembered)


def trace(
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
    """Where an event is, and who has had it.

    >>> from conquiet.operations import trace
    >>> trace("e-1", client=client).found
    False

    `client` is that of Redis, `engine` that of the database; what is not given is not looked at.
    `full` searches whole streams, and all keys for those of inboxes.
    """
    if client is None and engine is None:
        raise ConfigError("a trace needs a Redis or a database to look into")
    notes: list[str] = []
    written = _written(engine, outboxes, event_id, notes) if engine is not None else ()
    logged: tuple[Logged, ...] = ()
    buried: tuple[Buried, ...] = ()
    searched: tuple[Searched, ...] = ()
    remembered: tuple[Remembered, ...] = ()
    if client is not None:
        from conquiet.operations.tracing_log import LogSearch

        span = None if full else _span(event_id, written, window)
        if span is None and not full:
            notes.append("the log was not searched: no outbox knows when; --full searches it whole")
        search = LogSearch(client, event_id, streams)
        if span is not None or full:
            logged, searched = search.logged(span)
        buried = search.buried()
        remembered += search.remembered(logged, full)
        if not full:
            notes.append("inboxes in Redis were looked up by the names of groups; --full finds all")
    if engine is not None:
        from conquiet.operations.tracing_inbox import remembered_in_table

        told = [row.source for row in written] + [entry.source for entry in logged]
        sources = {source for source in (*told, *(letter.source for letter in buried)) if source}
        remembered += remembered_in_table(engine, inbox, event_id, sources, notes)
    return Trace(event_id, written, logged, buried, remembered, searched, tuple(notes))


def _written(
    engine: Engine, tables: Sequence[str], event_id: str, notes: list[str]
) -> tuple[Written, ...]:
    from sqlalchemy import inspect

    from conquiet.relay.inspection import Inspection
    from conquiet.sql.tables import checked_name

    found: list[Written] = []
    for table in tables:
        schema, plain = checked_name(table)
        try:
            if not inspect(engine).has_table(plain, schema=schema):
                continue
        except Exception as error:
            from conquiet.sql import dialect

            where = dialect.shown(engine.url)
            raise StoreError(f"{where}: {dialect.one_line(error):.300}") from error
        inspection = Inspection(engine, table)
        try:
            shown = inspection.show(event_id)
        except StoreError as error:  # no index by event id: a long table may take too long
            notes.append(f"{table} could not be searched: {error}")
            continue
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
    """Of a row; nothing, if its attributes are not what an outbox wrote."""
    import msgspec

    try:
        found = msgspec.json.decode(attributes)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return str(found.get("source", "")) if isinstance(found, dict) else ""


def _span(
    event_id: str, written: Sequence[Written], window: float
) -> tuple[int, int | None] | None:
    """From when to when to look, in milliseconds; None if nobody knows."""
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


def _ms(moment: datetime) -> int:
    return max(0, int(moment.timestamp() * 1000))
