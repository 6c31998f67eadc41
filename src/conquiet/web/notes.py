"""Notes: what came of an action, told by the page that follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from conquiet.web.access import cookie_name
from conquiet.web.place import home

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

_SECONDS = 60
_MOST_CHARS = 800
"""A cookie holds 4 kB, and other alphabets take more bytes."""


@dataclass(frozen=True)
class Note:
    text: str
    is_bad: bool = False


def go(request: Request, path: str, note: Note) -> Response:
    """To a page by GET, so that reloading it does nothing again; it shows the note once."""
    app: Dashboard = request.app
    response = RedirectResponse(path, 303)
    value = app.signer.sign("note", [note.text[:_MOST_CHARS], note.is_bad])
    set_cookie(request, response, "note", value, _SECONDS)
    return response


def taken(request: Request) -> Note | None:
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
