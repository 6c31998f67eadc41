"""Streams: their groups, entries in flight and contents; trimming them, removing groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.errors import NotFound, StoreError
from conquiet.web import words
from conquiet.web.forms import Form, Note, action, go, link, read_entry_id, read_query
from conquiet.web.stores import name_letters
from conquiet.web.template import fragment, page

if TYPE_CHECKING:
    from conquiet.operations.streams import CeleryQueue, GroupInfo, StreamInfo
    from conquiet.web.app import Dashboard

_PAGE = 50
_STREAMS = 100
_MOST_GROUPS = 6
MOST_QUEUES = 100
_FIELD_BYTES = 64 * 1024


def routes(app: Dashboard) -> list[BaseRoute]:
    return [
        Route("/streams", _streams),
        Route("/live/streams", app.live.endpoint(_part)),
        Route("/stream", _stream),
        Route("/group", _group),
        Route("/entry", _entry),
        Route("/stream/trim", _ask_trim),
        Route("/stream/trim", action(_trim), methods=["POST"]),
        Route("/group/remove", _ask_remove_group),
        Route("/group/remove", action(_remove_group), methods=["POST"]),
        Route("/consumer/remove", _ask_remove_consumer),
        Route("/consumer/remove", action(_remove_consumer), methods=["POST"]),
    ]


@dataclass(frozen=True)
class Row:
    """A stream of the list."""

    stream: StreamInfo
    rate: float | None
    """Entries added per second."""
    unread: int | None
    """By the group or reader that is the furthest behind; None if there is none."""
    in_flight: int


SORTS: dict[str, tuple[str, Callable[[Row], Any]]] = {
    "name": ("Stream", lambda row: row.stream.name),
    "entries": ("Entries", lambda row: -row.stream.length),
    "rate": ("Rate", lambda row: -(row.rate or 0.0)),
    "memory": ("Memory", lambda row: -(row.stream.bytes or 0)),
    "last": ("Last entry", lambda row: _descending(row.stream.last_time)),
    "unread": ("Unread", lambda row: -(row.unread or 0)),
    "flight": ("In flight", lambda row: -row.in_flight),
}


def _descending(text: str) -> tuple[int, ...]:
    return tuple(-ord(letter) for letter in text) or (1,)


def _streams(request: Request) -> Response:
    said = _said(request)
    live = link(request, "/live/streams", **said, page=read_query(request, "page"))
    return page(
        request,
        "streams.html",
        "Streams",
        at="/streams",
        part=_part(request),
        live=live,
        q=said["q"],
        sort=said["sort"],
        all=said["all"],
    )


def _said(request: Request) -> dict[str, str]:
    sort = read_query(request, "sort")
    return {
        "q": read_query(request, "q").strip(),
        "sort": sort if sort in SORTS else "name",
        "all": "1" if read_query(request, "all") else "",
    }


def _part(request: Request) -> str:
    app: Dashboard = request.app
    assert app.stores.client is not None  # raises if there is none
    from conquiet.operations.streams import is_internal

    sample = app.pulse.sample()
    if sample.streams is None:
        raise StoreError(sample.troubles.get("Redis", "Redis does not answer"))
    said = _said(request)
    fitting = [one for one in sample.streams if _fits(one.name, said["q"])]
    shown = [one for one in fitting if said["all"] or said["q"] or not is_internal(one.name)]
    rows = sorted(
        (_row(one, app.pulse.rates) for one in shown),
        key=lambda row: (SORTS[said["sort"]][1](row), row.stream.name),
    )
    number = read_query(request, "page")
    at = min(int(number), 1_000_000) if number.isascii() and number.isdecimal() else 1
    first = max(0, at - 1) * _STREAMS
    return fragment(
        request,
        "streams_part.html",
        queues=list_queues(app, said["q"]),
        rows=rows[first : first + _STREAMS],
        count=len(rows),
        folded=len(fitting) - len(shown),
        previous=at - 1,
        next=at + 1 if len(rows) > first + _STREAMS else 0,
        letters=sample.letters or {},
        pattern=app.stores.streams,
        sorts={name: title for name, (title, _) in SORTS.items()},
        most_groups=_MOST_GROUPS,
        most_queues=MOST_QUEUES,
        said=said,
        **said,
    )


@dataclass(frozen=True)
class Queue:
    """A queue of Celery."""

    info: CeleryQueue
    rate: float | None
    """Messages added per second."""
    dead_letters: int
    letters: str
    """The stream with its dead letters."""


def list_queues(app: Dashboard, wanted: str = "") -> list[Queue]:
    """Return the queues of Celery, those with the most messages first."""
    sample, rates = app.pulse.sample(), app.pulse.rates
    found = []
    for info in sample.celery_queues():
        letters = name_letters(info.prefix, info.name)
        known = [rates[name] for name in info.streams if name in rates]
        rate = sum(known) if known else None
        if _fits(info.name, wanted):
            found.append(Queue(info, rate, (sample.letters or {}).get(letters, 0), letters))
    return sorted(found, key=lambda one: (-one.info.ready - one.info.in_flight, one.info.name))


def _fits(name: str, wanted: str) -> bool:
    """Return whether a name has a text in it, or matches a pattern with * or ?."""
    if "*" in wanted or "?" in wanted:
        return fnmatchcase(name.lower(), wanted.lower())
    return wanted.lower() in name.lower()


def _row(stream: StreamInfo, rates: Mapping[str, float]) -> Row:
    lags = [*(one.lag for one in stream.groups), *(one.lag for one in stream.readers)]
    return Row(
        stream,
        rates.get(stream.name),
        max(lags, default=None),
        sum(group.pending for group in stream.groups),
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
    from conquiet.operations.streams import describe, list_pending, read_entries

    name, group_name = read_query(request, "stream"), read_query(request, "name")
    after = read_entry_id(request, "after")
    found = describe(client, name)
    group = _find_group(found, group_name)
    rows = list_pending(client, name, group_name, limit=_PAGE + 1, after=after or None)
    return page(
        request,
        "group.html",
        f"Group {group_name}",
        at="/streams",
        stream=found,
        group=group,
        rows=rows[:_PAGE],
        entries=read_entries(
            client, name, [row.id for row in rows[:_PAGE]], max_bytes=_FIELD_BYTES
        ),
        after=after,
        newer=rows[_PAGE - 1].id if len(rows) > _PAGE else "",
        waiting=open_retries(name, client, group_name).list(_PAGE),
    )


def _find_group(stream: StreamInfo, name: str) -> GroupInfo:
    for group in stream.groups:
        if group.name == name:
            return group
    raise NotFound(f"stream {stream.name!r} has no group {name!r}")


def _entry(request: Request) -> Response:
    app: Dashboard = request.app
    client = app.stores.client
    from conquiet.operations.streams import read_entry

    name, id_ = read_query(request, "stream"), read_entry_id(request, "id")
    found = read_entry(client, name, id_)
    return page(request, "entry.html", f"Entry {id_}", at="/streams", entry=found)


# --- what may go ----------------------------------------------------------------------------


def _ask(
    request: Request, path: str, question: str, consequence: str, count: int, **fields: str
) -> Response:
    """Ask before something of a stream is deleted; `count` 0 offers nothing."""
    back = "/group" if fields.get("name") else "/stream"
    shown = {"stream": fields["stream"], "name": fields.get("name", "")}
    if back == "/stream":
        shown = {"name": fields["stream"]}
    return page(
        request,
        "confirm.html",
        question,
        at="/streams",
        question=question,
        consequence=consequence,
        count=count,
        verb="Delete" if path == "/stream/trim" else "Remove",
        is_destructive=True,
        to=link(request, path),
        back=link(request, back, **shown),
        fields=fields,
        sample=[],
        offers_stream=False,
    )


def _ask_trim(request: Request) -> Response:
    client = request.app.stores.client
    from conquiet.operations.streams import describe, translate_errors
    from conquiet.redis import trim_stream

    name = read_query(request, "stream")
    describe(client, name)  # raises if there is none
    with translate_errors(f"stream {name!r}"):
        found = trim_stream(client, name, exact=True, dry_run=True)
    return _ask(
        request,
        "/stream/trim",
        f"Delete {words.plural(found.removed, 'entry', 'entries')} of {name}?",
        "Only entries that every group has acked and every reader has passed. The rest is kept:"
        f" {found.kept_by}. Entries in flight, and those that are unread, stay.",
        found.removed,
        stream=name,
    )


def _trim(request: Request, form: Form) -> Response:
    client = request.app.stores.client
    from conquiet.operations.streams import translate_errors
    from conquiet.redis import trim_stream

    name = form.get("stream", "")
    with translate_errors(f"stream {name!r}"):
        done = trim_stream(client, name, exact=True)
    text = f"{words.plural(done.removed, 'entry', 'entries')} of {name} deleted."
    return go(request, link(request, "/stream", name=name), Note(text))


def _ask_remove_group(request: Request) -> Response:
    client = request.app.stores.client
    from conquiet.operations.retries import open_retries
    from conquiet.operations.streams import describe

    name, group_name = read_query(request, "stream"), read_query(request, "name")
    group = _find_group(describe(client, name), group_name)
    waiting = open_retries(name, client, group_name).list(1)
    at_least = "" if group.lag_is_exact else "at least "
    lost = (
        f"{words.plural(group.pending, 'entry', 'entries')} in flight"
        f" and {at_least}{words.plural(group.lag, 'unread entry', 'unread entries')}"
    )
    consequence = (
        f"It has {lost}: this group will never handle them. They stay in the stream, for other"
        " groups. A worker that starts later creates the group again, at the beginning of the"
        " stream unless it says another start."
    )
    if group.alive:
        live = words.plural(group.alive, "live consumer")
        consequence = f"It has {live}, which would fail without it. Stop its workers first."
    elif waiting:
        consequence = "Messages wait for a later try in it. Try them now, or never, first."
    return _ask(
        request,
        "/group/remove",
        f"Remove group {group_name} of {name}?",
        consequence,
        0 if group.alive or waiting else 1,
        stream=name,
        name=group_name,
        pending=str(group.pending),
        position=group.last_delivered,
    )


def _remove_group(request: Request, form: Form) -> Response:
    from conquiet.operations.streams import remove_group

    name, group, pending = form.get("stream", ""), form.get("name", ""), form.get("pending", "")
    remove_group(
        request.app.stores.client,
        name,
        group,
        pending=int(pending) if pending.isascii() and pending.isdecimal() else 0,
        position=form.get("position", ""),
    )
    note = Note(f"Group {group} of {name} is removed.")
    return go(request, link(request, "/stream", name=name), note)


def _ask_remove_consumer(request: Request) -> Response:
    client = request.app.stores.client
    from conquiet.operations.streams import describe

    name, group_name = read_query(request, "stream"), read_query(request, "name")
    group = _find_group(describe(client, name), group_name)
    consumer = read_query(request, "consumer")
    pending = sum(one.pending for one in group.consumers if one.name == consumer)
    consequence = "It holds nothing. If its process still lives, it joins again with its next read."
    if pending:
        consequence = (
            f"It has {words.plural(pending, 'entry', 'entries')} in flight, which would be lost"
            " with it: nothing is removed. The other consumers of the group take them over when"
            " its lease ends; remove it then."
        )
    return _ask(
        request,
        "/consumer/remove",
        f"Remove consumer {consumer} of group {group_name}?",
        consequence,
        0 if pending else 1,
        stream=name,
        name=group_name,
        consumer=consumer,
    )


def _remove_consumer(request: Request, form: Form) -> Response:
    from conquiet.operations.streams import remove_consumer

    name, group, consumer = (form.get(field, "") for field in ("stream", "name", "consumer"))
    is_done = remove_consumer(request.app.stores.client, name, group, consumer)
    text = f"Consumer {consumer} is removed."
    if not is_done:
        text = f"Consumer {consumer} holds entries by now, or is gone; nothing was done."
    return go(request, link(request, "/group", stream=name, name=group), Note(text, not is_done))
