"""Overview: what flows, what waits, and what needs somebody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.web import words
from conquiet.web.advice import advice
from conquiet.web.place import link
from conquiet.web.pulse import POINTS, Point, Pulse, Sample
from conquiet.web.rendering import fragment, page
from conquiet.web.sparkline import line

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

_MOST_GROUPS = 12
_MOST_CONCERNS = 10
_LONG_SECONDS = 60.0
"""What waits for longer than this is worth a word."""


@dataclass(frozen=True)
class Tile:
    """One number, with what it counts and where more of it is told."""

    label: str
    value: str
    unit: str
    note: str = ""
    path: str = ""
    href: str = ""
    is_bad: bool = False


@dataclass(frozen=True)
class Concern:
    """Something that somebody should look at."""

    text: str
    fix: str
    href: str = ""


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
    found = concerns(request, sample)
    groups = sorted(sample.groups(), key=lambda pair: (-pair[1].lag, -pair[1].pending))
    return fragment(
        request,
        "overview_part.html",
        flow=_flow(request, sample, app.pulse),
        trouble=_trouble(request, sample),
        concerns=found[:_MOST_CONCERNS],
        more_concerns=max(0, len(found) - _MOST_CONCERNS),
        groups=groups[:_MOST_GROUPS],
        more=max(0, len(groups) - _MOST_GROUPS),
        has_redis=app.stores.has_redis,
    )


def _flow(request: Request, sample: Sample, pulse: Pulse) -> list[Tile]:
    history = list(pulse.history)
    now = history[-1]

    def path(of: Callable[[Point], float | None]) -> str:
        return line([of(point) for point in history], POINTS)

    groups = sample.groups()
    behind = max((group.behind_seconds for _, group in groups), default=0.0)
    exact = all(group.lag_is_exact for _, group in groups)
    oldest = sample.outbox.oldest_seconds if sample.outbox else 0.0
    streams = link(request, "/streams")
    by = f"by {len(groups)} groups, each for itself" if len(groups) > 1 else ""
    return [
        Tile(
            "Outbox waiting",
            words.number(now.waiting),
            "rows",
            f"oldest {words.age(oldest)}" if oldest else "",
            path(lambda point: point.waiting),
            link(request, "/outbox"),
            oldest > _LONG_SECONDS,
        ),
        Tile(
            *("Into the log", words.rate(now.coming), "events/s", ""),
            *(path(lambda point: point.coming), streams),
        ),
        Tile(
            *("Handled", words.rate(now.handled), "events/s", by),
            *(path(lambda point: point.handled), streams),
        ),
        Tile(
            "Lag",
            words.number(now.lag) if exact else f"≥ {words.number(now.lag)}",
            "unread",
            f"oldest {words.age(behind)}" if behind else "",
            path(lambda point: point.lag),
            streams,
            behind > _LONG_SECONDS,
        ),
        Tile(
            "In hand",
            words.number(now.pending),
            "unacked",
            "",
            path(lambda point: point.pending),
            streams,
        ),
    ]


def _trouble(request: Request, sample: Sample) -> list[Tile]:
    parked = sample.outbox.parked if sample.outbox else None
    letters = sum(sample.letters.values()) if sample.letters is not None else None
    consumers = [one for _, group in sample.groups() for one in group.consumers]
    alive = sum(one.alive for one in consumers)
    gone = [one for one in consumers if not one.alive and one.pending]
    known = sample.streams is not None
    return [
        Tile(
            *("Parked in the outbox", words.number(parked), "rows", "attempts used up", ""),
            *(link(request, "/outbox", state="parked"), bool(parked)),
        ),
        Tile(
            *("Dead letters", words.number(letters), "messages", "given up by consumers", ""),
            *(link(request, "/dead-letters"), bool(letters)),
        ),
        Tile(
            "Workers alive",
            words.number(alive if known else None),
            f"of {len(consumers)}" if known else "",
            f"{words.plural(len(gone), 'silent one')} with entries in hand" if gone else "",
            "",
            link(request, "/processes"),
            bool(gone),
        ),
    ]


def concerns(request: Request, sample: Sample) -> list[Concern]:
    """What is wrong, the worst first, and what mends it."""
    found = [
        Concern(f"{store} does not answer: {why}", advice(why))
        for store, why in sample.troubles.items()
    ]
    if sample.outbox is not None and sample.outbox.parked:
        found.append(
            Concern(
                f"{words.plural(sample.outbox.parked, 'row')} of the outbox used up the attempts",
                "See the last error, mend its cause, then retry.",
                link(request, "/outbox", state="parked"),
            )
        )
    if sample.outbox is not None and sample.outbox.oldest_seconds > _LONG_SECONDS:
        waited = words.age(sample.outbox.oldest_seconds)
        found.append(
            Concern(
                f"A row of the outbox has waited for {waited}",
                "Does a relay run? conquiet relay run publishes the outbox.",
                link(request, "/processes"),
            )
        )
    for stream, group in sample.groups():
        where = link(request, "/group", stream=stream.name, name=group.name)
        if group.lag and not group.alive:
            found.append(
                Concern(
                    f"Nobody reads {stream.name} for group {group.name}:"
                    f" {words.plural(group.lag, 'entry', 'entries')} unread",
                    "Start a worker of this group, or remove the group.",
                    where,
                )
            )
    for name, count in (sample.letters or {}).items():
        found.append(
            Concern(
                f"{words.plural(count, 'dead letter')} in {name}",
                "Look at the reasons, mend them, then replay.",
                link(request, "/dead-letters", stream=name),
            )
        )
    return found
