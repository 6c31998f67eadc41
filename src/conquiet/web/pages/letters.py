"""Dead letters: the reasons of failed messages; replay or drop them, some or by filter."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.errors import ConfigError, NotFound
from conquiet.operations.dead_letters import (
    Cause,
    Filter,
    Letter,
    Letters,
    Outcome,
    drop,
    find,
    group_by_cause,
    replay,
    show,
)
from conquiet.web import words
from conquiet.web.forms import Form, Note, action, clean, go, link, read_entry_id, read_query
from conquiet.web.stores import is_of_kombu, read_log, show_place
from conquiet.web.template import page

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from conquiet.web.app import Dashboard

_PAGE = 50
MOST = 10_000
"""Letters that one click replays or drops."""
_SHOWN = 5
_FILTER = ("cause", "type", "source", "error", "since", "until")
_MOST_CAUSES = 20


def routes(app: Dashboard) -> list[BaseRoute]:
    return [
        Route("/dead-letters", _letters),
        Route("/dead-letters/letter", _letter),
        Route("/dead-letters/replay", _ask("replay")),
        Route("/dead-letters/drop", _ask("drop")),
        Route("/dead-letters/replay", action(_replay), methods=["POST"]),
        Route("/dead-letters/drop", action(_drop), methods=["POST"]),
    ]


def _place(app: Dashboard, stream: str) -> Letters:
    return app.stores.letters(stream)


def filter_of(said: Mapping[str, str]) -> Filter:
    """Read the filter of an address or a form."""
    given = said.get("id", "")
    ids = tuple(id_ for id_ in given.split(",") if id_)
    if given and not ids:  # else the filter would select all
        raise ConfigError(f"{given!r:.60} names no dead letter")
    return Filter(
        ids[:_PAGE],
        said.get("type", "").strip(),
        said.get("source", "").strip(),
        said.get("error", "").strip(),
        _moment(said.get("since", "")),
        _moment(said.get("until", "")),
        cause=said.get("cause", ""),
    )


def _moment(text: str) -> datetime | None:
    """Parse a browser's time field, in UTC; raise if it is not one, since no filter selects all."""
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r:.60} is not a time; write it as 2026-01-31T12:00") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _letters(request: Request) -> Response:
    app: Dashboard = request.app
    places, troubles = app.stores.letter_places()
    name = read_query(request, "stream") or next(iter(places), "")
    said = {word: read_query(request, word) for word in _FILTER}
    after = read_entry_id(request, "after")
    rows: list[Letter] = []
    causes: list[Cause] = []
    if name:
        place, chosen = _place(app, name), filter_of(said)
        rows = find(place, replace(chosen, after=after), _PAGE + 1, brief=True)
        if not after and not said["cause"]:
            causes = group_by_cause(place, chosen, MOST)
    return page(
        request,
        "letters.html",
        "Dead letters",
        at="/dead-letters",
        places=places,
        troubles=[(why, words.advise(why)) for why in troubles],
        stream=name,
        said=said,
        is_narrowed=any(said.values()),
        rows=rows[:_PAGE],
        causes=causes[:_MOST_CAUSES],
        more_causes=max(0, len(causes) - _MOST_CAUSES),
        most=MOST,
        after=after,
        next=rows[_PAGE - 1].id if len(rows) > _PAGE else "",
    )


def _letter(request: Request) -> Response:
    app: Dashboard = request.app
    name, id_ = read_query(request, "stream"), read_query(request, "id")
    letter = show(_place(app, name), id_)
    return page(
        request,
        "letter.html",
        "Dead letter",
        at="/dead-letters",
        stream=name,
        letter=letter,
        frames=list_frames(letter.traceback),
        hide_attributes=app.hide_payloads and is_of_kombu(name),  # arguments are among them
    )


# --- tracebacks -----------------------------------------------------------------------------


class Frame(NamedTuple):
    """A frame of a traceback: where it is, and the line of code there."""

    place: str
    code: str


_frame = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_library = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen |/conquiet/(?!.*/conquiet/)")


def list_frames(traceback: str) -> list[Frame]:
    """Return the frames of the user's own code, the innermost first.

    >>> [frame] = list_frames(
    ...     '  File "/srv/lib/python3.11/site-packages/a.py", line 3, in run\\n    call()\\n'
    ...     '  File "/srv/shop/orders.py", line 7, in place\\n    raise LookupError\\n'
    ... )
    >>> frame
    Frame(place='/srv/shop/orders.py:7 in place', code='raise LookupError')
    """
    lines = traceback.splitlines()
    found: list[Frame] = []
    for at, line in enumerate(lines):
        match = _frame.match(line)
        if match is None or _library.search(match["file"]):
            continue
        code = lines[at + 1].strip() if at + 1 < len(lines) else ""
        code = "" if _frame.match(lines[at + 1] if at + 1 < len(lines) else "") else code
        function = f" in {match['function']}" if match["function"] else ""
        found.append(Frame(f"{match['file']}:{match['line']}{function}", code))
    return found[::-1]


def _ask(verb: str) -> Callable[[Request], Response]:
    def ask(request: Request) -> Response:
        app: Dashboard = request.app
        name = read_query(request, "stream")
        said = {word: read_query(request, word) for word in ("id", *_FILTER)}
        picked = [clean(id_) for id_ in request.query_params.getlist("pick")[:_PAGE]]
        if picked:
            said = {"id": ",".join(picked)}
        elif read_query(request, "selected"):  # else it would be all of them
            back = link(request, "/dead-letters", stream=name)
            return go(request, back, Note("No dead letter was selected.", True))
        if not said["id"] and not said.get("until"):
            # Not letters that arrive after the question was asked.
            said["until"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        place, chosen = _place(app, name), filter_of(said)
        of_log = read_log(name) is not None
        act = replay if verb == "replay" else drop
        count = len(act(place, chosen, limit=MOST, dry_run=True).done)
        return page(
            request,
            "confirm.html",
            f"{_VERBS[verb]} dead letters",
            at="/dead-letters",
            question=f"{_VERBS[verb]} {words.plural(count, 'dead letter')} of {show_place(name)}?",
            consequence=_CONSEQUENCES["retry" if of_log and verb == "replay" else verb]
            + (f" No more than {MOST:,} at a time: then ask again." if count == MOST else ""),
            count=count,
            verb=_VERBS[verb],
            is_destructive=verb == "drop",
            to=link(request, f"/dead-letters/{verb}"),
            back=link(request, "/dead-letters", stream=name),
            fields={"stream": name, **said},
            sample=find(place, chosen, _SHOWN, brief=True),
            offers_stream=verb == "replay" and not of_log,
        )

    return ask


_VERBS = {"replay": "Replay", "drop": "Drop"}
_CONSEQUENCES = {
    "replay": "Each message goes back to the stream it came from, with the same event id, and"
    " leaves the dead letters. A letter that cannot be sent is kept.",
    "retry": "The group tries each message again, from its first attempt; other groups do not get"
    " it. If it fails for good, it is a dead letter again.",
    "drop": "They are deleted for good and cannot be restored.",
}


def _replay(request: Request, form: Form) -> Response:
    app: Dashboard = request.app
    place = _place(app, _stream_of(form))
    to = clean(form.get("to", "").strip()) or None
    outcome = replay(place, filter_of(form), to=to, limit=MOST)
    return _report(request, form, outcome, "sent again")


def _drop(request: Request, form: Form) -> Response:
    app: Dashboard = request.app
    outcome = drop(_place(app, _stream_of(form)), filter_of(form), limit=MOST)
    return _report(request, form, outcome, "dropped")


def _stream_of(form: Form) -> str:
    name = form.get("stream", "")
    if not name:
        raise NotFound("the form names no stream of dead letters")
    return name


def _report(request: Request, form: Form, outcome: Outcome, what: str) -> Response:
    text = f"{words.plural(len(outcome.done), 'message')} {what}."
    if outcome.failed:
        first = outcome.failed[0]
        text += (
            f" {words.plural(len(outcome.failed), 'message')} could not be, and kept; the first:"
            f" {first.why}"
        )
    elif not outcome.done:
        text = "No dead letter matches any more; nothing was done."
    is_bad = bool(outcome.failed) or not outcome.done
    return go(request, link(request, "/dead-letters", stream=_stream_of(form)), Note(text, is_bad))
