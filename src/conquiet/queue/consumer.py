"""The loop around a queue: one message at a time, until stopped."""

from __future__ import annotations

from collections.abc import Iterator

from conquiet.queue.errors import InvalidSettingError
from conquiet.queue.message import QueueMessage
from conquiet.queue.queue import RedisStreamsQueue
from conquiet.queue.sigterm import SigtermHandler


class QueueConsumer:
    """Hands out messages until `stop()`. It acks nothing, retries nothing and catches nothing.

    >>> from conquiet.queue import QueueConfig, RedisStreamsQueue
    >>> queue = RedisStreamsQueue(client, QueueConfig("orders", "billing", "billing-1"))
    >>> _ = queue.enqueue({"order": 7})
    >>> consumer = QueueConsumer(queue)
    >>> for message in consumer.iter_messages():
    ...     print(message.payload)
    ...     consumer.ack(message)
    ...     consumer.stop()
    {'order': 7}
    """

    def __init__(self, queue: RedisStreamsQueue) -> None:
        if queue.config.max_read_count != 1:
            raise InvalidSettingError(
                f"max_read_count={queue.config.max_read_count!r} is not allowed: a QueueConsumer "
                f"holds one message, so it must be 1; to read more, call RedisStreamsQueue.read"
            )
        self._queue = queue
        # Not an Event: a signal handler that sets one can wait for a lock its own thread holds.
        self._stopped = False

    @property
    def stopped(self) -> bool:
        return self._stopped

    def next(self, block_ms: int | None = None) -> QueueMessage | None:
        """The next message, or None if none came within `block_ms` or the consumer is stopped.

        A message that arrives together with `stop()` is still returned.
        """
        if self._stopped:
            return None
        messages = self._queue.read(self._queue.config.block_ms if block_ms is None else block_ms)
        return messages[0] if messages else None

    def iter_messages(self) -> Iterator[QueueMessage]:
        """Messages until stopped. After an error the same iterator can be asked for the next."""
        return _Messages(self)

    def ack(self, msg: QueueMessage) -> None:
        """Settle a message; one that is never acked is left to `claim_stale`."""
        self._queue.ack(msg)

    def stop(self) -> None:
        """Begin no new read, for good; from any thread or signal handler, as often as you like.

        A read under way ends within its block time. What was delivered and not acked stays pending.
        """
        self._stopped = True

    def stop_on_sigterm(self) -> SigtermHandler:
        """Let SIGTERM call `stop()`, and then the handler that was there before.

        Only from the main thread. The handler stays until the returned object is left as a context
        manager or told to `restore()`.
        """
        return SigtermHandler(self.stop)


class _Messages:
    """An iterator of its own, because a generator that has raised is at its end."""

    def __init__(self, consumer: QueueConsumer) -> None:
        self._consumer = consumer

    def __iter__(self) -> Iterator[QueueMessage]:
        return self

    def __next__(self) -> QueueMessage:
        while not self._consumer.stopped:
            message = self._consumer.next()
            if message is not None:
                return message
        raise StopIteration
