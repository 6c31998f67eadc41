"""Template: pages and their parts, with the context that all of them share.

Every value is escaped and cut to a length that a page can take, whatever a producer wrote.
"""

from __future__ import annotations

import re
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from conquiet.web import words
from conquiet.web.forms import forget, link, read_note, token_of
from conquiet.web.stores import show_place

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

HERE = Path(__file__).parent
PAGES = (
    ("/", "Overview"),
    ("/handlers", "Handlers"),
    ("/streams", "Streams"),
    ("/outbox", "Outbox"),
    ("/later", "Later"),
    ("/dead-letters", "Dead letters"),
    ("/processes", "Processes"),
    ("/trace", "Trace"),
)
_MOST_ATTRIBUTES = 200


@cache
def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,  # for files of every name
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    for filter_ in (
        *(
            words.number,
            words.rate,
            words.age,
            words.estimate,
            words.since,
            words.size,
            words.moment,
            words.iso,
            words.ago,
            words.brief,
        ),
    ):
        made.filters[filter_.__name__] = filter_
    made.filters["breaks"] = partial(_break_at, _parts)
    made.filters["fields"] = partial(_break_at, _commas)
    made.filters["place"] = show_place
    made.filters["payload"] = lambda text: escape(words.payload(text))
    made.filters["exact"] = lambda text: escape(text[: words.FIELD_CHARS])
    made.globals["plural"] = words.plural
    made.globals["most_attributes"] = _MOST_ATTRIBUTES
    return made


def _finalize(value: object) -> object:
    """Prepare a value of a template; markup has been through here, or through a filter."""
    return words.field(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_parts = re.compile(r"(?<=[_.:/-])(?=[^_.:/-])")
_commas = re.compile(r"(?<=,)(?=\S)")


def _break_at(places: re.Pattern[str], text: str) -> Markup:
    """Let a text be broken after parts of a name, or fields of a payload, rather than anywhere."""
    return Markup("<wbr>").join(map(escape, places.split(words.field(text))))


@cache
def our_version() -> str:
    return version("conquiet")


def fragment(request: Request, template: str, **context: Any) -> Markup:
    """Render a part of a page; its values are escaped."""
    app: Dashboard = request.app

    def here(path: str, **query: object) -> Markup:
        return escape(link(request, path, **query))

    html = (
        environment()
        .get_template(template)
        .render(
            link=here,
            read_only=app.read_only,
            hide_payloads=app.hide_payloads,
            csrf=token_of(request),
            **context,
        )
    )
    return Markup(html)


def page(
    request: Request, template: str, title: str, *, status: int = 200, at: str = "", **context: Any
) -> HTMLResponse:
    """Render a whole page; `at` is its entry in the menu."""
    app: Dashboard = request.app
    note = read_note(request)
    is_in = bool(request.scope.get("conquiet.who"))
    body = fragment(
        request,
        template,
        title=title,
        at=at,
        pages=PAGES if app.interface is None else (*PAGES, ("/interface", "Interface")),
        note=note,
        stores=app.stores.describe() if is_in else (),
        can_sign_out=app.can_sign_out and is_in,
        version=our_version(),
        **context,
    )
    response = HTMLResponse(body, status)
    if note is not None:
        forget(request, response)
    return response
