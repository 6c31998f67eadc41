"""The tables of the inbox and the outbox, on PostgreSQL and SQLite.

row of the outbox:   stored ──published──▶ published_at set ──retention──▶ deleted
                       └─attempts used up─▶ parked_at set ──retry by hand──▶ stored
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.sql.functions import now
from sqlalchemy.types import UserDefinedType

from conquiet.errors import ConfigError

INBOX_TABLE = "processed_messages"
OUTBOX_TABLE = "outbox"

_table_name = re.compile(r"(?:[a-z_][a-z0-9_]{0,47}\.)?[a-z_][a-z0-9_]{0,47}")


def checked_name(name: str) -> tuple[str | None, str]:
    """Schema and name of a table; refuses whatever would have to be quoted.

    48 characters, so that the names of its indexes stay within PostgreSQL's 63.
    """
    if not isinstance(name, str) or not _table_name.fullmatch(name):
        raise ConfigError(
            f"table name {name!r:.80}: use a-z, 0-9 and _, at most 48 characters, with"
            " schema if need be, as in 'sales.outbox'"
        )
    schema, _, table = name.rpartition(".")
    return schema or None, table


class Xid8(UserDefinedType[int]):
    """PostgreSQL's 64-bit transaction id; plain integers elsewhere."""

    cache_ok = True


@compiles(Xid8, "postgresql")
def _xid8_on_postgresql(element: Xid8, compiler: Any, **options: Any) -> str:
    return "xid8"


@compiles(Xid8)
def _xid8_elsewhere(element: Xid8, compiler: Any, **options: Any) -> str:
    return "INTEGER"


class CurrentTransaction(FunctionElement[int]):
    """The id of the running transaction; 0 where transactions commit in the order they begin."""

    inherit_cache = True
    type = Xid8()


@compiles(CurrentTransaction, "postgresql")
def _current_on_postgresql(element: CurrentTransaction, compiler: Any, **options: Any) -> str:
    return "pg_current_xact_id()"


@compiles(CurrentTransaction)
def _current_elsewhere(element: CurrentTransaction, compiler: Any, **options: Any) -> str:
    return "0"


def inbox_table(name: str = INBOX_TABLE, metadata: MetaData | None = None) -> Table:
    """What took effect: one row per subscriber and message."""
    schema, table = checked_name(name)
    return Table(
        table,
        metadata if metadata is not None else MetaData(),
        Column("subscriber", Text, nullable=False),
        Column("message_id", Text, nullable=False),
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=now()),
        PrimaryKeyConstraint("subscriber", "message_id", name=f"{table}_pkey"),
        # For the cleanup alone, which deletes the oldest.
        Index(f"{table}_created_at", "created_at"),
        schema=schema,
    )


def outbox_table(name: str = OUTBOX_TABLE, metadata: MetaData | None = None) -> Table:
    """What transactions produced: one row per event, bytes as they are."""
    schema, table = checked_name(name)
    published_at = Column("published_at", DateTime(timezone=True))
    parked_at = Column("parked_at", DateTime(timezone=True))
    key = Column("key", Text)
    id_ = Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    claimable = published_at.is_(None) & parked_at.is_(None)
    return Table(
        table,
        metadata if metadata is not None else MetaData(),
        id_,
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=now()),
        Column("topic", Text, nullable=False),
        Column("event_type", Text, nullable=False),
        Column("event_id", Text, nullable=False),
        key,
        Column("content_type", Text, nullable=False),
        Column("data", LargeBinary, nullable=False),
        Column(
            "attributes",
            JSON(none_as_null=True).with_variant(JSONB(), "postgresql"),
            nullable=False,
        ),
        Column("attempts", Integer, nullable=False, server_default="0"),
        Column("last_error", Text),
        published_at,
        parked_at,
        Column("xid", Xid8(), nullable=False, server_default=CurrentTransaction()),
        CheckConstraint(
            "published_at IS NULL OR parked_at IS NULL", name=f"{table}_published_or_parked"
        ),
        # The claim reads only what waits; a million published rows cost it nothing.
        Index(f"{table}_claimable", id_, postgresql_where=claimable, sqlite_where=claimable),
        # Claims in order of a key look up the oldest waiting row of that key.
        Index(
            f"{table}_claimable_key",
            key,
            id_,
            postgresql_where=claimable & key.is_not(None),
            sqlite_where=claimable & key.is_not(None),
        ),
        # Whether a key is stuck, for those claims; and what waits for an operator.
        Index(
            f"{table}_parked",
            key,
            id_,
            postgresql_where=parked_at.is_not(None),
            sqlite_where=parked_at.is_not(None),
        ),
        Index(
            f"{table}_published_at",
            published_at,
            postgresql_where=published_at.is_not(None),
            sqlite_where=published_at.is_not(None),
        ),
        # Readers of the log go by (transaction, row): ids alone commit out of order.
        Index(f"{table}_log", "xid", id_),
        schema=schema,
        sqlite_autoincrement=True,  # a deleted id must never come back: it is a position
    )


def is_postgresql(dialect: Dialect) -> bool:
    return dialect.name == "postgresql"
