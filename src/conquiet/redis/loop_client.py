"""LoopClient: a client of `redis.asyncio` as the blocking code of this room uses it.

Each call waits by `conquiet.bridge`: the event loop runs other code meanwhile. So source, sink,
transaction and inbox are written once, for both kinds of clients.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import redis
import redis.asyncio

from conquiet import bridge
from conquiet.errors import ConfigError
from conquiet.lease import LoopLeaseKeeper, Renewable

P = ParamSpec("P")
T = TypeVar("T")


def is_async(client: object) -> bool:
    """Return whether a client is one of `redis.asyncio`."""
    is_pipeline = isinstance(client, redis.asyncio.client.Pipeline)
    return isinstance(client, redis.asyncio.Redis) and not is_pipeline


class LoopClient:
    """Wraps a `redis.asyncio.Redis`: what `Wire` needs of a client."""

    connection = None

    def __init__(self, client: redis.asyncio.Redis) -> None:
        if client.single_connection_client:
            raise ConfigError(
                "a redis.asyncio.Redis with single_connection_client cannot be used: a blocking"
                " read would hold up every other task; give a client with a pool"
            )
        self.connection_pool = LoopPool(client.connection_pool)


class LoopPool:
    """Takes connections from the pool of a `redis.asyncio.Redis`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.max_connections: int = pool.max_connections

    def get_connection(self) -> LoopConnection:
        return LoopConnection(_wait_for(self._pool.get_connection()))

    def release(self, connection: LoopConnection) -> None:
        with bridge.shield():  # a cancellation in between would lose the connection to its pool
            bridge.wait_for(self._pool.release(connection.inner))


class LoopConnection:
    """Wraps a connection of `redis.asyncio`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.register_connect_callback = inner.register_connect_callback
        self.deregister_connect_callback = inner.deregister_connect_callback
        self.pack_commands = inner.pack_commands

    @property
    def socket_timeout(self) -> float | None:
        seconds: float | None = self.inner.socket_timeout
        return seconds

    def send_packed_command(self, pieces: Sequence[bytes], check_health: bool = True) -> None:
        _wait_for(self._send(pieces, check_health))

    async def _send(self, pieces: Sequence[bytes], check_health: bool) -> None:
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        await self.inner.send_packed_command(pieces, check_health=check_health)
        if task is not None and task.cancelling() > cancels:
            # redis-py sends by asyncio.wait_for(), which in Python 3.11 may swallow a cancellation.
            raise asyncio.CancelledError

    def read_replies(self, count: int, replies: list[Any], seconds: float) -> None:
        """Append replies, or errors of the server; wait up to `seconds` for each."""
        _wait_for(self._read(count, replies, seconds))

    async def _read(self, count: int, replies: list[Any], seconds: float) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        # A timeout of ours: read_response(timeout=…) returns None when it is over, as for nil.
        async with asyncio.timeout_at(began + seconds) as timeout:
            for _ in range(count):
                try:
                    reply = await self.inner.read_response(disable_decoding=True, timeout=math.inf)
                    replies.append(reply)
                except redis.ResponseError as error:
                    replies.append(error)
                if now() > began + seconds / 2:
                    began = now()
                    timeout.reschedule(began + seconds)

    def disconnect(self) -> None:
        with suppress(redis.ConnectionError):
            _wait_for(self.inner.disconnect(nowait=True))


def _wait_for(awaitable: Awaitable[T]) -> T:
    """Wait; a connection that cannot be used on this event loop counts as lost."""
    try:
        return bridge.wait_for(awaitable)
    except RuntimeError as error:
        raise redis.ConnectionError(
            f"the connection was opened on another event loop; create the client on the loop of its"
            f" worker: {error}"
        ) from error


class LoopLock:
    """A lock for code that runs on an event loop, and is held while it waits."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def __enter__(self) -> None:
        bridge.wait_for(self._lock.acquire())

    def __exit__(self, *exc_info: object) -> None:
        _call_on_loop(self._lock.release)


class BridgedLeaseKeeper:
    """Renews leases whose `renew` waits by `conquiet.bridge`."""

    def __init__(self, name: str) -> None:
        self._keeper: LoopLeaseKeeper[Renewable] = LoopLeaseKeeper(name, _renew)

    def add(self, lease: Renewable, every: float) -> None:
        _call_on_loop(self._keeper.add, lease, every)

    def remove(self, lease: Renewable) -> None:
        _call_on_loop(self._keeper.remove, lease)

    def __len__(self) -> int:
        return len(self._keeper)


async def _renew(lease: Renewable) -> float | None:
    return await bridge.run(lease.renew)


def _call_on_loop(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function of asyncio, also from a thread in which a part of the chain runs."""
    if bridge.is_on_loop():
        return function(*arguments, **options)

    async def call() -> T:
        return function(*arguments, **options)

    return bridge.wait_for(call())
