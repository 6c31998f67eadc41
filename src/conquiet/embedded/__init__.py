"""Private Redis and PostgreSQL servers for tests and the demo.

A server runs on a free loopback port, in a temporary directory and a process of its own. It is gone
when the block ends, when the interpreter exits, and also when the interpreter is killed.

    >>> from conquiet import embedded
    >>> with embedded.redis() as server:
    ...     server.url.startswith("redis://127.0.0.1:")
    True

Where a server is already at hand, `CONQUIET_BROKER_URL` and `CONQUIET_DATABASE_URL` name it, and
nothing is started.
"""

from __future__ import annotations

from conquiet.embedded.postgres_server import PostgresFlavour, PostgresServer, postgres
from conquiet.embedded.redis_server import RedisFlavour, RedisServer, redis
from conquiet.embedded.server import Server

__all__ = [
    "PostgresFlavour",
    "PostgresServer",
    "RedisFlavour",
    "RedisServer",
    "Server",
    "postgres",
    "redis",
]
