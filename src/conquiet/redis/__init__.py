"""Redis: streams as sources and sinks. Works on Redis 6.0 and later, and on Valkey."""

from conquiet.redis.consumer import remove_consumer, remove_idle_consumers
from conquiet.redis.entry import UndecodableEntry
from conquiet.redis.outbox_source import outbox_source
from conquiet.redis.server import Server, server_of
from conquiet.redis.sink import StreamSink
from conquiet.redis.source import StreamSource
from conquiet.redis.topic import Topic
from conquiet.redis.trim import (
    Trim,
    advance_reader,
    readers,
    register_reader,
    remove_reader,
    trim_stream,
)

__all__ = [
    "Server",
    "StreamSink",
    "StreamSource",
    "Topic",
    "Trim",
    "UndecodableEntry",
    "advance_reader",
    "outbox_source",
    "readers",
    "register_reader",
    "remove_consumer",
    "remove_idle_consumers",
    "remove_reader",
    "server_of",
    "trim_stream",
]
