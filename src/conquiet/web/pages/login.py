"""Login: exchange a token for a cookie, and sign out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from conquiet.web.access import SESSION_SECONDS, Token, new_session, same
from conquiet.web.forms import FIELD, forget, home, read, set_cookie, token_of
from conquiet.web.template import page

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

logger = logging.getLogger("conquiet.web")


def routes(app: Dashboard) -> list[BaseRoute]:
    if not isinstance(app.access, Token):
        return []
    return [
        Route("/login", _form),
        Route("/login", _submit, methods=["POST"]),
        Route("/logout", _leave, methods=["POST"]),
    ]


def _form(request: Request) -> Response:
    token = request.query_params.get("token")
    if token is not None:
        return _enter(request, token)
    if request.scope["conquiet.who"]:
        return RedirectResponse(f"{home(request)}/", 303)
    return page(request, "login.html", "Sign in", wrong=False)


async def _submit(request: Request) -> Response:
    form = await read(request)
    return _enter(request, form.get("token", "").strip())


def _enter(request: Request, token: str) -> Response:
    app: Dashboard = request.app
    assert isinstance(app.access, Token)
    if not app.access.fits(token):
        peer = request.client.host if request.client else "somewhere"
        logger.warning("a wrong token from %s", peer)
        return page(request, "login.html", "Sign in", status=401, wrong=True)
    logger.info("signed in from %s", request.client.host if request.client else "somewhere")
    # A page that forwards itself, not a redirect: browsers do not send a strict cookie with a
    # redirect if the link was clicked on another site, such as a terminal in a browser.
    response = page(request, "entered.html", "Signed in")
    set_cookie(request, response, "session", new_session(app.signer), SESSION_SECONDS)
    return response


async def _leave(request: Request) -> Response:
    form = await read(request)
    response = RedirectResponse(f"{home(request)}/login", 303)
    if same(form.get(FIELD, ""), token_of(request)):
        forget(request, response, "session")
    return response
