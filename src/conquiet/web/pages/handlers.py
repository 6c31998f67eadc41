"""Handlers: how often, how fast and how well each one works, from the history of the stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.errors import ConquietError
from conquiet.operations.dead_letters import Filter, Letter
from conquiet.operations.history import (
    HandlerFigures,
    Key,
    list_handlers,
    quantile,
    summarize,
)
from conquiet.web import words
from conquiet.web.chart import WINDOWS, Chart, Line, Past, draw, window_of
from conquiet.web.forms import link, read_query
from conquiet.web.template import fragment, page

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

_MOST_HANDLERS = 500
_MOST_LETTERS = 10
_LETTERS_READ = 1_000
"""Dead letters of one place that are searched for those of a handler."""
_PLACES = 10


SORTS: dict[str, tuple[str, Callable[[HandlerFigures], object]]] = {
    "p95": ("p95", lambda row: -(row.p95 or 0.0)),
    "p50": ("p50", lambda row: -(row.p50 or 0.0)),
    "rate": ("Rate", lambda row: -row.rate),
    "busy": ("Busy", lambda row: -row.busy),
    "errors": ("Errors", lambda row: -row.errors),
    "retries": ("Retries", lambda row: -row.retries),
    "dead": ("Dead letters", lambda row: -row.dead),
    "name": ("Handler", lambda row: row.name),
}


def routes(app: Dashboard) -> list[BaseRoute]:
    return [
        Route("/handlers", _handlers),
        Route("/live/handlers", app.live.endpoint(_part)),
        Route("/handler", _handler),
    ]


# --- the list -------------------------------------------------------------------------------


def _handlers(request: Request) -> Response:
    window, sort = window_of(read_query(request, "window")), read_query(request, "sort")
    live = link(request, "/live/handlers", window=window.name, sort=sort)
    return page(
        request, "handlers.html", "Handlers", at="/handlers", part=_part(request), live=live
    )


def _part(request: Request) -> str:
    app: Dashboard = request.app
    past = app.archive.read(window_of(read_query(request, "window")))
    sort = read_query(request, "sort")
    sort = sort if sort in SORTS else "p95"
    rows = sorted(
        list_handlers(past.entries, past.seconds),
        key=lambda row: (SORTS[sort][1](row), row.name, row.type),
    )
    slowest = max((row.p95 or 0.0 for row in rows), default=0.0)
    return fragment(
        request,
        "handlers_part.html",
        rows=rows[:_MOST_HANDLERS],
        more=max(0, len(rows) - _MOST_HANDLERS),
        slowest=slowest,
        sort=sort,
        sorts={name: title for name, (title, _) in SORTS.items()},
        **of_window(request, past, "/handlers", sort=sort),
    )


def of_window(request: HTTPConnection, past: Past, path: str, **query: object) -> dict[str, Any]:
    """Return what a template needs to offer the windows."""
    return {
        "past": past,
        "window": past.window,
        "windows": [
            (window, link(request, path, window=window.name, **query)) for window in WINDOWS
        ],
    }


# --- one handler ----------------------------------------------------------------------------


def _handler(request: Request) -> Response:
    app: Dashboard = request.app
    name, type_ = read_query(request, "name"), read_query(request, "type")
    window = window_of(read_query(request, "window"))
    past = app.archive.read(window).of_handler(name, type_)
    rows = list_handlers(past.entries, past.seconds)
    letters, trouble = _last_letters(app, name, type_)
    return page(
        request,
        "handler.html",
        f"Handler {name}",
        at="/handlers",
        name=name,
        type=type_,
        rows=rows,
        row=rows[0] if rows else summarize(name, type_, {}, 0.0),
        charts=_charts(past),
        letters=letters,
        trouble=trouble,
        **of_window(request, past, "/handler", name=name, type=type_),
    )


def _charts(past: Past) -> list[Chart]:
    def of(*figures: str) -> Callable[[Key], bool]:
        return lambda key: key.kind == "handler" and key.figure in figures

    second, minute = 1 / (60 * past.window.step), 1 / past.window.step

    def duration(part: float) -> list[float | None]:
        return past.each_step(lambda figures: quantile(figures, part))

    return [
        draw(
            "Rate",
            "/s",
            past,
            [
                Line("handled", "good", past.series(of("ok"), second)),
                Line("failed", "warn", past.series(of("errors"), second)),
            ],
        ),
        draw(
            "Duration of a call",
            "",
            past,
            [Line("p95", "warn", duration(0.95)), Line("p50", "good", duration(0.5))],
            words.estimate,
            words.duration,
        ),
        draw(
            "Failures",
            "/min",
            past,
            [
                Line("errors", "warn", past.series(of("errors"), minute)),
                Line("dead letters", "bad", past.series(of("dead"), minute)),
            ],
            whole=True,
        ),
    ]


def _last_letters(app: Dashboard, name: str, type_: str) -> tuple[list[tuple[str, Letter]], str]:
    """Return the last dead letters of a handler in a day, each with its place; and a trouble."""
    found: list[tuple[str, Letter]] = []
    day = Filter(since=datetime.now(UTC) - timedelta(days=1))
    places, troubles = app.stores.letter_places()
    try:
        for place in islice(places, _PLACES):
            letters = app.stores.letters(place).scan(day, brief=True)
            for letter, _ in islice(letters, _LETTERS_READ):
                is_ours = letter.handler == name or (
                    not letter.handler and letter.event_type == type_
                )
                if is_ours:
                    found.append((place, replace(letter, data="")))
    except ConquietError as error:
        troubles.append(str(error))
    found.sort(key=lambda pair: pair[1].time, reverse=True)
    return found[:_MOST_LETTERS], "\n".join(troubles)
