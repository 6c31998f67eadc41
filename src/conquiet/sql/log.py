"""OutboxLog: reads an outbox as a log, from a position on, and misses no row.

Ids are given out when a row is inserted, and rows appear when their transaction commits: a
reader that remembers the last id passes by every row that was inserted before and commits
after. On PostgreSQL a position is therefore (transaction, id), and the log ends below the
oldest transaction that still runs, the *horizon*. A transaction that stays open for an hour
holds the log up for an hour, wherever in the cluster's database it runs; `horizon()` tells.
SQLite has one writer at a time, so ids appear in order there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import URL, Engine, Row, text
from sqlalchemy.exc import SQLAlchemyError

from conquiet.errors import ConfigError, InvalidMessage, StoreError
from conquiet.message import Attributes, Message
from conquiet.sql import dialect
from conquiet.sql.tables import OUTBOX_TABLE, outbox_table

POSITION = "position"
"""Where a message of the log carries its position, in `message.locals`."""

_position = re.compile(r"(\d{1,19})-(\d{1,19})")
_attributes = msgspec.json.Decoder(dict[str, Any])


class Position(NamedTuple):
    """A place in the log: everything up to and with it was read. As text, `812-40017`."""

    xid: int = 0
    id: int = 0

    def __str__(self) -> str:
        return f"{self.xid}-{self.id}"

    @classmethod
    def parse(cls, given: str) -> Position:
        """
        >>> Position.parse("812-40017")
        Position(xid=812, id=40017)
        """
        found = _position.fullmatch(given)
        if found is None:
            raise ConfigError(f"{given!r:.60} is not a position of a log, such as '812-40017'")
        return cls(int(found[1]), int(found[2]))


class Horizon(NamedTuple):
    """How far a log can be read."""

    xid: int
    """The first transaction that may still be running; rows from it on are not read yet."""
    seconds: float
    """For how long the oldest transaction has held the log up; 0 if none does."""
    holder: str
    """What that transaction is: its process, state and application; empty if none."""


class OutboxLog:
    """Every event of an outbox, published or not, in an order that no late commit disturbs.

    For readers that keep their own position: replay, audit, an export. It sees what cleanup
    has not removed yet.
    """

    def __init__(self, engine: Engine | str | URL, table: str = OUTBOX_TABLE) -> None:
        self.engine = dialect.as_engine(engine)
        self.table = outbox_table(table)
        name = self.engine.dialect.identifier_preparer.format_table(self.table)
        self._postgresql = dialect.is_postgresql(self.engine.dialect)
        self._read = text((_POSTGRESQL if self._postgresql else _SQLITE).format(table=name))

    def read(self, after: Position | str | None = None, limit: int = 1_000) -> list[Message[bytes]]:
        """Up to `limit` messages behind a position, each with its own in `locals`."""
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        start = Position.parse(after) if isinstance(after, str) else after or Position()
        given = {"xid": str(start.xid) if self._postgresql else 0, "id": start.id, "limit": limit}
        return [_message(row) for row in self._rows(self._read, given)]

    def follow(
        self, after: Position | str | None = None, limit: int = 1_000
    ) -> Iterator[Message[bytes]]:
        """Everything behind a position that can be read now, page by page."""
        position = after
        while page := self.read(position, limit):
            yield from page
            position = page[-1].locals[POSITION]

    def horizon(self) -> Horizon:
        """How far the log can be read, how old that is, and who holds it up."""
        if not self._postgresql:
            return Horizon(0, 0.0, "")
        [row] = self._rows(_HORIZON, {})
        return Horizon(int(row.xid), float(row.seconds), row.holder)

    def _rows(self, statement: Any, given: dict[str, Any]) -> Sequence[Row[Any]]:
        try:
            with self.engine.connect() as connection:
                return connection.execute(statement, given).all()
        except SQLAlchemyError as error:
            reason = dialect.one_line(error)
            raise StoreError(f"{dialect.shown(self.engine.url)}: {reason:.500}") from error


def _message(row: Row[Any]) -> Message[bytes]:
    try:
        attributes: Attributes = _attributes.decode(row.attributes)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidMessage(
            f"row {row.id}: attributes is not a JSON object: {error}; mend it or delete it"
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
