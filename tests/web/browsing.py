"""What a browser is without a screen: cookies, redirects, and an application in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx


class Browser:
    """On loopback, as the dashboard expects it."""

    def __init__(
        self,
        app: Any,
        *,
        client: tuple[str, int] = ("127.0.0.1", 5000),
        raise_server_exceptions: bool = True,
        root_path: str = "",
        **settings: Any,
    ) -> None:
        self.app = app
        transport = httpx.ASGITransport(
            app, raise_app_exceptions=raise_server_exceptions, client=client, root_path=root_path
        )
        given = {"base_url": "http://127.0.0.1", "follow_redirects": True, **settings}
        self._client = httpx.AsyncClient(transport=transport, **given)

    @property
    def cookies(self) -> httpx.Cookies:
        return self._client.cookies

    def get(self, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._client.get(path, **options))

    def post(self, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._client.post(path, **options))
