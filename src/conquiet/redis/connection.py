"""Database and Connection: the server or cluster of transactions, and a connection for each."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import redis
from hiredis import pack_command
from redis.exceptions import RedisClusterException

from conquiet import bridge
from conquiet.errors import ConfigError, HandlerError, StoreError
from conquiet.lease import LeaseKeeper
from conquiet.redis.loop_client import BridgedLeaseKeeper, LoopLock, LoopPool, is_async
from conquiet.redis.wire import TROUBLE, Wire, read_replies

logger = logging.getLogger("conquiet.redis")

pack: Callable[[tuple[Any, ...]], bytes] = pack_command
"""Pack a command into bytes; raises TypeError for anything but text, bytes and numbers."""

_KEYLESS = frozenset(("PUBLISH", "SPUBLISH"))
_IDS_SECONDS = 1.0
"""How old ids of servers may be that differ; a restart or a failover changes them."""


class CrossSlot(HandlerError):
    """The keys of one transaction lie in two slots of a cluster; nothing was sent."""


class Database:
    """The server or cluster behind a client: packs commands for it and opens connections to it."""

    def __init__(self, client: Any) -> None:
        self.wire = Wire(client, allows_async=True)
        self.is_async = self.wire.is_async
        if getattr(client, "connection", None) is not None:
            raise ConfigError(
                "a transaction keeps a connection for itself; give it a client without"
                " single_connection_client"
            )
        self.client = client
        self.keeper: LeaseKeeper | BridgedLeaseKeeper = (
            BridgedLeaseKeeper("conquiet-leases")
            if self.is_async
            else LeaseKeeper("conquiet-leases")
        )
        """Renews leases of inboxes; one per server, so that one that hangs delays no other."""
        self.is_cluster = self.wire.is_cluster
        self._address = _address_of(client)
        encoder = client.get_encoder()
        self._encode = encoder.encode
        is_utf8 = encoder.encoding.replace("-", "").lower() == "utf8"
        self._is_plain = is_utf8 and encoder.encoding_errors == "strict"
        self._flags: dict[str, frozenset[str]] = {}
        self._allows_transactions = False
        self._has_warned = False

    def serves(self, client: Any) -> bool:
        """Return whether a client uses the same database, so that its writes join the transaction.

        A client of another address is asked for the id of its server, once: `localhost`,
        `127.0.0.1` and a Unix socket may be one server. On an event loop an async handler cannot
        wait for the answer, so that a client of another address counts as one of another database.
        """
        if self.has_address_of(client):
            return True
        if _database_number(client) != _database_number(self.client):
            return False
        if not (_can_ask(self.client) and _can_ask(client)):
            return False
        if _ids_of(self.client) & _ids_of(client):
            return True
        since = time.monotonic() - _IDS_SECONDS
        return bool(_ids_of(self.client, since) & _ids_of(client, since))

    def has_address_of(self, client: Any) -> bool:
        """Return whether a client names the database as ours does; asks no server."""
        return client is self.client or _address_of(client) == self._address

    def warn_of_use_outside(self, place: str) -> None:
        """Log, once, that this code writes at once while another place runs a transaction."""
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "commands(client) in %s is outside a transaction, while %s runs one on"
            " the same database: what is written takes effect at once. If it is work of a handler,"
            " start it by contextvars.copy_context().run; if not, say commands(client,"
            " outside=True). This is logged once.",
            *(describe_place(), place),
        )

    def pack(self, arguments: tuple[Any, ...]) -> bytes:
        """Pack a command; raises redis-py's `DataError` for a type that Redis cannot take."""
        if self._is_plain:
            try:
                return pack(arguments)
            except TypeError:
                pass
        return pack(tuple(bytes(self._encode(item)) for item in arguments))

    def flags(self, name: str) -> frozenset[str]:
        """Ask the server for the flags of a command (`write`, `readonly`, …); none if unknown."""
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
        """Return the slot of a key; only in a cluster."""
        slot: int = self.client.keyslot(key)
        return slot

    def slot_of(self, name: str, arguments: tuple[Any, ...]) -> int | None:
        """Return the slot of a command's keys; None if it has none."""
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

    def connect(self, slot: int | None) -> Connection:
        """Take a connection from the pool of the server, or of the node that serves a slot."""
        try:
            connection = Connection(self._pool(slot))
        except (redis.RedisError, OSError) as error:
            self.learn_topology()
            raise StoreError(f"Redis cannot be reached: {error}") from error
        if not self._allows_transactions:
            self._check_transactions(connection)
        return connection

    def _pool(self, slot: int | None) -> Any:
        if self.is_async:
            return self.wire.client.connection_pool
        if not self.is_cluster:
            return self.client.connection_pool
        if slot is None:
            node = self.client.get_random_node()
        else:
            node = self.client.nodes_manager.get_node_from_slot(slot)
        return self.client.get_redis_connection(node).connection_pool

    @property
    def max_connections(self) -> int:
        """Return how many connections the pool of the server has, or that of a node."""
        count: int = self._pool(None).max_connections
        return count

    def _check_transactions(self, connection: Connection) -> None:
        """Refuse a user without MULTI or EXEC: without MULTI, commands would take effect singly."""
        try:
            replies = connection.exchange([pack((b"MULTI",)), pack((b"EXEC",))])
        except TROUBLE as error:
            connection.close()
            raise StoreError(f"Redis cannot be reached: {error}") from error
        for reply in replies:
            if isinstance(reply, Exception):
                connection.close()
                raise StoreError(f"this user of Redis cannot have transactions: {reply}")
        self._allows_transactions = True

    def learn_topology(self) -> None:
        """Ask which node of a cluster serves which slots, after a failure."""
        if self.is_cluster:
            self.wire.learn_topology()


def describe_place() -> str:
    """Name the task or the thread that runs this code."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        task = None
    if task is not None:
        return f"task {task.get_name()!r}"
    return f"thread {threading.current_thread().name!r}"


def _can_ask(client: Any) -> bool:
    return not is_async(client) or bridge.is_inside()


def _address_of(client: Any) -> object:
    """Return what two clients of the same database have in common if they name it alike."""
    pool = getattr(client, "connection_pool", None)
    if pool is None:  # a cluster is recognised by the ids of its nodes
        return id(client)
    service = getattr(pool, "service_name", None)
    if service is None:
        where: object = _place(pool)
    else:
        sentinels = pool.sentinel_manager.sentinels
        where = (service, frozenset(_place(each.connection_pool) for each in sentinels))
    return (where, _database_number(client))


def _place(pool: Any) -> tuple[Any, Any, Any]:
    settings = pool.connection_kwargs
    return (settings.get("host"), settings.get("port"), settings.get("path"))


def _database_number(client: Any) -> int | None:
    """Return the number of a server's database; None for a cluster, which has one."""
    pool = getattr(client, "connection_pool", None)
    return None if pool is None else pool.connection_kwargs.get("db") or 0


# --- the ids of servers ---------------------------------------------------------------------


class _Ids(NamedTuple):
    ids: frozenset[bytes]
    asked: float


_ids: WeakKeyDictionary[Any, _Ids] = WeakKeyDictionary()
_run_id = re.compile(rb"^run_id:(\S+)", re.MULTILINE)


def _ids_of(client: Any, since: float = 0.0) -> frozenset[bytes]:
    """Return the run id of a server, or the ids of a cluster's nodes, asked after `since`.

    None if the server refuses to say: INFO needs a permission.
    """
    known = _ids.get(client)
    if known is None or known.asked < since:
        known = _ids[client] = _Ids(_ask_ids(client), time.monotonic())
    return known.ids


def _ask_ids(client: Any) -> frozenset[bytes]:
    wire = Wire(client, allows_async=True)
    try:
        if wire.is_cluster:
            slots = wire.call(b"", b"CLUSTER", b"SLOTS")
            return frozenset(node[2] for _, _, *nodes in slots for node in nodes)
        return frozenset(_run_id.findall(wire.call(b"", b"INFO", b"server")))
    except redis.ResponseError:
        return frozenset()
    except (redis.RedisError, OSError) as error:
        raise StoreError(f"Redis cannot be asked which server it is: {error}") from error
    finally:
        wire.close()


class Connection:
    """A connection that one transaction has to itself, from its first WATCH to its EXEC.

    A WATCH holds on the connection it was sent on. If redis-py replaces that connection, the WATCH
    is gone, so a replaced connection raises instead of sending. Each command is sent once.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._connection = pool.get_connection()
        self._connection.register_connect_callback(self._refuse_replacement)
        self.lock = LoopLock() if isinstance(pool, LoopPool) else threading.Lock()
        """Held during an exchange: the lease keeper's thread uses the connection too."""
        self._is_watching = False
        self._is_open = True
        self._is_lost = False

    @property
    def is_watching(self) -> bool:
        """Return whether the server watches keys for this connection."""
        return self._is_watching

    def exchange(self, packed: Sequence[bytes]) -> list[Any]:
        """Send commands; return a reply or an error for each, in order."""
        self.send(packed)
        return self.receive(len(packed))

    def begin_watch(self) -> None:
        """Note that a WATCH is about to be sent; a connection that watches is not pooled again."""
        self._is_watching = True

    def end_watch(self) -> None:
        """Note that EXEC or UNWATCH was answered."""
        self._is_watching = False

    def watch(self, packed: Sequence[bytes]) -> list[Any]:
        """Exchange commands of which one is a WATCH."""
        self.begin_watch()
        return self.exchange(packed)

    def unwatch(self) -> None:
        """Send UNWATCH if keys are watched; if that fails, the connection is dropped."""
        if not self._is_watching:
            return
        try:
            self.exchange([_UNWATCH])
            self.end_watch()
        except TROUBLE:
            pass

    def execute(self, packed: Sequence[bytes]) -> list[Any]:
        """Exchange commands between MULTI and EXEC, which ends the WATCH; the last reply is EXEC's.

        Raises `NotSent` if the server cannot have received EXEC.
        """
        try:
            self.send([_MULTI, *packed, _EXEC])
        except TROUBLE as error:
            raise NotSent(str(error)) from error
        replies = self.receive(len(packed) + 2)
        self.end_watch()
        return replies

    def send(self, packed: Sequence[bytes]) -> None:
        """Send; if it raises, the last command was not sent in full and cannot take effect."""
        if self._is_lost:
            raise redis.ConnectionError("the connection of a transaction was lost")
        try:
            # No health check: it would reconnect, and the server would forget the watched keys.
            self._connection.send_packed_command((b"".join(packed),), check_health=False)
        except BaseException:
            self.drop()
            raise

    def receive(self, count: int) -> list[Any]:
        """Receive replies, of which errors of the server are returned, not raised."""
        replies: list[Any] = []
        try:
            read_replies(self._connection, count, replies)
        except BaseException:
            self.drop()
            raise
        return replies

    def drop(self) -> None:
        """Disconnect: the server forgets the watched keys, and late replies are not read."""
        self._is_lost = True
        self.end_watch()
        self._connection.disconnect()

    def close(self) -> None:
        """Return the connection to its pool."""
        if not self._is_open:
            return
        self._is_open = False
        if self._is_watching:
            self.drop()
        self._connection.deregister_connect_callback(self._refuse_replacement)
        self._pool.release(self._connection)

    def _refuse_replacement(self, connection: Any) -> None:
        raise redis.ConnectionError("the connection of a transaction was lost and replaced")


class NotSent(redis.ConnectionError):
    """A transaction was not sent in full, so that nothing of it took effect."""


_MULTI = pack((b"MULTI",))
_EXEC = pack((b"EXEC",))
_UNWATCH = pack((b"UNWATCH",))
