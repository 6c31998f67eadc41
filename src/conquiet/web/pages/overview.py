"""Overview: rates, backlogs, failures, and what needs attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.web import words
from conquiet.web.forms import link
from conquiet.web.pulse import POINTS, Point, Sample
from conquiet.web.template import fragment, page

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

LONG_SECONDS = 60.0
"""A wait longer than this is reported."""
_MOST_GROUPS = 12
_MOST_CONCERNS = 10
WIDTH, HEIGHT = 120, 28
_MARGIN = 2
"""Keeps the whole width of the line inside the picture."""


def routes(app: Dashboard) -> list[BaseRoute]:
    return [
        Route("/", _overview),
        Route("/live/overview", app.live.endpoint(_part)),
    ]


def _overview(request: Request) -> Response:
    return page(request, "overview.html", "Overview", at="/", part=_part(request))


def _part(request: Request) -> str:
    app: Dashboard = request.app
    sample = app.pulse.sample()
    found = find_concerns(request, sample)
    groups = sorted(sample.groups(), key=lambda pair: (-pair[1].lag, -pair[1].pending))
    return fragment(
        request,
        "overview_part.html",
        flow=show_flow(request, sample, app.pulse.history),
        trouble=show_failures(request, sample),
        concerns=found[:_MOST_CONCERNS],
        more_concerns=max(0, len(found) - _MOST_CONCERNS),
        groups=groups[:_MOST_GROUPS],
        more=max(0, len(groups) - _MOST_GROUPS),
        has_broker=app.stores.has_broker,
    )


# --- concerns -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Concern:
    """A problem, and what to do about it."""

    text: str
    fix: str
    href: str = ""


def find_concerns(request: HTTPConnection, sample: Sample) -> list[Concern]:
    return [
        *_of_stores(sample),
        *_of_outbox(request, sample),
        *_of_groups(request, sample),
        *_of_letters(request, sample),
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
    if figures.oldest_seconds > LONG_SECONDS:
        yield Concern(
            f"A row of the outbox has waited for {words.age(figures.oldest_seconds)}",
            "Does a relay run? conquiet relay run publishes the outbox.",
            link(request, "/processes"),
        )


def _of_groups(request: HTTPConnection, sample: Sample) -> Iterator[Concern]:
    for stream, group in sample.groups():
        left = [(group.lag or 0, "unread"), (group.pending, "in flight")]
        backlog = [f"{words.plural(n, 'entry', 'entries')} {what}" for n, what in left if n]
        if backlog and not group.alive:
            yield Concern(
                f"Group {group.name} of {stream.name} has no live consumer: {', '.join(backlog)}",
                "Start a worker of this group, or remove the group.",
                link(request, "/group", stream=stream.name, name=group.name),
            )


def _of_letters(request: HTTPConnection, sample: Sample) -> Iterator[Concern]:
    for name, count in (sample.letters or {}).items():
        yield Concern(
            f"{words.plural(count, 'dead letter')} in {name}",
            "See the reasons, fix them, then replay.",
            link(request, "/dead-letters", stream=name),
        )


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
    now, groups = history[-1], sample.groups()
    oldest = sample.outbox.oldest_seconds if sample.outbox else 0.0
    behind = max((group.behind_seconds for _, group in groups), default=0.0)
    at_least = "" if all(group.lag_is_exact for _, group in groups) else "≥ "
    by = f"by {len(groups)} groups" if len(groups) > 1 else ""
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


def show_failures(request: HTTPConnection, sample: Sample) -> list[Tile]:
    """Return the tiles of failed messages and of workers."""
    parked = sample.outbox.parked if sample.outbox else None
    letters = sum(sample.letters.values()) if sample.letters is not None else None
    consumers = [one for _, group in sample.groups() for one in group.consumers]
    gone = sum(not one.alive and one.pending > 0 for one in consumers)
    known = sample.streams is not None
    alive = sum(one.alive for one in consumers) if known else None
    return [
        Tile(
            "Parked in the outbox",
            words.number(parked),
            "row" if parked == 1 else "rows",
            link(request, "/outbox", state="parked"),
            "attempts used up",
            is_bad=bool(parked),
        ),
        Tile(
            "Dead letters",
            words.number(letters),
            "message" if letters == 1 else "messages",
            link(request, "/dead-letters"),
            "failed for good",
            is_bad=bool(letters),
        ),
        Tile(
            "Workers alive",
            words.number(alive),
            f"of {len(consumers)}" if known else "",
            link(request, "/processes"),
            f"{words.plural(gone, 'silent one')} with entries in flight" if gone else "",
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
