"""Forms: parameters, links, actions with their protection against forgery, and notes.

Every action is wrapped by `action`, which checks the token of the form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qsl, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from conquiet.web.access import cookie_name, same

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

logger = logging.getLogger("conquiet.web")

_MOST_BYTES = 64 * 1024
_MOST_FIELDS = 40
_MOST_CHARS = 2_000
_NOTE_SECONDS = 60
_NOTE_CHARS = 800
"""A cookie holds 4 kB, and other alphabets take more bytes."""
FIELD = "csrf"

Form: TypeAlias = Mapping[str, str]
Act: TypeAlias = Callable[[Request, Form], Response]


def home(request: HTTPConnection) -> str:
    """Return the path prefix of the dashboard; empty if it is served at the root."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def link(request: HTTPConnection, path: str, **query: object) -> str:
    """Return a path of the dashboard with a query; empty parameters are left out."""
    said = {
        name: value[:_MOST_CHARS] if isinstance(value, str) else value
        for name, value in query.items()
        if value not in (None, "", False)
    }
    text = urlencode(said, doseq=True)
    return f"{home(request)}{path}{'?' if text else ''}{text}"


def token_of(request: HTTPConnection) -> str:
    """Return the token that a form of this user must carry."""
    app: Dashboard = request.app
    return app.signer.digest("form", str(request.scope.get("conquiet.who", "")))


def action(act: Act) -> Callable[[Request], object]:
    """Return an endpoint for POST that reads a form and refuses one without its token."""

    async def endpoint(request: Request) -> Response:
        app: Dashboard = request.app
        form = await read(request)
        if not same(form.get(FIELD, ""), token_of(request)):
            raise HTTPException(
                403, "This form is from an older session; nothing was done. Reload the page."
            )
        if app.read_only:
            raise HTTPException(403, "This dashboard is read-only: see --read-only.")
        peer = request.client.host if request.client else "somewhere"
        what = {name: value for name, value in form.items() if name != FIELD and value}
        logger.info(
            "%s %s by %s from %s", request.url.path, what, request.scope["conquiet.who"], peer
        )
        return await run_in_threadpool(act, request, form)

    return endpoint


async def read(request: Request) -> Form:
    """Read the fields of a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "A form is expected.")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise HTTPException(413, "This form is too long.")
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise HTTPException(400, "This form cannot be read.") from None
    return {name: clean(value) for name, value in fields}


def read_query(request: Request, name: str) -> str:
    """Return a parameter of the address; empty if it is missing."""
    return clean(request.query_params.get(name, ""))


def read_entry_id(request: Request, name: str) -> str:
    """Return a parameter that is an entry id; empty if it is missing."""
    text = read_query(request, name)
    if not text:
        return ""
    from conquiet.redis import ids

    if not ids.is_valid(text):
        raise HTTPException(400, f"{text!r:.60} is not an entry id, such as 1700000000000-0.")
    return text


def clean(text: str) -> str:
    """Remove NUL characters, and limit the length."""
    return text.replace("\0", "")[:_MOST_CHARS]


# --- notes and cookies ----------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """The result of an action, shown by the page that follows it."""

    text: str
    is_bad: bool = False


def go(request: Request, path: str, note: Note) -> Response:
    """Redirect to a page, which shows the note once; reloading it does not repeat the action."""
    app: Dashboard = request.app
    response = RedirectResponse(path, 303)
    value = app.signer.sign("note", [note.text[:_NOTE_CHARS], note.is_bad])
    set_cookie(request, response, "note", value, _NOTE_SECONDS)
    return response


def read_note(request: Request) -> Note | None:
    app: Dashboard = request.app
    found = app.signer.read("note", request.cookies.get(cookie_name(app.signer, "note")))
    return Note(*found) if found is not None else None


def forget(request: Request, response: Response, of: str = "note") -> None:
    app: Dashboard = request.app
    response.delete_cookie(cookie_name(app.signer, of), path=home(request) or "/")


def set_cookie(request: Request, response: Response, of: str, value: str, seconds: int) -> None:
    app: Dashboard = request.app
    response.set_cookie(
        cookie_name(app.signer, of),
        value,
        max_age=seconds,
        path=home(request) or "/",
        httponly=True,
        samesite="strict",
        secure=app.is_https or request.url.scheme == "https",
    )
