"""Guard: checks every request, and adds security headers to every answer.

    Host known? ──▶ signed in? ──▶ unsafe method: from our own pages? ──▶ the page
       400             401/303              403

The token of a form is checked where forms are read, in `forms.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conquiet.web.access import Access, Signer, Token
from conquiet.web.forms import home

logger = logging.getLogger("conquiet.web")

_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'; object-src 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: browsers would send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_SAFE = ("GET", "HEAD")
_FREE = ("/static/", "/login")
"""Paths that need no sign-in: the form itself, and its style."""


class Guard:
    """ASGI middleware around all of the dashboard."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        signer: Signer,
        hosts: Collection[str],
        public_host: str = "",
    ) -> None:
        self._app = app
        self._access = access
        self._signer = signer
        self._hosts = frozenset(host.lower() for host in hosts)
        self._public_host = public_host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Request(scope)
        refusal = self._refusal(request)
        app = self._app if refusal is None else refusal
        await app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if path == "/healthz":  # probes use any address
            return None
        if not self._knows_host(request):
            return _no(
                400,
                "The host name in your address bar is not allowed."
                " Allow it with --allowed-hosts, CONQUIET_DASHBOARD_ALLOWED_HOSTS or"
                " dashboard(allowed_hosts=[…]).",
            )
        who = self._access.who(request, self._signer)
        if who is None and not path.startswith(_FREE):
            return self._ask_to_sign_in(request)
        request.scope["conquiet.who"] = who or ""
        if request.method not in _SAFE and not self._is_from_here(request):
            logger.warning("refused: %s %s from another site", request.method, path)
            return _no(403, "This form was sent from another site; nothing was done.")
        return None

    def _knows_host(self, request: Request) -> bool:
        name = _hostname(f"//{request.headers.get('host', '')}")
        return "*" in self._hosts or name in self._hosts

    def _is_from_here(self, request: Request) -> bool:
        """Check the origin that browsers send; other clients are checked by the form's token."""
        origin = request.headers.get("origin")
        if origin is None:
            return request.headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
        # Scheme and host may differ behind a proxy with https and another name.
        host = urlsplit(origin).netloc.lower()
        return bool(host) and host in (request.headers.get("host", "").lower(), self._public_host)

    def _ask_to_sign_in(self, request: Request) -> Response:
        if isinstance(self._access, Token):
            if request.method in _SAFE and "text/html" in request.headers.get("accept", ""):
                return RedirectResponse(f"{home(request)}/login", 303)
            return _no(401, "Sign in first: open the link that was printed at the start.")
        challenge = self._access.challenge
        headers = {"WWW-Authenticate": challenge} if challenge else {}
        return _no(401, "You are not signed in.", headers)


def _hostname(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _no(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{why}\n", status, headers)
