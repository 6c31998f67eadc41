"""Connect to Redis from a query's options, once per process, and repeat commands after an outage.

    redis://user:secret@host:6379/0      also rediss:// and unix://, with redis-py's parameters
    redis+cluster://host:7000,host:7001  rediss+cluster:// with TLS
    redis+sentinel://user:secret@host:26379,host:26380/service/0?sentinel_password=…

The executors get an `Address` and never a client.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.connection import parse_url
from redis.sentinel import Sentinel

from conquiet.errors import ConfigError, StoreError
from conquiet.redis.wire import TROUBLE, Command, Wire
from conquiet.spark.options import Address

logger = logging.getLogger("conquiet.spark")


_SECONDS = 30.0
"""How long to wait for a reply, unless the URL has socket_timeout=…"""

_scheme = re.compile(r"(rediss?)\+(cluster|sentinel)://", re.IGNORECASE)
_secret = re.compile(r"(?<=://)[^/@\s]*@|(password=)[^&\s]+", re.IGNORECASE)


def redacted(text: str) -> str:
    """Return a text without the secrets of the URLs in it.

    >>> redacted("redis://app:pa55@host/0?sentinel_password=s3cret")
    'redis://***@host/0?sentinel_password=***'
    """
    return _secret.sub(lambda found: f"{found[1]}***" if found[1] else "***@", text)


# --- clients --------------------------------------------------------------------------------
_clients: dict[tuple[int, str], Any] = {}


def client_of(address: Address) -> Any:
    """Return this process's client for an address; its replies are bytes."""
    # The key has the process: Spark forks its workers, and a socket must not be shared with a
    # parent. It has the URL: one in a file may change, and the next task then uses the new one.
    key = os.getpid(), address.resolve()
    client = _clients.get(key)
    if client is None:
        client = _clients[key] = connect(key[1])
    return client


def disconnect() -> None:
    """Close the clients of this process; the next call of `client_of` connects again."""
    mine = [key for key in list(_clients) if key[0] == os.getpid()]
    for key in mine:
        _clients.pop(key).close()


def pool_of(client: Any, stream: str) -> Any:
    """Return the connections to the server, or in a cluster to the node, that holds a stream."""
    if not isinstance(client, redis.RedisCluster):
        return client.connection_pool
    node = client.get_node_from_key(stream)  # type: ignore[no-untyped-call]
    return client.get_redis_connection(node).connection_pool


def connect(url: str) -> Any:
    """Return a new client of a server, a cluster, or the master that sentinels name."""
    try:
        return _connect(url)
    except (ValueError, TypeError) as error:
        reason = redacted(str(error))
        if "port" in reason.lower():  # the text taken for a port may be a part of the password
            reason = "its port is no number; write / # ? in a password as %2F %23 %3F"
        raise ConfigError(f"the URL of Redis cannot be used: {reason}") from None


def _connect(url: str) -> Any:
    special = _scheme.match(url)
    if special is not None:
        scheme, kind = special[1].lower(), special[2].lower()
        rest = url[special.end() :]
        return _cluster(scheme, rest) if kind == "cluster" else _sentinel(scheme, rest)
    client = redis.Redis.from_url(url, **_settings(url))
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)  # checks the parameters, connects to nothing
    return client


def _settings(url: str) -> dict[str, Any]:
    """Return the settings of every connection, unless its URL has others."""
    # RESP2 has no push messages, which could come between the replies of a range.
    own: dict[str, Any] = {"protocol": 2, "decode_responses": False}
    if "socket_timeout" not in urlsplit(url).query:
        own["socket_timeout"] = _SECONDS
    return own


def _cluster(scheme: str, rest: str) -> Any:
    from redis.cluster import ClusterNode

    nodes, settings, _ = _hosts(scheme, rest)
    settings.pop("db", None)
    where = [ClusterNode(host, port or 6379) for host, port in nodes]  # type: ignore[no-untyped-call]
    return redis.RedisCluster(startup_nodes=where, **_with_tls(scheme, settings))


def _sentinel(scheme: str, rest: str) -> Any:
    nodes, settings, path = _hosts(scheme, rest)
    service, _, database = path.partition("/")
    if not service:
        raise ConfigError(
            "name the service that the sentinels watch: redis+sentinel://host:26379/service/0"
        )
    own = {name: settings.pop(name) for name in list(settings) if name.startswith("sentinel_")}
    for_sentinels = {name.removeprefix("sentinel_"): value for name, value in own.items()}
    sentinels: Any = Sentinel(  # type: ignore[no-untyped-call]
        [(host, port or 26379) for host, port in nodes],
        sentinel_kwargs=_with_tls(scheme, {"socket_timeout": _SECONDS} | for_sentinels),
    )
    settings["db"] = int(database or 0)
    return sentinels.master_for(service, **_with_tls(scheme, settings))


def _hosts(scheme: str, rest: str) -> tuple[list[tuple[str, int]], dict[str, Any], str]:
    """Return the hosts of a URL with several, its other settings, and its path."""
    place, _, query = rest.partition("?")
    place, _, path = place.partition("/")
    user, _, hosts = place.rpartition("@")
    plain = f"{scheme}://{user}@host?{query}" if user else f"{scheme}://host?{query}"
    settings = parse_url(plain)  # type: ignore[no-untyped-call]
    for name in ("host", "port", "connection_class"):
        settings.pop(name, None)
    nodes = []
    for item in hosts.split(","):
        found = urlsplit(f"//{item}")
        if not found.hostname:
            raise ConfigError("the URL of Redis names no host: redis+cluster://host:7000")
        nodes.append((found.hostname, found.port or 0))
    return nodes, _settings(rest) | settings, unquote(path)


def _with_tls(scheme: str, settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"ssl": True} if scheme == "rediss" else settings


PAUSES_SECONDS = (0.1, 0.5, 2.0)
"""Pauses between attempts, while a server restarts or fails over."""


def ask(wire: Wire, commands: Sequence[tuple[bytes, Command]]) -> list[Any]:
    """Return a reply for each command, an exception where Redis refused it; retry after an outage.

    The commands must be safe to repeat.
    """
    trouble: Any = None
    for pause in (*PAUSES_SECONDS, None):
        try:
            replies = wire.send(commands)
        except TROUBLE as error:
            trouble = error
        else:
            trouble = next((reply for reply in replies if isinstance(reply, TROUBLE)), None)
            if trouble is None:
                return replies
        if pause is not None:
            logger.warning("Redis does not answer; retrying in %g s: %s", pause, trouble)
            time.sleep(pause)
    raise StoreError(f"Redis cannot be reached: {trouble}") from trouble
