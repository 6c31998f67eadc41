"""Queue on Redis Streams: at least once, with explicit acks, independent of other packages.

    >>> from conquiet.queue import QueueConfig, QueueConsumer, RedisStreamsQueue
    >>> config = QueueConfig("orders", "billing", "billing-1")

`RedisStreamsQueue(client, config)` sends the commands, `QueueConsumer(queue)` runs the loop;
`AsyncRedisStreamsQueue` and `AsyncQueueConsumer` do so on an event loop, with a client of
`redis.asyncio`. The package imports no other part of conquiet.
"""

from conquiet.queue.config import QueueConfig
from conquiet.queue.consumer import AsyncQueueConsumer, QueueConsumer
from conquiet.queue.errors import (
    InvalidPayloadError,
    InvalidSettingError,
    MalformedEntryError,
    QueueError,
)
from conquiet.queue.message import QueueMessage
from conquiet.queue.queue import AsyncRedisStreamsQueue, RedisStreamsQueue

__all__ = [
    "AsyncQueueConsumer",
    "AsyncRedisStreamsQueue",
    "InvalidPayloadError",
    "InvalidSettingError",
    "MalformedEntryError",
    "QueueConfig",
    "QueueConsumer",
    "QueueError",
    "QueueMessage",
    "RedisStreamsQueue",
]
