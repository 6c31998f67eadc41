"""Where the dashboard stands: at the root of a server, or somewhere inside an application."""

from __future__ import annotations

from urllib.parse import urlencode

from starlette.requests import HTTPConnection


def home(request: HTTPConnection) -> str:
    """The path that all of its own paths begin with; empty at the root."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def link(request: HTTPConnection, path: str, **query: object) -> str:
    """A path of the dashboard, with what is not empty of a query."""
    said = {name: value for name, value in query.items() if value not in (None, "", False)}
    text = urlencode(said, doseq=True)
    return f"{home(request)}{path}{'?' if text else ''}{text}"
