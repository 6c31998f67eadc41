"""Later: delayed events, messages that wait for a retry, and schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.errors import ConquietError
from conquiet.web import words
from conquiet.web.forms import Form, Note, action, go, link, read_query
from conquiet.web.template import page

if TYPE_CHECKING:
    from conquiet.operations.delayed import DelayedStream
    from conquiet.operations.retries import Retries
    from conquiet.relay.inspection import DelayedEntry, Inspection
    from conquiet.schedule import Schedules
    from conquiet.web.app import Dashboard

_PAGE = 50


@dataclass(frozen=True)
class Delayed:
    """The delayed events of one outbox; `stream` is empty for the table of the database."""

    name: str
    stream: str
    count: int
    events: Sequence[DelayedEntry]


def routes(app: Dashboard) -> list[BaseRoute]:
    found: list[BaseRoute] = [
        Route("/later", _later),
        Route("/later/cancel", _ask_cancel),
        Route("/later/cancel", action(_cancel), methods=["POST"]),
        Route("/retries/now", action(_now), methods=["POST"]),
        Route("/retries/never", action(_never), methods=["POST"]),
    ]
    if app.shown is not None:
        found += [
            Route("/schedules/pause", action(_pause), methods=["POST"]),
            Route("/schedules/resume", action(_resume), methods=["POST"]),
            Route("/schedules/run", action(_run), methods=["POST"]),
        ]
    return found


def _later(request: Request) -> Response:
    app: Dashboard = request.app
    type_, id_ = (read_query(request, name).strip() for name in ("type", "id"))
    troubles: list[str] = []

    def read(look: Callable[[], list[Any]]) -> list[Any]:
        """Return what one store has, and go on without it if it does not answer."""
        try:
            return look()
        except ConquietError as error:
            if str(error) not in troubles:
                troubles.append(str(error))
            return []

    delayed: list[Delayed] = []
    waiting: list[Any] = []
    if app.stores.has_database:
        delayed += read(lambda: _read_table(app, type_, id_))
        waiting = read(lambda: _read_retries(app))
    if app.stores.has_broker:
        delayed += read(lambda: _read_streams(app, type_, id_))
    return page(
        request,
        "later.html",
        "Later",
        at="/later",
        type=type_,
        id=id_,
        delayed=[one for one in delayed if one.count],
        groups=waiting,
        troubles=[(why, words.advise(why)) for why in troubles],
        has_app=app.shown is not None,
        schedules=read(lambda: _schedules(app).list()) if app.shown is not None else [],
    )


# --- delayed events -------------------------------------------------------------------------


def _read_table(app: Dashboard, type_: str, id_: str) -> list[Delayed]:
    outbox = app.stores.outbox
    return [_read(outbox, f"table {outbox.name}", "", type_, id_)]


def _read_streams(app: Dashboard, type_: str, id_: str) -> list[Delayed]:
    client = app.stores.client
    from conquiet.operations.delayed import find_delayed

    found = find_delayed(client, app.stores.streams)
    return [_read(one, f"stream {one.name}", one.name, type_, id_) for one in found]


def _read(
    outbox: Inspection | DelayedStream, name: str, stream: str, type_: str, id_: str
) -> Delayed:
    events = outbox.delayed(_PAGE, type=type_, id=id_)
    return Delayed(name, stream, outbox.count_delayed(), events)


def _ask_cancel(request: Request) -> Response:
    id_, stream = read_query(request, "id"), read_query(request, "stream")
    return page(
        request,
        "confirm.html",
        "Cancel a delayed event",
        at="/later",
        question=f"Cancel the delayed event {id_}?",
        consequence="It is deleted, and never published. If it is due by then, nothing is done.",
        count=1,
        verb="Cancel",
        is_destructive=True,
        to=link(request, "/later/cancel"),
        back=link(request, "/later"),
        fields={"id": id_, "stream": stream},
        sample=[],
        offers_stream=False,
    )


def _cancel(request: Request, form: Form) -> Response:
    app: Dashboard = request.app
    id_, stream = form.get("id", ""), form.get("stream", "")
    if stream:
        from conquiet.operations.delayed import DelayedStream

        done = DelayedStream(app.stores.client, stream).cancel([id_])
    else:
        done = app.stores.outbox.cancel([id_])
    text = f"{id_} is cancelled." if done else f"{id_}: too late, it does not wait any more."
    return go(request, link(request, "/later"), Note(text, not done))


# --- messages that wait for a retry ---------------------------------------------------------


def _read_retries(app: Dashboard) -> list[Any]:
    """Return the groups of the log, each with what waits for it."""
    engine = app.stores.engine
    from conquiet.operations.retries import find_retries

    found = ((one, one.list(_PAGE)) for one in find_retries(engine, app.stores.table))
    return [(one, waiting) for one, waiting in found if waiting]


def _now(request: Request, form: Form) -> Response:
    retries = _retries_of(request, form)
    return _report(request, form, retries.now([form.get("id", "")]), "is tried now")


def _never(request: Request, form: Form) -> Response:
    retries = _retries_of(request, form)
    return _report(request, form, retries.never([form.get("id", "")]), "is a dead letter now")


def _retries_of(request: Request, form: Form) -> Retries:
    """Return what waits for a group: of a topic of the log, or of a stream."""
    from conquiet.operations.retries import LogRetries, open_retries

    stores, group = request.app.stores, form.get("group", "")
    if form.get("topic"):
        return LogRetries(stores.engine, form["topic"], group, stores.table)
    return open_retries(form.get("stream", ""), stores.client, group)


def _report(request: Request, form: Form, done: Sequence[str], what: str) -> Response:
    text = f"The message {what}." if done else "It does not wait any more; nothing was done."
    back = link(request, "/group", stream=form.get("stream", ""), name=form.get("group", ""))
    if form.get("topic"):
        back = link(request, "/later")
    return go(request, back, Note(text, not done))


# --- schedules ------------------------------------------------------------------------------


def _schedules(app: Dashboard) -> Schedules:
    assert app.shown is not None, "there are routes to it only then"
    return app.shown.schedules


def _pause(request: Request, form: Form) -> Response:
    return _set_paused(request, form.get("name", ""), True)


def _resume(request: Request, form: Form) -> Response:
    return _set_paused(request, form.get("name", ""), False)


def _set_paused(request: Request, name: str, is_paused: bool) -> Response:
    is_changed = _schedules(request.app).set_paused(name, is_paused)
    already = "" if is_changed else " already"
    text = f"{name} is{already} {'paused' if is_paused else 'active'}."
    return go(request, link(request, "/later"), Note(text))


def _run(request: Request, form: Form) -> Response:
    id_ = _schedules(request.app).run(form.get("name", ""))
    text = f"{id_} is in the log; a worker of the app handles it."
    return go(request, link(request, "/later"), Note(text))
