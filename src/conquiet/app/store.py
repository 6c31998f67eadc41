"""Open the database and the broker of an app: transaction, inbox, outbox, log, sessions.

no broker    database: effects + inbox + outbox, which is the log ──▶ LogSource
a broker     database: effects + inbox + outbox ──▶ relay ──▶ broker ──▶ its source
Redis alone  Redis: effects + inbox + outbox ──▶ relay ──▶ streams of the same Redis
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from conquiet.app.injection import Form, Provider
from conquiet.config import Url, require
from conquiet.errors import ConfigError, StoreError
from conquiet.message import Message, new_id
from conquiet.registry import SourceOptions, connect_source, open_redis, open_sink
from conquiet.schedule import States
from conquiet.secret import mask
from conquiet.sink import Sink
from conquiet.source import Source
from conquiet.stage import Middleware
from conquiet.task import topic_of_tasks

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine, MetaData

    from conquiet.relay.inspection import Figures
    from conquiet.relay.relay import Relay

LEASE_SECONDS = 10.0
"""How long what a process held that was killed waits for another one; it is renewed until then."""
_COUNT_SECONDS = 2.0
"""How long the rows that wait may be counted for `/metrics`."""
_REDIS = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel")
_BROKERS = (*_REDIS, "amqp", "amqps", "kafka")
_OF_THE_APP = (
    *("queue", "topic", "group"),
    *("positions", "exactly_once", "producers_repeat"),  # it has an inbox
)
"""The parameters of a source that a broker's URL must not have: an app sets them itself."""
_OF_SOURCES = (
    *("prefetch", "queue_type", "heartbeat"),
    *("start", "max_in_flight", "dead_letters"),
)
_OF_SINKS = ("queues", "mandatory")


def scheme_of(url: str) -> str:
    return url.partition(":")[0].lower()


class Store(ABC):
    """Holds what an app keeps its effects in."""

    engine: Any = None
    sessions: Any = None
    is_async = False
    middlewares: Sequence[Middleware]
    outbox: Any

    def __init__(self) -> None:
        self._providers: dict[tuple[Any, bool], Provider | None] = {}

    def provider(self, kind: Any, is_async: bool) -> Provider | None:
        """Return the provider of a parameter of this type; raise if it does not fit the store."""
        asked = (kind, is_async)
        if asked not in self._providers:
            self._providers[asked] = self.find(kind, is_async)
        return self._providers[asked]

    @abstractmethod
    def find(self, kind: Any, is_async: bool) -> Provider | None:
        """Find what `provider` returns."""

    @abstractmethod
    def publish(self, messages: Sequence[Message[Any]]) -> None:
        """Store messages in the log of the store itself; raise if they were not stored."""

    @abstractmethod
    def delay(self, messages: Sequence[Message[Any]]) -> None:
        """Store delayed messages in the outbox; raise if they were not stored."""

    @abstractmethod
    def cancel(self, id: str) -> bool:
        """Delete a delayed message; return whether it still waited."""

    @abstractmethod
    def sources(self, topics: Sequence[str], group: str) -> list[Source]:
        """Open the sources of the log of the store itself."""

    @abstractmethod
    def schedules(self) -> States:
        """Return where the states of the app's schedules are kept."""

    @abstractmethod
    def relay_source(self) -> Source:
        """Open the outbox, for a relay."""

    def open_sink(self) -> Sink | None:
        """Open the log of the store for a relay; None if the outbox itself is the log."""
        return None

    def missing_tables(self) -> list[str]:
        return []

    def create_tables(self) -> None:
        """Create missing tables."""
        raise ConfigError(f"{self!r} has no tables to create; leave --create-tables away")

    def figures(self) -> Figures | None:
        """Count the rows of the outbox that wait for a relay; None if they are not in a table."""
        return None

    @abstractmethod
    def reach(self) -> None:
        """Raise if the store does not answer."""

    @abstractmethod
    def refuse_inside(self, what: str) -> None:
        """Raise if the running code is inside a transaction of the store."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections that the store has opened itself."""

    async def close_async(self) -> None:
        """Do as `close`, on the event loop of an async store."""
        self.close()


# --- SQL ------------------------------------------------------------------------------------


class SqlStore(Store):
    """Keeps effects, inbox and outbox in PostgreSQL or SQLite."""

    def __init__(self, database: Any, name: str, metadata: MetaData | None) -> None:
        super().__init__()
        require("conquiet.sql", "sql")
        from conquiet.sql import Inbox, Outbox, Transaction
        from conquiet.sql.dialect import as_engine, is_in_memory, is_sqlite

        self.engine, factory, self._url = _open_engine(database)
        self._owns_engine = factory is None and self.engine is not database
        sync = as_engine(self.engine)
        if is_sqlite(sync.dialect) and is_in_memory(sync):
            raise ConfigError(
                "database: SQLite in memory belongs to one connection; name a file, as in"
                " sqlite:///shop.db. For tests use app.test()"
            )
        self.is_async = sync.dialect.is_async
        self.metadata = metadata
        self.sync_sessions, self.sessions = _open_sessions(self.engine, factory)
        self.outbox = Outbox(name, source=f"/{name}")
        self.middlewares = (Transaction(self.engine), Inbox(name), self.outbox)
        self._log_engine: Engine | None = None if self.is_async else sync
        self._lock = threading.Lock()

    @property
    def log_engine(self) -> Engine:
        """Return a sync engine of the database: the log and the relay are read in threads."""
        with self._lock:
            if self._log_engine is None:
                from conquiet.sql import engine

                self._log_engine = engine(self._url)
            return self._log_engine

    def find(self, kind: Any, is_async: bool) -> Provider | None:
        from sqlalchemy import Connection
        from sqlalchemy.orm import Session

        from conquiet.sql import connection, session

        if not isinstance(kind, type):
            return None
        if kind.__module__.partition(".")[0] == "redis":
            raise ConfigError(
                "redis.Redis inside the transaction is for App(database='redis://…'); by"
                " Annotated[Redis, Depends(…)] you get a client whose commands take effect at once,"
                " and again with a redelivery"
            )
        if issubclass(kind, (Session, Connection)):
            if is_async:
                raise ConfigError(
                    f"{kind.__name__} in an async handler would block its event loop; take"
                    f" Async{'Session' if issubclass(kind, Session) else 'Connection'} with an"
                    " async database, or leave `async` away"
                )
            if issubclass(kind, Connection):
                return Provider(lambda: connection(self.engine), Form.CONTEXT)
            _check_class(kind, self.sync_sessions.class_)
            return Provider(lambda: session(self.sync_sessions), Form.CONTEXT)
        return self._find_async(kind, is_async)

    def _find_async(self, kind: type, is_async: bool) -> Provider | None:
        room: Any = sys.modules.get("sqlalchemy.ext.asyncio")
        if room is None or not issubclass(kind, (room.AsyncSession, room.AsyncConnection)):
            return None
        if not self.is_async or not is_async:
            driver = "postgresql+asyncpg://… or sqlite+aiosqlite:///…"
            raise ConfigError(
                f"{kind.__name__} needs an async handler and a database with an async driver,"
                f" {driver}; with a sync one take Session or Connection, without `async`"
            )
        from conquiet.sql import async_connection, async_session

        if issubclass(kind, room.AsyncConnection):
            return Provider(lambda: async_connection(self.engine), Form.ASYNC_CONTEXT)
        _check_class(kind, self.sessions.class_)
        return Provider(lambda: async_session(self.sessions), Form.ASYNC_CONTEXT)

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        self._publish(messages, self.outbox.table.fullname)

    def _publish(self, messages: Sequence[Message[Any]], table: str) -> None:
        from conquiet.sql.dialect import begin_to_write, raise_store_errors
        from conquiet.sql.notification import notify_relays

        engine = self.log_engine
        with raise_store_errors(engine), begin_to_write(engine) as connection:
            self.outbox.add(connection, messages)
        notify_relays(engine, table)

    def delay(self, messages: Sequence[Message[Any]]) -> None:
        self._publish(messages, self.outbox.delayed.fullname)  # the outbox holds them

    def cancel(self, id: str) -> bool:
        from conquiet.sql.dialect import begin_to_write, raise_store_errors

        engine = self.log_engine
        with raise_store_errors(engine), begin_to_write(engine) as connection:
            was_there: bool = self.outbox.cancel(connection, id)
        return was_there

    def sources(self, topics: Sequence[str], group: str) -> list[Source]:
        from conquiet.sql import LogSource

        return [LogSource(self.log_engine, topic, group, lease=LEASE_SECONDS) for topic in topics]

    def schedules(self) -> States:
        from conquiet.sql.schedules import Schedules

        return Schedules(self.log_engine, self.outbox, self.outbox.topic)

    def relay_source(self) -> Source:
        from conquiet.sql import OutboxSource

        return OutboxSource(self.log_engine)

    def missing_tables(self) -> list[str]:
        from sqlalchemy import MetaData

        from conquiet.sql.dialect import has_table, raise_store_errors
        from conquiet.sql.schema import add_tables

        ours = MetaData()
        add_tables(ours)
        names = [table.fullname for table in ours.sorted_tables]
        if self.metadata is not None:
            names += [table.fullname for table in self.metadata.sorted_tables]
        engine = self.log_engine
        with raise_store_errors(engine), engine.connect() as connection:
            return [name for name in names if not has_table(connection, name)]

    def create_tables(self) -> None:
        from conquiet.sql import schema
        from conquiet.sql.dialect import raise_store_errors

        with raise_store_errors(self.log_engine):
            schema.init(self.log_engine)
            if self.metadata is not None:  # several processes may start at once
                with schema.lock_tables(self.log_engine) as connection:
                    self.metadata.create_all(connection)

    def figures(self) -> Figures | None:
        from conquiet.relay.inspection import Inspection

        return Inspection(self.log_engine, self.outbox.table.fullname).figures()

    def reach(self) -> None:
        with self.log_engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")

    def refuse_inside(self, what: str) -> None:
        from conquiet.sql.transaction import UNITS

        if any(not unit.ended for unit in UNITS.get()):
            raise inside_error(what)

    def close(self) -> None:
        log = self._log_engine
        if log is not None and (self.is_async or self._owns_engine):
            log.dispose()

    async def close_async(self) -> None:
        self.close()
        if self.is_async and self._owns_engine:
            await self.engine.dispose()

    def __repr__(self) -> str:
        from conquiet.sql.dialect import display_url

        return display_url(self.engine.url)


def inside_error(what: str) -> ConfigError:
    return ConfigError(
        f"{what} inside a handler would take effect although its transaction may fail, and again"
        " with a redelivery; return it from the handler, or use app.emit(session, …)"
    )


def _open_engine(database: Any) -> tuple[Any, Any, URL]:
    """Return the engine of a database, the factory of sessions if that was given, and the URL."""
    from sqlalchemy import URL, Engine
    from sqlalchemy.orm import scoped_session, sessionmaker

    from conquiet import sql
    from conquiet.registry import parse_database
    from conquiet.sql.dialect import async_engine, is_async_url

    if isinstance(database, (str, URL)):
        url = parse_database(database, "database") if isinstance(database, str) else database
        return (async_engine(url) if is_async_url(url) else sql.engine(url)), None, url
    if isinstance(database, Engine) or hasattr(database, "sync_engine"):
        return database, None, database.url
    factory = database.session_factory if isinstance(database, scoped_session) else database
    bind: Any = getattr(factory, "kw", {}).get("bind")
    if isinstance(bind, Engine) or hasattr(bind, "sync_engine"):
        return bind, factory, bind.url
    what = type(database).__name__
    if isinstance(factory, sessionmaker) or hasattr(factory, "configure"):
        raise ConfigError(
            f"database: the {what} has no engine; give it one, as in sessionmaker(engine)"
        )
    raise ConfigError(
        f"database is a {what}; give a URL, an Engine, an AsyncEngine, a sessionmaker or an"
        " async_sessionmaker"
    )


def _open_sessions(engine: Any, factory: Any) -> tuple[Any, Any]:
    """Return the factory for handlers without `async`, and that of the app's own kind."""
    from sqlalchemy.orm import sessionmaker

    if not hasattr(engine, "sync_engine"):
        sync = factory or sessionmaker(engine)
        return sync, sync
    from sqlalchemy.ext.asyncio import async_sessionmaker

    own = factory or async_sessionmaker(engine)
    kind = getattr(own.class_, "sync_session_class", None)
    settings = {name: value for name, value in own.kw.items() if name not in _OF_ASYNC}
    settings["bind"] = engine.sync_engine
    return sessionmaker(class_=kind, **settings) if kind else sessionmaker(**settings), own


_OF_ASYNC = ("bind", "sync_session_class")


def replace_engine(store: SqlStore, path: str) -> Any:
    """Return what `App(database=…)` takes for a SQLite file, with the sessions of another store."""
    from sqlalchemy import NullPool, make_url

    from conquiet.sql.dialect import async_engine, engine

    factory = store.sessions
    settings = {name: value for name, value in factory.kw.items() if name not in ("bind", "binds")}
    if not store.is_async:
        return type(factory)(class_=factory.class_, **settings, bind=engine(f"sqlite:///{path}"))
    # A test may use it on other event loops than the client's, so it has no pool.
    made = async_engine(make_url(f"sqlite+aiosqlite:///{path}"), poolclass=NullPool)
    return type(factory)(class_=factory.class_, **settings, bind=made)


def _check_class(asked: type, made: type) -> None:
    if not issubclass(made, asked):
        raise ConfigError(
            f"the sessions of the app are {made.__name__}, not {asked.__name__}; give App(database="
            f"sessionmaker(engine, class_={asked.__name__}))"
        )


# --- Redis ----------------------------------------------------------------------------------


class RedisStore(Store):
    """Keeps effects, inbox and outbox in Redis; a relay moves events to streams of the same one."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__()
        require("conquiet.redis", "redis")
        from conquiet.redis import Inbox, Outbox, StreamSink, Transaction

        self._url = url
        self.client = open_redis(url, "database")
        self.outbox = Outbox(name, f"conquiet:outbox:{name}", source=f"/{name}")
        self.middlewares = (Transaction(self.client), Inbox(name), self.outbox)
        self._sink = StreamSink(self.client, name)
        self._name = name

    def find(self, kind: Any, is_async: bool) -> Provider | None:
        import redis

        from conquiet.redis import commands

        if not isinstance(kind, type) or not issubclass(kind, (redis.Redis, redis.RedisCluster)):
            return None
        if is_async:
            raise ConfigError(
                f"{kind.__name__} in an async handler would block its event loop; leave `async`"
                " away"
            )
        return Provider(lambda: commands(self.client))

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        self._sink.publish(messages)

    def delay(self, messages: Sequence[Message[Any]]) -> None:
        for message in messages:
            self._call(self.outbox.command(message))

    def cancel(self, id: str) -> bool:
        return int(self._call(self.outbox.delayed.cancel(id))) > 0

    def _call(self, command: Sequence[Any]) -> Any:
        import redis

        from conquiet.redis.wire import Wire

        wire = Wire(self.client)  # sent once, whatever the client does about lost connections
        try:
            return wire.call(self.outbox.delayed.times, *command)
        except (redis.RedisError, OSError) as error:
            raise StoreError(f"{self!r}: {error}") from error
        finally:
            wire.close()

    def sources(self, topics: Sequence[str], group: str) -> list[Source]:
        from conquiet.redis import StreamSource

        return [StreamSource(self.client, list(topics), group, lease=LEASE_SECONDS)]

    def schedules(self) -> States:
        from conquiet.redis.schedules import Schedules

        return Schedules(self.client, self.outbox)

    def open_sink(self) -> Sink | None:
        from conquiet.redis import StreamSink

        return StreamSink(self.client, self._name)

    def relay_source(self) -> Source:
        from conquiet.redis import OutboxSource

        # The default name of the consumer is that of the host, and several processes may share it.
        consumer = f"{socket.gethostname()}-{os.getpid()}-{new_id()[-12:]}"
        return OutboxSource(self.client, self.outbox.stream, consumer=consumer)

    def reach(self) -> None:
        self.client.ping()

    def refuse_inside(self, what: str) -> None:
        from conquiet.redis.transaction import is_inside

        if is_inside():
            raise inside_error(what)

    def close(self) -> None:
        self.client.close()

    def __repr__(self) -> str:
        return mask(self._url)


def open_store(database: Any, name: str, metadata: MetaData | None) -> Store:
    """Open the store that `App(database=…)` names."""
    if isinstance(database, Store):
        return database
    if isinstance(database, str) and scheme_of(database) in _REDIS:
        if metadata is not None:
            raise ConfigError("metadata: Redis has no tables; leave it out")
        return RedisStore(database, name)
    return SqlStore(database, name, metadata)


# --- brokers --------------------------------------------------------------------------------


class Broker:
    """Opens sources and sinks at a broker that a URL names."""

    def __init__(self, url: str, name: str) -> None:
        self.scheme = scheme_of(url)
        if self.scheme == "sqs":
            raise ConfigError(
                "broker sqs:…: a queue of SQS has no consumer groups, so that an event would reach"
                " one of the apps that want it; leave the broker out, or choose another, and read"
                " the queue by Worker(SqsSource(…), app.router)"
            )
        if self.scheme not in _BROKERS or "://" not in url:
            raise ConfigError(
                f"broker {mask(url)!r:.60}: write the URL of one, as {'://, '.join(_BROKERS)}://;"
                " without a broker the database is the log"
            )
        self._url = self._url_of_sink = url
        if self.scheme not in _REDIS:
            self._url, self._url_of_sink = _split(url)
        self._name = name
        self._sink: Sink | None = None
        self._lock = threading.Lock()

    def open_sink(self) -> Sink:
        if self.scheme not in _REDIS:
            return open_sink(self._url_of_sink, topic=self._name)
        room: Any = require("conquiet.redis", "redis")
        sink: Sink = room.StreamSink(open_redis(self._url, "broker"), self._name)
        return sink

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        """Publish by a sink that all threads share, one at a time."""
        with self._lock:
            self._sink = self._sink or self.open_sink()
            self._sink.publish(messages)

    def sources(self, topics: Sequence[str], group: str) -> list[Source]:
        if self.scheme in _REDIS:
            room: Any = require("conquiet.redis", "redis")
            client = open_redis(self._url, "broker")
            return [room.StreamSource(client, list(topics), group, lease=LEASE_SECONDS)]
        for topic in topics:
            if "," in topic:  # it separates topics in a URL
                raise ConfigError(f"topic {topic!r}: a topic of {self.scheme} has no comma")
        queue = {"group": group} if self.scheme == "kafka" else {"queue": group}
        query = urlencode({**queue, "topic": ",".join(topics)})
        url = f"{self._url}{'&' if '?' in self._url else '?'}{query}"
        return [connect_source(url, SourceOptions(origin="broker"))]

    def close(self) -> None:
        with self._lock:
            if self._sink is not None:
                self._sink.close()
                self._sink = None


def _split(url: str) -> tuple[str, str]:
    """Return the URLs of source and sink; each is without the parameters of the other alone."""
    of_source, of_sink = Url(url, "broker"), Url(url, "broker")
    for name in _OF_THE_APP:
        if of_source.text(name) is not None:
            raise ConfigError(
                f"broker {scheme_of(url)}://…: an app sets {name!r} itself, by its name and its"
                " handlers, and has an inbox; leave it out, or read by a Worker beside the app"
            )
    if scheme_of(url) == "kafka" and of_source.path:
        raise ConfigError(
            f"broker kafka://…/{of_source.path:.60}: an app names its topics itself; leave it out"
        )
    for name in _OF_SINKS:
        of_source.text(name)
    for name in _OF_SOURCES:
        of_sink.text(name)
    return of_source.rest, of_sink.rest


def make_relay(source: Source, sink: Sink, figures: Callable[[], Figures | None]) -> Relay:
    """Create a relay that counts for `/metrics`."""
    from conquiet.health import Check
    from conquiet.relay.metrics import RelayMetrics
    from conquiet.relay.process import WatchedRelay

    counts = Check(lambda: {"figures": figures()}, timeout=_COUNT_SECONDS)

    def read_counts() -> Figures | None:
        answer = counts.answer()
        return answer.detail["figures"] if answer.ok else None

    return WatchedRelay(source, sink, RelayMetrics(read_counts), batch_size=100)


def make_task_relay(store: Store, sink: Sink | None, celery: Any, name: str) -> Relay:
    """Create a relay of tasks; without a `sink` for events it reads tasks alone, from the log."""
    require("celery", "kombu")
    from conquiet.relay.sinks.celery import CelerySink, TaskSplit

    tasks = CelerySink(celery)
    if sink is not None:
        return make_relay(store.relay_source(), TaskSplit(tasks, sink), store.figures)
    [source] = store.sources([topic_of_tasks(name)], name)
    return make_relay(source, tasks, lambda: None)  # a log has no mark of what is published
