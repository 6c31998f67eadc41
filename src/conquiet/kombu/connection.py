"""Reach a Redis server: the clients of a channel, and the oldest version that they can use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import redis

from conquiet.errors import ConfigError
from conquiet.kombu.scripts import Argument, Script

OLDEST_SERVER = (6, 2)

UNREACHABLE = (redis.ConnectionError, redis.TimeoutError, OSError)

REPLY_TIMEOUT = 10.0
"""Seconds that a command waits for its reply, unless the application sets `socket_timeout`.

A peer that falls silent without closing the connection would block the caller for ever. Reads that
block in Redis are awaited by polling their socket, so that this does not limit them.
"""

# Seconds that the clients of leases wait at most, however long the application lets commands wait:
# they must notice a dead connection in time to renew a lease over another one.
_BACKGROUND_TIMEOUT = 5.0


class ServerTooOld(ConfigError):
    """The server lacks commands that the transport needs."""


class ClusterUnsupported(ConfigError):
    """The server is a node of a Redis Cluster."""


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


def is_replica(error: redis.ResponseError) -> bool:
    """Return whether the server refused a command because it is no master any more."""
    return isinstance(error, redis.exceptions.ReadOnlyError) or "READONLY" in str(error)


def close_idle(pool: Any) -> None:
    """Close the connections that are not in use, those to sentinels included.

    A client of the pool connects again when it needs to.
    """
    pool.disconnect(inuse_connections=False)
    for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
        close_idle(sentinel.connection_pool)


def limit_waits(params: dict[str, Any], longest: float = math.inf) -> None:
    """Limit how long connections with these parameters wait for a reply, and for the server."""
    for name in ("socket_timeout", "socket_connect_timeout"):
        if name in params:  # a unix socket has no second one
            params[name] = min(params[name] or REPLY_TIMEOUT, longest)


def background_client(pool: Any, lease_seconds: float) -> Any:
    """Create a client for leases; it outlives the channel."""
    limit_waits(pool.connection_kwargs, max(min(_BACKGROUND_TIMEOUT, lease_seconds / 10), 0.5))
    return redis.Redis(connection_pool=pool)


def check_server(client: Any) -> None:
    """Refuse a server that cannot be used; one that hides what it is is accepted."""
    try:
        server = client.info("server")
    except redis.exceptions.NoPermissionError:
        return
    if "cluster" in (server.get("redis_mode"), server.get("server_mode")):  # the second of Valkey
        raise ClusterUnsupported(
            "the server is a node of a Redis Cluster, which spreads keys that one script of this "
            "transport needs together: use a server without cluster mode, or Sentinel by "
            "sentinel-streams://"
        )
    found = server.get("redis_version", "")
    version = tuple(int(part) for part in str(found).split(".")[:2] if part.isdigit())
    if version and version < OLDEST_SERVER:
        raise ServerTooOld(
            f"the server is Redis {found}, and this transport needs 6.2 or newer (for ZADD GT "
            f"and exclusive ranges of XRANGE and XPENDING): upgrade the server, or keep redis:// "
            f"until then"
        )
