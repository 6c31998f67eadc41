"""Connect to Redis from a query's options, once per process, and repeat commands after an outage.

The executors get an `Address` and never a client.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import redis

from conquiet.errors import StoreError
from conquiet.redis.wire import TROUBLE, Command, Wire
from conquiet.registry import open_redis
from conquiet.spark.options import Address

logger = logging.getLogger("conquiet.spark")


_SECONDS = 30.0
"""How long to wait for a reply, unless the URL has socket_timeout=…"""

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
    # RESP2 has no push messages, which could come between the replies of a range.
    return open_redis(
        url, "the URL of Redis", answer_seconds=_SECONDS, protocol=2, decode_responses=False
    )


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
