"""Store events in an outbox table, in the ambient transaction or in one of the caller's.

    handler's outputs ──▶ rows ──▶ one INSERT in the transaction ──▶ relay

Ids ascend in the order of the events. Data is stored byte for byte, with its content type.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Executable, Table, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql import ClauseElement

from conquiet import outbox
from conquiet.codec import check_attributes, encode_data
from conquiet.errors import ConfigError, HandlerError, InvalidMessage
from conquiet.message import Message, describe
from conquiet.sql import dialect
from conquiet.sql.schema import OUTBOX_TABLE, outbox_table
from conquiet.sql.transaction import current

_COLUMNS = ("topic", "event_type", "event_id", "key", "content_type", "data", "attributes")
_KINDS = ("text", "text", "text", "text", "text", "bytea", "text")
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

    Without a router, in a transaction of your own: `add` for a SQLAlchemy `Session` or
    `Connection`, a psycopg or a sqlite3 connection; `statement` for `AsyncSession` and
    `AsyncConnection`; `for_asyncpg` and `for_psycopg` for async drivers.
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
        self._insert(unit.connection, [self._row(output) for output in outputs])
        unit.note_write(self.table.fullname if self.notify else None)

    def add(self, transaction: Any, events: Iterable[Any], *, source: str = "") -> list[str]:
        """Write events in the caller's transaction and return their ids, in order.

        `events` are messages, or instances of event classes; these need a `source` here or in
        the constructor. Nothing is committed.
        """
        rows = self._rows(events, source)
        if not rows:
            return []
        if isinstance(transaction, Session):
            self._insert(transaction.connection(), rows)
        elif isinstance(transaction, Connection):
            if not transaction.in_transaction():
                transaction.begin()  # SQLAlchemy does not see statements that the driver executes
            self._insert(transaction, rows)
        elif _is_async(transaction):
            raise ConfigError(
                f"add() cannot await {type(transaction).__name__};"
                " use: await session.execute(outbox.statement(events))"
            )
        else:
            self._insert_by_driver(transaction, rows)
        return [row.event_id for row in rows]

    def statement(self, events: Iterable[Any], *, source: str = "") -> Executable:
        """Return the INSERT as a SQLAlchemy statement, for any number of events."""
        rows = self._rows(events, source)
        if not rows:
            raise ConfigError("an outbox statement needs at least one event")
        return InsertRows(self, rows)

    def for_asyncpg(self, events: Iterable[Any], *, source: str = "") -> tuple[Any, ...]:
        """Return text and arguments: `await connection.execute(*outbox.for_asyncpg(events))`."""
        marks = [f"${number}" for number in range(1, len(_COLUMNS) + 1)]
        return self.insert_arrays(marks), *_by_column(self._rows(events, source))

    def for_psycopg(self, events: Iterable[Any], *, source: str = "") -> tuple[str, Any]:
        """Return text and arguments: `await connection.execute(*outbox.for_psycopg(events))`."""
        return self._query(self._rows(events, source))

    def _rows(self, events: Iterable[Any], source: str) -> list[NewRow]:
        return [self._row(event) for event in outbox.complete_all(events, source or self.source)]

    def _row(self, message: Message[Any]) -> NewRow:
        """Validate before the INSERT: a database error would abort the whole transaction."""
        try:
            check_attributes(message.attributes)
        except InvalidMessage as error:
            raise HandlerError(f"{error}; no relay could publish it") from error
        try:
            row = NewRow(
                message.topic or self.topic,
                message.type,
                message.id,
                message.key,
                message.datacontenttype,
                encode_data(message),
                _encode(message.attributes).decode(),
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

    def _insert(self, connection: Connection, rows: Sequence[NewRow]) -> None:
        if dialect.uses_psycopg(connection.dialect):
            with dialect.translate_errors(connection):
                self._insert_by_driver(dialect.driver_connection(connection), rows)
        elif dialect.is_postgresql(connection.dialect):
            connection.exec_driver_sql(*self._query(rows))
        elif len(rows) == 1:
            connection.exec_driver_sql(self._sqlite, rows[0])
        else:
            connection.exec_driver_sql(self._sqlite, [tuple(row) for row in rows])

    def _insert_by_driver(self, connection: Any, rows: Sequence[NewRow]) -> None:
        psycopg = sys.modules.get("psycopg")  # not loaded: not a psycopg connection
        if psycopg is not None and isinstance(connection, psycopg.Connection):
            with connection.cursor() as cursor:
                cursor.execute(*self._query(rows))
        elif isinstance(connection, sqlite3.Connection):
            connection.executemany(self._sqlite, rows)
        else:
            raise ConfigError(
                f"an outbox cannot write by {type(connection).__name__}; it takes SQLAlchemy's"
                " Session and Connection, and connections of psycopg and sqlite3"
            )

    def _query(self, rows: Sequence[NewRow]) -> tuple[str, tuple[Any, ...]]:
        if len(rows) == 1:  # arrays pay from two rows on
            return self._one, tuple(rows[0])
        return self._many, dialect.FrozenParameters(_by_column(rows))

    @cached_property
    def _name(self) -> str:
        return self.table.fullname

    @cached_property
    def _one(self) -> str:
        return (
            f"INSERT INTO {self._name} ({', '.join(_COLUMNS)})"
            " VALUES (%s, %s, %s, nullif(%s, ''), %s, %b, %s::jsonb)"
        )

    @cached_property
    def _many(self) -> str:
        return self.insert_arrays(["%b"] * len(_COLUMNS))

    def insert_arrays(self, marks: Sequence[str]) -> str:
        """Insert one array per column: fewer bytes and less parsing than a VALUES list."""
        arrays = ", ".join(f"{mark}::{kind}[]" for mark, kind in zip(marks, _KINDS, strict=True))
        return (
            f"INSERT INTO {self._name} ({', '.join(_COLUMNS)})"
            " SELECT topic, event_type, event_id, nullif(key, ''), content_type, data,"
            f" attributes::jsonb FROM unnest({arrays}) WITH ORDINALITY"
            f" AS row ({', '.join(_COLUMNS)}, place) ORDER BY place"
        )

    @cached_property
    def _sqlite(self) -> str:
        return (
            f"INSERT INTO {self._name} ({', '.join(_COLUMNS)})"
            " VALUES (?, ?, ?, nullif(?, ''), ?, ?, ?)"
        )


class InsertRows(Executable, ClauseElement):
    """Inserts any number of rows by a fixed number of parameters, which drivers limit.

    PostgreSQL takes one array per column. SQLite, which has no arrays, takes the columns as JSON
    and cuts the data of each row out of one BLOB.
    """

    inherit_cache = False

    def __init__(self, outbox: Outbox, rows: Sequence[NewRow]) -> None:
        self.outbox = outbox
        self.rows = rows


@compiles(InsertRows, "postgresql")
def _insert_arrays(element: InsertRows, compiler: Any, **options: Any) -> str:
    columns = zip(_COLUMNS, _by_column(element.rows), strict=True)
    return element.outbox.insert_arrays(
        [compiler.process(bindparam(f"new_{name}", values)) for name, values in columns]
    )


@compiles(InsertRows, "sqlite")
def _insert_json(element: InsertRows, compiler: Any, **options: Any) -> str:
    place, columns = 1, []
    for row in element.rows:
        columns.append((*row[:5], place, len(row.data), row.attributes))
        place += len(row.data)
    rows = compiler.process(bindparam("new_rows", _encode(columns).decode()))
    data = compiler.process(bindparam("new_data", b"".join(row.data for row in element.rows)))
    topic, type_, id_, key, content, start, length, attributes = (
        f"json_extract(value, '$[{number}]')" for number in range(8)
    )
    return (
        f"INSERT INTO {element.outbox.table.fullname} ({', '.join(_COLUMNS)})"
        f" SELECT {topic}, {type_}, {id_}, nullif({key}, ''), {content},"
        f" substr({data}, {start}, {length}), {attributes} FROM json_each({rows}) ORDER BY key"
    )


def _by_column(rows: Sequence[NewRow]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _is_async(transaction: Any) -> bool:
    # Not by isinstance: importing SQLAlchemy's asyncio needs greenlet.
    kinds = type(transaction).__mro__
    return any(kind.__module__.startswith("sqlalchemy.ext.asyncio") for kind in kinds)


def _has_nul(message: Message[Any], row: NewRow) -> bool:
    if "\0" in row.topic:
        return True
    if "\\u0000" not in row.attributes:  # the only way JSON writes NUL
        return False
    values = (*message.attributes, *message.attributes.values())
    return any(isinstance(value, str) and "\0" in value for value in values)
