"""Processes: relays and workers, and which of them are alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.errors import ConquietError
from conquiet.web.pulse import SECONDS, Cached
from conquiet.web.template import fragment, page

if TYPE_CHECKING:
    from conquiet.operations.presence import Health, Session
    from conquiet.web.app import Dashboard
    from conquiet.web.stores import Stores

_MOST_WORKERS = 200
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
    workers = [
        (stream, group, consumer)
        for stream, group in sample.groups()
        for consumer in group.consumers
    ]
    workers.sort(key=lambda found: (found[2].alive, -found[2].pending, found[2].name))
    return fragment(
        request,
        "processes_part.html",
        workers=workers[:_MOST_WORKERS],
        more=max(0, len(workers) - _MOST_WORKERS),
        relays=app.relays(),
        named=bool(app.stores.relays),
        has_broker=app.stores.has_broker,
        has_database=app.stores.has_database,
        trouble=sample.troubles,
    )
