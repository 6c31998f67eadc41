"""One command, sent once, over a connection of the client that the caller gave.

The queue asks the client's pool for a connection instead of calling the client's methods:

- redis-py 8 sends a command again, up to ten times, when a connection breaks. A repeated XADD may
  add an entry twice, and the seed says: no retries.
- redis-py 8 gives up on a reply after 5 s, whatever the command. The block time is added to the
  client's own `socket_timeout`, so that a blocking read of any length is one command, and a dead
  server is still found out.
- a client with `decode_responses` fails on the first entry that is not UTF-8, and takes the good
  entries of the same reply with it. Here replies are bytes, whatever the client says.
"""

from __future__ import annotations

import inspect
from typing import Any

try:
    import redis
except ImportError as error:
    raise ImportError("conquiet.queue needs redis-py: pip install 'conquiet[redis]'") from error

from conquiet.queue.errors import InvalidSettingError, QueueError

# poll(2) counts milliseconds in a C int, which is full after 24 days
_LONGEST_WAIT_S = 2_000_000.0

# An idle server looks for reads whose time is over `hz` times a second, and that may be once.
_SHORTEST_GRACE_S = 1.1

# since redis-py 8; before that the only public way to wait longer is can_read()
_TAKES_TIMEOUT = "timeout" in inspect.signature(redis.Connection.read_response).parameters


class Wire:
    """Sends commands as bytes and returns replies as bytes; every failure is a QueueError."""

    def __init__(self, client: redis.Redis) -> None:
        _refuse_unless_usable(client)
        self._client = client

    def call(self, name: bytes, *arguments: bytes | int, wait_s: float = 0.0) -> Any:
        """Send one command; `wait_s` is how long the server may take before it begins to reply."""
        try:
            connection = self._client.connection
            if connection is not None:  # a client that was made with single_connection_client
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


def _exchange(
    connection: Any, name: bytes, arguments: tuple[bytes | int, ...], wait_s: float
) -> Any:
    try:
        # Packed here, because a connection with redis-py's client-side cache would otherwise answer
        # XPENDING from its cache.
        connection.send_packed_command(connection.pack_command(name, *arguments))
        reply_s = getattr(connection, "socket_timeout", None)
        if not wait_s or reply_s is None:
            return connection.read_response(disable_decoding=True)
        timeout_s = wait_s + max(reply_s, _SHORTEST_GRACE_S)
        return _read_late_reply(connection, min(timeout_s, _LONGEST_WAIT_S))
    except redis.ResponseError:
        raise
    except BaseException:
        # A reply may still be on its way, and must not be taken for that of the next command.
        connection.disconnect()
        raise


def _read_late_reply(connection: Any, timeout_s: float) -> Any:
    if _TAKES_TIMEOUT:
        return connection.read_response(disable_decoding=True, timeout=timeout_s)
    if not connection.can_read(timeout_s):
        raise redis.TimeoutError(f"no reply within {timeout_s:g} s")
    return connection.read_response(disable_decoding=True)


def _refuse_unless_usable(client: object) -> None:
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    if isinstance(client, redis.client.Pipeline):
        why = "a pipeline collects commands and has no replies to give"
    elif isinstance(client, redis.Redis):
        return
    elif isinstance(client, redis.RedisCluster):
        why = "a cluster client moves between nodes, and a blocking read stays on one"
    elif kind.startswith("redis.asyncio."):
        why = "it is an asyncio client, and the queue is synchronous"
    else:
        why = "it is not a client of redis-py"
    raise InvalidSettingError(f"client {kind} cannot serve a queue: {why}; give it a redis.Redis")
