"""Overview: what flows, what waits, and what needs somebody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from conquiet.web.concerns import concerns
from conquiet.web.rendering import fragment, page
from conquiet.web.tiles import failures, flow

if TYPE_CHECKING:
    from conquiet.web.app import Dashboard

_MOST_GROUPS = 12
_MOST_CONCERNS = 10


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
        flow=flow(request, sample, app.pulse.history),
        trouble=failures(request, sample),
        concerns=found[:_MOST_CONCERNS],
        more_concerns=max(0, len(found) - _MOST_CONCERNS),
        groups=groups[:_MOST_GROUPS],
        more=max(0, len(groups) - _MOST_GROUPS),
        has_broker=app.stores.has_broker,
    )
