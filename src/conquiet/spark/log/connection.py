"""Connection: from the options of a query to a client of Redis, once per process.

    redis://user:secret@host:6379/0      also rediss:// and unix://, with redis-py's parameters
    redis+cluster://host:7000,host:7001  rediss+cluster:// with TLS
    redis+sentinel://user:secret@host:26379,host:26380/service/0?sentinel_password=…

What travels to the executors is a `RedisAddress`: never a client, and with `urlFile` or `urlEnv`
no secret either.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.connection import parse_url
from redis.sentinel import Sentinel

from conquiet.errors import ConfigError

_SECONDS = 30.0
"""For a reply, unless the URL says socket_timeout=…: nobody waits for ever for a silent server."""

_scheme = re.compile(r"(rediss?)\+(cluster|sentinel)://", re.IGNORECASE)
_secret = re.compile(r"(?<=://)[^/@\s]*@|(password=)[^&\s]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a Redis is; can be pickled, and shows no secret."""

    url: str | None = field(default=None, repr=False)
    url_file: str | None = None
    url_env: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> RedisAddress:
        """From the options `url`, `urlFile` and `urlEnv`, of which one is needed."""
        known = {str(name).lower(): value for name, value in options.items()}
        given = cls(known.get("url"), known.get("urlfile"), known.get("urlenv"))
        if sum(bool(item) for item in (given.url, given.url_file, given.url_env)) != 1:
            raise ConfigError(
                "say where Redis is, by one of the options url (redis://host:6379/0),"
                " urlFile (a file that holds it) and urlEnv (a variable that holds it)"
            )
        return given

    def resolve(self) -> str:
        """The URL itself, read here and now: the file and the variable are those of this host."""
        if self.url:
            return self.url
        if self.url_env:
            found = os.environ.get(self.url_env, "")
            where = f"the environment variable {self.url_env} of this host"
        else:
            found, where = self._from_file(), f"the file {self.url_file} of this host"
        if not found.strip():
            raise ConfigError(f"{where} should hold the URL of Redis, and is missing or empty")
        return found.strip()

    def _from_file(self) -> str:
        try:
            return Path(str(self.url_file)).read_text()
        except OSError as error:
            raise ConfigError(f"urlFile cannot be read on this host: {error}") from error


def redacted(text: str) -> str:
    """A text without the secrets of the URLs in it.

    >>> redacted("redis://app:pa55@host/0?sentinel_password=s3cret")
    'redis://***@host/0?sentinel_password=***'
    """
    return _secret.sub(lambda found: f"{found[1]}***" if found[1] else "***@", text)


# --- clients --------------------------------------------------------------------------------

_clients: dict[tuple[int, str], Any] = {}


def client_of(address: RedisAddress) -> Any:
    """The client of this process for an address; its replies are bytes."""
    # By process: Spark forks its workers, and a socket must not be shared with a parent.
    # By the URL itself: in a file it may change, and the next task then takes the new one.
    key = os.getpid(), address.resolve()
    client = _clients.get(key)
    if client is None:
        client = _clients[key] = connect(key[1])
    return client


def disconnect() -> None:
    """Close the clients of this process; whoever needs one again gets a new one."""
    mine = [key for key in list(_clients) if key[0] == os.getpid()]
    for key in mine:
        _clients.pop(key).close()


def pool_of(client: Any, stream: str) -> Any:
    """The connections to the server, or in a cluster to the node, that holds a stream."""
    if not isinstance(client, redis.RedisCluster):
        return client.connection_pool
    node = client.get_node_from_key(stream)  # type: ignore[no-untyped-call]
    return client.get_redis_connection(node).connection_pool


def connect(url: str) -> Any:
    """A new client of a server, a cluster, or the master that sentinels name."""
    try:
        return _connect(url)
    except (ValueError, TypeError) as error:
        told = redacted(str(error))
        if "port" in told.lower():  # what was taken for one may be a part of the password
            told = "its port is no number; write / # ? in a password as %2F %23 %3F"
        raise ConfigError(f"the URL of Redis cannot be used: {told}") from None


def _connect(url: str) -> Any:
    special = _scheme.match(url)
    if special is not None:
        scheme, kind = special[1].lower(), special[2].lower()
        rest = url[special.end() :]
        return _cluster(scheme, rest) if kind == "cluster" else _sentinel(scheme, rest)
    client = redis.Redis.from_url(url, **_settings(url))
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)  # connects to nothing, but knows its parameters
    return client


def _settings(url: str) -> dict[str, Any]:
    """What every connection gets unless its URL says otherwise."""
    # RESP2: no message that nobody asked for may stand between the replies of a range.
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
    """The hosts of a URL with several, its other settings, and its path."""
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
