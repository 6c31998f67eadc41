"""Outbox: rows that wait, are parked or were published; retries of parked rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.errors import NotFound
from conquiet.web import words
from conquiet.web.forms import Form, Note, action, go, link, read_query
from conquiet.web.template import page

if TYPE_CHECKING:
    from conquiet.relay.inspection import Search
    from conquiet.web.app import Dashboard

_PAGE = 50


def routes(app: Dashboard) -> list[BaseRoute]:
    return [
        Route("/outbox", _rows),
        Route("/outbox/row", _row),
        Route("/outbox/retry-all", _ask_retry_all),
        Route("/outbox/retry", action(_retry), methods=["POST"]),
        Route("/outbox/retry-all", action(_retry_all), methods=["POST"]),
    ]


def _rows(request: Request) -> Response:
    app: Dashboard = request.app
    inspection = app.stores.outbox
    from conquiet.relay.inspection import State

    search, after = _search(request), read_query(request, "after")
    newest = search.state in ("published", "any")
    figures = inspection.figures()
    rows = inspection.entries(search=search, newest=newest, limit=_PAGE + 1, after=after or None)
    shown = rows[:_PAGE]
    said = {
        name: getattr(search, name)
        for name in ("state", "id", "type", "aggregate", "error", "attempts")
    }
    return page(
        request,
        "outbox.html",
        "Outbox",
        at="/outbox",
        table=app.stores.table,
        figures=figures,
        rows=shown,
        previews={} if app.hide_payloads else inspection.previews(shown),
        search=search,
        said=said,
        is_narrowed=any(value for name, value in said.items() if name != "state"),
        states=get_args(State),
        after=after,
        next=rows[_PAGE - 1].id if len(rows) > _PAGE else "",
        newest=newest,
    )


def _search(request: Request) -> Search:
    from conquiet.relay.inspection import Search, State

    state, attempts = read_query(request, "state"), read_query(request, "attempts")
    return Search(
        cast("Any", state if state in get_args(State) else "waiting"),
        read_query(request, "id").strip(),
        read_query(request, "type").strip(),
        read_query(request, "aggregate").strip(),
        read_query(request, "error").strip(),
        int(attempts) if attempts.isascii() and attempts.isdecimal() and len(attempts) < 7 else 0,
    )


def _row(request: Request) -> Response:
    app: Dashboard = request.app
    id_ = read_query(request, "id")
    found = app.stores.outbox.show(id_)
    if found is None:
        raise NotFound(f"no row {id_!r:.100} in {app.stores.table}; it may have been pruned")
    row, more = found
    return page(
        request,
        "row.html",
        f"Event {row.event_id}",
        at="/outbox",
        row=row,
        table=app.stores.table,
        payload=more["payload"],
        attributes=more.get("attributes"),
    )


def _retry(request: Request, form: Form) -> Response:
    app: Dashboard = request.app
    id_ = form.get("id", "")
    done = app.stores.outbox.retry([id_])
    if done:
        note = Note(f"{done[0]} has new attempts; a relay will publish it.")
    else:
        note = Note(f"{id_!r:.100} is not parked any more; nothing was done.", True)
    return go(request, link(request, "/outbox/row", id=id_), note)


def _ask_retry_all(request: Request) -> Response:
    app: Dashboard = request.app
    parked = app.stores.outbox.figures().parked
    return page(
        request,
        "confirm.html",
        "Retry all parked rows",
        at="/outbox",
        question=f"Give {words.plural(parked, 'parked row')} new attempts?",
        consequence="Relays publish them again, from the first attempt. Rows that still fail are"
        " parked again. The last errors are shown until then.",
        count=parked,
        verb="Retry",
        is_destructive=False,
        to=link(request, "/outbox/retry-all"),
        back=link(request, "/outbox", state="parked"),
        fields={},
        sample=[],
        offers_stream=False,
    )


def _retry_all(request: Request, form: Form) -> Response:
    app: Dashboard = request.app
    done = app.stores.outbox.retry(None)
    note = Note(f"{words.plural(len(done), 'row')} got new attempts.")
    return go(request, link(request, "/outbox"), note)
