"""Open what a URL names: a database, a Redis, a source, a sink.

    redis://HOST/0?stream=NAME&group=NAME   file:PATH   stdin:   stdout:   kafka://   amqp://   …

A module is imported when its scheme is used, so that the packages of other schemes may be absent.
Other distributions add schemes by the entry points `conquiet.sources` and `conquiet.sinks`: the
name is the scheme, the object a callable `(url, topic=…, timeout=…) -> Sink` or
`(url, max_attempts=…) -> Source`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from conquiet.config import (
    BROKER,
    BROKER_VARIABLE,
    DATABASES,
    explain,
    read,
    require,
)
from conquiet.errors import ConfigError, StoreError
from conquiet.secret import mask

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

    from conquiet.sink import Sink
    from conquiet.source import Source

CONNECT_SECONDS = 5
_one_server = re.compile(r"(rediss?|unix)://", re.IGNORECASE)
_several_hosts = re.compile(r"(rediss?)\+(cluster|sentinel)://", re.IGNORECASE)
_LINE_ATTEMPTS = 3


# --- databases ------------------------------------------------------------------------------


def parse_database(text: str, origin: str) -> URL:
    """Parse the URL of a database that conquiet works with; `origin` names the setting."""
    sqlalchemy: Any = require("sqlalchemy", "sql")
    try:
        url: URL = sqlalchemy.make_url(text)
    except (require("sqlalchemy.exc", "sql").ArgumentError, ValueError):
        raise ConfigError(
            f"{origin} is not a database URL; write postgresql://USER@HOST/NAME or sqlite:///FILE"
        ) from None
    if url.get_backend_name() not in DATABASES:
        raise ConfigError(
            f"{origin} {url.get_backend_name()}://: conquiet works with postgresql and sqlite"
        )
    return url


def refuse_missing_file(url: URL, origin: str) -> None:
    """Raise if SQLite would create an empty file under a mistyped name."""
    if url.get_backend_name() != "sqlite":
        return
    if not url.database or ":memory:" in url.database:
        raise ConfigError(
            f"{origin}: needs a SQLite file, sqlite:///FILE; a database in memory belongs to the"
            " process that created it"
        )
    if not os.path.exists(url.database):
        raise ConfigError(
            f"{origin}: no file {url.database!r}; conquiet outbox migrate would create it"
        )


def open_database(
    url: str | URL,
    origin: str = "database",
    *,
    application: str = "conquiet",
    connect_seconds: int = CONNECT_SECONDS,
    silent_seconds: int = 30,
    must_exist: bool = True,
    **options: Any,
) -> Engine:
    """Create an engine whose connections give up on a network that does not answer.

    Timeouts and application name that the URL itself sets take precedence. `options` go to
    `sqlalchemy.create_engine`.
    """
    parsed = parse_database(url, origin) if isinstance(url, str) else url
    if must_exist:
        refuse_missing_file(parsed, origin)
    if parsed.get_backend_name() != "sqlite":
        wanted = {
            "connect_timeout": connect_seconds,
            "tcp_user_timeout": silent_seconds * 1000,
            "application_name": application,
        }
        options["connect_args"] = {
            name: value for name, value in wanted.items() if name not in parsed.query
        }
    sql: Any = require("conquiet.sql", "postgres")
    try:
        return sql.engine(parsed, **options)  # type: ignore[no-any-return]
    except require("sqlalchemy.exc", "sql").NoSuchModuleError:
        raise ConfigError(
            f"{origin} {parsed.drivername}://: unknown driver; pip install 'conquiet[postgres]'"
        ) from None


# --- Redis ----------------------------------------------------------------------------------


def open_redis(
    url: str,
    origin: str = BROKER_VARIABLE,
    *,
    connect_seconds: float | None = None,
    answer_seconds: float | None = None,
    **options: Any,
) -> Any:
    """Create a client of a server, a cluster, or the master that sentinels name.

        redis://user:secret@host:6379/0      also rediss:// and unix://, with redis-py's parameters
        redis+cluster://host:7000,host:7001  rediss+cluster:// with TLS
        redis+sentinel://user:secret@host:26379,host:26380/service/0?sentinel_password=…

    Takes broker URLs of Kombu as well: `redis-streams://HOST`, `redis+socket:///PATH`. What the URL
    says takes precedence over `options`. A client of a cluster connects now, others on first use.
    """
    redis: Any = require("redis", "redis")
    if url.startswith("sentinel"):
        raise ConfigError(
            f"{origin} sentinel…: write redis+sentinel://HOST:26379/SERVICE/0, or name the master"
            " itself, as redis://HOST:PORT/0"
        )
    settings = _redis_waits(connect_seconds, answer_seconds) | options
    several = _several_hosts.match(url)
    if several is None and not _one_server.match(_plain_redis(url)):
        raise ConfigError(
            f"{origin} {mask(url)}: unknown scheme; write redis://, rediss://, unix://,"
            " redis+cluster:// or redis+sentinel://"
        )
    try:
        if several is None:
            client = redis.Redis.from_url(_plain_redis(url), **settings)
        else:
            open_hosts = _open_cluster if several[2].lower() == "cluster" else _open_sentinels
            client = open_hosts(several[1].lower(), url[several.end() :], settings)
        if not isinstance(client, redis.RedisCluster):
            client.connection_pool.make_connection()  # refuses options that it does not know
    except (ValueError, TypeError, redis.DataError) as error:
        raise ConfigError(f"{origin} {mask(url)}: {explain(error, url)}") from None
    except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
        if several is None:  # no server has been asked yet
            raise ConfigError(f"{origin} {mask(url)}: {error}") from None
        raise StoreError(f"{origin} {mask(url)}: Redis cannot be reached: {error}") from error
    return client


def _open_cluster(scheme: str, rest: str, settings: dict[str, Any]) -> Any:
    redis: Any = require("redis", "redis")
    nodes, found, _ = _parse_hosts(scheme, rest)
    found.pop("db", None)
    where = [redis.cluster.ClusterNode(host, port or 6379) for host, port in nodes]
    return redis.RedisCluster(startup_nodes=where, **_with_tls(scheme, settings | found))


def _open_sentinels(scheme: str, rest: str, settings: dict[str, Any]) -> Any:
    module: Any = require("redis.sentinel", "redis")
    nodes, found, path = _parse_hosts(scheme, rest)
    service, _, database = path.partition("/")
    if not service:
        raise ConfigError(
            "name the service that the sentinels watch: redis+sentinel://host:26379/service/0"
        )
    waits = {name: value for name, value in settings.items() if name.startswith("socket_")}
    own = {name: found.pop(name) for name in list(found) if name.startswith("sentinel_")}
    own = waits | {name.removeprefix("sentinel_"): value for name, value in own.items()}
    sentinels = module.Sentinel(
        [(host, port or 26379) for host, port in nodes], sentinel_kwargs=_with_tls(scheme, own)
    )
    found["db"] = int(database or 0)
    return sentinels.master_for(service, **_with_tls(scheme, settings | found))


def _parse_hosts(scheme: str, rest: str) -> tuple[list[tuple[str, int]], dict[str, Any], str]:
    """Return the hosts of a URL with several, its other settings, and its path."""
    place, _, query = rest.partition("?")
    place, _, path = place.partition("/")
    user, _, hosts = place.rpartition("@")
    plain = f"{scheme}://{user}@host?{query}" if user else f"{scheme}://host?{query}"
    settings: dict[str, Any] = require("redis.connection", "redis").parse_url(plain)
    for name in ("host", "port", "connection_class"):
        settings.pop(name, None)
    nodes = []
    for item in hosts.split(","):
        found = urlsplit(f"//{item}")
        if not found.hostname:
            raise ConfigError("the URL of Redis names no host: redis+cluster://host:7000")
        nodes.append((found.hostname, found.port or 0))
    return nodes, settings, unquote(path)


def _with_tls(scheme: str, settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"ssl": True} if scheme == "rediss" else settings


def join_cluster(
    client: Any,
    url: str,
    *,
    connect_seconds: float | None = None,
    answer_seconds: float | None = None,
    **options: Any,
) -> Any:
    """Return a client of the whole cluster if the server belongs to one, else `client` itself.

    A node of a cluster knows only its own streams.
    """
    redis: Any = require("redis", "redis")
    if isinstance(client, redis.RedisCluster):
        return client
    try:
        if not client.info("cluster").get("cluster_enabled"):
            return client
    except redis.exceptions.NoPermissionError:  # an ACL without INFO
        return client
    waits = _redis_waits(connect_seconds, answer_seconds)
    return redis.RedisCluster.from_url(_plain_redis(url), **waits, **options)


def _plain_redis(url: str) -> str:
    plain = re.sub(r"^redis(-streams)?\+socket://", "unix://", url)
    return re.sub(r"^(rediss?)-streams://", r"\1://", plain)


def _redis_waits(connect: float | None, answer: float | None) -> dict[str, float]:
    wanted = {"socket_connect_timeout": connect, "socket_timeout": answer}
    return {name: value for name, value in wanted.items() if value is not None}


class _RedisPlace:
    """The parts of `redis://HOST/0?stream=NAME&group=NAME&partitions=N&dead_letters=NAME`.

    Without a host it names the broker: `redis:?stream=NAME`.
    """

    def __init__(
        self, url: str, origin: str, broker: str | None, broker_origin: str = "--broker"
    ) -> None:
        self.asked = self.origin = origin
        require("redis", "redis")
        self.room: Any = require("conquiet.redis", "redis")
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(f"{origin}: {explain(error, url)}") from None
        if parts.path.strip("/") and not parts.netloc:
            raise ConfigError(
                f"{origin}: {mask(url)!r:.100} names no server; write redis://HOST:PORT/0, or"
                f" redis: for the broker of {BROKER_VARIABLE}"
            )
        query = dict(parse_qsl(parts.query))
        self.stream, self.group = query.pop("stream", ""), query.pop("group", "")
        self.dead_letters = query.pop("dead_letters", None)
        partitions = query.pop("partitions", "1")
        if not partitions.isdecimal():
            raise ConfigError(f"{origin}: partitions={partitions!r:.40} is not a whole number")
        self.partitions = int(partitions)
        self.url = urlunsplit(parts._replace(query=urlencode(query)))
        if not parts.netloc:
            self.url, self.origin = broker or read(BROKER), BROKER_VARIABLE
            if broker:
                self.origin = broker_origin

    def require(self, **examples: str) -> None:
        """Raise if a parameter is missing from the URL; `examples` are values for the message."""
        for name in examples:
            if not getattr(self, name):
                example = "&".join(f"{known}={value}" for known, value in examples.items())
                raise ConfigError(f"{self.asked} redis://…: say which {name}, as in ?{example}")

    @property
    def topic(self) -> Any:
        return self.room.Topic(self.stream, self.partitions)


# --- sinks ----------------------------------------------------------------------------------


@dataclass
class SinkOptions:
    """Options of a sink; each scheme uses the options that concern it."""

    topic: str | None = None
    """For messages that name none."""
    timeout: float = 10.0
    """Seconds that the sink may take to confirm."""
    check_timeout: float | None = None
    """Seconds that `OpenSink.check` may take; None if no check is wanted."""
    ordered: bool = False
    broker: str | None = None
    """The server of `redis:`; else that of CONQUIET_BROKER_URL."""
    broker_origin: str = "--broker"
    """The option or variable that error messages name for it."""
    needs_stream: bool = False
    """Whether a Redis URL must name a stream, since messages carry no topic."""
    origin: str = "the sink"
    """The option or variable that error messages name."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Closes connections and files that are not the sink's own."""


@dataclass(frozen=True)
class OpenSink:
    """A sink, and how to check that it can be reached."""

    sink: Sink
    check: Callable[[], object] | None = None
    """Raises if the sink is out of reach; None if only publishing can show it."""
    cloudevents: bool = False
    """Whether it takes attribute names of CloudEvents only, which have no underscore."""


def _open_redis_sink(url: str, options: SinkOptions) -> OpenSink:
    place = _RedisPlace(url, options.origin, options.broker, options.broker_origin)
    if options.needs_stream:
        place.require(stream="events")
    client = open_redis(
        place.url,
        place.origin,
        connect_seconds=min(CONNECT_SECONDS, options.timeout),
        answer_seconds=options.timeout,
    )
    options.closing.callback(client.close)
    check = None
    if options.check_timeout is not None:
        wait = options.check_timeout
        prober = open_redis(
            place.url, place.origin, connect_seconds=wait, answer_seconds=wait, max_connections=2
        )
        options.closing.callback(prober.close)
        check = prober.ping
    settings: dict[str, Any] = {"ordered": options.ordered}
    if place.stream:
        settings |= {"topic": place.stream, "streams": {place.stream: place.topic}}
    else:
        settings |= {"topic": options.topic, "partitions": place.partitions}
    return OpenSink(place.room.StreamSink(client, **settings), check, cloudevents=True)


def _open_stdout(url: str, options: SinkOptions) -> OpenSink:
    lines: Any = require("conquiet.jsonlines", "all")
    return OpenSink(lines.LinesSink(sys.stdout.buffer), lambda: None, cloudevents=True)


def _open_file_sink(url: str, options: SinkOptions) -> OpenSink:
    lines: Any = require("conquiet.jsonlines", "all")
    stream = options.closing.enter_context(append_to(file_path(url), options.origin))
    return OpenSink(lines.LinesSink(stream), lambda: None, cloudevents=True)


def _by_class(place: str, extra: str) -> Callable[[str, SinkOptions], OpenSink]:
    """Open a sink by the `from_url(url, topic=…, timeout=…)` of its class."""

    def open_(url: str, options: SinkOptions) -> OpenSink:
        module, _, name = place.partition(":")
        return _by_call(getattr(require(module, extra), name).from_url)(url, options)

    return open_


def _by_call(from_url: Callable[..., Any]) -> Callable[[str, SinkOptions], OpenSink]:
    def open_(url: str, options: SinkOptions) -> OpenSink:
        sink = from_url(url, topic=options.topic, timeout=options.timeout)
        if options.check_timeout is None:
            return OpenSink(sink)
        # A second one for checks, which run in another thread: a sink belongs to one thread.
        prober = from_url(url, topic=options.topic, timeout=options.check_timeout)
        options.closing.callback(prober.close)
        return OpenSink(sink, getattr(prober, "check", None))

    return open_


SINKS: Mapping[str, Callable[[str, SinkOptions], OpenSink]] = {
    "-": _open_stdout,
    "stdout": _open_stdout,
    "file": _open_file_sink,
    "redis": _open_redis_sink,
    "rediss": _open_redis_sink,
    "pubsub": _by_class("conquiet.relay.sinks.pubsub:PubSubSink", "pubsub"),
    "amqp": _by_class("conquiet.relay.sinks.kombu:KombuSink", "amqp"),
    "amqps": _by_class("conquiet.relay.sinks.kombu:KombuSink", "amqp"),
    "kombu+": _by_class("conquiet.relay.sinks.kombu:KombuSink", "kombu"),
    "celery": _by_class("conquiet.relay.sinks.celery:CelerySink", "kombu"),
    "kafka": _by_class("conquiet.relay.sinks.kafka:KafkaSink", "kafka"),
    "http": _by_class("conquiet.relay.sinks.http:HttpSink", "sql"),
    "https": _by_class("conquiet.relay.sinks.http:HttpSink", "sql"),
}
"""By scheme; `kombu+` is the prefix of every transport of Kombu."""

SINK_SCHEMES = (
    "redis:, rediss:, pubsub:, amqp:, amqps:, kombu+…:, celery:, kafka:, http:, https:, file:,"
    " stdout: or -"
)


def sink_scheme(url: str) -> str:
    """Return the scheme of `SINKS` or of an entry point that a URL has; raise ValueError."""
    scheme, colon, _ = url.partition(":")
    if scheme.startswith("kombu+"):
        return "kombu+"
    if (colon or scheme == "-") and (scheme in SINKS or scheme in _entries("conquiet.sinks")):
        return scheme
    raise ValueError(f"no sink has the scheme {scheme!r:.40}")


def connect_sink(url: str, options: SinkOptions) -> OpenSink:
    """Open the sink of a URL, with a check of its connection if the options ask for one."""
    try:
        scheme = sink_scheme(url)
    except ValueError:
        raise _unknown(url, options.origin, SINK_SCHEMES) from None
    opener = SINKS.get(scheme)
    if opener is None:
        opener = _by_call(_entries("conquiet.sinks")[scheme].load())
    return opener(url, options)


def open_sink(url: str, *, topic: str | None = None, timeout: float = 10.0) -> Sink:
    """Open the sink that a URL names; `topic` is for messages that name none.

    >>> type(open_sink("https://example.com/events?tenant=7", topic="orders")).__name__
    'HttpSink'

    A transport of Kombu has the prefix `kombu+`: `kombu+sqs://…?queues=events`.
    """
    return connect_sink(url, SinkOptions(topic, timeout)).sink


# --- sources --------------------------------------------------------------------------------


@dataclass
class SourceOptions:
    """Options of a source; each scheme uses the options that concern it."""

    max_attempts: int | None = None
    dead_letters: Path | None = None
    """A file for messages of a pipe or file that failed."""
    max_line_bytes: int | None = None
    broker: str | None = None
    origin: str = "--source"
    closing: ExitStack = field(default_factory=ExitStack)
    """Closes files when the worker has ended."""


def _open_stdin(url: str, options: SourceOptions) -> Source:
    # Not sys.stdin: a buffer of its own is not closed while it is read.
    return _lines(open(0, "rb", closefd=False), "stdin:", options)


def _open_file(url: str, options: SourceOptions) -> Source:
    path = file_path(url)
    try:
        stream = options.closing.enter_context(path.open("rb"))
        stream.peek(1)  # a directory can be opened, but not read
    except OSError as error:
        raise ConfigError(
            f"{options.origin} file:{path}: {error.strerror}; name a readable file"
        ) from None
    return _lines(stream, f"file:{path}", options)


def _lines(stream: BinaryIO, name: str, options: SourceOptions) -> Source:
    lines: Any = require("conquiet.jsonlines", "all")
    letters = None
    if options.dead_letters is not None:
        letters = _open_dead_letters(options.dead_letters, options.closing)
    return lines.LinesSource(  # type: ignore[no-any-return]
        stream,
        letters,
        max_attempts=options.max_attempts or _LINE_ATTEMPTS,
        max_line_bytes=options.max_line_bytes or lines.MAX_LINE_BYTES,
        name=name,
    )


def _open_dead_letters(path: Path, closing: ExitStack) -> Any:
    lines: Any = require("conquiet.jsonlines", "all")
    is_new = not path.exists()
    stream = append_to(path, "--dead-letters")  # now, not when the first message has failed

    def remove_if_unused() -> None:
        if is_new and path.stat().st_size == 0:
            path.unlink()

    closing.callback(remove_if_unused)
    closing.enter_context(stream)
    return lines.LinesSink(stream)


def _open_redis_source(url: str, options: SourceOptions) -> Source:
    if options.dead_letters is not None or options.max_line_bytes is not None:
        raise ConfigError(
            "--dead-letters and --max-line-bytes are for JSON lines; dead letters of a stream go"
            " to another stream: add &dead_letters=NAME to the URL"
        )
    place = _RedisPlace(url, options.origin, options.broker)
    place.require(stream=place.stream or "commands", group="billing")
    return place.room.StreamSource(  # type: ignore[no-any-return]
        open_redis(place.url, place.origin),
        place.topic,
        place.group,
        dead_letters=place.dead_letters,
        **({} if options.max_attempts is None else {"max_attempts": options.max_attempts}),
    )


def _source_by_class(place: str, extra: str) -> Callable[[str, SourceOptions], Source]:
    """Open a source by the `from_url(url, max_attempts=…)` of its class."""

    def open_(url: str, options: SourceOptions) -> Source:
        if options.dead_letters is not None or options.max_line_bytes is not None:
            raise ConfigError(
                "--dead-letters and --max-line-bytes are for JSON lines; name the dead letters of a"
                " broker in its URL: dead_letters=NAME"
            )
        module, _, name = place.partition(":")
        source: Source = getattr(require(module, extra), name).from_url(
            url, max_attempts=options.max_attempts
        )
        return source

    return open_


SOURCES: Mapping[str, Callable[[str, SourceOptions], Source]] = {
    "-": _open_stdin,
    "stdin": _open_stdin,
    "file": _open_file,
    "redis": _open_redis_source,
    "rediss": _open_redis_source,
    "amqp": _source_by_class("conquiet.sources.amqp:AmqpSource", "amqp"),
    "amqps": _source_by_class("conquiet.sources.amqp:AmqpSource", "amqp"),
    "kafka": _source_by_class("conquiet.sources.kafka:KafkaSource", "kafka"),
    "postgresql": _source_by_class("conquiet.sql:LogSource", "postgres"),
    "postgres": _source_by_class("conquiet.sql:LogSource", "postgres"),
    "postgresql+psycopg": _source_by_class("conquiet.sql:LogSource", "postgres"),
    "postgresql+asyncpg": _source_by_class("conquiet.sql:LogSource", "postgres"),
    "postgresql+psycopg_async": _source_by_class("conquiet.sql:LogSource", "postgres"),
    "sqlite": _source_by_class("conquiet.sql:LogSource", "sql"),
    "sqlite+aiosqlite": _source_by_class("conquiet.sql:LogSource", "sql"),
    "sqs": _source_by_class("conquiet.sources.sqs:SqsSource", "sqs"),
}
_OF_ONE_PROCESS = frozenset(("-", "stdin", "file"))


def connect_source(url: str, options: SourceOptions) -> Source:
    """Open the source that a URL names."""
    scheme = url.partition(":")[0]
    opener = SOURCES.get(scheme)
    if opener is not None:
        return opener(url, options)
    entry = _entries("conquiet.sources").get(scheme)
    if entry is None:
        raise _unknown(url, options.origin, _choices(SOURCES))
    return entry.load()(url, max_attempts=options.max_attempts)  # type: ignore[no-any-return]


def open_source(url: str, *, max_attempts: int | None = None) -> Source:
    """Open the source that a URL names; `max_attempts` is how often it delivers a message.

    >>> type(open_source("stdin:")).__name__
    'LinesSource'
    """
    return connect_source(url, SourceOptions(max_attempts, origin="the source"))


def is_shareable(url: str) -> bool:
    """Return whether several processes can read a source at once."""
    return url.partition(":")[0] not in _OF_ONE_PROCESS


# --- files and schemes ----------------------------------------------------------------------


def append_to(path: Path, origin: str) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigError(f"{origin} {path}: {error.strerror}; name a writable file") from None


def file_path(url: str) -> Path:
    rest = url.removeprefix("file:")
    path = rest.removeprefix("//") if rest.startswith("///") else rest
    if not path or path.startswith("//"):
        raise ConfigError(f"{url!r} names no file; write file:commands.jsonl")
    return Path(path)


def refuse_one_file_for_both(source: str, sink: str) -> None:
    """Raise if a source and a sink are one file: each event written would be read again."""
    if source.startswith("file:") and sink.startswith("file:"):
        ends = [file_path(url) for url in (source, sink)]
        if all(map(os.path.exists, ends)) and os.path.samefile(*ends):
            raise ConfigError(f"--source and --sink are one file, {ends[0]}; name two")


def _entries(group: str) -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=group)}


def _choices(known: Collection[str]) -> str:
    return ", ".join(name if name == "-" else f"{name}:" for name in known)


def _unknown(url: str, origin: str, choices: str) -> ConfigError:
    scheme, colon, _ = url.partition(":")  # no more of it: the rest may hold a password
    hint = "" if colon or "@" in url else f"; for a file, write file:{url:.100}"
    return ConfigError(f"{origin} {scheme + colon!r:.100}: unknown, choose one of {choices}{hint}")
