"""Remember handled messages in a table, in the ambient transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import msgspec

from conquiet import inbox
from conquiet.errors import InvalidMessage
from conquiet.message import Message, describe
from conquiet.sql import dialect
from conquiet.sql.schema import INBOX_TABLE, split_name
from conquiet.sql.transaction import current

MAX_IDENTITY_BYTES = 2000
"""The limit of source and id together: an index entry of PostgreSQL holds 2,704 bytes."""


class Inbox(inbox.Inbox):
    """Middleware: remembers handled messages in the database of the ambient transaction.

    Executes one statement per batch. A concurrent delivery of the same message waits for the
    first to end; then it is skipped as a duplicate, or handled if the first rolled back. Under
    REPEATABLE READ and SERIALIZABLE it fails with a `StoreError` instead, and is retried.
    """

    def __init__(self, subscriber: str, table: str = INBOX_TABLE) -> None:
        super().__init__(subscriber)
        split_name(table)
        self.table = table

    def admit(self, message: Message[Any]) -> None:
        super().admit(message)
        if not _fits(message.identity):
            raise InvalidMessage(
                f"{describe(message.attributes)}: source and id must be text without NUL, of"
                f" {MAX_IDENTITY_BYTES:,} bytes at most; let the producer shorten them"
            )

    def remember(self, entries: Sequence[inbox.Entry]) -> Collection[inbox.Entry]:
        unit = current("the inbox")
        unit.use_table(self.table)
        connection = unit.connection
        # Two workers with the same messages must lock them in the same order.
        ordered = sorted(entries)
        if dialect.is_sqlite(connection.dialect):
            document = msgspec.json.encode(ordered).decode()
            new = connection.exec_driver_sql(self._sqlite, (document,)).all()
        elif dialect.uses_psycopg(connection.dialect):
            with (
                dialect.translate_errors(connection),
                dialect.driver_connection(connection).cursor() as cursor,
            ):
                new = cursor.execute(*self._postgresql(ordered)).fetchall()
        else:
            new = connection.exec_driver_sql(*self._postgresql(ordered)).all()
        unit.note_write()
        return entries if len(new) == len(entries) else [(name, id_) for name, id_ in new]

    def _postgresql(self, entries: Sequence[inbox.Entry]) -> tuple[str, tuple[Any, ...]]:
        if len(entries) == 1:  # arrays pay from two entries on
            return self._one, entries[0]
        return self._many, ([name for name, _ in entries], [identity for _, identity in entries])

    @cached_property
    def _one(self) -> str:
        return self._insert("VALUES (%s, %s)")

    @cached_property
    def _many(self) -> str:
        return self._insert("SELECT * FROM unnest(%s::text[], %s::text[])")

    @cached_property
    def _sqlite(self) -> str:
        # One parameter for all entries: a VALUES list could exceed SQLite's limit of variables.
        # Without WHERE true, ON CONFLICT would be parsed as a join condition.
        return self._insert(
            "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]')"
            " FROM json_each(?) WHERE true"
        )

    def _insert(self, rows: str) -> str:
        return (
            f"INSERT INTO {self.table} (subscriber, message_id) {rows}"
            " ON CONFLICT DO NOTHING RETURNING subscriber, message_id"
        )


def _fits(identity: str) -> bool:
    if identity.isascii():
        return len(identity) <= MAX_IDENTITY_BYTES and "\0" not in identity
    try:
        return len(identity.encode()) <= MAX_IDENTITY_BYTES and "\0" not in identity
    except UnicodeEncodeError:
        return False
