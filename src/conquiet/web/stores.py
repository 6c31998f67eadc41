"""Stores: the database and the broker that the pages show, connected on first use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from conquiet.config import has_events_layout
from conquiet.errors import NotFound, StoreError
from conquiet.registry import join_cluster, open_database, open_redis
from conquiet.secret import mask

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from conquiet.operations.dead_letters import Letters
    from conquiet.operations.history import Keeper
    from conquiet.operations.log_groups import LogGroup
    from conquiet.relay.inspection import Inspection

_CONNECT_SECONDS = 3
_ANSWER_SECONDS = 5
_OF_CLIENTS: dict[str, Any] = {
    "connect_seconds": _CONNECT_SECONDS,
    "answer_seconds": _ANSWER_SECONDS,
    "client_name": "conquiet-dashboard",
}


_OF_KOMBU = "conquiet:kombu:dead:"
"""As in `conquiet.kombu.layout`: the key prefix of the application before, the queue after."""


def is_of_kombu(stream: str) -> bool:
    return _OF_KOMBU in stream


_OF_LOG = "?topic="
"""Begins the name of a group of the log: the query of its URL, without the database."""


def _name_log(topic: str, group: str) -> str:
    return f"?{urlencode({'topic': topic, 'group': group})}"


def read_log(place: str) -> tuple[str, str] | None:
    """Return topic and group of a place in the log; None if it is in no log.

    >>> read_log("?topic=orders&group=billing"), read_log("orders:dead")
    (('orders', 'billing'), None)
    """
    said = dict(parse_qsl(place[1:])) if place.startswith(_OF_LOG) else {}
    return (said["topic"], said["group"]) if said.keys() == {"topic", "group"} else None


def show_place(place: str) -> str:
    """Return the name of a place for readers.

    >>> show_place("?topic=orders&group=billing"), show_place("orders:dead")
    ('group billing of orders', 'orders:dead')
    >>> show_place("conquiet:kombu:dead:mail"), show_place("shop:conquiet:kombu:dead:mail")
    ('queue mail', 'queue mail of shop:')
    """
    if is_of_kombu(place):
        prefix, _, queue = place.partition(_OF_KOMBU)
        return show_queue(prefix, queue)
    of_log = read_log(place)
    return place if of_log is None else f"group {of_log[1]} of {of_log[0]}"


def show_queue(prefix: str, name: str) -> str:
    """Return the name of a queue of Celery for readers."""
    return f"queue {name} of {prefix}" if prefix else f"queue {name}"


def name_letters(prefix: str, queue: str) -> str:
    """Return the stream with the dead letters of a queue of Celery."""
    return f"{prefix}{_OF_KOMBU}{queue}"


class Stores:
    """The servers that the pages show; one that was not given, or does not answer, raises."""

    def __init__(
        self,
        database: Engine | str | None,
        broker: Any,
        *,
        table: str = "outbox",
        max_attempts: int = 10,
        streams: str = "*",
        relays: Sequence[str] = (),
    ) -> None:
        self._database = database or None
        self._broker = broker or None
        self._max_attempts = max_attempts
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._client: Any = None
        self._knows_server = False
        self.table = table
        self.streams = streams
        self.relays = tuple(relays)
        if isinstance(self._broker, str):
            # At once, so that a wrong URL is reported at the start.
            self._client = open_redis(self._broker, "broker", **_OF_CLIENTS)
        if isinstance(self._database, str):
            self._engine = open_database(
                *(self._database, "database"),
                application="conquiet-dashboard",
                connect_seconds=_CONNECT_SECONDS,
                silent_seconds=_ANSWER_SECONDS,
                must_exist=False,
                pool_pre_ping=True,
                pool_size=4,
            )

    @property
    def has_database(self) -> bool:
        return self._database is not None

    @property
    def has_broker(self) -> bool:
        return self._broker is not None

    @property
    def engine(self) -> Engine:
        if self._database is None:
            raise NotFound(
                "no database is set: start the dashboard with --database URL or"
                " CONQUIET_DATABASE_URL, or give dashboard(database=…)"
            )
        engine = self._engine if isinstance(self._database, str) else self._database
        assert engine is not None
        _refuse_missing_file(engine)
        return engine

    @property
    def client(self) -> Any:
        if self._broker is None:
            raise NotFound(
                "no broker is set: start the dashboard with --broker URL or CONQUIET_BROKER_URL,"
                " or give dashboard(broker=…)"
            )
        return self._whole(self._broker) if isinstance(self._broker, str) else self._broker

    def _whole(self, url: str) -> Any:
        """Return a client of the server of a URL, or of the cluster that it belongs to."""
        import redis

        with self._lock:
            if not self._knows_server:
                try:
                    whole = join_cluster(self._client, url, **_OF_CLIENTS)
                except (redis.RedisError, OSError) as error:
                    raise StoreError(f"Redis does not answer at {mask(url)}: {error}") from error
                if whole is not self._client:
                    self._client.close()
                self._client = whole
                self._knows_server = True
            return self._client

    @property
    def outbox(self) -> Inspection:
        engine = self.engine  # raises if there is none
        from conquiet.relay.inspection import Inspection

        return Inspection(engine, self.table, max_attempts=self._max_attempts)

    def keepers(self) -> list[Callable[[], Keeper]]:
        """Return how to open the histories of the stores."""
        from conquiet.operations.history import RedisKeeper, TableKeeper

        found: list[Callable[[], Keeper]] = []
        if self.has_broker:
            found.append(lambda: RedisKeeper(self.client))
        if self.has_database and not has_events_layout(self.table):
            found.append(lambda: TableKeeper(self.engine, self.table))
        return found

    def letters(self, stream: str) -> Letters:
        """Open the dead letters of a place that `letter_places` names."""
        if (place := read_log(stream)) is not None:
            engine = self.engine
            from conquiet.operations.log_groups import LogLetters

            return LogLetters(engine, *place, self.table)
        client = self.client
        from conquiet.operations.dead_letters import open_letters

        if not is_of_kombu(stream):
            return open_letters(stream, client)
        prefix, _, queue = stream.partition(_OF_KOMBU)
        try:
            return open_letters(f"kombu:{queue}", client, prefix=prefix)
        except ModuleNotFoundError as error:
            raise NotFound(
                f"{stream!r} are dead letters of Celery, which need {error.name}: pip install"
                " 'conquiet[kombu]' where the dashboard runs"
            ) from error

    def letter_places(self) -> tuple[dict[str, int], list[str]]:
        """Return where dead letters are and how many; and why a store could not tell."""
        found: dict[str, int] = {}
        troubles: list[str] = []
        looks = [self.log_letters] if self.has_database else []
        if self.has_broker or not looks:  # without stores, raise
            looks.insert(0, self.stream_letters)
        for look in looks:
            try:
                found |= look()
            except StoreError as error:
                troubles.append(str(error))
        return found, troubles

    def log_letters(self) -> dict[str, int]:
        """Return the groups of the database's log that have dead letters."""
        engine = self.engine  # raises if there is none
        if has_events_layout(self.table):
            return {}
        from conquiet.operations.log_groups import count_dead

        found = count_dead(engine, self.table)
        return {_name_log(*place): count for place, count in found.items()}

    def log_groups(self) -> list[LogGroup]:
        """Return the groups that read the outbox as a log."""
        engine = self.engine
        if has_events_layout(self.table):
            return []
        from conquiet.operations.log_groups import survey

        return survey(engine, table=self.table)

    def stream_letters(self) -> dict[str, int]:
        """Return the streams with dead letters, those of Kombu included, and their lengths."""
        client = self.client
        from conquiet.operations.dead_letters import list_streams
        from conquiet.operations.streams import names_of, open_wire

        found = list_streams(client, self.streams)
        with open_wire(client, f"streams {self.streams!r}") as wire:
            for name in names_of(wire, self.streams):
                if is_of_kombu(name):
                    found[name] = int(wire.call(name.encode(), b"XLEN", name))
        return {name: count for name, count in sorted(found.items()) if count}

    def describe(self) -> list[tuple[str, str]]:
        """Return names and addresses, without passwords."""
        found: list[tuple[str, str]] = []
        if self._broker is not None:
            found.append(("Redis", _address(self._broker)))
        if self._database is not None:
            from conquiet.sql import dialect

            engine = self._engine if isinstance(self._database, str) else self._database
            assert engine is not None
            found.append(("Database", dialect.display_url(engine.url)))
        return found

    def close(self) -> None:
        """Close the connections that were opened here."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()
            if self._client is not None:
                self._client.close()


def _refuse_missing_file(engine: Engine) -> None:
    """Raise if SQLite would create an empty file under a mistyped name."""
    from conquiet.sql import dialect

    if not dialect.is_sqlite(engine.dialect) or dialect.is_in_memory(engine):
        return
    path = dialect.path_of(engine)
    if not os.path.exists(path):
        raise StoreError(f"no file {path!r}; conquiet outbox migrate would create it")


def _address(broker: Any) -> str:
    if isinstance(broker, str):
        return mask(broker)
    settings = getattr(getattr(broker, "connection_pool", None), "connection_kwargs", {})
    if "host" not in settings:
        return str(settings.get("path") or type(broker).__name__)
    return f"redis://{settings['host']}:{settings.get('port', 6379)}/{settings.get('db') or 0}"
