"""What a relay works with, by its settings: the engine, the source, the sink of a URL.

Modules are imported when their scheme is used: nobody needs the packages of another sink.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from conquiet.errors import ConfigError
from conquiet.relay.masked import masked
from conquiet.relay.settings import Settings
from conquiet.relay.sinks.url import Url, trouble
from conquiet.sink import Sink
from conquiet.source import Source

if TYPE_CHECKING:
    from sqlalchemy import Engine

CONNECT_SECONDS = 5
EVENTS_TABLE = "outbox_events"
"""A table of this name, in whatever schema, has the locked layout of domain events."""
EVENTS_SOURCE = "conquiet.events.source:EventSource"


@dataclass(frozen=True)
class OpenedSink:
    """A sink, how to see whether it is there, and what to let go of at the end."""

    sink: Sink
    check: Callable[[], object] | None
    """Raises if the sink is out of reach; None if only publishing can tell."""
    close: Callable[[], object] = lambda: None
    cloudevents: bool = False
    """Whether it takes the attribute names of CloudEvents alone, which have no underscore."""


def _redis(url: str, settings: Settings) -> OpenedSink:
    redis: Any = _needed("redis", "redis")
    room: Any = _needed("conquiet.redis", "redis")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"CONQUIET_OUTBOX_SINK: {trouble(error, url)}") from None
    if parts.path.strip("/") and not parts.netloc:
        raise ConfigError(
            f"CONQUIET_OUTBOX_SINK: {masked(url)!r:.100} names no server; write redis://HOST:PORT/0,"
            " or redis: for that of CONQUIET_REDIS_URL"
        )
    query = dict(parse_qsl(parts.query))
    partitions = query.pop("partitions", "1")
    if not partitions.isdecimal():
        raise ConfigError(f"CONQUIET_OUTBOX_SINK: partitions={partitions!r:.40} is no whole number")
    variable, address = "CONQUIET_OUTBOX_SINK", urlunsplit(parts._replace(query=urlencode(query)))
    if not parts.netloc:
        variable = "CONQUIET_REDIS_URL"
        address = os.environ.get(variable) or "redis://localhost:6379/0"
    try:
        client = redis.Redis.from_url(
            address,
            socket_timeout=settings.publish_seconds,
            socket_connect_timeout=min(CONNECT_SECONDS, settings.publish_seconds),
        )
        wait = settings.check_timeout_ms / 1000
        prober = redis.Redis.from_url(
            address, socket_timeout=wait, socket_connect_timeout=wait, max_connections=2
        )
        client.connection_pool.make_connection()  # refuses options that it does not know
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigError(f"{variable} {masked(address)}: {trouble(error, address)}") from None
    sink = room.StreamSink(
        client, settings.topic, partitions=int(partitions), ordered=settings.ordered
    )

    def close() -> None:
        client.close()
        prober.close()

    return OpenedSink(sink, prober.ping, close, cloudevents=True)


def _stdout(url: str, settings: Settings) -> OpenedSink:
    import sys

    from conquiet.jsonlines import LinesSink

    return OpenedSink(LinesSink(sys.stdout.buffer), lambda: None, cloudevents=True)


def _by(place: str, extra: str) -> Callable[[str, Settings], OpenedSink]:
    """A sink whose class is made by `from_url(url, topic=…, timeout=…)`."""

    def open_(url: str, settings: Settings) -> OpenedSink:
        module, _, name = place.partition(":")
        kind: Any = getattr(_needed(module, extra), name)
        topic = topic_of(settings)
        sink = kind.from_url(url, topic=topic, timeout=settings.publish_seconds)
        # Another one for the checks: they come from another thread, and a sink is for one.
        prober = kind.from_url(url, topic=topic, timeout=settings.check_timeout_ms / 1000)
        return OpenedSink(sink, getattr(prober, "check", None), prober.close)

    return open_


# A new kind of sink gets its line here.
SINKS: dict[str, Callable[[str, Settings], OpenedSink]] = {
    "redis": _redis,
    "rediss": _redis,
    "stdout": _stdout,
    "pubsub": _by("conquiet.relay.sinks.pubsub:PubSubSink", "pubsub"),
    "amqp": _by("conquiet.relay.sinks.kombu:KombuSink", "kombu"),
    "amqps": _by("conquiet.relay.sinks.kombu:KombuSink", "kombu"),
    "kombu+": _by("conquiet.relay.sinks.kombu:KombuSink", "kombu"),
    "kafka": _by("conquiet.relay.sinks.kafka:KafkaSink", "kafka"),
    "http": _by("conquiet.relay.sinks.http:HttpSink", "sql"),
    "https": _by("conquiet.relay.sinks.http:HttpSink", "sql"),
}


def scheme_of(url: str) -> str:
    """The key of `SINKS` for a URL; every transport of Kombu is one."""
    scheme, colon, _ = url.partition(":")
    return "kombu+" if scheme.startswith("kombu+") else scheme if colon else ""


def topic_of(settings: Settings) -> str:
    """The topic of events that name none: that of the setting, or of a URL that has one."""
    if scheme_of(settings.sink) not in ("pubsub", "kafka"):
        return settings.topic
    named = Url(settings.sink).path
    if named and named != settings.topic and settings.origins["topic"] != "default":
        raise ConfigError(
            f"two topics: {named!r:.100} in CONQUIET_OUTBOX_SINK, {settings.topic!r:.100} by"
            f" {settings.origins['topic']}; leave one out"
        )
    return named or settings.topic


def open_sink(settings: Settings) -> OpenedSink:
    return SINKS[scheme_of(settings.sink)](settings.sink, settings)


def open_engine(settings: Settings, **options: Any) -> Engine:
    """An engine that does not wait for ever, neither to connect nor for a dead network."""
    sql: Any = _needed("conquiet.sql", "postgres")
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(settings.database)
        if url.get_backend_name() in ("postgresql", "postgres"):
            wanted = {
                "connect_timeout": CONNECT_SECONDS,
                "tcp_user_timeout": 30_000,
                "application_name": "conquiet-relay",
            }
            options["connect_args"] = {
                name: value for name, value in wanted.items() if name not in url.query
            }
        elif not url.database or ":memory:" in url.database:
            raise ConfigError(
                "CONQUIET_DATABASE_URL: a relay needs a SQLite file, sqlite:///FILE; nobody else"
                " writes to one in memory"
            )
        elif not os.path.exists(url.database):
            raise ConfigError(
                f"CONQUIET_DATABASE_URL: no file {url.database!r}; conquiet outbox migrate would"
                " make it"
            )
        return sql.engine(url, **options)  # type: ignore[no-any-return]
    except ArgumentError:
        raise ConfigError(
            "CONQUIET_DATABASE_URL is no database URL; write postgresql://USER@HOST/NAME or"
            " sqlite:///FILE"
        ) from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed: pip install 'conquiet[postgres]'"
        ) from error


def has_events_layout(table: str) -> bool:
    return table.rpartition(".")[2] == EVENTS_TABLE


def open_source(settings: Settings, engine: Engine, *, cloudevents: bool) -> Source:
    options: dict[str, Any] = {
        "max_attempts": settings.max_attempts,
        "poll": settings.poll_ms / 1000,
        "wakeup": settings.wakeup,
        "ordered": settings.ordered,
    }
    if not has_events_layout(settings.table):
        from conquiet.sql import OutboxSource

        return OutboxSource(engine, settings.table, **options)
    module, _, name = EVENTS_SOURCE.partition(":")
    kind: Any = getattr(_needed(module, "sql"), name)
    return kind(  # type: ignore[no-any-return]
        engine, settings.table, topic=topic_of(settings), cloudevents=cloudevents, **options
    )


def _needed(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module} cannot be imported ({error}): pip install 'conquiet[{extra}]'"
        ) from error
