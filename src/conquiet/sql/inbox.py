"""Remember handled messages in a table, in the ambient transaction."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Sequence
from functools import cached_property
from typing import Any, overload

import msgspec
from sqlalchemy import Executable

from conquiet import inbox
from conquiet.errors import InvalidMessage
from conquiet.message import Message, describe
from conquiet.sql import handle
from conquiet.sql.schema import INBOX_TABLE, split_name
from conquiet.sql.transaction import current

MAX_IDENTITY_BYTES = 2000
"""The limit of source and id together: an index entry of PostgreSQL holds 2,704 bytes."""


class Inbox(inbox.Inbox):
    """Middleware: remembers handled messages in the database of the ambient transaction.

    Executes one statement per batch. A concurrent delivery of the same message waits for the
    first to end; then it is skipped as a duplicate, or handled if the first rolled back. Under
    REPEATABLE READ and SERIALIZABLE it fails with a `StoreError` instead, and is retried.

    `subscriber` names the consumer: what one has handled is new to another. `table` is that of the
    inbox, if need be with its schema.
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
        # Two workers with the same messages must lock them in the same order.
        new = handle.execute_with_begin(unit.connection, InsertEntries(self, sorted(entries)))
        unit.note_write()
        return entries if len(new) == len(entries) else [(name, id_) for name, id_ in new]

    @overload
    def fresh(self, transaction: handle.Handle, message: Message[Any] | str) -> bool: ...

    @overload
    def fresh(
        self, transaction: handle.AsyncHandle, message: Message[Any] | str
    ) -> Coroutine[Any, Any, bool]: ...

    def fresh(self, transaction: Any, message: Message[Any] | str) -> Any:
        """Remember a message in the caller's transaction; return False if it took effect before.

        For consumers without a router: commit the transaction, then ack; on False, ack alone.
        `transaction` is what `Outbox.add` takes; await the result if it is an async one. `message`
        may be the id that the producer gave it. A delivery of the same message that is under way
        elsewhere is waited for.
        """
        is_async = handle.is_async(transaction, "Inbox.fresh()")
        inserted = self._insert_one(message)
        if is_async:
            return _has_rows(handle.run_async(transaction, inserted))
        return bool(handle.run(transaction, inserted))

    def statement(self, message: Message[Any] | str) -> Executable:
        """Return the INSERT of `fresh` as a SQLAlchemy statement; a row comes back if it is new."""
        return self._insert_one(message)

    def _insert_one(self, message: Message[Any] | str) -> InsertEntries:
        if isinstance(message, str):
            message = Message(b"", {"id": message})
        self.admit(message)
        return InsertEntries(self, [self.entry(message)])

    @cached_property
    def one(self) -> str:
        """Return the INSERT of one entry on PostgreSQL."""
        return self._insert("VALUES (%s, %s)")

    @cached_property
    def many(self) -> str:
        """Return the INSERT on PostgreSQL of all entries in one parameter.

        Drivers take longer for arrays than msgspec for JSON.
        """
        return self._insert(
            "SELECT value ->> 0, value ->> 1 FROM jsonb_array_elements(%s::text::jsonb)"
        )

    @cached_property
    def each(self) -> str:
        """Return the INSERT on SQLite, of all entries in one parameter.

        A VALUES list could exceed SQLite's limit of variables. Without WHERE true, ON CONFLICT
        would be parsed as a join condition.
        """
        return self._insert(
            "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]')"
            " FROM json_each(?) WHERE true"
        )

    def _insert(self, rows: str) -> str:
        return (
            f"INSERT INTO {self.table} (subscriber, message_id) {rows}"
            " ON CONFLICT DO NOTHING RETURNING subscriber, message_id"
        )


class InsertEntries(handle.Statement):
    """Inserts entries of an inbox and returns the new ones."""

    inherit_cache = False
    returns_rows = True

    def __init__(self, inbox: Inbox, entries: Sequence[inbox.Entry]) -> None:
        self.inbox = inbox
        self.entries = entries
        self.is_single = len(entries) == 1

    def postgresql(self) -> handle.Query:
        if self.is_single:  # JSON pays from two entries on
            return self.inbox.one, self.entries[0]
        return self.inbox.many, (msgspec.json.encode(self.entries).decode(),)

    def sqlite(self) -> handle.Query:
        return self.inbox.each, (msgspec.json.encode(self.entries).decode(),)


async def _has_rows(rows: Coroutine[Any, Any, handle.Rows]) -> bool:
    return bool(await rows)


def _fits(identity: str) -> bool:
    if identity.isascii():
        return len(identity) <= MAX_IDENTITY_BYTES and "\0" not in identity
    try:
        return len(identity.encode()) <= MAX_IDENTITY_BYTES and "\0" not in identity
    except UnicodeEncodeError:
        return False
