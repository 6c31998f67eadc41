"""Interface: what an app receives and sends, as its AsyncAPI document says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from conquiet.app.description import Use, list_fields, list_uses
from conquiet.web.template import page

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

_MOST_FIELDS = 200


@dataclass(frozen=True)
class Row:
    """A message of the interface with its fields: name, type, and whether it is always there."""

    use: Use
    fields: list[tuple[str, str, bool]]


def routes(app: Dashboard) -> list[BaseRoute]:
    if app.interface is None:
        return []
    return [Route("/interface", _interface), Route("/interface.json", _document)]


def _interface(request: Request) -> Response:
    app: Dashboard = request.app
    document = app.interface or {}
    rows = list(_rows(document))
    return page(
        request,
        "interface.html",
        "Interface",
        at="/interface",
        info=document.get("info", {}),
        received=[row for row in rows if not row.use.is_sent],
        sent=[row for row in rows if row.use.is_sent],
    )


def _rows(document: dict[str, Any]) -> Iterator[Row]:
    for use in list_uses(document):
        yield Row(use, list_fields(document, use)[:_MOST_FIELDS])


def _document(request: Request) -> Response:
    app: Dashboard = request.app
    return JSONResponse(app.interface)
