"""Redis: transaction, inbox, outbox; streams as sources and sinks.

Works on Redis 6.0 and later, and on Valkey.
"""

from conquiet.redis.commands import commands
from conquiet.redis.consumer import remove_consumer, remove_idle_consumers
from conquiet.redis.entry import UndecodableEntry
from conquiet.redis.inbox import Inbox
from conquiet.redis.outbox import Outbox
from conquiet.redis.outbox_source import outbox_source
from conquiet.redis.outcome import InProgress, PartialExecError, UnknownOutcome
from conquiet.redis.server import Server, server_of
from conquiet.redis.sink import StreamSink
from conquiet.redis.source import StreamSource
from conquiet.redis.topic import Topic
from conquiet.redis.transaction import Transaction
from conquiet.redis.trim import (
    Trim,
    advance_reader,
    readers,
    register_reader,
    remove_reader,
    trim_stream,
)

__all__ = [
    "InProgress",
    "Inbox",
    "Outbox",
    "PartialExecError",
    "Server",
    "StreamSink",
    "StreamSource",
    "Topic",
    "Transaction",
    "Trim",
    "UndecodableEntry",
    "UnknownOutcome",
    "advance_reader",
    "commands",
    "outbox_source",
    "readers",
    "register_reader",
    "remove_consumer",
    "remove_idle_consumers",
    "remove_reader",
    "server_of",
    "trim_stream",
]
