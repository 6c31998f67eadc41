"""The Redis and the database of a command: by its option, else by the environment.

Whatever is wrong with them is one line, which never shows a password.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conquiet.cli.progress import Waiting
from conquiet.errors import ConfigError, StoreError

REDIS_VARIABLE = "CONQUIET_REDIS_URL"
DATABASE_VARIABLE = "CONQUIET_DATABASE_URL"
_CONNECT_SECONDS = 5
_PATIENCE: dict[str, Any] = {"socket_connect_timeout": _CONNECT_SECONDS, "socket_timeout": 30}
"""Of Redis, unless its URL says otherwise."""


def add_redis(parser: ArgumentParser, option: str = "--url") -> None:
    parser.add_argument(option, metavar="URL", help=f"Redis, or a cluster; else {REDIS_VARIABLE}")


def redis_url(given: str | None, option: str = "--url") -> str:
    url = given or os.environ.get(REDIS_VARIABLE)
    if not url:
        raise ConfigError(f"no Redis given: use {option}, or set {REDIS_VARIABLE}")
    if url.startswith("sentinel"):
        raise ConfigError(f"{option} sentinel…: name the master itself, as redis://HOST:PORT/0")
    return url


@contextmanager
def redis_at(given: str | None, option: str = "--url") -> Iterator[Any]:
    """A client of the server, or of the cluster that it belongs to; closed at the end."""
    redis = _redis()
    url = redis_url(given, option)
    # Of a broker of Kombu, too: redis-streams://HOST, redis+socket:///PATH.
    plain = re.sub(r"^redis(-streams)?\+socket://", "unix://", url)
    plain = re.sub(r"^(rediss?)-streams://", r"\1://", plain)
    where = _masked(url)
    try:
        client = redis.Redis.from_url(plain, **_PATIENCE)
        client.connection_pool.make_connection()  # refuses options that it does not know
    except (ValueError, TypeError) as error:
        from conquiet.relay.sinks.url import trouble

        raise ConfigError(f"{option} {where}: {trouble(error, url)}") from None
    try:
        with Waiting(f"asking {where}"), client:
            if client.info("cluster").get("cluster_enabled"):
                with redis.RedisCluster.from_url(plain, **_PATIENCE) as whole:
                    yield whole
            else:
                yield client
    except redis.AuthenticationError as error:
        raise StoreError(f"{where}: {error}; correct user and password in {option}") from error
    except redis.exceptions.NoPermissionError as error:
        raise StoreError(f"{where}: {error}; its ACL must allow this") from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise StoreError(f"{where}: {error}; is it running, and is {option} right?") from error
    except redis.RedisError as error:
        raise StoreError(f"{where}: {error}") from error


def _redis() -> Any:
    try:
        import redis
    except ModuleNotFoundError as error:
        raise ConfigError("redis-py is not installed: pip install 'conquiet[redis]'") from error
    return redis


def _masked(url: str) -> str:
    from conquiet.relay.masked import masked

    return masked(url)


def database_url(given: str | None, *, option: str = "--url", must_exist: bool = False) -> Any:
    """The URL of a database, as SQLAlchemy has it."""
    try:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError
    except ModuleNotFoundError as error:
        raise ConfigError("SQLAlchemy is not installed: pip install 'conquiet[sql]'") from error

    from conquiet.relay.settings import setting
    from conquiet.sql.schema import DIALECTS

    text = given or setting("database", required=False)
    if not text:
        raise ConfigError(f"no database given: use {option}, or set {DATABASE_VARIABLE}")
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigError(
            f"{option} is no database URL; write postgresql://USER@HOST/NAME or sqlite:///FILE"
        ) from None
    name = url.get_backend_name()
    kind = "postgresql" if name == "postgres" else name
    if kind not in DIALECTS:
        raise ConfigError(f"{option} {kind}://: conquiet works with {' and '.join(DIALECTS)}")
    if must_exist and kind == "sqlite" and not os.path.exists(url.database or ""):
        raise ConfigError(f"no file {url.database!r}; conquiet outbox migrate would make it")
    return url


@contextmanager
def database_at(given: str | None, option: str = "--url") -> Iterator[Any]:
    """An engine, disposed at the end."""
    url = database_url(given, option=option, must_exist=True)
    with Reached(url), Waiting(f"asking {url.set(query={}).render_as_string()}"):
        from conquiet.sql import engine as make_engine

        patience = {}
        if url.get_backend_name() != "sqlite" and "connect_timeout" not in url.query:
            patience = {"connect_timeout": _CONNECT_SECONDS}
        engine = make_engine(url, connect_args=patience)
        try:
            yield engine
        finally:
            engine.dispose()


class Reached:
    """Says in one line that a database is out of reach, where SQLAlchemy takes five."""

    def __init__(self, url: Any) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        from sqlalchemy.exc import DBAPIError, NoSuchModuleError

        where = self._url.set(query={}).render_as_string()  # a query may hold a password too
        if isinstance(error, DBAPIError):
            raise StoreError(f"{where}: {error.orig}") from error
        if isinstance(error, (NoSuchModuleError, ModuleNotFoundError)):
            raise ConfigError(
                f"{where}: its driver is not installed: pip install 'conquiet[postgres]'"
            ) from error
