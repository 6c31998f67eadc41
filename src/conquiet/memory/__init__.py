"""Log, store, transaction, inbox and outbox in memory: for tests, and to read first.

The room does with lists and dicts what the other rooms do with PostgreSQL or Redis; it is the
shortest description of how a source, an inbox and an outbox behave.
"""

from conquiet.memory.log import Log, LogSink, LogSource
from conquiet.memory.store import Inbox, Outbox, Store, Transaction

__all__ = ["Inbox", "Log", "LogSink", "LogSource", "Outbox", "Store", "Transaction"]
