"""Inspect an outbox table: count, search, show, retry and prune its rows.

Both tables are handled alike: the generic `outbox`, which parks a row by `parked_at`, and
`outbox_events`, which parks it by its attempt count.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Connection,
    DateTime,
    Engine,
    LargeBinary,
    Text,
    and_,
    case,
    cast,
    column,
    delete,
    func,
    or_,
    select,
    table,
    true,
    tuple_,
    update,
)

from conquiet.config import has_events_layout
from conquiet.errors import ConfigError
from conquiet.events.table import UuidText
from conquiet.sql import Cleanup, days, dialect
from conquiet.sql.schema import Xid8, delayed_table, split_name
from conquiet.sql.wal import Slot, find_slot

State = Literal["waiting", "pending", "parked", "published", "any"]


@dataclass(frozen=True, slots=True)
class Search:
    """Selects rows that match all given fields; `*` in `type` matches anything.

    >>> Search(state="parked", type="order.*", error="timeout").state
    'parked'
    """

    state: State = "waiting"
    """`waiting` means not published: pending or parked."""
    id: str = ""
    """The id of the event or of the row."""
    type: str = ""
    aggregate: str = ""
    """The aggregate's id or type; in the generic outbox, the key or the topic."""
    error: str = ""
    """A part of the last error; case does not matter."""
    attempts: int = 0
    """The least number of attempts."""

    def __post_init__(self) -> None:
        if self.state not in get_args(State):
            raise ConfigError(f"state={self.state!r}: choose one of {', '.join(get_args(State))}")

    def condition(
        self,
        states: Mapping[str, ColumnElement[bool]],
        columns: Mapping[str, ColumnElement[Any]],
        named: ColumnElement[bool] | None,
    ) -> ColumnElement[bool]:
        """Build the SQL condition from the columns, which have other names in each table."""
        wanted = [states[self.state]]
        if named is not None:
            wanted.append(named)
        if self.type:
            wanted.append(columns["type"].like(_pattern(self.type), escape="\\"))
        if self.aggregate:
            ids = (columns["aggregate_id"], columns["aggregate_type"])
            wanted.append(or_(*(column == self.aggregate for column in ids)))
        if self.error:
            wanted.append(columns["error"].icontains(self.error, autoescape=True))
        if self.attempts:
            wanted.append(columns["attempts"] >= self.attempts)
        return and_(*wanted)


def _pattern(text: str) -> str:
    plain = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return plain.replace("*", "%")


_STATEMENT_MS = 5_000


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts the unpublished rows of an outbox."""

    pending: int
    parked: int
    oldest_seconds: float
    """Age of the oldest pending row; 0 if there is none."""
    slot: str = ""
    """The status of the slot, if the outbox is published from the write-ahead log: PostgreSQL's
    `reserved`, `extended` or `unreserved`; `lost` or `missing`."""
    slot_lag_bytes: int | None = None
    """How much log the slot has still to confirm."""
    slot_kept_bytes: int | None = None
    """How much log PostgreSQL keeps for it at most; None if there is no limit."""


@dataclass(frozen=True, slots=True)
class DelayedEntry:
    """Describes one event that waits until it is due."""

    event_id: str
    event_type: str
    topic: str
    key: str
    due_at: str
    created_at: str
    seconds_left: float
    """By the clock of the database; negative if it is overdue."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes one row to an operator."""

    id: str
    event_id: str
    event_type: str
    aggregate_type: str
    aggregate_id: str
    state: str
    """`pending`, `parked` or `published`."""
    attempts: int
    created_at: str
    published_at: str | None
    last_error: str | None


class Inspection:
    """Reads and changes the rows of one outbox table for an operator."""

    def __init__(self, engine: Engine, name: str, *, max_attempts: int = 10) -> None:
        self.engine = engine
        self.name = name
        schema, plain = split_name(name)
        self.is_events = has_events_layout(name)
        moment = DateTime(timezone=True)
        attempts = "attempt_count" if self.is_events else "attempts"
        kind, key = ("aggregate_type", "aggregate_id") if self.is_events else ("topic", "key")
        payload = column("payload_json", Text) if self.is_events else column("data", LargeBinary)
        self._table = table(
            plain,
            column("id", UuidText()) if self.is_events else column("id"),
            column("event_type"),
            column(kind),
            column(key),
            column(attempts),
            column("created_at", moment),
            column("published_at", moment),
            column("last_error"),
            payload,
            *(() if self.is_events else (column("event_id"), column("attributes"))),
            *(() if self.is_events else (column("parked_at", moment), column("content_type"))),
            *(() if self.is_events else (column("xid"),)),
            schema=schema,
        )
        columns = self._table.c
        self._id: ColumnElement[Any] = cast(columns.id, Text)
        self._attempts = columns[attempts]
        self._payload = columns[payload.name]
        event_id = self._id if self.is_events else columns.event_id
        unpublished = columns.published_at.is_(None)
        if self.is_events:
            self._parked = and_(unpublished, self._attempts >= max_attempts)
            self._pending = and_(unpublished, self._attempts < max_attempts)
        else:
            self._parked = columns.parked_at.is_not(None)
            self._pending = and_(unpublished, columns.parked_at.is_(None))
        self._searched = {
            "type": cast(columns.event_type, Text),
            "aggregate_type": cast(columns[kind], Text),
            "aggregate_id": cast(columns[key], Text),
            "error": columns.last_error,
            "attempts": self._attempts,
        }
        self._shown = (
            self._id.label("id"),
            event_id.label("event_id"),
            cast(columns.event_type, Text).label("event_type"),
            cast(columns[kind], Text).label("aggregate_type") if self.is_events else _NOTHING,
            cast(columns[key], Text).label("aggregate_id"),
            self._attempts.label("attempts"),
            columns.created_at,
            columns.published_at,
            columns.last_error,
        )
        self._event_id = event_id
        self._unpublished = unpublished
        self._delayed = None if self.is_events else delayed_table(name)

    def _states(self, slot: Slot | None) -> dict[str, ColumnElement[bool]]:
        """Return the conditions of the states; by the slot, if rows are published from the log.

        Rows above its horizon count as pending, although the latest may be published.
        """
        unpublished: ColumnElement[bool] = self._unpublished
        pending = self._pending
        if slot is not None:
            columns = self._table.c
            above = columns.xid >= cast(str(slot.horizon), Xid8())
            waits = or_(columns.last_error.is_not(None), above)
            pending = and_(pending, waits)
            unpublished = or_(pending, self._parked)
        return {
            "waiting": unpublished,
            "pending": pending,
            "parked": self._parked,
            "published": ~unpublished,
            "any": true(),
        }

    def _columns(self, states: dict[str, ColumnElement[bool]]) -> list[ColumnElement[Any]]:
        state = case((states["published"], "published"), (self._parked, "parked"), else_="pending")
        return [*self._shown, state.label("state")]

    def _slot(self, connection: Connection) -> Slot | None:
        if self.is_events or not dialect.uses_psycopg(connection.dialect):
            return None
        name = connection.dialect.identifier_preparer.format_table(self._table)
        return find_slot(connection, name)

    def reach(self, timeout_ms: int = _STATEMENT_MS) -> None:
        """Raise if the database or the table is unavailable."""
        with self._read(timeout_ms) as connection:
            connection.execute(select(self._table.c.id).limit(1)).first()

    def figures(self, timeout_ms: int = _STATEMENT_MS) -> Figures:
        """Count unpublished rows by the partial indexes; published rows cost nothing."""
        oldest = func.min(self._table.c.created_at)
        with self._read(timeout_ms) as connection:
            age: ColumnElement[Any]
            if dialect.is_postgresql(connection.dialect):
                age = func.extract("epoch", func.clock_timestamp() - oldest)
            else:
                age = (func.julianday("now") - func.julianday(oldest)) * 86_400.0
            slot = self._slot(connection)
            waits = self._states(slot)["pending"]
            query = select(func.count(), age).select_from(self._table).where(waits)
            pending, seconds = connection.execute(query).one()
            parked = connection.execute(
                select(func.count()).select_from(self._table).where(self._parked)
            ).scalar_one()
        figures = Figures(int(pending), int(parked), max(0.0, round(float(seconds or 0.0), 3)))
        if slot is None:
            return figures
        return dataclasses.replace(
            figures,
            slot=slot.status,
            slot_lag_bytes=slot.lag_bytes,
            slot_kept_bytes=slot.kept_bytes,
        )

    def entries(
        self,
        *,
        parked: bool = False,
        limit: int = 50,
        search: Search | None = None,
        newest: bool = False,
        after: str | None = None,
    ) -> list[Entry]:
        """List unpublished rows, the oldest first; or parked rows, or those of a search.

        `after` is the id of the last row of the previous page.
        """
        search = search or Search("parked" if parked else "waiting")
        named = self._with_ids([search.id]) if search.id else None
        columns = self._table.c
        # The primary key of the generic outbox ascends, so its index gives the order.
        order = (columns.created_at, columns.id) if self.is_events or not newest else (columns.id,)
        turned = [column.desc() for column in order] if newest else order
        with self._read() as connection:
            states = self._states(self._slot(connection))
            wanted = search.condition(states, self._searched, named)
            if after is not None:
                wanted = and_(wanted, self._beyond(after, order, newest))
            query = select(*self._columns(states)).where(wanted).order_by(*turned).limit(limit)
            return [_entry(row) for row in connection.execute(query)]

    def _beyond(
        self, id_: str, order: Sequence[ColumnElement[Any]], newest: bool
    ) -> ColumnElement[bool]:
        """Select the rows behind a row; the database compares, since SQLite's time formats vary."""
        seen = self._table.alias("seen")
        columns = [seen.c[str(column.key)] for column in order]
        key = _uuid(id_) if self.is_events else int(id_) if _is_key(id_) else None
        one = select(*columns).where(seen.c.id == key).scalar_subquery()
        here = tuple_(*order)
        return here < one if newest else here > one

    def show(self, id_: str) -> tuple[Entry, dict[str, Any]] | None:
        """Return a row by its id or its event's id, with its payload; None if there is none."""
        with self._read() as connection:
            columns = self._columns(self._states(self._slot(connection)))
            query = select(*columns, _payload_text(self._payload).label("payload"))
            if not self.is_events:
                query = query.add_columns(cast(self._table.c.attributes, Text).label("attributes"))
            row = connection.execute(query.where(self._with_ids([id_])).limit(1)).first()
        if row is None:
            return None
        payload = row.payload
        if isinstance(payload, (bytes, memoryview)):
            payload = bytes(payload).decode(errors="backslashreplace")
        more = {"payload": payload}
        if not self.is_events:
            more["attributes"] = row.attributes
        return _entry(row), more

    def previews(self, entries: Sequence[Entry], size: int = 480) -> dict[str, str | None]:
        """Return the beginnings of payloads, by the ids of the rows; None if one is not text."""
        key = self._table.c.id
        keys = [_uuid(one.id) if self.is_events else int(one.id) for one in entries]
        payload = _payload_text(self._payload)
        start = func.substr(payload, 1, size, type_=self._payload.type).label("start")
        with self._read() as connection:
            rows = connection.execute(select(self._id.label("id"), start).where(key.in_(keys)))
            return {str(row.id): _text_of(row.start) for row in rows}

    def delayed(self, limit: int = 50, *, type: str = "", id: str = "") -> list[DelayedEntry]:
        """List the events that wait until they are due, the next one first."""
        with self._read() as connection:
            table = self._delayed
            if table is None or not dialect.has_table(connection, table.fullname):
                return []
            left: ColumnElement[Any]
            if dialect.is_postgresql(connection.dialect):
                left = func.extract("epoch", table.c.due_at - func.clock_timestamp())
            else:
                left = (func.julianday(table.c.due_at) - func.julianday("now")) * 86_400.0
            query = select(table, left.label("seconds_left"))
            if type:
                query = query.where(table.c.event_type.like(_pattern(type), escape="\\"))
            if id:
                query = query.where(table.c.event_id == id)
            rows = connection.execute(query.order_by(table.c.due_at, table.c.id).limit(limit)).all()
        return [
            DelayedEntry(
                row.event_id,
                row.event_type,
                row.topic,
                row.key or "",
                _moment(row.due_at) or "",
                _moment(row.created_at) or "",
                round(float(row.seconds_left), 3),
            )
            for row in rows
        ]

    def count_delayed(self) -> int:
        """Count the events that wait until they are due."""
        with self._read() as connection:
            table = self._delayed
            if table is None or not dialect.has_table(connection, table.fullname):
                return 0
            return int(connection.execute(select(func.count()).select_from(table)).scalar_one())

    def cancel(self, ids: Sequence[str]) -> list[str]:
        """Delete delayed events by their ids; return the ids of those that still waited."""
        with self._write() as connection:
            table = self._delayed
            if table is None or not dialect.has_table(connection, table.fullname):
                return []
            statement = delete(table).where(table.c.event_id.in_(ids)).returning(table.c.event_id)
            return sorted({id_ for (id_,) in connection.execute(statement)})

    def retry(self, ids: Sequence[str] | None = None) -> list[str]:
        """Reset the attempts of the given or all parked rows; return their event ids.

        `last_error` is kept until another error replaces it.
        """
        wanted = self._parked if ids is None else and_(self._parked, self._with_ids(ids))
        values: dict[Any, Any] = {self._attempts: 0}
        if not self.is_events:
            values[self._table.c.parked_at] = None
        with self._write() as connection:
            statement = update(self._table).where(wanted).values(values).returning(self._event_id)
            return [str(id_) for (id_,) in connection.execute(statement)]

    def prunable(self, older_than: float) -> int:
        """Count the rows that `prune` would delete now."""
        query = select(func.count()).select_from(self._table)
        published = self._table.c.published_at
        with self._read() as connection:
            if dialect.is_postgresql(connection.dialect):
                before = func.now() - timedelta(seconds=older_than)
                old: ColumnElement[bool] = published < before
                slot = self._slot(connection)
                if slot is not None:
                    passed = and_(published.is_(None), self._states(slot)["published"])
                    old = or_(old, and_(passed, self._table.c.created_at < before))
                if days.is_divided(connection, self.name):  # whole days go
                    end = days.passed(connection, self.name, older_than)
                    if end is None:
                        return 0
                    old = and_(old, self._table.c.created_at < datetime.fromisoformat(end))
            else:
                ago = f"-{older_than} seconds"
                old = published < func.datetime("now", ago, type_=Text)
            return int(connection.execute(query.where(old)).scalar_one())

    def prune(self, older_than: float, progress: Callable[[int], object] | None = None) -> int:
        """Delete rows published more than `older_than` seconds ago, in small transactions."""
        cleanup = Cleanup(self.engine, inbox=None, outbox=self.name, retention=older_than)
        return cleanup.run_once(progress).outbox

    def _with_ids(self, ids: Sequence[str]) -> ColumnElement[bool]:
        if self.is_events:  # by the primary key, in any notation of UUIDs
            return self._table.c.id.in_([id_ for text in ids if (id_ := _uuid(text))])
        return self._event_id.in_(ids) | self._id.in_(ids)

    @contextmanager
    def _read(self, timeout_ms: int = _STATEMENT_MS) -> Iterator[Connection]:
        with self._store_errors(), self.engine.connect() as connection:
            if dialect.is_postgresql(connection.dialect):
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = {int(timeout_ms)}")
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self._store_errors(), dialect.begin_to_write(self.engine) as connection:
            yield connection

    def _store_errors(self) -> AbstractContextManager[None]:
        return dialect.raise_store_errors(self.engine)


_NOTHING: ColumnElement[Any] = cast("", Text).label("aggregate_type")


def _payload_text(payload: ColumnElement[Any]) -> ColumnElement[Any]:
    return cast(payload, Text) if isinstance(payload.type, Text) else payload


def _text_of(start: Any) -> str | None:
    """Decode the beginning of a payload, whose last character may be cut."""
    if start is None or isinstance(start, str):
        return start
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(bytes(start))
    except UnicodeDecodeError:
        return None


def _is_key(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19  # fits a bigint


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _entry(row: Any) -> Entry:
    return Entry(
        str(row.id),
        str(row.event_id),
        row.event_type,
        row.aggregate_type or "",
        row.aggregate_id or "",
        row.state,
        row.attempts,
        _moment(row.created_at) or "",
        _moment(row.published_at),
        row.last_error,
    )


def _moment(value: Any) -> str | None:
    if value is None:
        return None
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
