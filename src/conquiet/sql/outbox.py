"""Store events in an outbox table, in the ambient transaction or in one of the caller's.

    handler's outputs ──▶ rows ──▶ one INSERT in the transaction ──▶ relay
                            └ delayed: a row of `outbox_delayed` ──when due──▶ row of the outbox

With `rows=False` the events are a message of PostgreSQL's write-ahead log in place of rows; a
relay that follows the log publishes both.

Ids ascend in the order of the events. Data is stored byte for byte, with its content type.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple, overload

import msgspec
from sqlalchemy import Executable, Table, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session

from conquiet import outbox
from conquiet.codec import check_attributes, encode_data
from conquiet.delay import delay_all, due_of, split_delayed, utc_text
from conquiet.errors import ConfigError, HandlerError, InvalidMessage, StoreError
from conquiet.message import Message, describe
from conquiet.sql import dialect, handle, wal
from conquiet.sql.notification import notify_after_commit
from conquiet.sql.schema import OUTBOX_TABLE, delayed_table, outbox_table
from conquiet.sql.transaction import TransactionConnection, current
from conquiet.sql.wal import COLUMNS

_encode = msgspec.json.Encoder().encode


class NewRow(NamedTuple):
    """Holds the columns of a new event; the database adds id, time and transaction."""

    topic: str
    event_type: str
    event_id: str
    key: str
    """The ordering key; empty for none, stored as NULL."""
    content_type: str
    data: bytes
    attributes: str
    """All attributes as JSON; the other columns are copies for searching."""


class DelayedRow(NamedTuple):
    """Holds the columns of a new event that waits: those of `NewRow`, and until when."""

    topic: str
    event_type: str
    event_id: str
    key: str
    content_type: str
    data: bytes
    attributes: str
    at: str
    """The moment in UTC, or empty."""
    after: str
    """The seconds from now on by the clock of the database, or empty."""


class Outbox(outbox.Outbox):
    """Middleware: stores the outputs of handlers as rows, in the ambient transaction.

    Without a router, in a transaction of your own: `add`. `statement` gives the INSERT for whatever
    executes SQLAlchemy's statements.

    `topic` is where the events go, `table` that of the outbox, if need be with its schema. `source`
    is the source of events that name none. With `notify=False` commits wake no relay, and rows wait
    for its next poll.

    With `rows=False`, on PostgreSQL 14 or newer, events are written into the write-ahead log alone,
    for a relay that follows it (`WalSource` of this table, `--from wal`); while there is no slot
    for one, `StoreError`. Only events that are delayed, or that the sink has refused, are rows.
    """

    def __init__(
        self,
        topic: str,
        table: str = OUTBOX_TABLE,
        *,
        source: str = "",
        notify: bool = True,
        rows: bool = True,
    ) -> None:
        super().__init__(topic)
        self.rows = rows
        self.table: Table = outbox_table(table)
        self.delayed: Table = delayed_table(table)
        self.source = source
        self.notify = notify
        """Whether relays are notified after a commit; if not, they find the rows by polling."""
        self._at_once = _Insert(self.table)
        self._later = _Insert(self.delayed, is_delayed=True)

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        unit = current("the outbox")
        now, later = split_delayed(outputs)
        if later:
            unit.use_table(self.delayed.fullname)
            handle.execute(unit.connection, self._insert_delayed(later))
            unit.note_write(self.delayed.fullname if self.notify else None)
        if now and self.rows:
            unit.use_table(self.table.fullname)
            handle.execute_with_commit(unit.connection, self._insert(now))
            unit.note_write(self.table.fullname if self.notify else None)
        elif now:  # not with COMMIT: a refusal is one of the store, and no fault of a message
            statement = self._emit(now)
            with self._explain(statement):
                handle.execute(unit.connection, statement)
            unit.note_write()

    @overload
    def add(
        self,
        transaction: handle.Handle,
        events: Iterable[Any],
        *,
        source: str = "",
        at: datetime | None = None,
        after: timedelta | float | None = None,
    ) -> list[str]: ...

    @overload
    def add(
        self,
        transaction: handle.AsyncHandle,
        events: Iterable[Any],
        *,
        source: str = "",
        at: datetime | None = None,
        after: timedelta | float | None = None,
    ) -> Coroutine[Any, Any, list[str]]: ...

    def add(
        self,
        transaction: Any,
        events: Iterable[Any],
        *,
        source: str = "",
        at: datetime | None = None,
        after: timedelta | float | None = None,
    ) -> Any:
        """Write events in the caller's transaction and return their ids, in order.

        `transaction` is a `Session` or `Connection` of SQLAlchemy, or a connection of psycopg or
        sqlite3. With an `AsyncSession`, an `AsyncConnection`, or a connection of asyncpg, async
        psycopg or aiosqlite, await the result. Nothing is committed.

        `events` are messages, or instances of event classes; these need a `source` here or in
        the constructor. Relays are notified after the commit of a session; the commit of a
        connection cannot be seen.

        `at`, a datetime with a time zone, or `after`, seconds or a timedelta, is when they are
        published at the earliest, by the clock of the database; `Message.notbefore` comes first.
        """
        is_async = handle.is_async(transaction, "Outbox.add()")
        messages = outbox.complete_all(events, source or self.source)
        delay_all(messages, due_of(at, after))
        statements = self._inserts(messages)
        ids = [message.id for message in messages]
        if is_async:
            return self._add_async(transaction, statements, ids)
        for statement in statements:
            with self._explain(statement):
                handle.run(transaction, statement)
        for statement in statements:
            self._notify(transaction, statement)
        return ids

    async def _add_async(
        self, transaction: Any, statements: Sequence[InsertRows | EmitEvents], ids: list[str]
    ) -> list[str]:
        for statement in statements:
            with self._explain(statement):
                await handle.run_async(transaction, statement)
        for statement in statements:
            self._notify(transaction, statement)
        return ids

    @overload
    def cancel(self, transaction: handle.Handle, id: str) -> bool: ...

    @overload
    def cancel(self, transaction: handle.AsyncHandle, id: str) -> Coroutine[Any, Any, bool]: ...

    def cancel(self, transaction: Any, id: str) -> Any:
        """Delete a delayed event in the caller's transaction; return whether it still waited.

        `id` is that of the event. False means too late: it is published, or about to be, or there
        never was one. With an async transaction, as in `add`, await the result.
        """
        is_async = handle.is_async(transaction, "Outbox.cancel()")
        statement = DeleteDelayed(self.delayed.fullname, id)
        if is_async:
            return self._cancel_async(transaction, statement)
        with self._explain(statement):
            return len(handle.run(transaction, statement)) > 0

    async def _cancel_async(self, transaction: Any, statement: DeleteDelayed) -> bool:
        with self._explain(statement):
            return len(await handle.run_async(transaction, statement)) > 0

    @contextmanager
    def _explain(self, statement: InsertRows | EmitEvents | DeleteDelayed) -> Iterator[None]:
        """Say what the database lacks: the table of delayed events, or a slot for messages."""
        try:
            yield
        except Exception as error:
            if isinstance(statement, EmitEvents):
                if dialect.is_missing_table(error) or wal.NOT_FOLLOWED in str(error):
                    refusal = f"{self.table.fullname} {wal.NOT_FOLLOWED}"
                    raise StoreError(refusal) from error
                raise
            if statement.table != self.delayed.fullname or not dialect.is_missing_table(error):
                raise
            raise ConfigError(
                f"the database has no table {self.delayed.fullname}, which holds delayed events;"
                " create it: conquiet outbox migrate"
            ) from error

    def _notify(self, transaction: Any, statement: InsertRows | EmitEvents) -> None:
        """Notify relays after the commit, where it can be seen."""
        session = getattr(transaction, "sync_session", transaction)
        bind = session.bind if isinstance(session, Session) else session
        is_read = self.notify and isinstance(statement, InsertRows)
        table = statement.table if is_read else None
        if isinstance(bind, TransactionConnection):
            bind.unit.note_write(table)
        elif isinstance(session, Session) and table is not None:
            notify_after_commit(session, table)

    def statement(
        self,
        events: Iterable[Any],
        *,
        source: str = "",
        at: datetime | None = None,
        after: timedelta | float | None = None,
    ) -> Executable:
        """Return the INSERT as a SQLAlchemy statement, for any number of events.

        `source` is that of events that name none. With `at` or `after` all of them wait until then.
        """
        messages = outbox.complete_all(events, source or self.source)
        delay_all(messages, due_of(at, after))
        statements = self._inserts(messages)
        if not statements:
            raise ConfigError("an outbox statement needs at least one event")
        if len(statements) > 1:
            raise ConfigError(
                "some of the events are delayed and go into another table; make a statement for"
                " these, and one for the others"
            )
        return statements[0]

    def _inserts(self, messages: Sequence[Message[Any]]) -> list[InsertRows | EmitEvents]:
        now, later = split_delayed(messages)
        made: list[InsertRows | EmitEvents] = []
        if now:
            made.append(self._insert(now) if self.rows else self._emit(now))
        return [*made, self._insert_delayed(later)] if later else made

    def _insert(self, messages: Sequence[Message[Any]]) -> InsertRows:
        return InsertRows(self._at_once, [self._row(message) for message in messages])

    def _emit(self, messages: Sequence[Message[Any]]) -> EmitEvents:
        return EmitEvents(self.table.fullname, [self._row(message) for message in messages])

    def _insert_delayed(self, messages: Sequence[Message[Any]]) -> InsertRows:
        rows: list[DelayedRow] = []
        for message in messages:
            due = message.notbefore
            if isinstance(due, datetime):
                rows.append(DelayedRow(*self._row(message), utc_text(due), ""))
            else:
                assert due is not None, "else it is not delayed"
                rows.append(DelayedRow(*self._row(message), "", f"{due.total_seconds():.6f}"))
        return InsertRows(self._later, rows)

    def _row(self, message: Message[Any]) -> NewRow:
        """Validate before the INSERT: a database error would abort the whole transaction."""
        attributes = message.attributes
        try:
            check_attributes(attributes)
        except InvalidMessage as error:
            raise HandlerError(f"{error}; no relay could publish it") from error
        try:
            row = NewRow(
                message.topic or self.topic_of(message),
                attributes["type"],
                attributes["id"],
                attributes.get("partitionkey") or attributes.get("subject") or "",
                attributes.get("datacontenttype") or "application/json",
                encode_data(message),
                _encode(attributes).decode(),
            )
        except (TypeError, ValueError) as error:
            raise HandlerError(
                f"{describe(message.attributes)}: an attribute cannot be stored: {error}"
            ) from error
        if _has_nul(message, row):
            raise HandlerError(
                f"{describe(message.attributes)}: NUL in an attribute or a topic, which"
                " PostgreSQL cannot store; only data may have any byte"
            )
        return row


class _Insert:
    """Holds the texts of an INSERT into the outbox, or into the table of delayed events."""

    def __init__(self, table: Table, *, is_delayed: bool = False) -> None:
        self.table = table.fullname
        self._is_delayed = is_delayed
        self._columns = ", ".join((*COLUMNS, "due_at") if is_delayed else COLUMNS)

    @cached_property
    def one(self) -> str:
        """Return the INSERT of one row on PostgreSQL."""
        # A parameter of the type text: a codec that asyncpg has for jsonb would encode it again.
        due = f", {_POSTGRESQL_DUE.format('%s::text', '%s::text')}" if self._is_delayed else ""
        return (
            f"INSERT INTO {self.table} ({self._columns})"
            f" VALUES (%s, %s, %s, nullif(%s, ''), %s, %b, %s::text::jsonb{due})"
        )

    @cached_property
    def many(self) -> str:
        """Return the INSERT of all rows on PostgreSQL, from what `_pack` gives.

        Drivers take longer for an array per column than msgspec for JSON.
        """
        due = f", {_POSTGRESQL_DUE.format('item ->> 8', 'item ->> 9')}" if self._is_delayed else ""
        return (
            f"INSERT INTO {self.table} ({self._columns})"
            " SELECT item ->> 0, item ->> 1, item ->> 2, nullif(item ->> 3, ''), item ->> 4,"
            " substring(%b::bytea FROM (item ->> 5)::integer FOR (item ->> 6)::integer), item -> 7"
            f"{due}"
            " FROM jsonb_array_elements(%s::text::jsonb) WITH ORDINALITY AS packed (item, place)"
            " ORDER BY place"
        )

    @cached_property
    def each(self) -> str:
        """Return the INSERT of one row on SQLite."""
        due = f", {_SQLITE_DUE.format('?', '?')}" if self._is_delayed else ""
        return (
            f"INSERT INTO {self.table} ({self._columns})"
            f" VALUES (?, ?, ?, nullif(?, ''), ?, ?, ?{due})"
        )

    def packed(self, data: str, rows: str) -> str:
        """Return the INSERT of all rows on SQLite, from the two parameters that `_pack` gives."""
        topic, type_, id_, key, content, start, length, attributes, at, after = (
            f"json_extract(value, '$[{number}]')" for number in range(10)
        )
        due = f", {_SQLITE_DUE.format(at, after)}" if self._is_delayed else ""
        return (
            f"INSERT INTO {self.table} ({self._columns})"
            f" SELECT {topic}, {type_}, {id_}, nullif({key}, ''), {content},"
            f" substr({data}, {start}, {length}), {attributes}{due} FROM json_each({rows})"
            " ORDER BY key"
        )


_POSTGRESQL_DUE = (
    "coalesce(nullif({}, '')::timestamp AT TIME ZONE 'UTC',"
    " statement_timestamp() + nullif({}, '')::double precision * interval '1 second')"
)
_SQLITE_DUE = (
    "coalesce(nullif({}, ''),"
    " strftime('%Y-%m-%d %H:%M:%f000', 'now', nullif({}, '') || ' seconds'))"
)


class InsertRows(handle.Statement):
    """Inserts any number of rows by a fixed number of parameters, which drivers limit."""

    inherit_cache = False

    def __init__(self, texts: _Insert, rows: Sequence[NewRow | DelayedRow]) -> None:
        self.texts = texts
        self.rows = rows

    @property
    def table(self) -> str:
        return self.texts.table

    def postgresql(self) -> handle.Query:
        if len(self.rows) == 1:  # JSON pays from two rows on
            return self.texts.one, tuple(self.rows[0])
        return self.texts.many, _pack(self.rows, msgspec.Raw)

    def sqlite(self) -> handle.Query:
        if len(self.rows) == 1:
            return self.texts.each, tuple(self.rows[0])
        return self.texts.each, [tuple(row) for row in self.rows]


@compiles(InsertRows, "sqlite")
def _insert_json(element: InsertRows, compiler: Any, **options: Any) -> str:
    packed = _pack(element.rows, str)  # as text: SQLite would write the JSON in another way
    data, rows = (
        compiler.process(bindparam(name, value))
        for name, value in zip(("new_data", "new_rows"), packed, strict=True)
    )
    return element.texts.packed(data, rows)


class EmitEvents(handle.Statement):
    """Writes events into PostgreSQL's write-ahead log, as one message of the transaction."""

    inherit_cache = False

    def __init__(self, table: str, rows: Sequence[NewRow]) -> None:
        self.table = table
        self._rows = rows

    def postgresql(self) -> handle.Query:
        return wal.emit_events(self.table), (wal.pack_events([_event(row) for row in self._rows]),)

    def sqlite(self) -> handle.Query:
        raise ConfigError(
            "SQLite has no log that a relay follows: Outbox(rows=False) is for PostgreSQL"
        )


def _event(row: NewRow) -> wal.Event:
    return (
        row.topic.encode(),
        row.event_type.encode(),
        row.event_id.encode(),
        row.key.encode(),
        row.content_type.encode(),
        row.data,
        row.attributes.encode(),
    )


class DeleteDelayed(handle.Statement):
    """Deletes a delayed event by its id, and returns the id if it still waited.

    A promotion that is under way has locked the row: then it waits for it, and finds none.
    """

    inherit_cache = False
    returns_rows = True

    def __init__(self, table: str, id: str) -> None:
        self.table = table
        self._id = id

    def postgresql(self) -> handle.Query:
        return f"DELETE FROM {self.table} WHERE event_id = %s RETURNING event_id", (self._id,)

    def sqlite(self) -> handle.Query:
        return f"DELETE FROM {self.table} WHERE event_id = ? RETURNING event_id", (self._id,)


def _pack(
    rows: Sequence[NewRow | DelayedRow], attributes_as: Callable[[str], Any]
) -> tuple[bytes, str]:
    """Return the data of all rows in one piece, and the rest as JSON.

    A row has the place of its data, from 1, and its length: SQL cuts it out.
    """
    place, columns = 1, []
    for topic, type_, id_, key, content, data, attributes, *due in rows:
        size = len(data)
        written = attributes_as(attributes)
        columns.append((topic, type_, id_, key, content, place, size, written, *due))
        place += size
    return b"".join([row.data for row in rows]), _encode(columns).decode()


def _has_nul(message: Message[Any], row: NewRow) -> bool:
    if "\0" in row.topic:
        return True
    if "\\u0000" not in row.attributes:  # the only way JSON writes NUL
        return False
    values = (*message.attributes, *message.attributes.values())
    return any(isinstance(value, str) and "\0" in value for value in values)
