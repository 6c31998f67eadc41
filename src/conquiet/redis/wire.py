"""Wire: commands over the connections of a redis-py client, each sent once, replies as bytes.

The client's own methods are not used, because

- they send a command again when a connection breaks, and a repeated XADD is an entry twice;
- they give up on a reply after `socket_timeout`, even if a blocking read asked to wait longer;
- with `decode_responses` they fail on the first value that is not UTF-8 and lose the whole reply.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

try:
    import redis
    import redis.asyncio
except ImportError as error:  # pragma: no cover - the extra installs it
    raise ImportError("conquiet.redis needs redis-py: pip install 'conquiet[redis]'") from error

from redis import exceptions
from redis.exceptions import AskError, MovedError

from conquiet.errors import ConfigError
from conquiet.redis.loop_client import LoopClient, LoopConnection, is_async

Argument: TypeAlias = bytes | str | int
Command: TypeAlias = Sequence[Argument]

TROUBLE = (redis.ConnectionError, redis.TimeoutError, OSError)
"""The server was not reached or did not answer: the outcome of the command is unknown."""

_UNWILLING = (
    exceptions.AskError,  # MOVED too
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,  # MASTERDOWN too
    exceptions.ExecAbortError,  # EXEC was refused although every command was queued
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
)
_UNWILLING_WORDS = ("MISCONF ", "NOREPLICAS ", "BUSY ")
"""Error codes for which redis-py has no class; where it has one, it strips the code."""

REPLY_SECONDS = 30.0
"""How long a reply may take if the client sets no `socket_timeout`."""
_LEAST_SLACK_SECONDS = 1.1  # a server with hz=1 ends blocking reads once a second
_REDIRECTIONS = 5
_PIECE_BYTES = 256 * 1024

_pack: Any
try:
    from hiredis import pack_command as _pack
except ImportError:  # pragma: no cover - the extra installs it
    _pack = None

# Since redis-py 8; before it, can_read() is the public way to wait for a reply with a limit.
_takes_timeout = "timeout" in inspect.signature(redis.Connection.read_response).parameters


def is_unwilling(error: object) -> bool:
    """Return whether the server refused only for now (loading, out of memory, failover, …)."""
    return isinstance(error, _UNWILLING) or str(error).startswith(_UNWILLING_WORDS)


def may_pass(error: object) -> bool:
    """Return whether the same command may succeed later: the server was away or unwilling."""
    return isinstance(error, TROUBLE) or is_unwilling(error)


class Wire:
    """Sends commands to the server, or in a cluster to the node, that holds a key.

    With a client of `redis.asyncio`, where it is allowed, it waits by `conquiet.bridge`.
    """

    def __init__(self, client: Any, *, allows_async: bool = False) -> None:
        self.is_async = allows_async and is_async(client)
        if not self.is_async:
            _refuse_unless_usable(client)
        self.given = client
        self.is_cluster = isinstance(client, redis.RedisCluster)
        self.client = client
        self._is_own = False
        if self.is_async:
            self.client = LoopClient(client)
        elif not self.is_cluster:
            self.client = _with_timeout(client)
            self._is_own = self.client is not client
        if self._is_own:  # a caller that forgets to close must not leak sockets
            weakref.finalize(self, self.client.connection_pool.disconnect).atexit = False

    def close(self) -> None:
        """Close connections that were opened here; a late command opens one again."""
        if self._is_own:
            self.client.connection_pool.disconnect(inuse_connections=False)

    def call(self, key: bytes, *command: Argument, wait: float = 0.0) -> Any:
        """Send one command and return its reply; the server may hold it back for `wait` seconds."""
        [reply] = self.send([(key, command)], wait=wait)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def send(self, commands: Sequence[tuple[bytes, Command]], *, wait: float = 0.0) -> list[Any]:
        """Send many commands at once; return a reply or an error for each, in order.

        Raises only if none was answered.
        """
        if not self.is_cluster:
            return self._exchange(self.client, [command for _, command in commands], wait)
        return self._send_to_nodes(commands, wait)

    def atomically(self, key: bytes, commands: Sequence[Command]) -> list[Any]:
        """Send commands between MULTI and EXEC; their keys must be in one slot."""
        for _ in range(_REDIRECTIONS):
            client = self._node(key)
            *queued, replies = self._exchange(client, [(b"MULTI",), *commands, (b"EXEC",)], 0.0)
            refused = next((item for item in queued if isinstance(item, Exception)), None)
            if isinstance(refused, (MovedError, AskError)):
                self.learn_topology()
                continue
            if refused is not None:
                raise refused
            break
        if isinstance(replies, Exception):
            raise replies
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return cast("list[Any]", replies)

    def by_slot(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        """Group keys by slot: one command may name the keys of one group."""
        if not self.is_cluster:
            return [list(keys)]
        slots: dict[int, list[bytes]] = {}
        for key in keys:
            slots.setdefault(self.client.keyslot(key), []).append(key)
        return list(slots.values())

    # --- one server -------------------------------------------------------------------------

    def _exchange(self, client: Any, commands: Sequence[Command], wait: float) -> list[Any]:
        replies: list[Any] = []
        with _connection(client) as connection:
            try:
                # Packed here: a connection with redis-py's client-side cache would otherwise
                # answer some commands by itself.
                connection.send_packed_command(_pack_all(connection, commands))
                read_replies(connection, len(commands), replies, wait)
            except BaseException as error:
                # A late reply must not be taken for the reply of a later command.
                connection.disconnect()
                if not replies or not isinstance(error, TROUBLE):
                    raise
                replies.extend([error] * (len(commands) - len(replies)))
        return replies

    # --- a cluster --------------------------------------------------------------------------

    def _node(self, key: bytes) -> Any:
        if not self.is_cluster:
            return self.client
        try:
            node = self.client.get_node_from_key(key)
        except redis.RedisError:  # no node served the slot when the client last asked
            self.learn_topology()
            node = self.client.get_node_from_key(key)
        return self.client.get_redis_connection(node)

    def _send_to_nodes(self, commands: Sequence[tuple[bytes, Command]], wait: float) -> list[Any]:
        replies: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))
        for attempt in range(_REDIRECTIONS):
            self._send_part(commands, left, replies, wait)
            moved = [i for i in left if isinstance(replies[i], (MovedError, AskError))]
            lost = [i for i in left if isinstance(replies[i], TROUBLE)]
            if moved or lost:
                self.learn_topology()
            if not moved or attempt == _REDIRECTIONS - 1:
                break
            left = moved
        for index in left:
            if isinstance(replies[index], AskError):  # the slot is being moved to another node
                replies[index] = self._ask(replies[index], commands[index][1], wait)
        trouble = [reply for reply in replies if isinstance(reply, TROUBLE)]
        if trouble and len(trouble) == len(replies):
            raise trouble[0]
        return replies

    def _send_part(
        self,
        commands: Sequence[tuple[bytes, Command]],
        chosen: Sequence[int],
        replies: list[Any],
        wait: float,
    ) -> None:
        nodes: dict[int, tuple[Any, list[int]]] = {}
        for index in chosen:
            client = self._node(commands[index][0])
            nodes.setdefault(id(client), (client, []))[1].append(index)
        for client, indexes in nodes.values():
            try:
                answers = self._exchange(client, [commands[i][1] for i in indexes], wait)
            except TROUBLE as error:
                answers = [error] * len(indexes)
            for index, answer in zip(indexes, answers, strict=True):
                replies[index] = answer

    def _ask(self, asked: AskError, command: Command, wait: float) -> Any:
        node = self.client.get_node(host=asked.host, port=asked.port)
        if node is None:
            return asked
        client = self.client.get_redis_connection(node)
        return self._exchange(client, [(b"ASKING",), command], wait)[1]

    def learn_topology(self) -> None:
        """Ask the cluster which node serves which slots."""
        try:
            self.client.nodes_manager.initialize()
        except (redis.RedisError, OSError):  # no node answers; the next command will raise
            pass


def _with_timeout(client: Any) -> Any:
    """Return the client, or a copy with a `socket_timeout` if it has none.

    Before redis-py 8 a client without one hangs for ever in the greeting of a new connection if
    the server does not answer.
    """
    pool = client.connection_pool
    settings = pool.connection_kwargs
    if (
        client.connection is not None
        or type(pool) not in (redis.ConnectionPool, redis.BlockingConnectionPool)
        or settings.get("socket_timeout") is not None
    ):
        return client
    # Settings that redis-py 8 adds by itself belong to the original pool.
    known = {
        name: value
        for name, value in settings.items()
        if not name.startswith(("orig_", "maint_", "himport_"))
    }
    known |= {"socket_timeout": REPLY_SECONDS, "connection_class": pool.connection_class}
    return redis.Redis(connection_pool=redis.ConnectionPool(**known))


@contextmanager
def _connection(client: Any) -> Iterator[Any]:
    single = getattr(client, "connection", None)
    if single is not None:  # a client made with single_connection_client
        with client.single_connection_lock:
            yield single
        return
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        yield connection
    finally:
        pool.release(connection)


def _pack_all(connection: Any, commands: Sequence[Command]) -> list[bytes]:
    """Pack commands into few large pieces: redis-py inspects every argument and sends 6 kB each."""
    if _pack is None:
        return cast("list[bytes]", connection.pack_commands(commands))
    pieces: list[bytes] = []
    piece: list[bytes] = []
    size = 0
    for command in commands:
        packed = _pack(tuple(command))
        piece.append(packed)
        size += len(packed)
        if size > _PIECE_BYTES:
            pieces.append(b"".join(piece))
            piece, size = [], 0
    if piece:
        pieces.append(b"".join(piece))
    return pieces


def read_replies(connection: Any, count: int, replies: list[Any], wait: float = 0.0) -> None:
    """Append replies as bytes, or errors; the server may hold each back for `wait` seconds."""
    own = getattr(connection, "socket_timeout", None)
    limit = wait + max(REPLY_SECONDS if own is None else own, _LEAST_SLACK_SECONDS)
    if isinstance(connection, LoopConnection):
        connection.read_replies(count, replies, limit)
        return
    for _ in range(count):
        try:
            if own is not None and not wait:
                replies.append(connection.read_response(disable_decoding=True))
            else:
                replies.append(_read_late_reply(connection, limit))
        except redis.ResponseError as error:
            replies.append(error)


def _read_late_reply(connection: Any, seconds: float) -> Any:
    if _takes_timeout:
        return connection.read_response(disable_decoding=True, timeout=seconds)
    if not connection.can_read(seconds):
        raise redis.TimeoutError(f"no reply within {seconds:g} s")
    return connection.read_response(disable_decoding=True)


def _refuse_unless_usable(client: object) -> None:
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    if isinstance(client, redis.client.Pipeline):
        why = "a pipeline collects commands and has no replies to give"
    elif isinstance(client, (redis.Redis, redis.RedisCluster)):
        return
    elif isinstance(client, redis.asyncio.RedisCluster):
        why = (
            "on a cluster an async worker takes the client without asyncio, and uses it in threads"
        )
    elif kind.startswith("redis.asyncio."):
        why = "it is an asyncio client"
    else:
        why = "it is not a client of redis-py"
    raise ConfigError(f"{kind} cannot be used: {why}; give a redis.Redis or redis.RedisCluster")


# --- replies --------------------------------------------------------------------------------


def pairs(reply: Any) -> Mapping[bytes, Any]:
    """Return a reply that is a map in RESP3 and a flat list in RESP2 as a mapping."""
    if isinstance(reply, dict):
        return reply
    items = iter(reply or ())
    return dict(zip(items, items, strict=True))


def entries_by_stream(reply: Any) -> dict[bytes, list[Any]]:
    """Return the entries of XREAD or XREADGROUP by stream: a map in RESP3, pairs in RESP2."""
    if not reply:
        return {}
    return reply if isinstance(reply, dict) else dict(reply)


# --- the version of the server --------------------------------------------------------------

_field = re.compile(rb"^(redis_version|valkey_version|server_name):(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Server:
    """Name and version of a server. Valkey reports the Redis version it is compatible with.

    >>> Server("redis", "6.2.14").at_least("6.2"), Server("redis", "6.0.16").at_least("6.2")
    (True, False)
    """

    name: str
    version: str

    def at_least(self, version: str) -> bool:
        return _numbers(self.version) >= _numbers(version)


def server_of(client: Any, key: str = "") -> Server:
    """Ask the server, or in a cluster the node that holds `key`, for its version."""
    wire = client if isinstance(client, Wire) else Wire(client)
    found = dict(_field.findall(wire.call(key.encode(), b"INFO", b"server")))
    is_valkey = b"valkey_version" in found
    return Server(
        "valkey" if is_valkey else "redis", found.get(b"redis_version", b"6.0.0").decode()
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
