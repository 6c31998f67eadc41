"""Store events in an outbox table, in the ambient transaction or in one of the caller's.

    handler's outputs ──▶ rows ──▶ one INSERT in the transaction ──▶ relay

Ids ascend in the order of the events. Data is stored byte for byte, with its content type.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import msgspec
from sqlalchemy import Executable, Table, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session

from conquiet import outbox
from conquiet.codec import check_attributes, encode_data
from conquiet.errors import ConfigError, HandlerError, InvalidMessage
from conquiet.message import Message, describe
from conquiet.sql import handle
from conquiet.sql.notification import notify_after_commit
from conquiet.sql.schema import OUTBOX_TABLE, outbox_table
from conquiet.sql.transaction import TransactionConnection, current

_COLUMNS = ("topic", "event_type", "event_id", "key", "content_type", "data", "attributes")
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


class Outbox(outbox.Outbox):
    """Middleware: stores the outputs of handlers as rows, in the ambient transaction.

    Without a router, in a transaction of your own: `add`. `statement` gives the INSERT for whatever
    executes SQLAlchemy's statements.
    """

    def __init__(
        self, topic: str, table: str = OUTBOX_TABLE, *, source: str = "", notify: bool = True
    ) -> None:
        super().__init__(topic)
        self.table: Table = outbox_table(table)
        self.source = source
        self.notify = notify
        """Whether relays are notified after a commit; if not, they find the rows by polling."""

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        unit = current("the outbox")
        unit.use_table(self.table.fullname)
        inserted = InsertRows(self, [self._row(item) for item in outputs])
        handle.execute_with_commit(unit.connection, inserted)
        unit.note_write(self.table.fullname if self.notify else None)

    @overload
    def add(
        self, transaction: handle.Handle, events: Iterable[Any], *, source: str = ""
    ) -> list[str]: ...

    @overload
    def add(
        self, transaction: handle.AsyncHandle, events: Iterable[Any], *, source: str = ""
    ) -> Coroutine[Any, Any, list[str]]: ...

    def add(self, transaction: Any, events: Iterable[Any], *, source: str = "") -> Any:
        """Write events in the caller's transaction and return their ids, in order.

        `transaction` is a `Session` or `Connection` of SQLAlchemy, or a connection of psycopg or
        sqlite3. With an `AsyncSession`, an `AsyncConnection`, or a connection of asyncpg, async
        psycopg or aiosqlite, await the result. Nothing is committed.

        `events` are messages, or instances of event classes; these need a `source` here or in
        the constructor. Relays are notified after the commit of a session; the commit of a
        connection cannot be seen.
        """
        is_async = handle.is_async(transaction, "Outbox.add()")
        inserted = InsertRows(self, self._rows(events, source))
        if is_async:
            return self._add_async(transaction, inserted)
        if inserted.rows:
            handle.run(transaction, inserted)
            self._notify(transaction)
        return inserted.ids

    async def _add_async(self, transaction: Any, inserted: InsertRows) -> list[str]:
        if inserted.rows:
            await handle.run_async(transaction, inserted)
            self._notify(transaction)
        return inserted.ids

    def _notify(self, transaction: Any) -> None:
        """Notify relays after the commit, where it can be seen."""
        session = getattr(transaction, "sync_session", transaction)
        bind = session.bind if isinstance(session, Session) else session
        table = self.table.fullname if self.notify else None
        if isinstance(bind, TransactionConnection):
            bind.unit.note_write(table)
        elif isinstance(session, Session) and table is not None:
            notify_after_commit(session, table)

    def statement(self, events: Iterable[Any], *, source: str = "") -> Executable:
        """Return the INSERT as a SQLAlchemy statement, for any number of events."""
        rows = self._rows(events, source)
        if not rows:
            raise ConfigError("an outbox statement needs at least one event")
        return InsertRows(self, rows)

    def _rows(self, events: Iterable[Any], source: str) -> list[NewRow]:
        return [self._row(event) for event in outbox.complete_all(events, source or self.source)]

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

    @cached_property
    def _name(self) -> str:
        return self.table.fullname

    @cached_property
    def one(self) -> str:
        """Return the INSERT of one row on PostgreSQL."""
        # A parameter of the type text: a codec that asyncpg has for jsonb would encode it again.
        return (
            f"INSERT INTO {self._name} ({', '.join(_COLUMNS)})"
            " VALUES (%s, %s, %s, nullif(%s, ''), %s, %b, %s::text::jsonb)"
        )

    @cached_property
    def many(self) -> str:
        """Return the INSERT of all rows on PostgreSQL, from what `_pack` gives.

        Drivers take longer for an array per column than msgspec for JSON.
        """
        return (
            f"INSERT INTO {self._name} ({', '.join(_COLUMNS)})"
            " SELECT item ->> 0, item ->> 1, item ->> 2, nullif(item ->> 3, ''), item ->> 4,"
            " substring(%b::bytea FROM (item ->> 5)::integer FOR (item ->> 6)::integer), item -> 7"
            " FROM jsonb_array_elements(%s::text::jsonb) WITH ORDINALITY AS packed (item, place)"
            " ORDER BY place"
        )

    @cached_property
    def each(self) -> str:
        """Return the INSERT of one row on SQLite."""
        return (
            f"INSERT INTO {self._name} ({', '.join(_COLUMNS)})"
            " VALUES (?, ?, ?, nullif(?, ''), ?, ?, ?)"
        )


class InsertRows(handle.Statement):
    """Inserts any number of rows by a fixed number of parameters, which drivers limit."""

    inherit_cache = False

    def __init__(self, outbox: Outbox, rows: Sequence[NewRow]) -> None:
        self.outbox = outbox
        self.rows = rows

    @property
    def ids(self) -> list[str]:
        return [row.event_id for row in self.rows]

    def postgresql(self) -> handle.Query:
        if len(self.rows) == 1:  # JSON pays from two rows on
            return self.outbox.one, tuple(self.rows[0])
        return self.outbox.many, _pack(self.rows, msgspec.Raw)

    def sqlite(self) -> handle.Query:
        if len(self.rows) == 1:
            return self.outbox.each, tuple(self.rows[0])
        return self.outbox.each, [tuple(row) for row in self.rows]


@compiles(InsertRows, "sqlite")
def _insert_json(element: InsertRows, compiler: Any, **options: Any) -> str:
    packed = _pack(element.rows, str)  # as text: SQLite would write the JSON in another way
    data, rows = (
        compiler.process(bindparam(name, value))
        for name, value in zip(("new_data", "new_rows"), packed, strict=True)
    )
    topic, type_, id_, key, content, start, length, attributes = (
        f"json_extract(value, '$[{number}]')" for number in range(8)
    )
    return (
        f"INSERT INTO {element.outbox.table.fullname} ({', '.join(_COLUMNS)})"
        f" SELECT {topic}, {type_}, {id_}, nullif({key}, ''), {content},"
        f" substr({data}, {start}, {length}), {attributes} FROM json_each({rows}) ORDER BY key"
    )


def _pack(rows: Sequence[NewRow], attributes_as: Callable[[str], Any]) -> tuple[bytes, str]:
    """Return the data of all rows in one piece, and the rest as JSON.

    A row has the place of its data, from 1, and its length: SQL cuts it out.
    """
    place, columns = 1, []
    for topic, type_, id_, key, content, data, attributes in rows:
        size = len(data)
        columns.append((topic, type_, id_, key, content, place, size, attributes_as(attributes)))
        place += size
    return b"".join([row.data for row in rows]), _encode(columns).decode()


def _has_nul(message: Message[Any], row: NewRow) -> bool:
    if "\0" in row.topic:
        return True
    if "\\u0000" not in row.attributes:  # the only way JSON writes NUL
        return False
    values = (*message.attributes, *message.attributes.values())
    return any(isinstance(value, str) and "\0" in value for value in values)
