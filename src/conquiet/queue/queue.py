"""Send the commands of a queue on a Redis Stream, one call each: no loop, no retry, no policy.

    QueueProtocol ──commands──▶ RedisStreamsQueue      ──▶ Wire      ──▶ redis.Redis
                  ◀──replies──  AsyncRedisStreamsQueue ──▶ AsyncWire ──▶ redis.asyncio.Redis

What is sent, and what a reply means, is written once: generators yield commands and receive
replies. Two shells send them.

Every command and option exists in Redis 6.0. A command is sent once, over a connection of the
client's pool instead of the client's methods:

- redis-py 8 sends a command again, up to ten times, when a connection breaks. A repeated XADD may
  add an entry twice, and the specification allows no retries.
- redis-py 8 waits at most 5 s for any reply. The block time is added to the client's own
  `socket_timeout`, so that a blocking read of any length is one command, and a dead server is
  still detected.
- A client with `decode_responses` fails at the first entry that is not UTF-8, and loses the valid
  entries of the same reply. Here replies are bytes with every client.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

try:
    import redis
    import redis.asyncio
except ImportError as error:
    raise ImportError("conquiet.queue needs redis-py: pip install 'conquiet[redis]'") from error

from conquiet.queue.config import QueueConfig, require_block_ms, require_int
from conquiet.queue.errors import InvalidSettingError, MalformedEntryError, QueueError
from conquiet.queue.message import FIELD, QueueMessage, decode, encode
from conquiet.queue.metrics import StreamMetrics

_log = logging.getLogger(__name__)

# poll(2) counts milliseconds in a C int, which overflows after 24 days.
_MAX_WAIT_S = 2_000_000.0

# An idle server checks `hz` times a second, maybe only once, for reads that have timed out.
_MIN_GRACE_S = 1.1

# Since redis-py 8; before that, can_read() is the only public way to wait longer.
_TAKES_TIMEOUT = "timeout" in inspect.signature(redis.Connection.read_response).parameters

# How many pending entries one claim_stale() reads.
_PENDING_PAGE = 1_000

_FIRST, _LAST = b"-", b"+"
_LARGEST_SEQUENCE = 2**64 - 1


class Call(NamedTuple):
    """A command to send; `wait_s` is how long the server may wait before it replies."""

    name: bytes
    arguments: tuple[bytes | int, ...]
    wait_s: float = 0.0


T = TypeVar("T")
Steps: TypeAlias = Generator[Call, Any, T]
"""Yields commands, receives their replies, or their QueueErrors, and returns a result."""


class QueueProtocol:
    """Knows which commands a consumer of a group sends and what the replies mean; sends none."""

    def __init__(self, config: QueueConfig) -> None:
        self._name = config.stream_key
        self._stream = config.stream_key.encode()
        self._group = config.consumer_group.encode()
        self._consumer = config.consumer_name.encode()
        self._unreported: deque[MalformedEntryError] = deque()
        self._scan_from = _FIRST
        self.is_ready = False
        """Whether the group was created; nothing else is to be sent before."""
        self._metrics: StreamMetrics

    def create_group(self) -> Steps[None]:
        name, arguments = b"XGROUP", (b"CREATE", self._stream, self._group, b"0-0", b"MKSTREAM")
        try:
            yield Call(name, arguments)
        except QueueError as error:
            if not str(error.__cause__).startswith("BUSYGROUP"):
                raise
        # Only now: a stream that Redis refused gets no metrics, not even at zero.
        self._metrics = StreamMetrics(self._name)
        self.is_ready = True

    def enqueue(self, payload: dict[str, Any]) -> Steps[str]:
        entry_id: bytes = yield Call(b"XADD", (self._stream, b"*", FIELD, encode(payload)))
        return entry_id.decode()

    def read(self, block_ms: int, count: int) -> Steps[list[QueueMessage]]:
        require_block_ms(block_ms)
        require_int("count", count, at_least=1)
        self._raise_unreported()
        who = (b"GROUP", self._group, self._consumer)
        how = (b"COUNT", count, b"BLOCK", block_ms)
        what = (b"STREAMS", self._stream, b">")
        started = perf_counter()
        reply = yield Call(b"XREADGROUP", (*who, *how, *what), wait_s=block_ms / 1000)
        seconds = perf_counter() - started
        entries = _entries_of_only_stream(reply)
        self._metrics.count_read(len(entries), seconds)
        return self._messages(entries)

    def ack(self, msg: QueueMessage) -> Steps[None]:
        settled: int = yield Call(b"XACK", (self._stream, self._group, msg.id.encode()))
        self._metrics.count_acked(settled)

    def claim_stale(self, min_idle_ms: int, count: int) -> Steps[list[QueueMessage]]:
        require_int("min_idle_ms", min_idle_ms, at_least=0)
        require_int("count", count, at_least=1)
        self._raise_unreported()
        stale = yield from self._stale_ids(min_idle_ms, count)
        if not stale:
            return []
        claim = (self._stream, self._group, self._consumer, min_idle_ms)
        reply = yield Call(b"XCLAIM", (*claim, *stale))
        entries = [entry for entry in reply if entry is not None]
        self._metrics.count_claimed(len(entries))
        if len(entries) < len(reply):
            claimed = {entry[0] for entry in entries}
            yield from self._settle_deleted([i for i in stale if i not in claimed])
        return self._messages(entries)

    def _messages(self, entries: Iterable[Sequence[Any]]) -> list[QueueMessage]:
        messages = []
        for entry_id, fields in entries:
            try:
                messages.append(QueueMessage(entry_id.decode(), decode(fields)))
            except ValueError as error:
                self._found_malformed(entry_id.decode(), str(error))
        if not messages:
            self._raise_unreported()
        return messages

    def _found_malformed(self, entry_id: str, reason: str) -> None:
        error = MalformedEntryError(self._name, entry_id, reason)
        _log.warning("%s", error)  # now: the process may end before the next call
        self._unreported.append(error)

    def _raise_unreported(self) -> None:
        try:
            error = self._unreported.popleft()
        except IndexError:
            return
        raise error

    def _stale_ids(self, min_idle_ms: int, count: int) -> Steps[list[bytes]]:
        """Return stale ids, from where the last call ended to the end, then from the start.

        If each call began at the start, fresh or malformed entries at the head of the pending list
        would hide all others for ever.
        """
        resume = self._scan_from
        self._scan_from = _FIRST
        stale: dict[bytes, None] = {}
        for start, end in ((resume, _LAST), (_FIRST, resume)):
            page_size = max(count, _PENDING_PAGE)
            page = yield Call(b"XPENDING", (self._stream, self._group, start, end, page_size))
            for entry_id, _consumer, idle_ms, _deliveries in page:
                if idle_ms >= min_idle_ms:
                    stale[entry_id] = None
                if len(stale) == count:
                    self._scan_from = _id_after(entry_id)
                    return list(stale)
            if len(page) == page_size:
                self._scan_from = _id_after(page[-1][0])
                break
            if resume == _FIRST:
                break
        return list(stale)

    def _settle_deleted(self, suspects: Sequence[bytes]) -> Steps[None]:
        """Ack entries that were deleted while pending; from Redis 7.0 on, XCLAIM does so itself."""
        try:
            deleted: list[bytes] = []
            for entry_id in suspects:
                found = yield Call(b"XRANGE", (self._stream, entry_id, entry_id))
                deleted += () if found else (entry_id,)
            if deleted:
                yield Call(b"XACK", (self._stream, self._group, *deleted))
                _log.warning(
                    "%d pending entries of stream %r were deleted before they were acked: %s",
                    len(deleted),
                    self._name,
                    b", ".join(deleted).decode(),
                )
        except QueueError:  # the claimed messages must be returned
            _log.warning("could not ack deleted entries", exc_info=True)


def _entries_of_only_stream(reply: Any) -> list[Any]:
    """Read a reply: pairs of stream and entries in RESP2, a map in RESP3, nil for none."""
    if not reply:
        return []
    entries: list[Any] = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
    return entries


def _id_after(entry_id: bytes) -> bytes:
    """Return the next possible id: exclusive ranges need Redis 6.2."""
    milliseconds, sequence = map(int, entry_id.split(b"-"))
    if sequence == _LARGEST_SEQUENCE:
        return b"%d-0" % (milliseconds + 1)
    return b"%d-%d" % (milliseconds, sequence + 1)


class RedisStreamsQueue:
    """Adds and reads messages of one stream, as one consumer of one group.

    `client` is a `redis.Redis` with any options; `config` names stream, group and consumer. Every
    error of Redis or of the network is raised as a QueueError with its cause; a retry is the
    caller's decision.

    >>> queue = RedisStreamsQueue(client, QueueConfig("orders", "billing", "billing-1"))
    >>> entry_id = queue.enqueue({"order": 7})
    >>> [message] = queue.read(block_ms=1_000)
    >>> message.payload
    {'order': 7}
    >>> queue.ack(message)
    """

    def __init__(self, client: redis.Redis, config: QueueConfig) -> None:
        self.config = config
        self._wire = Wire(client)
        self._protocol = QueueProtocol(config)
        self._run(self._protocol.create_group())

    def enqueue(self, payload: dict[str, Any]) -> str:
        """Add a message and return its id."""
        return self._run(self._protocol.enqueue(payload))

    def read(self, block_ms: int, count: int = 1) -> list[QueueMessage]:
        """Wait up to `block_ms` for up to `count` messages, new to the group.

        They are pending until `ack`. An entry that is not a message raises MalformedEntryError: at
        once if nothing else was read, else from the next call, so that it hides no message.
        """
        return self._run(self._protocol.read(block_ms, count))

    def ack(self, msg: QueueMessage) -> None:
        """Ack a message; one that is not pending any more was acked before."""
        self._run(self._protocol.ack(msg))

    def claim_stale(self, min_idle_ms: int, count: int = 10) -> list[QueueMessage]:
        """Claim up to `count` stale messages: delivered `min_idle_ms` ago and not acked.

        Best effort: one call reads a part of the pending list, and the next one continues there.
        A message that is still in flight counts as stale too when it is old enough.
        """
        return self._run(self._protocol.claim_stale(min_idle_ms, count))

    def _run(self, steps: Steps[T]) -> T:
        send: Callable[[], Call] = partial(next, steps)
        try:
            while True:
                call = send()
                try:
                    reply = self._wire.call(call.name, *call.arguments, wait_s=call.wait_s)
                    send = partial(steps.send, reply)
                except QueueError as error:
                    send = partial(steps.throw, error)
        except StopIteration as end:
            return cast("T", end.value)


class AsyncRedisStreamsQueue:
    """Does what RedisStreamsQueue does, on an event loop: `client` is a `redis.asyncio.Redis`.

    The first call creates the group of `config`. A read that is cancelled, as by a timeout, may
    have got messages whose reply was lost: they stay pending, and `claim_stale` finds them.

    >>> async def main():
    ...     async with async_client:
    ...         queue = AsyncRedisStreamsQueue(async_client, QueueConfig("orders", "billing", "b1"))
    ...         _ = await queue.enqueue({"order": 7})
    ...         [message] = await queue.read(block_ms=1_000)
    ...         print(message.payload)
    ...         await queue.ack(message)
    >>> asyncio.run(main())
    {'order': 7}
    """

    def __init__(self, client: redis.asyncio.Redis, config: QueueConfig) -> None:
        self.config = config
        self._wire = AsyncWire(client)
        self._protocol = QueueProtocol(config)

    async def enqueue(self, payload: dict[str, Any]) -> str:
        """Add a message and return its id."""
        return await self._run(self._protocol.enqueue(payload))

    async def read(self, block_ms: int, count: int = 1) -> list[QueueMessage]:
        """Wait up to `block_ms` for up to `count` messages, new to the group.

        They are pending until `ack`. An entry that is not a message raises MalformedEntryError: at
        once if nothing else was read, else from the next call, so that it hides no message.
        """
        return await self._run(self._protocol.read(block_ms, count))

    async def ack(self, msg: QueueMessage) -> None:
        """Ack a message; one that is not pending any more was acked before."""
        await self._run(self._protocol.ack(msg))

    async def claim_stale(self, min_idle_ms: int, count: int = 10) -> list[QueueMessage]:
        """Claim up to `count` stale messages: delivered `min_idle_ms` ago and not acked.

        Best effort: one call reads a part of the pending list, and the next one continues there.
        A message that is still in flight counts as stale too when it is old enough.
        """
        return await self._run(self._protocol.claim_stale(min_idle_ms, count))

    async def _run(self, steps: Steps[T]) -> T:
        if not self._protocol.is_ready:
            await self._send(self._protocol.create_group())
        return await self._send(steps)

    async def _send(self, steps: Steps[T]) -> T:
        send: Callable[[], Call] = partial(next, steps)
        while True:
            try:
                call = send()
            except StopIteration as end:
                return cast("T", end.value)
            try:
                reply = await self._wire.call(call.name, *call.arguments, wait_s=call.wait_s)
                send = partial(steps.send, reply)
            except QueueError as error:
                send = partial(steps.throw, error)


class Wire:
    """Sends commands as bytes and returns replies as bytes; every failure is a QueueError."""

    def __init__(self, client: redis.Redis) -> None:
        _refuse_unless_usable(client, redis)
        self._client = client

    def call(self, name: bytes, *arguments: bytes | int, wait_s: float = 0.0) -> Any:
        """Send one command; `wait_s` is how long the server may wait before it replies."""
        try:
            connection = self._client.connection
            if connection is not None:  # a client with single_connection_client
                with self._client.single_connection_lock:
                    return _exchange(connection, name, arguments, wait_s)
            pool = self._client.connection_pool
            connection = pool.get_connection()
            try:
                return _exchange(connection, name, arguments, wait_s)
            finally:
                pool.release(connection)
        except (redis.RedisError, OSError) as error:
            raise QueueError(f"{name.decode()} failed: {error}") from error


class AsyncWire:
    """Does what Wire does, over the connections of a `redis.asyncio.Redis`."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        _refuse_unless_usable(client, redis.asyncio)
        if client.single_connection_client:
            raise InvalidSettingError(
                "a redis.asyncio.Redis with single_connection_client cannot serve a queue: a"
                " blocking read would hold up every other task; give it a client with a pool"
            )
        self._pool: Any = client.connection_pool

    async def call(self, name: bytes, *arguments: bytes | int, wait_s: float = 0.0) -> Any:
        """Send one command; `wait_s` is how long the server may wait before it replies."""
        try:
            connection = await self._pool.get_connection()
            try:
                return await _exchange_async(connection, name, arguments, wait_s)
            finally:
                await self._pool.release(connection)
        except (redis.RedisError, OSError) as error:
            raise QueueError(f"{name.decode()} failed: {error}") from error


def _exchange(
    connection: Any, name: bytes, arguments: tuple[bytes | int, ...], wait_s: float
) -> Any:
    try:
        # Packed here: a connection with redis-py's client-side cache would otherwise answer
        # XPENDING from its cache.
        connection.send_packed_command(connection.pack_command(name, *arguments))
        timeout_s = _timeout_s(connection, wait_s)
        if timeout_s is None:
            return connection.read_response(disable_decoding=True)
        return _read_late_reply(connection, timeout_s)
    except redis.ResponseError:
        raise
    except BaseException:
        # A late reply must not be read as that of the next command.
        connection.disconnect()
        raise


def _read_late_reply(connection: Any, timeout_s: float) -> Any:
    if _TAKES_TIMEOUT:
        return connection.read_response(disable_decoding=True, timeout=timeout_s)
    if not connection.can_read(timeout_s):
        raise redis.TimeoutError(f"no reply within {timeout_s:g} s")
    return connection.read_response(disable_decoding=True)


def _timeout_s(connection: Any, wait_s: float) -> float | None:
    """Return how long to wait for a late reply; None to wait as the connection does."""
    reply_s = getattr(connection, "socket_timeout", None)
    if not wait_s or reply_s is None:
        return None
    return min(wait_s + max(float(reply_s), _MIN_GRACE_S), _MAX_WAIT_S)


async def _exchange_async(
    connection: Any, name: bytes, arguments: tuple[bytes | int, ...], wait_s: float
) -> Any:
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    try:
        await connection.send_packed_command(connection.pack_command(name, *arguments))
        if task is not None and task.cancelling() > cancels:
            # redis-py sends by asyncio.wait_for(), which in Python 3.11 may swallow a cancellation.
            raise asyncio.CancelledError
        timeout_s = _timeout_s(connection, wait_s)
        if timeout_s is None:
            return await connection.read_response(disable_decoding=True)
        # A timeout of ours: read_response(timeout=…) returns None when it is over, as for nil.
        async with asyncio.timeout(timeout_s):
            return await connection.read_response(disable_decoding=True, timeout=math.inf)
    except redis.ResponseError:
        raise
    except BaseException:  # also a cancellation
        await connection.disconnect(nowait=True)
        raise


def _refuse_unless_usable(client: object, library: Any) -> None:
    """Refuse clients other than those of `library`: `redis` or `redis.asyncio`."""
    wanted = f"{library.__name__}.Redis"
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    if isinstance(client, (redis.client.Pipeline, redis.asyncio.client.Pipeline)):
        why = "a pipeline queues commands and returns no replies"
    elif isinstance(client, library.Redis):
        return
    elif isinstance(client, (redis.RedisCluster, redis.asyncio.RedisCluster)):
        why = "a cluster client moves between nodes, and a blocking read stays on one"
    elif isinstance(client, redis.asyncio.Redis):
        why = "it is an asyncio client, which AsyncRedisStreamsQueue takes"
    elif isinstance(client, redis.Redis):
        why = "it would block the event loop; RedisStreamsQueue takes it"
    else:
        why = "it is not a client of redis-py"
    raise InvalidSettingError(f"client {kind} cannot serve a queue: {why}; give it a {wanted}")
