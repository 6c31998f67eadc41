"""What `conquiet doctor` looks at in a Redis and a database: reach, version, tables, clocks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from conquiet.cli.check import Check, Status
from conquiet.cli.terminal import one_line
from conquiet.errors import ConquietError
from conquiet.relay.masked import masked
from conquiet.relay.sinks.url import trouble

_CONNECT_SECONDS = 3
_OLDEST_REDIS = "6.0"
_CLOCK_SECONDS = 5.0
"""A clock that differs by more makes ages, leases of others and searches by time wrong."""


def server_checks(redis_url: str | None, database_url: str | None) -> Iterator[Check]:
    """Of the servers that are named, else whether something listens at the usual ports."""
    redis = redis_url or os.environ.get("CONQUIET_REDIS_URL")
    if redis:
        yield from _redis(redis)
    else:
        yield _local("redis server", 6379, "CONQUIET_REDIS_URL")
    database = database_url or os.environ.get("CONQUIET_DATABASE_URL")
    if database:
        yield from _database(database)
    else:
        yield _local("database", 5432, "CONQUIET_DATABASE_URL")


def _local(name: str, port: int, variable: str) -> Check:
    """Whether somebody listens; nobody has told us how to log in."""
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        fix = f"export {variable}=… names one; conquiet.embedded can start a private one"
        return Check("servers", name, "absent", f"nothing listens on localhost:{port}", fix)
    detail = f"localhost:{port} accepts connections; set {variable} to have it checked"
    return Check("servers", name, "ok", detail)


# --- Redis ----------------------------------------------------------------------------------


def _redis(url: str) -> Iterator[Check]:
    try:
        import redis
    except ModuleNotFoundError:
        yield _unchecked("redis server", url, "redis")
        return
    try:
        with redis.Redis.from_url(
            url, socket_connect_timeout=_CONNECT_SECONDS, socket_timeout=_CONNECT_SECONDS
        ) as client:
            info: Any = client.info()
            yield _redis_version(url, info)
            yield _redis_clock(client)
            yield from _redis_eviction(info)
            if info.get("cluster_enabled"):  # a node knows only its own streams
                with redis.RedisCluster.from_url(
                    url, socket_connect_timeout=_CONNECT_SECONDS, socket_timeout=_CONNECT_SECONDS
                ) as whole:
                    yield _dead_letters(whole)
            else:
                yield _dead_letters(client)
    except (redis.RedisError, OSError, ValueError, ConquietError) as error:
        yield _unreachable("redis server", url, error, "CONQUIET_REDIS_URL")


def _redis_version(url: str, info: dict[str, Any]) -> Check:
    from conquiet.redis.wire import Server

    version = info.get("valkey_version") or info.get("redis_version")
    known = Server("redis", str(info.get("redis_version", "0")))
    status: Status = "ok" if known.at_least(_OLDEST_REDIS) else "broken"
    fix = f"conquiet needs Redis {_OLDEST_REDIS} or newer, or Valkey"
    return Check("servers", "redis server", status, f"{masked(url)}, version {version}", fix)


def _redis_clock(client: Any) -> Check:
    before = time.time()
    seconds, micros = client.time()
    return _clock("redis clock", seconds + micros / 1_000_000, before)


def _redis_eviction(info: dict[str, Any]) -> Iterator[Check]:
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if info.get("maxmemory") and policy.startswith("allkeys"):
        detail = f"maxmemory-policy {policy} deletes streams and inbox keys when memory is short"
        fix = "redis-cli CONFIG SET maxmemory-policy noeviction, and in its file"
        yield Check("servers", "redis memory", "notice", detail, fix)


def _dead_letters(client: Any) -> Check:
    from conquiet.operations.letters_in_stream import letter_streams

    found = letter_streams(client)
    if not found:
        return Check("servers", "dead letters", "ok", "no stream holds any")
    some = ", ".join(f"{count:,} in {name}" for name, count in list(found.items())[:5])
    fix = f"conquiet dead-letters list {next(iter(found))} says why"
    return Check("servers", "dead letters", "notice", some, fix)


# --- databases ------------------------------------------------------------------------------


def _database(url: str) -> Iterator[Check]:
    try:
        import sqlalchemy
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

        from conquiet.sql import engine
    except ModuleNotFoundError:
        yield _unchecked("database", url, "postgres")
        return
    try:
        is_sqlite = url.startswith("sqlite")
        patience = {} if is_sqlite else {"connect_timeout": _CONNECT_SECONDS}
        made = engine(url, connect_args=patience, poolclass=sqlalchemy.NullPool)
        with made.connect() as connection:
            version = ".".join(map(str, connection.dialect.server_version_info or ()))
            detail = f"{masked(url)}, {made.dialect.name} {version}".rstrip()
            yield Check("servers", "database", "ok", detail)
            yield from _verification(made.url)
            if not is_sqlite:  # that has the clock of this machine
                before = time.time()
                now = connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())")
                yield _clock("database clock", float(now.scalar_one()), before)
        yield from _tables(made)
    except (ModuleNotFoundError, NoSuchModuleError):
        yield _unchecked("database", url, "postgres")
    except (ArgumentError, SQLAlchemyError, OSError, ValueError, ConquietError) as error:
        cause = getattr(error, "orig", None) or error
        yield _unreachable("database", url, cause, "CONQUIET_DATABASE_URL")


def _verification(url: Any) -> Iterator[Check]:
    """Whether somebody between us and PostgreSQL could pass for it, since the URL says so."""
    from conquiet.sql.tls import VERIFIED, is_near, mode_of

    mode = mode_of(url)
    if url.get_backend_name() != "postgresql" or is_near(url) or mode == VERIFIED:
        return
    fix = "say sslmode=verify-full in its URL, with sslrootcert=FILE for an authority of your own"
    said = f"sslmode={mode}" if mode else "a service file"
    detail = f"{said}: the certificate of {url.host} is not verified"
    yield Check("servers", "database TLS", "notice", detail, fix)


def _tables(engine: Any) -> Iterator[Check]:
    """Whether the tables are there, and as this version needs them."""
    from sqlalchemy import inspect

    from conquiet.relay.opening import has_events_layout
    from conquiet.relay.settings import setting
    from conquiet.sql import schema
    from conquiet.sql.tables import checked_name

    fix = "conquiet outbox migrate"
    found = inspect(engine)
    for table in dict.fromkeys((setting("table"), "outbox", "outbox_events")):
        place, plain = checked_name(table)
        if not found.has_table(plain, schema=place):
            continue
        if has_events_layout(table):
            yield Check("servers", f"table {table}", "ok", "is there")
        elif differences := schema.verify(engine.url, outbox=table, inbox=None):
            more = f" --table {table}" if table != "outbox" else ""
            yield Check("servers", f"table {table}", "broken", str(differences[0]), fix + more)
        else:
            yield Check("servers", f"table {table}", "ok", "as this version needs it")
        yield _parked(engine, table)
        return
    yield Check("servers", "table outbox", "absent", "no outbox in this database", fix)


def _parked(engine: Any, table: str) -> Check:
    from conquiet.relay.inspection import Inspection
    from conquiet.relay.settings import setting

    try:
        figures = Inspection(engine, table, max_attempts=setting("max_attempts")).figures()
    except ConquietError as error:
        return Check("servers", "parked rows", "notice", one_line(str(error))[:200])
    if not figures.parked:
        return Check("servers", "parked rows", "ok", f"none; {figures.pending:,} wait")
    fix = "conquiet outbox list --parked says why, conquiet outbox retry tries again"
    return Check("servers", "parked rows", "notice", f"{figures.parked:,}", fix)


# --- both -----------------------------------------------------------------------------------


def _clock(name: str, there: float, before: float) -> Check:
    """The clocks of two machines, less the time that the question took."""
    after = time.time()
    apart = max(0.0, before - there, there - after)
    fix = "let both machines keep the time by NTP: timedatectl set-ntp true"
    status: Status = "notice" if apart > _CLOCK_SECONDS else "ok"
    detail = f"differs from this machine's by {apart:.1f} s"
    return Check("servers", name, status, detail, fix)


def _unchecked(name: str, url: str, extra: str) -> Check:
    fix = f"pip install 'conquiet[{extra}]'"
    return Check("servers", name, "broken", f"{masked(url)}: no client is installed", fix)


def _unreachable(name: str, url: str, error: BaseException, variable: str) -> Check:
    secret = _secret(url)
    reason = one_line(trouble(error, url) or repr(error))[:300]
    reason = reason.replace(secret, "***") if secret else reason
    fix = f"start the server, or correct {variable}"
    return Check("servers", name, "broken", f"{masked(url)}: {reason}", fix)


def _secret(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""
