"""Processes: relays and workers, and which of them are alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.errors import ConquietError
from conquiet.operations.history import list_reports
from conquiet.web.chart import WINDOWS
from conquiet.web.pulse import SECONDS, Cached, Sample
from conquiet.web.template import fragment, page

if TYPE_CHECKING:
    from conquiet.operations.presence import Health, Session
    from conquiet.operations.streams import ConsumerInfo
    from conquiet.web.app import Dashboard
    from conquiet.web.stores import Stores

_MOST_WORKERS = 200
_MOST_GROUPS = 4
_SELF = "conquiet-dashboard"


@dataclass(frozen=True)
class Relays:
    """The health answers and database sessions of relays."""

    answers: tuple[Health, ...] = ()
    sessions: tuple[Session, ...] = ()
    trouble: str = ""


def look_at(stores: Stores) -> Cached[Relays]:
    def take() -> Relays:
        from conquiet.operations.presence import check_relays, list_sessions

        answers = tuple(check_relays(stores.relays))
        if not stores.has_database:
            return Relays(answers)
        try:
            found = [one for one in list_sessions(stores.engine) if one.name != _SELF]
        except ConquietError as error:
            return Relays(answers, trouble=str(error))
        return Relays(answers, tuple(found))

    return Cached(take, 2 * SECONDS)


@dataclass(frozen=True)
class Process:
    """A worker or a relay, by its reports to the history, or as a consumer of groups."""

    name: str
    role: str
    is_alive: bool
    seen_seconds: float
    """Since its last report or request."""
    in_flight: int
    groups: tuple[tuple[str, str], ...] = ()
    """Streams and groups that it reads."""


def list_processes(app: Dashboard, sample: Sample) -> list[Process]:
    """Return processes, each once, however many streams it reads; the silent ones first.

    A name of a consumer that is gone, and holds nothing, is none. Consumers of Celery are not
    counted: `celery status` knows them.
    """
    past = app.archive.read(WINDOWS[0])
    found = {
        one.name: Process(one.name, one.role, one.is_alive, one.seconds, one.in_flight)
        for one in list_reports(past.entries, past.now)
    }
    of_name: dict[str, list[tuple[str, str, ConsumerInfo]]] = {}
    for stream, group in sample.own_groups():
        for consumer in group.consumers:
            of_name.setdefault(consumer.name, []).append((stream.name, group.name, consumer))
    for name, reads in of_name.items():
        consumers = [consumer for _, _, consumer in reads]
        known = found.get(name)
        is_alive = any(one.alive for one in consumers) or (known is not None and known.is_alive)
        in_flight = sum(one.pending for one in consumers)
        if is_alive or in_flight or known is not None:
            idle = min(one.idle_seconds for one in consumers)
            found[name] = Process(
                name,
                "worker" if known is None else known.role,
                is_alive,
                idle if known is None else min(idle, known.seen_seconds),
                in_flight,
                tuple((stream, group) for stream, group, _ in reads),
            )
    return sorted(found.values(), key=lambda one: (one.is_alive, -one.in_flight, one.name))


def routes(app: Dashboard) -> list[BaseRoute]:
    return [
        Route("/processes", _processes),
        Route("/live/processes", app.live.endpoint(_part)),
    ]


def _processes(request: Request) -> Response:
    return page(request, "processes.html", "Processes", at="/processes", part=_part(request))


def _part(request: Request) -> str:
    app: Dashboard = request.app
    sample = app.pulse.sample()
    workers = list_processes(app, sample)
    alive = sum(one.is_alive for one in workers)
    return fragment(
        request,
        "processes_part.html",
        workers=workers[:_MOST_WORKERS],
        alive=alive,
        silent=len(workers) - alive,
        more=max(0, len(workers) - _MOST_WORKERS),
        most_groups=_MOST_GROUPS,
        relays=app.relays(),
        has_relay=any("relay" in one.role for one in workers),
        has_broker=app.stores.has_broker,
        trouble=sample.troubles,
    )
