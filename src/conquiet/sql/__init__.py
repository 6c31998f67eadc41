"""Transaction, inbox, outbox and relay source on PostgreSQL and SQLite."""

from conquiet.sql.ambient import connection, session
from conquiet.sql.claim import OutboxSource
from conquiet.sql.cleanup import Cleanup
from conquiet.sql.dialect import engine
from conquiet.sql.inbox import Inbox
from conquiet.sql.log import OutboxLog
from conquiet.sql.outbox import Outbox
from conquiet.sql.transaction import Transaction
from conquiet.sql.wakeup import written

__all__ = [
    "Cleanup",
    "Inbox",
    "Outbox",
    "OutboxLog",
    "OutboxSource",
    "Transaction",
    "connection",
    "engine",
    "session",
    "written",
]
