"""Redis: streams as sources and sinks. Works on Redis 6.0 and later, and on Valkey."""

from conquiet.redis.sink import StreamSink
from conquiet.redis.source import StreamSource
from conquiet.redis.topic import Topic

__all__ = ["StreamSink", "StreamSource", "Topic"]
