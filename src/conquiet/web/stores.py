"""Stores: the database and the Redis that are looked at, connected when somebody looks."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from conquiet.errors import ConfigError, StoreError
from conquiet.operations.errors import NotFound
from conquiet.relay.masked import masked

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from conquiet.relay.inspection import Inspection

_CONNECT_SECONDS = 3
_ANSWER_SECONDS = 5
_PATIENCE: dict[str, Any] = {
    "socket_connect_timeout": _CONNECT_SECONDS,
    "socket_timeout": _ANSWER_SECONDS,
    "client_name": "conquiet-dashboard",
}


class Stores:
    """What the pages look at. A store that was not named, or does not answer, raises in words."""

    def __init__(
        self,
        database: Engine | str | None,
        redis: Any,
        *,
        table: str = "outbox",
        max_attempts: int = 10,
        streams: str = "*",
        relays: Sequence[str] = (),
    ) -> None:
        self._database = database or None
        self._redis = redis or None
        self._max_attempts = max_attempts
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._client: Any = None
        self._knows_server = False
        self.table = table
        self.streams = streams
        self.relays = tuple(relays)
        if isinstance(self._redis, str):
            self._client = _client(self._redis)  # says at once what is wrong with the URL
        if isinstance(self._database, str):
            self._engine = _engine(self._database)

    @property
    def has_database(self) -> bool:
        return self._database is not None

    @property
    def has_redis(self) -> bool:
        return self._redis is not None

    @property
    def engine(self) -> Engine:
        if self._database is None:
            raise NotFound(
                "no database was named: start the dashboard with --database URL or"
                " CONQUIET_DATABASE_URL, or give dashboard(database=…)"
            )
        engine = self._engine if isinstance(self._database, str) else self._database
        assert engine is not None
        _refuse_missing_file(engine)
        return engine

    @property
    def client(self) -> Any:
        if self._redis is None:
            raise NotFound(
                "no Redis was named: start the dashboard with --redis URL or CONQUIET_REDIS_URL,"
                " or give dashboard(redis=…)"
            )
        return self._whole(self._redis) if isinstance(self._redis, str) else self._redis

    def _whole(self, url: str) -> Any:
        """The server of a URL, or the cluster that it belongs to: a node of it knows only its own
        streams."""
        with self._lock:
            if not self._knows_server:
                if _is_in_cluster(self._client, url):
                    node, self._client = self._client, _cluster(url)
                    node.close()
                self._knows_server = True
            return self._client

    @property
    def outbox(self) -> Inspection:
        engine = self.engine  # says what to do if there is none
        from conquiet.relay.inspection import Inspection

        return Inspection(engine, self.table, max_attempts=self._max_attempts)

    def shown(self) -> list[tuple[str, str]]:
        """Names and addresses, without passwords."""
        found: list[tuple[str, str]] = []
        if self._redis is not None:
            found.append(("Redis", _address(self._redis)))
        if self._database is not None:
            from conquiet.sql import dialect

            engine = self._engine if isinstance(self._database, str) else self._database
            assert engine is not None
            found.append(("Database", dialect.shown(engine.url)))
        return found

    def close(self) -> None:
        """Let go of connections that were made here."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()
            if self._client is not None:
                self._client.close()


def _client(url: str) -> Any:
    try:
        import redis
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed: pip install 'conquiet[redis]', or say --redis off"
        ) from error
    try:
        client = redis.Redis.from_url(url, **_PATIENCE)
        client.connection_pool.make_connection()  # refuses options that it does not know
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigError(
            f"{masked(url)!r:.100} is no URL of Redis ({masked(str(error))}); write"
            " redis://HOST:PORT/0"
        ) from None
    return client


def _is_in_cluster(client: Any, url: str) -> bool:
    import redis

    try:
        return bool(client.info("cluster").get("cluster_enabled"))
    except redis.exceptions.NoPermissionError:  # an ACL without INFO; then it is what was named
        return False
    except (redis.RedisError, OSError) as error:
        raise StoreError(f"Redis does not answer at {masked(url)}: {error}") from error


def _cluster(url: str) -> Any:
    import redis

    return redis.RedisCluster.from_url(url, **_PATIENCE)


def _engine(url: str) -> Engine:
    try:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        from conquiet.sql import engine
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    try:
        address = make_url(url)
        options: dict[str, Any] = {"pool_pre_ping": True, "pool_size": 4}
        if address.get_backend_name() in ("postgresql", "postgres"):
            wanted = {
                "connect_timeout": _CONNECT_SECONDS,
                "tcp_user_timeout": _ANSWER_SECONDS * 1000,
                "application_name": "conquiet-dashboard",
            }
            options["connect_args"] = {
                name: value for name, value in wanted.items() if name not in address.query
            }
        elif address.get_backend_name() != "sqlite":
            raise ArgumentError
        return engine(address, **options)
    except ArgumentError:
        raise ConfigError(
            f"{masked(url)!r:.100} is no URL of a database that conquiet works with; write"
            " postgresql://USER@HOST/NAME or sqlite:///FILE"
        ) from None
    except ModuleNotFoundError as error:  # the driver
        raise _not_installed(error) from error


def _not_installed(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"{error.name} is not installed: pip install 'conquiet[postgres]'")


def _refuse_missing_file(engine: Engine) -> None:
    """SQLite would make an empty file of a name that was mistyped."""
    from conquiet.sql import dialect

    if not dialect.is_sqlite(engine.dialect) or dialect.is_in_memory(engine):
        return
    path = dialect.path_of(engine)
    if not os.path.exists(path):
        raise StoreError(f"no file {path!r}; conquiet outbox migrate would make it")


def _address(redis: Any) -> str:
    if isinstance(redis, str):
        return masked(redis)
    settings = getattr(getattr(redis, "connection_pool", None), "connection_kwargs", {})
    if "host" not in settings:
        return str(settings.get("path") or type(redis).__name__)
    return f"redis://{settings['host']}:{settings.get('port', 6379)}/{settings.get('db') or 0}"
