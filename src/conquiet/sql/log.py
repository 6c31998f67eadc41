"""Read an outbox as a log, from a position on, without missing a row.

A row gets its id when it is inserted and becomes visible when its transaction commits: a reader
that remembers the last id misses every row that was inserted before and commits later. On
PostgreSQL a position is therefore (transaction, id), and the log ends below the oldest running
transaction, the *horizon*. A transaction that stays open for an hour delays the log by an hour,
wherever in the database it runs; `horizon()` reports it. SQLite has one writer at a time, so ids
become visible in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import URL, Engine, Row, text
from sqlalchemy.exc import SQLAlchemyError

from conquiet.errors import ConfigError, InvalidMessage
from conquiet.message import Attributes, Message
from conquiet.sql import dialect
from conquiet.sql.schema import OUTBOX_TABLE, outbox_table

POSITION = "position"
"""The name in `message.locals` under which a message of the log carries its position."""

_position = re.compile(r"(\d{1,19})-(\d{1,19})")
_attributes = msgspec.json.Decoder(dict[str, Any])


class Position(NamedTuple):
    """Marks a place in the log, up to which all rows were read. As text: `812-40017`."""

    xid: int = 0
    id: int = 0

    def __str__(self) -> str:
        return f"{self.xid}-{self.id}"

    @classmethod
    def parse(cls, given: str) -> Position:
        """Parse the text form of a position.

        >>> Position.parse("812-40017")
        Position(xid=812, id=40017)
        """
        found = _position.fullmatch(given)
        if found is None:
            raise ConfigError(f"{given!r:.60} is not a position of a log, such as '812-40017'")
        return cls(int(found[1]), int(found[2]))


class Horizon(NamedTuple):
    """Describes how far the log can be read, and which transaction delays it."""

    xid: int
    """The first transaction that may still be running; its rows and later ones are not read yet."""
    seconds: float
    """For how long the oldest transaction has delayed the log; 0 if none does."""
    holder: str
    """Process, state and application of that transaction; empty if none."""


class OutboxLog:
    """Reads all events of an outbox, published or not, in an order that late commits keep.

    For readers that keep their own position: replay, audit, export. Rows that cleanup has removed
    are gone.

    `engine` is one of SQLAlchemy's, or a URL; `table` is that of the outbox.
    """

    def __init__(self, engine: Engine | str | URL, table: str = OUTBOX_TABLE) -> None:
        self.engine = dialect.as_engine(engine)
        self.table = outbox_table(table)
        name = self.engine.dialect.identifier_preparer.format_table(self.table)
        self._postgresql = dialect.is_postgresql(self.engine.dialect)
        self._read = text((_POSTGRESQL if self._postgresql else _SQLITE).format(table=name))

    def read(self, after: Position | str | None = None, limit: int = 1_000) -> list[Message[bytes]]:
        """Return up to `limit` messages behind a position, each with its position in `locals`.

        Without `after`, from the first that is kept.
        """
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        start = Position.parse(after) if isinstance(after, str) else after or Position()
        given = {"xid": str(start.xid) if self._postgresql else 0, "id": start.id, "limit": limit}
        return [_message(row) for row in self._rows(self._read, given)]

    def follow(
        self, after: Position | str | None = None, limit: int = 1_000
    ) -> Iterator[Message[bytes]]:
        """Yield all messages that can be read now, from behind `after`, in pages of `limit`."""
        position = after
        while page := self.read(position, limit):
            yield from page
            position = page[-1].locals[POSITION]

    def horizon(self) -> Horizon:
        """Return how far the log can be read, and which transaction delays it."""
        if not self._postgresql:
            return Horizon(0, 0.0, "")
        [row] = self._rows(_HORIZON, {})
        return Horizon(int(row.xid), float(row.seconds), row.holder)

    def _rows(self, statement: Any, given: dict[str, Any]) -> Sequence[Row[Any]]:
        try:
            with self.engine.connect() as connection:
                return connection.execute(statement, given).all()
        except SQLAlchemyError as error:
            raise dialect.store_error(self.engine, error) from error


def _message(row: Row[Any]) -> Message[bytes]:
    try:
        attributes: Attributes = _attributes.decode(row.attributes)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidMessage(
            f"row {row.id}: attributes is not a JSON object: {error}; correct or delete the row"
        ) from error
    message = Message(bytes(row.data), attributes, topic=row.topic)
    message.locals[POSITION] = str(Position(int(row.xid), row.id))
    return message


# The comparison is row-wise, so that the index on (xid, id) is entered at the position.
_POSTGRESQL = """
SELECT o.xid::text AS xid, o.id, o.topic, o.data, o.attributes::text AS attributes
  FROM {table} AS o
 WHERE (o.xid, o.id) > (CAST(:xid AS xid8), :id)
   AND o.xid < pg_snapshot_xmin(pg_current_snapshot())
 ORDER BY o.xid, o.id LIMIT :limit
"""
_SQLITE = """
SELECT 0 AS xid, id, topic, data, attributes FROM {table}
 WHERE id > :id AND 0 = :xid ORDER BY id LIMIT :limit
"""
_HORIZON = text("""
WITH edge AS (SELECT pg_snapshot_xmin(pg_current_snapshot()) AS xid),
     holder AS (
    SELECT pid, state, application_name, xact_start FROM pg_stat_activity, edge
     WHERE backend_xid = edge.xid::xid AND pid <> pg_backend_pid()
     LIMIT 1)
SELECT edge.xid::text AS xid,
       coalesce(extract(epoch FROM clock_timestamp() - holder.xact_start), 0) AS seconds,
       coalesce('process ' || holder.pid || ', ' || holder.state || ', '
                || holder.application_name, '') AS holder
  FROM edge LEFT JOIN holder ON true
""")
