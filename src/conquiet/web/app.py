"""The dashboard as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import SplitResult, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from conquiet.errors import ConfigError, ConquietError, NotFound
from conquiet.web import words
from conquiet.web.access import Access, Signer, Token
from conquiet.web.chart import Archive
from conquiet.web.guard import Guard
from conquiet.web.pages import (
    handlers,
    interface,
    later,
    letters,
    login,
    outbox,
    overview,
    processes,
    streams,
    trace,
)
from conquiet.web.pulse import SECONDS, Pulse
from conquiet.web.settings import TOKEN_VARIABLE
from conquiet.web.stores import Stores
from conquiet.web.template import HERE, fragment, page

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from conquiet.app import App

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ASSET_SECONDS = 3_600
"""Addresses of assets carry the version, so that a new version is loaded at once."""

logger = logging.getLogger("conquiet.web")


class Dashboard(Starlette):
    """Created by `dashboard`; `close()` closes connections, if its lifespan is not run.

    `stores` are the database and the broker, `access` identifies users, `hosts` are the names that
    requests may have, and `shown` is the `app` of `dashboard`. `read_only`, `hide_payloads` and
    `public_url` are as there.
    """

    def __init__(
        self,
        stores: Stores,
        access: Access,
        *,
        read_only: bool = False,
        hide_payloads: bool = False,
        hosts: Sequence[str] = LOOPBACK,
        public_url: str = "",
        shown: App | None = None,
    ) -> None:
        self.stores = stores
        self.shown = shown
        """The app whose interface and schedules are shown, if there is one."""
        self.interface = None if shown is None else shown.describe()
        """Its AsyncAPI document."""
        self.access = access
        self.signer = Signer(access.secret)
        self.read_only = read_only
        self.hide_payloads = hide_payloads
        public = _public(public_url)
        self.is_https = public.scheme == "https"
        self.can_sign_out = isinstance(access, Token)
        self.pulse = Pulse(stores)
        self.archive = Archive(stores)
        self.relays = processes.look_at(stores)
        self.live = Live(SECONDS)
        pages = (
            *(overview, handlers, streams, outbox, later, letters, processes, trace),
            *(interface, login),
        )
        super().__init__(
            routes=[
                *(route for each in pages for route in each.routes(self)),
                Route("/healthz", _healthz),
                Mount("/static", _Assets(), name="static"),
            ],
            exception_handlers=_error_handlers(),
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
    app: App | None = None,
) -> Dashboard:
    """Create the dashboard, to be served by itself or mounted in another application.

    >>> from conquiet.web import Open, dashboard
    >>> app = dashboard(broker="redis://localhost:6379/0", auth=Open(), read_only=True)
    >>> app.close()

    `database` and `broker` are URLs, or an engine and a Redis client of your own. Without `auth`,
    users sign in by the token of CONQUIET_DASHBOARD_TOKEN, else by a new one that is printed on
    stderr. `allowed_hosts` are the names under which it is reached, besides those of loopback.
    `public_url` is its address behind a proxy, whose host is allowed as well.

    `table` is the outbox. `max_attempts` is the relay's: with so many attempts, a row of
    `outbox_events` counts as parked. `streams` is a pattern of the streams to show, `relays` are
    the health addresses of relays, as `http://relay:8080`. `read_only` refuses each change;
    `hide_payloads` shows no data of messages.

    `app` is an `App` whose interface and schedules are shown.
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
        shown=app,
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
        raise ConfigError(
            f"{url!r:.100} is not a public URL; write https://ops.example.com/conquiet"
        )
    return parts


class _Assets(StaticFiles):
    """Style, script and icon, from the package."""

    def __init__(self) -> None:
        super().__init__(directory=HERE / "static")

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        if response.status_code == 200:
            response.headers["Cache-Control"] = f"max-age={_ASSET_SECONDS}"
        return response


# --- errors as pages ------------------------------------------------------------------------


def _store_error(request: Request, error: Exception) -> Response:
    logger.warning("%s: %s", request.url.path, error)
    return _page(request, 503, "Out of reach", str(error), words.advise(str(error)))


def _not_found(request: Request, error: Exception) -> Response:
    return _page(request, 404, "Not found", str(error), "")


def _wrong(request: Request, error: Exception) -> Response:
    return _page(request, 400, "That cannot work", str(error), "")


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = {403: "Refused", 404: "Not found", 405: "Not that way"}.get(error.status_code, "No")
    text = error.detail
    if error.status_code == 404:
        text = "There is no such page here."
    return _page(request, error.status_code, title, text, "")


def _internal_error(request: Request, error: Exception) -> Response:
    return _page(
        request,
        500,
        "Something broke",
        f"{type(error).__name__}, in the dashboard itself.",
        "The log of the dashboard has the traceback. Nothing else was affected.",
    )


def _page(request: Request, status: int, title: str, what: str, fix: str) -> Response:
    return page(request, "trouble.html", title, status=status, what=what, fix=fix)


def _error_handlers() -> Mapping[Any, Any]:
    return {
        ConquietError: _store_error,
        ConfigError: _wrong,
        NotFound: _not_found,
        HTTPException: _http,
        Exception: _internal_error,
    }


# --- parts of pages that are sent again while a page is open -----------------------------------

Part: TypeAlias = Callable[[Request], str]
"""Returns the HTML of a part of a page."""

_LONGEST_SECONDS = 600.0
"""Then the browser connects again, and is authenticated again."""
_LOOK_SECONDS = 0.2
_MOST = 100


class Live:
    """The event streams of open pages; `stop()` ends them, so that the server can end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopping = threading.Event()
        self.open = 0

    def stop(self) -> None:
        self._stopping.set()

    def endpoint(self, part: Part) -> Callable[[Request], object]:
        async def stream(request: Request) -> Response:
            if self.open >= _MOST:
                raise HTTPException(503, "Too many pages are open.")
            return StreamingResponse(
                self._events(request, part),
                media_type="text/event-stream; charset=utf-8",
                headers={"X-Accel-Buffering": "no"},  # a proxy must not buffer them
            )

        return stream

    async def _events(self, request: Request, part: Part) -> AsyncIterator[str]:
        self.open += 1
        try:
            passed = 0.0
            while passed < _LONGEST_SECONDS:
                html = await run_in_threadpool(_or_trouble, part, request)
                yield "".join(f"data: {line}\n" for line in html.splitlines()) + "\n"
                waited = 0.0
                while waited < self._seconds:
                    if self._stopping.is_set():
                        return
                    await asyncio.sleep(_LOOK_SECONDS)
                    waited += _LOOK_SECONDS
                passed += waited
        finally:
            self.open -= 1


def _or_trouble(part: Part, request: Request) -> str:
    """Return the part, or the error in its place: the next refresh may succeed."""
    try:
        return part(request)
    except ConquietError as error:
        return fragment(request, "trouble_part.html", what=str(error), fix=words.advise(str(error)))
