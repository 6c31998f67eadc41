"""Reach a Redis server: the clients of a channel, and the oldest version that they can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis

from conquiet.errors import ConfigError
from conquiet.kombu.scripts import Argument, Script

OLDEST_SERVER = (6, 2)

UNREACHABLE = (redis.ConnectionError, redis.TimeoutError, OSError)

# Seconds that the background client waits at most, however long the application lets commands wait:
# it must notice a dead connection in time to renew a lease over another one.
_BACKGROUND_TIMEOUT = 5.0


class ServerTooOld(ConfigError):
    """The server lacks commands that the transport needs."""


class Commands:
    """Own the client of the commands whose reply is awaited; it is created on first use.

    A channel keeps one, since building a client takes 75 µs.
    """

    def __init__(self, create: Callable[[], Any]) -> None:
        self._create = create
        self._client: Any = None

    @property
    def client(self) -> Any:
        client = self._client
        if client is None:
            client = self._client = self._create()
        return client

    def call(self, script: Script, keys: list[str], args: list[Argument]) -> Any:
        return script.call(self.client, keys, args)

    def reset(self) -> None:
        """Drop the client, because its pool was closed; the next command creates another."""
        self._client = None


def close_idle(pool: Any) -> None:
    """Close the connections that are not in use, those to sentinels included.

    A client of the pool connects again when it needs to.
    """
    pool.disconnect(inuse_connections=False)
    for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
        close_idle(sentinel.connection_pool)


def background_client(pool: Any, lease_seconds: float) -> Any:
    """Create the client of the thread that renews leases; it outlives the channel."""
    params = pool.connection_kwargs
    longest = max(min(_BACKGROUND_TIMEOUT, lease_seconds / 10), 0.5)
    params["socket_timeout"] = min(params.get("socket_timeout") or longest, longest)
    if "socket_connect_timeout" in params:  # a unix socket has none
        given = params["socket_connect_timeout"] or longest
        params["socket_connect_timeout"] = min(given, longest)
    return redis.Redis(connection_pool=pool)


def check_server(client: Any) -> None:
    """Refuse a server that is too old; one that hides its version is accepted."""
    try:
        found = client.info("server").get("redis_version", "")
    except redis.exceptions.NoPermissionError:
        return
    version = tuple(int(part) for part in str(found).split(".")[:2] if part.isdigit())
    if version and version < OLDEST_SERVER:
        raise ServerTooOld(
            f"the server is Redis {found}, and this transport needs 6.2 or newer (for ZADD GT "
            f"and exclusive ranges of XRANGE and XPENDING): upgrade the server, or keep redis:// "
            f"until then"
        )
