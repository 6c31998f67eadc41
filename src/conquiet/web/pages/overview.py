"""Overview: rates, backlogs and failures, their charts, and what needs attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.operations.history import Key
from conquiet.web import words
from conquiet.web.chart import Chart, Line, Past, draw, window_of
from conquiet.web.forms import link, read_query
from conquiet.web.pages.handlers import of_window
from conquiet.web.pages.processes import Process, list_processes
from conquiet.web.pages.streams import list_queues
from conquiet.web.pulse import POINTS, Point, Sample
from conquiet.web.stores import show_place, show_queue
from conquiet.web.template import fragment, page

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

LONG_SECONDS = 60.0
"""A wait longer than this is reported."""
_MOST_GROUPS = 12
_MOST_PLACES = 4
WIDTH, HEIGHT = 120, 28
_MARGIN = 2
"""Keeps the whole width of the line inside the picture."""


def routes(app: Dashboard) -> list[BaseRoute]:
    return [
        Route("/", _overview),
        Route("/live/overview", app.live.endpoint(_part)),
    ]


def _overview(request: Request) -> Response:
    live = link(request, "/live/overview", window=read_query(request, "window"))
    return page(request, "overview.html", "Overview", at="/", part=_part(request), live=live)


def _part(request: Request) -> str:
    app: Dashboard = request.app
    sample = app.pulse.sample()
    past = app.archive.read(window_of(read_query(request, "window")))
    processes = list_processes(app, sample)
    groups = sorted(
        list_backlogs(request, sample), key=lambda one: (-one.lag, -(one.in_flight or 0))
    )
    return fragment(
        request,
        "overview_part.html",
        tiles=[
            *show_flow(request, sample, app.pulse.history),
            *show_failures(request, sample, processes),
        ],
        charts=list(list_charts(past)),
        concerns=find_concerns(request, sample, processes),
        groups=groups[:_MOST_GROUPS],
        more=max(0, len(groups) - _MOST_GROUPS),
        queues=list_queues(app),
        most_queues=_MOST_GROUPS,
        has_broker=app.stores.has_broker,
        **of_window(request, past, "/"),
    )


def list_charts(past: Past) -> Iterator[Chart]:
    """Draw what was handled and published, what waits, and what failed."""

    def count(kind: str, scale: float, *figures: str) -> list[float | None]:
        def is_chosen(key: Key) -> bool:
            return key.kind == kind and key.figure in figures

        return past.series(is_chosen, scale)

    second, minute = 1 / (60 * past.window.step), 1 / past.window.step
    yield draw(
        "Rate",
        "messages/s",
        past,
        [
            Line("handled", "good", count("handler", second, "ok")),
            Line("published", "warn", count("relay", second, "published")),
        ],
    )
    yield draw(
        "Backlog",
        "messages",
        past,
        [
            Line("unread by groups", "good", past.gauges("lag")),
            Line("in the outbox", "warn", past.gauges("waiting")),
        ],
        words.number,
        whole=True,
    )
    yield draw(
        "Failures",
        "/min",
        past,
        [
            Line("errors", "warn", count("handler", minute, "errors")),
            Line("dead letters", "bad", count("handler", minute, "dead")),
        ],
        whole=True,
    )


# --- groups ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backlog:
    """How far behind a group is: of a stream, or of the log of a database."""

    group: str
    place: str
    lag: int
    lag_is_exact: bool
    behind_seconds: float
    in_flight: int | None
    """None in the log of a database, which knows positions only."""
    alive: str
    is_alone: bool
    """Whether it has a backlog, and no live consumer."""
    href: str = ""
    place_href: str = ""


def list_backlogs(request: HTTPConnection, sample: Sample) -> Iterator[Backlog]:
    """Return how far behind each group is, but those of Celery and of retries."""
    for stream, group in sample.own_groups():
        yield Backlog(
            group.name,
            stream.name,
            group.lag,
            group.lag_is_exact,
            group.behind_seconds,
            group.pending,
            f"{group.alive} of {len(group.consumers)}",
            bool(group.lag or group.pending) and not group.alive,
            link(request, "/group", stream=stream.name, name=group.name),
            link(request, "/stream", name=stream.name),
        )
    for one in sample.logs:
        yield Backlog(
            one.name,
            one.topic,
            one.lag,
            True,
            one.behind_seconds,
            None,
            f"{one.members}",
            bool(one.lag or one.retries) and not one.members,
        )


# --- concerns -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a problem is, and how large it is there."""

    name: str
    what: str
    href: str


@dataclass(frozen=True)
class Concern:
    """A problem of one kind, where it is, and what to do about it."""

    text: str
    fix: str
    href: str = ""
    places: Sequence[Place] = ()
    more: int = 0
    """Places that are not listed."""


def find_concerns(
    request: HTTPConnection, sample: Sample, processes: Sequence[Process]
) -> list[Concern]:
    """Return the problems, one for each kind."""
    return [
        *_of_stores(sample),
        *_of_outbox(request, sample),
        *_of_groups(request, sample),
        *_of_letters(request, sample),
        *_of_processes(request, processes),
    ]


def _of_stores(sample: Sample) -> Iterator[Concern]:
    for store, why in sample.troubles.items():
        yield Concern(f"{store} does not answer: {why}", words.advise(why))


def _of_outbox(request: HTTPConnection, sample: Sample) -> Iterator[Concern]:
    figures = sample.outbox
    if figures is None:
        return
    if figures.parked:
        yield Concern(
            f"{words.plural(figures.parked, 'row')} of the outbox used up the attempts",
            "See the last error, fix its cause, then retry.",
            link(request, "/outbox", state="parked"),
        )
    if figures.slot in ("lost", "missing"):
        yield Concern(
            f"The slot of the outbox is {figures.slot}",
            "The next relay claims what it lacks: conquiet relay run --from wal.",
            link(request, "/outbox"),
        )
    if figures.slot_kept_bytes and 2 * (figures.slot_lag_bytes or 0) > figures.slot_kept_bytes:
        yield Concern(
            "The slot of the outbox uses more than half of max_slot_wal_keep_size",
            "Does a relay run? conquiet relay run --from wal reads it.",
            link(request, "/processes"),
        )
    if figures.oldest_seconds > LONG_SECONDS and not sample.is_log:
        yield Concern(
            f"A row of the outbox has waited for {words.age(figures.oldest_seconds)}",
            "Does a relay run? conquiet relay run publishes the outbox.",
            link(request, "/processes"),
        )


def _of_groups(request: HTTPConnection, sample: Sample) -> Iterator[Concern]:
    places = []
    queues = sample.celery_queues()
    for queue in queues:
        backlog = [(queue.ready, "ready"), (queue.in_flight, "in flight")]
        if any(count for count, _ in backlog) and not queue.alive:
            name, href = show_queue(queue.prefix, queue.name), link(request, "/streams")
            places.append(_alone(name, backlog, href))
    for stream, group in sample.own_groups():
        backlog = [(group.lag or 0, "unread"), (group.pending, "in flight")]
        if any(count for count, _ in backlog) and not group.alive:
            href = link(request, "/group", stream=stream.name, name=group.name)
            places.append(_alone(f"{group.name} of {stream.name}", backlog, href))
    for one in sample.logs:
        backlog = [(one.lag, "unread"), (one.retries, "to retry")]
        if any(count for count, _ in backlog) and not one.members:
            name, href = f"{one.name} of {one.topic}", link(request, "/processes")
            places.append(_alone(name, backlog, href))
    if places:
        what, several = ("group or queue", "groups or queues") if queues else ("group", "groups")
        yield _grouped(
            f"No live consumer reads {words.plural(len(places), what, several)} with a backlog",
            "Start a worker, or remove the group.",
            places,
        )


def _alone(name: str, backlog: Sequence[tuple[int, str]], href: str) -> tuple[int, Place]:
    what = ", ".join(f"{count:,} {word}" for count, word in backlog if count)
    return sum(count for count, _ in backlog), Place(name, what, href)


def _of_letters(request: HTTPConnection, sample: Sample) -> Iterator[Concern]:
    letters = sample.letters or {}
    places = [
        (count, Place(show_place(name), f"{count:,}", link(request, "/dead-letters", stream=name)))
        for name, count in letters.items()
    ]
    if places:
        where = f"in {words.plural(len(places), 'place')}"
        yield _grouped(
            f"{words.plural(sum(letters.values()), 'dead letter')} {where}",
            "See the causes, fix them, then replay.",
            places,
        )


def _of_processes(request: HTTPConnection, processes: Sequence[Process]) -> Iterator[Concern]:
    silent = [one for one in processes if not one.is_alive]
    if silent:
        href = link(request, "/processes")
        yield _grouped(
            f"{words.plural(len(silent), 'process', 'processes')} stopped without saying so",
            "Killed, or frozen? Others of the group take over what it had in flight.",
            [
                (one.in_flight, Place(one.name, words.since(one.seen_seconds), href))
                for one in silent
            ],
        )


def _grouped(text: str, fix: str, places: Sequence[tuple[int, Place]]) -> Concern:
    """Return a concern with the places where it is worst."""
    worst = [place for _, place in sorted(places, key=lambda pair: -pair[0])]
    return Concern(text, fix, "", worst[:_MOST_PLACES], max(0, len(worst) - _MOST_PLACES))


# --- tiles ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """One number of the overview, with a link to its details."""

    label: str
    value: str
    unit: str
    href: str
    note: str = ""
    path: str = ""
    """Of its sparkline; empty if there is none."""
    is_bad: bool = False


def show_flow(request: HTTPConnection, sample: Sample, history: Sequence[Point]) -> list[Tile]:
    """Return the tiles of rates and backlogs, with the last two minutes of each."""
    now, groups = history[-1], list(list_backlogs(request, sample))
    oldest = sample.outbox.oldest_seconds if sample.outbox and not sample.is_log else 0.0
    behind = max((group.behind_seconds for group in groups), default=0.0)
    at_least = "" if all(group.lag_is_exact for group in groups) else "≥ "
    handlers = len(sample.own_groups())
    by = f"by {handlers:,} groups" if handlers > 1 else ""
    lag = f"{at_least}{words.number(now.lag)}"
    rows = "row" if now.waiting == 1 else "rows"
    streams = link(request, "/streams")

    def tile(
        label: str, value: str, unit: str, of: str, note: str = "", waited: float = 0.0
    ) -> Tile:
        path = draw_line([getattr(point, of) for point in history], POINTS)
        href = link(request, "/outbox") if of == "waiting" else streams
        note = f"oldest {words.age(waited)}" if waited else note
        return Tile(label, value, unit, href, note, path, waited > LONG_SECONDS)

    return [
        tile("Outbox waiting", words.number(now.waiting), rows, "waiting", waited=oldest),
        tile("Into the log", words.rate(now.coming), "events/s", "coming"),
        tile("Handled", words.rate(now.handled), "events/s", "handled", by),
        tile("Lag", lag, "unread", "lag", waited=behind),
        tile("In flight", words.number(now.pending), "unacked", "pending"),
    ]


def show_failures(
    request: HTTPConnection, sample: Sample, processes: Sequence[Process]
) -> list[Tile]:
    """Return the tiles of failed messages and of processes."""
    parked = sample.outbox.parked if sample.outbox else None
    letters = sum(sample.letters.values()) if sample.letters is not None else None
    alive = sum(one.is_alive for one in processes)
    gone = len(processes) - alive
    return [
        Tile(
            "Parked in the outbox",
            words.number(parked),
            "row" if parked == 1 else "rows",
            link(request, "/outbox", state="parked"),
            "attempts used up" if parked else "",
            is_bad=bool(parked),
        ),
        Tile(
            "Dead letters",
            words.number(letters),
            "message" if letters == 1 else "messages",
            link(request, "/dead-letters"),
            "failed for good" if letters else "",
            is_bad=bool(letters),
        ),
        Tile(
            "Processes",
            words.number(alive),
            "alive",
            link(request, "/processes"),
            f"{gone:,} silent" if gone else "",
            is_bad=gone > 0,
        ),
    ]


def draw_line(values: Sequence[float | None], points: int) -> str:
    """Return an SVG path from left to right, the newest value at the right edge.

    >>> draw_line([0, 5, 10], points=3)
    'M0.0 26.0L60.0 14.0L120.0 2.0'
    """
    last = values[-points:]
    known = [value for value in last if value is not None]
    if len(known) < 2:
        return ""
    top = max(known) or 1.0
    step = WIDTH / max(points - 1, 1)
    begin = WIDTH - step * (len(last) - 1)
    return "".join(
        f"{'M' if not at or last[at - 1] is None else 'L'}{begin + at * step:.1f}"
        f" {HEIGHT - _MARGIN - value / top * (HEIGHT - 2 * _MARGIN):.1f}"
        for at, value in enumerate(last)
        if value is not None
    )
