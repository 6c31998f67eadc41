"""The servers of the demo: private ones that are removed afterwards, or the user's own.

On the user's PostgreSQL the demo creates a schema of its own. On the user's Redis it refuses a
database that has one of its keys. It removes the schema and its keys at the end.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import redis
from psycopg import sql
from sqlalchemy.exc import SQLAlchemyError

from conquiet import embedded
from conquiet.config import explain
from conquiet.errors import ConfigError
from conquiet.redis import Topic
from conquiet.sql import engine
from marketplace.demo.settings import (
    COMMANDS,
    DEAD_LETTERS,
    PROCESSES,
    WORKERS,
    Settings,
)
from marketplace.generator import DOMAIN_TOPIC, TELEMETRY_TOPIC
from marketplace.service import init

STREAMS = Topic(COMMANDS, WORKERS).streams
_LEASES = tuple(f"conquiet:leases:{stream}" for stream in STREAMS)
KEYS = (*STREAMS, DEAD_LETTERS, PROCESSES, DOMAIN_TOPIC, TELEMETRY_TOPIC, *_LEASES)


@dataclass(frozen=True)
class Servers:
    """Holds the URLs of the database and of the broker."""

    database: str
    broker: str

    @property
    def client(self) -> Any:
        return redis.Redis.from_url(self.broker)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.database, autocommit=True)


@contextmanager
def servers(settings: Settings) -> Iterator[Servers]:
    """Provide both servers, with the marketplace's tables and no rows."""
    with ExitStack() as stack:
        if settings.broker is not None:
            broker = stack.enter_context(_own_redis(settings.broker))
        database = None
        if settings.database is not None:
            database = stack.enter_context(_own_schema(settings.database))
        private: list[embedded.RedisServer | embedded.PostgresServer] = []
        if settings.broker is None:
            private.append(embedded.redis(private=True))
        if database is None:
            private.append(embedded.postgres(private=True))
        for server in private:
            stack.callback(server.stop)
        with ThreadPoolExecutor(2) as pool:  # a new database takes a second or two
            list(pool.map(lambda server: server.start(), private))
        for server in private:
            if isinstance(server, embedded.PostgresServer):
                database = server.create_database("marketplace")
            else:
                broker = server.url
        assert database is not None
        init(database)
        yield Servers(database, broker)


@contextmanager
def _own_redis(url: str) -> Iterator[str]:
    try:
        client: Any = redis.Redis.from_url(url)
        taken = [key for key in KEYS if client.exists(key)]
    except (redis.RedisError, ValueError, OSError) as error:
        raise ConfigError(f"--broker: it cannot be used: {explain(error, url)}") from None
    if taken:
        raise ConfigError(
            f"--broker: the key {taken[0]} exists already: name an empty database, as"
            " redis://host/9, or delete that key"
        )
    try:
        yield url
    finally:
        client.delete(*KEYS)
        client.close()


@contextmanager
def _own_schema(url: str) -> Iterator[str]:
    """Create a schema, and yield a URL whose connections use it; drop it afterwards."""
    schema = f"conquiet_demo_{uuid.uuid4().hex[:8]}"
    name = sql.Identifier(schema)
    try:
        address = engine(url).url.set(drivername="postgresql")  # with its TLS verified
        plain = address.render_as_string(hide_password=False)
        psycopg.connect(plain).close()
    except (psycopg.Error, SQLAlchemyError, ValueError) as error:
        raise ConfigError(f"--database: it cannot be used: {explain(error, url)}") from None
    try:
        _execute(plain, sql.SQL("CREATE SCHEMA {}").format(name))
        inside = address.update_query_dict({"options": f"-csearch_path={schema}"})
        yield inside.render_as_string(hide_password=False)
    finally:
        _execute(plain, sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(name))


def _execute(url: str, statement: sql.Composed) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)
