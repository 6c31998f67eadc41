"""Streams: their groups, pending entries and contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.errors import NotFound, StoreError
from conquiet.web.forms import link, read_entry_id, read_query
from conquiet.web.template import fragment, page

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

_PAGE = 50
_STREAMS = 100
_FIELD_BYTES = 64 * 1024


def routes(app: Dashboard) -> list[BaseRoute]:
    return [
        Route("/streams", _streams),
        Route("/live/streams", app.live.endpoint(_part)),
        Route("/stream", _stream),
        Route("/group", _group),
        Route("/entry", _entry),
    ]


def _streams(request: Request) -> Response:
    after = read_query(request, "after")
    live = link(request, "/live/streams", after=after)
    return page(request, "streams.html", "Streams", at="/streams", part=_part(request), live=live)


def _part(request: Request) -> str:
    app: Dashboard = request.app
    assert app.stores.client is not None  # raises if there is none
    sample = app.pulse.sample()
    if sample.streams is None:
        raise StoreError(sample.troubles.get("Redis", "Redis does not answer"))
    after = read_query(request, "after")
    found = [one for one in sample.streams if one.name > after]
    return fragment(
        request,
        "streams_part.html",
        streams=found[:_STREAMS],
        count=len(sample.streams),
        after=after,
        next=found[_STREAMS - 1].name if len(found) > _STREAMS else "",
        letters=sample.letters or {},
        pattern=app.stores.streams,
    )


def _stream(request: Request) -> Response:
    app: Dashboard = request.app
    client = app.stores.client
    from conquiet.operations.streams import describe, peek
    from conquiet.redis import ids

    name, before = read_query(request, "name"), read_entry_id(request, "before")
    found = describe(client, name)
    start = ids.before(before) if before else None
    entries = peek(client, name, start, _PAGE + 1, newest=True, max_bytes=_FIELD_BYTES)
    return page(
        request,
        "stream.html",
        f"Stream {name}",
        at="/streams",
        stream=found,
        entries=entries[:_PAGE],
        before=before,
        older=entries[_PAGE - 1].id if len(entries) > _PAGE else "",
    )


def _group(request: Request) -> Response:
    app: Dashboard = request.app
    client = app.stores.client
    from conquiet.operations.retries import open_retries
    from conquiet.operations.streams import describe, list_pending

    name, group_name = read_query(request, "stream"), read_query(request, "name")
    after = read_entry_id(request, "after")
    found = describe(client, name)
    for group in found.groups:
        if group.name == group_name:
            break
    else:
        raise NotFound(f"stream {name!r} has no group {group_name!r}")
    rows = list_pending(client, name, group_name, limit=_PAGE + 1, after=after or None)
    return page(
        request,
        "group.html",
        f"Group {group_name}",
        at="/streams",
        stream=found,
        group=group,
        rows=rows[:_PAGE],
        after=after,
        newer=rows[_PAGE - 1].id if len(rows) > _PAGE else "",
        waiting=open_retries(name, client, group_name).list(_PAGE),
    )


def _entry(request: Request) -> Response:
    app: Dashboard = request.app
    client = app.stores.client
    from conquiet.operations.streams import read_entry

    name, id_ = read_query(request, "stream"), read_entry_id(request, "id")
    found = read_entry(client, name, id_)
    return page(request, "entry.html", f"Entry {id_}", at="/streams", entry=found)
