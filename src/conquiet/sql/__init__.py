"""Transaction, inbox, outbox, outbox source and log on PostgreSQL and SQLite."""

from conquiet.config import missing_extra

try:
    import sqlalchemy  # noqa: F401
except ImportError as error:
    raise missing_extra(error, "sql") from error

from conquiet.sql import schema
from conquiet.sql.cleanup import Cleanup
from conquiet.sql.dialect import engine
from conquiet.sql.inbox import Inbox
from conquiet.sql.log import OutboxLog
from conquiet.sql.log_source import LogSource, PositionInbox
from conquiet.sql.notification import notify_relays, notify_statement
from conquiet.sql.outbox import Outbox
from conquiet.sql.outbox_source import OutboxSource
from conquiet.sql.transaction import (
    Transaction,
    TransactionEnded,
    async_connection,
    async_session,
    connection,
    session,
)
from conquiet.sql.wal_source import WalSource

__all__ = [
    "Cleanup",
    "Inbox",
    "LogSource",
    "Outbox",
    "OutboxLog",
    "OutboxSource",
    "PositionInbox",
    "Transaction",
    "TransactionEnded",
    "WalSource",
    "async_connection",
    "async_session",
    "connection",
    "engine",
    "notify_relays",
    "notify_statement",
    "schema",
    "session",
]
