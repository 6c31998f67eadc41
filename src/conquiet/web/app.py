"""The dashboard as an ASGI application."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from conquiet.errors import ConfigError
from conquiet.web import troubles
from conquiet.web.access import Access, Token
from conquiet.web.assets import Assets
from conquiet.web.guard import Guard
from conquiet.web.live import Live
from conquiet.web.pages import letters, login, outbox, overview, processes, streams, trace
from conquiet.web.pulse import SECONDS, Pulse
from conquiet.web.signing import Signer
from conquiet.web.stores import Stores

if TYPE_CHECKING:
    from sqlalchemy import Engine

LOOPBACK = ("localhost", "127.0.0.1", "::1")
TOKEN_VARIABLE = "CONQUIET_DASHBOARD_TOKEN"


class Dashboard(Starlette):
    """Made by `dashboard`; `close()` lets go of connections, if its lifespan is not run."""

    def __init__(
        self,
        stores: Stores,
        access: Access,
        *,
        read_only: bool = False,
        hide_payloads: bool = False,
        hosts: Sequence[str] = LOOPBACK,
        public_url: str = "",
    ) -> None:
        self.stores = stores
        self.access = access
        self.signer = Signer(access.secret)
        self.read_only = read_only
        self.hide_payloads = hide_payloads
        public = _public(public_url)
        self.is_https = public.scheme == "https"
        self.can_sign_out = isinstance(access, Token)
        self.pulse = Pulse(stores)
        self.relays = processes.look_at(stores)
        self.live = Live(SECONDS)
        rooms = (overview, streams, outbox, letters, processes, trace, login)
        super().__init__(
            routes=[
                *(route for room in rooms for route in room.routes(self)),
                Route("/healthz", _healthz),
                Mount("/static", Assets(), name="static"),
            ],
            exception_handlers=troubles.handlers(),
            lifespan=_lifespan,
        )
        # Around all of it, so that the page of an unexpected error is protected too.
        known = (*hosts, public.hostname) if public.hostname else hosts
        self._guard = Guard(super().__call__, access, self.signer, known, public.netloc)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    def close(self) -> None:
        self.live.stop()
        self.stores.close()


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    assert isinstance(app, Dashboard)
    yield
    app.close()


async def _healthz(request: Request) -> Response:
    return PlainTextResponse("ok\n")


def dashboard(
    *,
    database: Engine | str | None = None,
    broker: Any = None,
    table: str = "outbox",
    max_attempts: int = 10,
    streams: str = "*",
    relays: Sequence[str] = (),
    auth: Access | None = None,
    read_only: bool = False,
    hide_payloads: bool = False,
    allowed_hosts: Sequence[str] = (),
    public_url: str = "",
) -> Dashboard:
    """The dashboard, to be served by itself or mounted in another application.

    >>> from conquiet.web import Open, dashboard
    >>> app = dashboard(broker="redis://localhost:6379/0", auth=Open(), read_only=True)
    >>> app.close()

    `database` and `broker` are URLs, or an engine and a Redis client of your own. Without `auth`,
    users sign in by the token of CONQUIET_DASHBOARD_TOKEN, else by a new one that is printed on
    stderr. `allowed_hosts` are the names under which it is reached, besides those of loopback.
    """
    return Dashboard(
        Stores(
            database,
            broker,
            table=table,
            max_attempts=max_attempts,
            streams=streams,
            relays=relays,
        ),
        _token() if auth is None else auth,
        read_only=read_only,
        hide_payloads=hide_payloads,
        hosts=(*LOOPBACK, *allowed_hosts),
        public_url=public_url,
    )


def _token() -> Token:
    given = os.environ.get(TOKEN_VARIABLE)
    if given:
        return Token(given)
    made = Token()
    print(f"the dashboard's token, for this run: {made.token}", file=sys.stderr)
    return made


def _public(url: str) -> SplitResult:
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ConfigError(f"{url!r:.100} is no public URL; write https://ops.example.com/conquiet")
    return parts
