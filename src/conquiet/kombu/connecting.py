"""Connecting: how a channel reaches Redis, with one client for all its commands."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import redis
from kombu.transport import redis as lists

from conquiet.kombu.errors import ServerTooOld
from conquiet.kombu.keys import Keys
from conquiet.kombu.scripts import Argument, Script

OLDEST_SERVER = (6, 2)

# Seconds of the background client at most: however long the user lets commands wait, it must notice
# a dead connection in time to renew a lease by another.
_BACKGROUND_TIMEOUT = 5.0


def close_idle(pool: Any) -> None:
    """Close what nobody uses now, the connections to sentinels included; it connects again."""
    pool.disconnect(inuse_connections=False)
    for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
        close_idle(sentinel.connection_pool)


class Connecting(lists.Channel):  # type: ignore[misc]  # Kombu has no types
    """A channel of Kombu's Redis transport whose keys and clients are ours."""

    lease_seconds: float

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.global_keyprefix or "")

    @cached_property
    def commands(self) -> Any:
        """The client of everything that is answered at once; building one takes 75 µs."""
        return self._create_client()

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        yield client or self.commands

    def call(self, script: Script, keys: list[str], args: list[Argument]) -> Any:
        return script.call(self.commands, keys, args)

    def background_client(self) -> Any:
        """A client for the thread that renews leases; it outlives the channel."""
        pool = self._get_pool()
        params = pool.connection_kwargs
        longest = max(min(_BACKGROUND_TIMEOUT, self.lease_seconds / 10), 0.5)
        params["socket_timeout"] = min(params.get("socket_timeout") or longest, longest)
        if "socket_connect_timeout" in params:  # a unix socket has none
            given = params["socket_connect_timeout"] or longest
            params["socket_connect_timeout"] = min(given, longest)
        return redis.Redis(connection_pool=pool)

    def _get_client(self) -> Any:
        super()._get_client()  # refuses a redis-py that is too old
        return redis.Redis  # Kombu's prefixing client knows no command of streams

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        conninfo = self.connection.client
        wants_tls = conninfo.transport_cls == "rediss-streams" or conninfo.ssl is True
        if wants_tls and not isinstance(conninfo.ssl, dict):
            conninfo.ssl = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
        params: dict[str, Any] = super()._connparams(asynchronous=asynchronous)
        return params

    def _disconnect_pools(self) -> None:
        self.__dict__.pop("commands", None)
        super()._disconnect_pools()

    def check_server(self) -> None:
        """Refuse a server that is too old; one that does not tell its version is believed."""
        try:
            found = self.commands.info("server").get("redis_version", "")
        except redis.exceptions.NoPermissionError:
            return
        version = tuple(int(part) for part in str(found).split(".")[:2] if part.isdigit())
        if version and version < OLDEST_SERVER:
            raise ServerTooOld(
                f"the server is Redis {found}, and this transport needs 6.2 or newer (for ZADD GT "
                f"and exclusive ranges of XRANGE and XPENDING): upgrade the server, or stay with "
                f"redis:// until then"
            )
