"""Transaction, inbox, outbox and relay source on PostgreSQL and SQLite."""

from conquiet.sql.ambient import connection, session
from conquiet.sql.dialect import engine
from conquiet.sql.inbox import Inbox
from conquiet.sql.outbox import Outbox
from conquiet.sql.transaction import Transaction

__all__ = ["Inbox", "Outbox", "Transaction", "connection", "engine", "session"]
