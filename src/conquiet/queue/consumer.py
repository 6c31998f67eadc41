"""Read a queue in a loop, one message at a time, until stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Self

from conquiet.queue.config import QueueConfig
from conquiet.queue.errors import InvalidSettingError, QueueError
from conquiet.queue.message import QueueMessage
from conquiet.queue.queue import AsyncRedisStreamsQueue, RedisStreamsQueue


class _Stoppable:
    """Ends by `stop()` or SIGTERM; the base of both consumers."""

    def __init__(self, config: QueueConfig, handle_sigterm: bool) -> None:
        if config.max_read_count != 1:
            raise InvalidSettingError(
                f"max_read_count={config.max_read_count!r} is not allowed: a {type(self).__name__} "
                f"holds one message, so it must be 1; to read more, call read() of the queue"
            )
        self._block_ms = config.block_ms
        self._handles_sigterm = handle_sigterm
        # Not an Event: a signal handler that sets one can wait for a lock its own thread holds.
        self._stopped = False

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """Begin no new read; safe from any thread or signal handler, also repeatedly.

        A current read ends within its block time. Delivered messages that were not acked stay
        pending.
        """
        self._stopped = True

    def stop_on_sigterm(self) -> SigtermHandler:
        """Let SIGTERM call `stop()`, and then the previous handler; for loops over `next()`.

        Call it in the main thread. The handler stays until the returned object is left as a context
        manager or its `restore()` is called.
        """
        return SigtermHandler(self.stop)

    def _sigterm_handler(self) -> SigtermHandler | None:
        is_main = threading.current_thread() is threading.main_thread()
        if not self._handles_sigterm or not is_main:
            return None
        if signal.getsignal(signal.SIGTERM) in (None, signal.SIG_IGN):
            return None
        return SigtermHandler(self.stop)


class QueueConsumer(_Stoppable):
    """Yields messages until `stop()` or SIGTERM. It does not ack, retry or catch errors.

    `iter_messages()` in the main thread handles SIGTERM until it ends; with
    `handle_sigterm=False` it leaves the signal alone.

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

    def __init__(self, queue: RedisStreamsQueue, *, handle_sigterm: bool = True) -> None:
        super().__init__(queue.config, handle_sigterm)
        self._queue = queue

    def next(self, block_ms: int | None = None) -> QueueMessage | None:
        """Return the next message; None after `block_ms`, or if the consumer is stopped.

        A message that arrives together with `stop()` is still returned.
        """
        if self._stopped:
            return None
        messages = self._queue.read(self._block_ms if block_ms is None else block_ms)
        return messages[0] if messages else None

    def iter_messages(self) -> Iterator[QueueMessage]:
        """Iterate over messages until stopped; the iterator can go on after an error.

        In the main thread SIGTERM calls `stop()`, and then the previous handler, until the iterator
        ends or is left. A SIGTERM that the program ignores stays ignored.
        """
        return _Messages(self, self._sigterm_handler())

    def ack(self, msg: QueueMessage) -> None:
        """Ack a message; `claim_stale` finds messages that were never acked."""
        self._queue.ack(msg)


class AsyncQueueConsumer(_Stoppable):
    """Does what QueueConsumer does, on an event loop; `handle_sigterm` likewise.

    >>> import asyncio
    >>> from conquiet.queue import AsyncRedisStreamsQueue, QueueConfig
    >>> async def main():
    ...     async with async_client:
    ...         queue = AsyncRedisStreamsQueue(async_client, QueueConfig("orders", "billing", "b1"))
    ...         _ = await queue.enqueue({"order": 7})
    ...         consumer = AsyncQueueConsumer(queue)
    ...         async for message in consumer.iter_messages():
    ...             print(message.payload)
    ...             await consumer.ack(message)
    ...             consumer.stop()
    >>> asyncio.run(main())
    {'order': 7}
    """

    def __init__(self, queue: AsyncRedisStreamsQueue, *, handle_sigterm: bool = True) -> None:
        super().__init__(queue.config, handle_sigterm)
        self._queue = queue

    async def next(self, block_ms: int | None = None) -> QueueMessage | None:
        """Return the next message; None after `block_ms`, or if the consumer is stopped.

        A message that arrives together with `stop()` is still returned.
        """
        if self._stopped:
            return None
        messages = await self._queue.read(self._block_ms if block_ms is None else block_ms)
        return messages[0] if messages else None

    def iter_messages(self) -> AsyncIterator[QueueMessage]:
        """Iterate over messages until stopped; the iterator can go on after an error.

        In the main thread SIGTERM calls `stop()`, and then the previous handler, until the iterator
        ends or is left. A SIGTERM that the program ignores stays ignored.
        """
        return _AsyncMessages(self, self._sigterm_handler())

    async def ack(self, msg: QueueMessage) -> None:
        """Ack a message; `claim_stale` finds messages that were never acked."""
        await self._queue.ack(msg)


class _Restoring:
    """Restores SIGTERM when the iteration ends or is left."""

    def __init__(self, sigterm: SigtermHandler | None) -> None:
        self._sigterm = sigterm

    def __del__(self) -> None:  # a loop that was left by break or by an error
        self._restore_sigterm()

    def _restore_sigterm(self) -> None:
        if self._sigterm is not None and threading.current_thread() is threading.main_thread():
            self._sigterm.restore()
            self._sigterm = None


class _Messages(_Restoring):
    """Iterates over messages; a generator would end at the first error."""

    def __init__(self, consumer: QueueConsumer, sigterm: SigtermHandler | None) -> None:
        super().__init__(sigterm)
        self._consumer = consumer

    def __iter__(self) -> Iterator[QueueMessage]:
        return self

    def __next__(self) -> QueueMessage:
        while not self._consumer.stopped:
            message = self._consumer.next()
            if message is not None:
                return message
        self._restore_sigterm()
        raise StopIteration


class _AsyncMessages(_Restoring):
    """Iterates over messages; a generator would end at the first error."""

    def __init__(self, consumer: AsyncQueueConsumer, sigterm: SigtermHandler | None) -> None:
        super().__init__(sigterm)
        self._consumer = consumer

    def __aiter__(self) -> AsyncIterator[QueueMessage]:
        return self

    async def __anext__(self) -> QueueMessage:
        while not self._consumer.stopped:
            message = await self._consumer.next()
            if message is not None:
                return message
        self._restore_sigterm()
        raise StopAsyncIteration


class SigtermHandler:
    """Handles SIGTERM from its creation on: calls `stop`, then the previous handler."""

    def __init__(self, stop: Callable[[], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise QueueError(
                "Python allows signal handlers in the main thread only: call this there, or "
                "call stop() from a handler of your own"
            )
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None:
            raise QueueError(
                "SIGTERM has a handler that was not installed by Python and cannot be restored: "
                "call stop() from it"
            )
        self._stop = stop
        self._previous = previous
        self._is_over = False
        self._installed = self._handle  # one object, to be recognised by `restore`
        signal.signal(signal.SIGTERM, self._installed)

    def restore(self) -> None:
        """Restore the previous handler, unless another one was installed since.

        Loops that overlap may end in any order, so the previous handler may be one that is over.
        """
        self._is_over = True
        if signal.getsignal(signal.SIGTERM) is not self._installed:
            return
        previous = self._previous
        while isinstance(of := getattr(previous, "__self__", None), SigtermHandler) and of._is_over:
            previous = of._previous
        signal.signal(signal.SIGTERM, previous)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._stop()
        if callable(self._previous):  # SIG_DFL and SIG_IGN are not
            self._previous(number, frame)
