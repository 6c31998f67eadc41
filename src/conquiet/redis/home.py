"""Home: the server or the cluster behind a client, as a transaction sees it."""

from __future__ import annotations

import threading
from typing import Any

import redis
from redis.exceptions import RedisClusterException

from conquiet.errors import ConfigError, HandlerError, StoreError
from conquiet.lease import LeaseKeeper
from conquiet.redis.session import Session, pack
from conquiet.redis.wire import TROUBLE, Wire

_KEYLESS = frozenset(("PUBLISH", "SPUBLISH"))


class CrossSlot(HandlerError):
    """The keys of one transaction lie in two slots of a cluster; nothing was sent."""


class Home:
    """Where transactions of one client live: how to pack commands for it and to connect to it."""

    def __init__(self, client: Any) -> None:
        self.wire = Wire(client)
        if getattr(client, "connection", None) is not None:
            raise ConfigError(
                "a transaction keeps a connection for itself; give it a client without"
                " single_connection_client"
            )
        self.client = client
        self.keeper = LeaseKeeper("conquiet-leases")
        """Renews leases of inboxes; one per server, so that one that hangs delays no other."""
        self.is_cluster = self.wire.is_cluster
        self._place = place_of(client)
        encoder = client.get_encoder()
        self._encode = encoder.encode
        is_plain = encoder.encoding.replace("-", "").lower() == "utf8"
        self._is_plain = is_plain and encoder.encoding_errors == "strict"
        self._flags: dict[str, frozenset[str]] = {}
        self._checked = False
        self._lock = threading.Lock()

    def serves(self, client: Any) -> bool:
        """Whether a client talks to the same database: what it writes belongs in here then."""
        return client is self.client or place_of(client) == self._place

    def pack(self, arguments: tuple[Any, ...]) -> bytes:
        """A command as bytes; raises redis-py's `DataError` for what Redis cannot take."""
        if self._is_plain:
            try:
                return pack(arguments)
            except TypeError:
                pass
        return pack(tuple(bytes(self._encode(item)) for item in arguments))

    def flags(self, name: str) -> frozenset[str]:
        """What the server says about a command: `write`, `readonly`, …; empty if unknown."""
        known = self._flags.get(name)
        if known is None:
            try:
                [about] = self.wire.call(b"", b"COMMAND", b"INFO", name)
            except (redis.RedisError, OSError) as error:
                raise StoreError(f"Redis cannot be asked about {name}: {error}") from error
            words = about[2] if about else ()
            known = frozenset(bytes(word).decode().lower() for word in words)
            self._flags[name] = known
        return known

    # --- slots ------------------------------------------------------------------------------

    def slot(self, key: bytes) -> int:
        slot: int = self.client.keyslot(key)
        return slot

    def slot_of(self, name: str, arguments: tuple[Any, ...]) -> int | None:
        """The slot of a command's keys; None if it has none."""
        if name in _KEYLESS:
            return None
        try:
            slot: int | None = self.client.determine_slot(name, *arguments[1:])
        except RedisClusterException as error:
            raise CrossSlot(f"{name} cannot be part of a transaction: {error}") from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise StoreError(f"the cluster cannot be asked about {name}: {error}") from error
        return slot

    # --- connections ------------------------------------------------------------------------

    def session(self, slot: int | None) -> Session:
        """A connection of one's own to the server, or to the node of a slot."""
        try:
            session = Session(self._pool(slot))
        except (redis.RedisError, OSError) as error:
            self.lost()
            raise StoreError(f"Redis cannot be reached: {error}") from error
        if not self._checked:
            self._check(session)
        return session

    def _pool(self, slot: int | None) -> Any:
        if not self.is_cluster:
            return self.client.connection_pool
        if slot is None:
            node = self.client.get_random_node()
        else:
            node = self.client.nodes_manager.get_node_from_slot(slot)
        return self.client.get_redis_connection(node).connection_pool

    def _check(self, session: Session) -> None:
        """MULTI and EXEC are allowed: were only MULTI refused, what follows would take effect."""
        try:
            replies = session.exchange([pack((b"MULTI",)), pack((b"EXEC",))])
        except TROUBLE as error:
            session.close()
            raise StoreError(f"Redis cannot be reached: {error}") from error
        for reply in replies:
            if isinstance(reply, Exception):
                session.close()
                raise StoreError(f"this user of Redis cannot have transactions: {reply}")
        self._checked = True

    def lost(self) -> None:
        """After trouble in a cluster: ask who serves what now."""
        if self.is_cluster:
            self.wire.learn_topology()


def place_of(client: Any) -> object:
    """What two clients of the same database have in common."""
    pool = getattr(client, "connection_pool", None)
    if pool is None:  # a cluster: its client is its identity
        return id(client)
    settings = pool.connection_kwargs
    service = getattr(pool, "service_name", None)
    where = (settings.get("host"), settings.get("port"), settings.get("path"))
    return (service or where, settings.get("db") or 0)
