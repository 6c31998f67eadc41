"""Redis: transaction, inbox and outbox; streams as sources and sinks; retention of streams.

Works on Redis 6.0 and later, and on Valkey.
"""

from conquiet.redis.adapter import commands
from conquiet.redis.connection import CrossSlot
from conquiet.redis.group import remove_idle_consumers
from conquiet.redis.inbox import Inbox
from conquiet.redis.outbox import Outbox, OutboxSource
from conquiet.redis.retention import Readers, trim_stream
from conquiet.redis.sink import StreamSink
from conquiet.redis.source import StreamSource
from conquiet.redis.topic import Topic
from conquiet.redis.transaction import InProgress, PartialExecError, Transaction, UnknownOutcome

__all__ = [
    "CrossSlot",
    "InProgress",
    "Inbox",
    "Outbox",
    "OutboxSource",
    "PartialExecError",
    "Readers",
    "StreamSink",
    "StreamSource",
    "Topic",
    "Transaction",
    "UnknownOutcome",
    "commands",
    "remove_idle_consumers",
    "trim_stream",
]
