"""Presence: which workers and relays are alive.

A worker is a consumer of a group, and counts as alive while its lease lasts. A relay holds a
session of PostgreSQL under the name `conquiet-relay`, and answers at its health URL.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from conquiet.exchange import ExchangeSocket, open_http

if TYPE_CHECKING:
    from sqlalchemy import Engine

_PREFIX = "conquiet"
_HEALTH_SECONDS = 2.0
_MOST_BYTES = 64 * 1024
_SESSIONS = """
SELECT pid, application_name, coalesce(host(client_addr), 'local'), state,
       extract(epoch FROM clock_timestamp() - backend_start),
       extract(epoch FROM clock_timestamp() - state_change)
FROM pg_stat_activity
WHERE datname = current_database() AND starts_with(application_name, :prefix)
ORDER BY application_name, pid
"""


@dataclass(frozen=True, slots=True)
class Worker:
    """A consumer of a group."""

    stream: str
    group: str
    name: str
    alive: bool
    idle_seconds: float
    pending: int


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to PostgreSQL whose application name begins with conquiet."""

    pid: int
    name: str
    client: str
    state: str
    connected_seconds: float
    quiet_seconds: float
    """Since it last began or ended a statement."""


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of a relay at its `/readyz`."""

    url: str
    alive: bool
    """Whether it answered at all."""
    ready: bool
    detail: Mapping[str, Any]


def list_workers(client: Any, pattern: str = "*") -> list[Worker]:
    """List the consumers of all groups of the streams that match a pattern.

    >>> from conquiet.operations import presence
    >>> presence.list_workers(client, "orders*")
    []
    """
    from conquiet.operations import streams

    return [
        Worker(
            found.name,
            group.name,
            consumer.name,
            consumer.alive,
            consumer.idle_seconds,
            consumer.pending,
        )
        for found in streams.survey(client, pattern)
        for group in found.groups
        for consumer in group.consumers
    ]


def list_sessions(engine: Engine) -> list[Session]:
    """List sessions of relays and other processes of conquiet; SQLite has none."""
    from sqlalchemy import text
    from sqlalchemy.exc import SQLAlchemyError

    from conquiet.sql import dialect

    if not dialect.is_postgresql(engine.dialect):
        return []
    try:
        with engine.connect() as connection:
            rows = connection.execute(text(_SESSIONS), {"prefix": _PREFIX}).all()
    except SQLAlchemyError as error:
        raise dialect.store_error(engine, error) from error
    return [
        Session(pid, name, client, state or "", round(float(age), 3), round(float(quiet or 0), 3))
        for pid, name, client, state, age, quiet in rows
    ]


def check_relays(urls: Iterable[str], timeout: float = _HEALTH_SECONDS) -> list[Health]:
    """Ask relays for their health at `http://HOST:PORT`, as CONQUIET_OUTBOX_HEALTH sets it.

    Each has `timeout` seconds for its whole answer; a redirect is no answer of a relay.
    """
    return [_health(url.rstrip("/"), timeout) for url in urls]


def _health(url: str, timeout: float) -> Health:
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    try:
        status, body = _get(f"{url}/readyz", timeout)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Health(url, False, False, {"error": str(error) or type(error).__name__})
    try:
        detail = json.loads(body)
    except (ValueError, RecursionError):
        detail = None
    if status not in (200, 503) or not isinstance(detail, dict):
        return Health(url, False, False, {"error": f"no relay answers there; HTTP status {status}"})
    return Health(url, True, status == 200, detail)


def _get(url: str, timeout: float) -> tuple[int, bytes]:
    """Return status and body, all within `timeout` seconds; redirects are not followed."""
    until = time.monotonic() + timeout
    parts = urlsplit(url)
    context = ssl.create_default_context() if parts.scheme == "https" else None
    place = parts.hostname or "", parts.port or (80 if context is None else 443)
    connection = open_http(*place, timeout, context, max_bytes=_MOST_BYTES)
    try:
        cast("ExchangeSocket", connection.sock).begin(until - time.monotonic())
        connection.request("GET", parts.path)
        with connection.getresponse() as reply:
            return reply.status, reply.read(_MOST_BYTES)
    finally:
        connection.close()
