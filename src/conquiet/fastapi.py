"""Run an app inside FastAPI: its workers and relay, the transaction of a request, health.

shop = App("shop", database="postgresql+asyncpg://…")
api = FastAPI(lifespan=lifespan(shop))
api.include_router(health_router(shop))

@api.post("/orders")
async def place(order: PlaceOrder, session: Annotated[AsyncSession, transaction(shop)]) -> None:
    await shop.emit(session, OrderPlaced(order.id))
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any

from conquiet.app.app import App, make_health
from conquiet.config import missing_extra
from conquiet.errors import ConfigError

try:
    from fastapi import APIRouter, Depends, FastAPI, Response
except ImportError as error:
    raise missing_extra(error, "fastapi") from error

__all__ = ["health_router", "lifespan", "transaction"]

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Any]]
"""What FastAPI(lifespan=…) takes; it yields nothing, or the state of the requests."""


def lifespan(
    app: App,
    own: Lifespan | None = None,
    *,
    worker: bool = True,
    relay: bool = True,
    **options: Any,
) -> Lifespan:
    """Return a lifespan for FastAPI: workers and relay of the app run while requests are served.

    They run on the loop of the requests, and finish what is in flight at the end. `own` is a
    lifespan of your own; it begins before them, and ends after them. `options` are those of
    `Worker`: `concurrency=5` leaves the other connections of the engine's pool to the requests.
    """

    @asynccontextmanager
    async def run(api: FastAPI) -> AsyncIterator[Any]:
        async with AsyncExitStack() as open_:
            state = None if own is None else await open_.enter_async_context(own(api))
            await app.start_async(worker=worker, relay=relay, **options)
            open_.push_async_callback(app.stop_async)
            yield state

    return run


def transaction(app: App) -> Any:
    """Return the dependency of a request's transaction: `Annotated[Session, transaction(app)]`.

    It is an `AsyncSession` if the app's database is async, else a `Session`; `app.emit` writes
    events in it. It is committed when the endpoint has returned, before the answer is sent: if
    the commit fails, the client is not answered that it succeeded. An exception, also an
    `HTTPException`, rolls it back; an error that is returned as a `Response` does not. All
    parameters of one request share it. In a handler of the app it is the handler's transaction.
    """
    if app.sessions is None:
        raise ConfigError(f"{app!r}: an app on Redis has no sessions; send by app.send_async(…)")
    # scope: by default FastAPI would commit after the answer.
    return Depends(_open_session(app), scope="function")


@cache  # FastAPI shares a dependency within a request if it is the same function
def _open_session(app: App) -> Callable[[], Any]:
    from conquiet.sql import async_session, session

    async def open_async() -> AsyncIterator[Any]:
        async with async_session(app.sessions) as opened:
            yield opened

    def open_sync() -> Iterator[Any]:
        with session(app.sessions) as opened:
            yield opened

    return open_async if app.is_async else open_sync


def health_router(app: App, *, details: bool = False) -> APIRouter:
    """Return a router with `/healthz` and `/readyz`, which answer as those of `conquiet run`.

    `/healthz` is 503 if a worker or the relay has ended, or a message is stuck; `/readyz` if the
    database does not answer. `details` adds times and errors to `/readyz`; an error may name the
    host and the user of the database.
    """

    def find_trouble() -> str | None:
        return None if app.running is None else app.running.find_trouble()

    health = make_health(app, find_trouble, details=details)
    router = APIRouter(include_in_schema=False)

    def respond(path: str) -> Response:
        status, kind, body = health.respond(path)
        return Response(body, status, media_type=kind)

    @router.get("/healthz")
    def is_alive() -> Response:
        return respond("/healthz")

    @router.get("/readyz")
    def is_ready() -> Response:  # in a thread, since a check waits for the database
        return respond("/readyz")

    return router
