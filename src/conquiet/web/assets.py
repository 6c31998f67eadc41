"""Assets: style, script and icon, from the package itself."""

from __future__ import annotations

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from conquiet.web.rendering import HERE

_SECONDS = 3_600
"""Their addresses carry the version, so that a newer one is asked for at once."""


class Assets(StaticFiles):
    def __init__(self) -> None:
        super().__init__(directory=HERE / "static")

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        if response.status_code == 200:
            response.headers["Cache-Control"] = f"max-age={_SECONDS}"
        return response
