"""A log, a store and what stands on them, all in this process: for tests, and to read first.

What the other rooms do with PostgreSQL or Redis, this one does with lists and dicts; it is the
shortest statement of how a source, an inbox and an outbox behave.
"""

from conquiet.memory.inbox import Inbox
from conquiet.memory.log import Log, LogSink
from conquiet.memory.outbox import Outbox
from conquiet.memory.source import LogSource
from conquiet.memory.store import Store
from conquiet.memory.transaction import Transaction

__all__ = ["Inbox", "Log", "LogSink", "LogSource", "Outbox", "Store", "Transaction"]
