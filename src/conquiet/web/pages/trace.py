"""Trace: one event by its id, from the outbox to the log to its consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.web.forms import read_query
from conquiet.web.template import page

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard


def routes(app: Dashboard) -> list[BaseRoute]:
    return [Route("/trace", _trace)]


def _trace(request: Request) -> Response:
    from conquiet.operations.trace import trace_event

    app: Dashboard = request.app
    stores = app.stores
    id_, full = read_query(request, "id").strip(), read_query(request, "full") == "1"
    found = None
    if id_:
        found = trace_event(
            id_,
            client=stores.client if stores.has_broker else None,
            engine=stores.engine if stores.has_database else None,
            outboxes=tuple({stores.table: 0, "outbox": 0, "outbox_events": 0}),
            streams=stores.streams,
            full=full,
        )
    title = f"Trace {id_}" if id_ else "Trace"
    return page(
        request,
        "trace.html",
        title,
        at="/trace",
        id=id_,
        full=full,
        trace=found,
        table=stores.table,
    )
