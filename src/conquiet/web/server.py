"""The server of `conquiet dashboard`: listens, reports its port, ends on a signal."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from urllib.parse import urlsplit

import uvicorn

from conquiet.errors import ConfigError
from conquiet.web.app import Dashboard

_GRACE_SECONDS = 3


def serve(
    app: Dashboard, host: str, port: int, public_url: str, on_start: Callable[[int], object]
) -> None:
    """Serve until SIGTERM or SIGINT; `on_start` is called with the port when it listens."""
    listening = _listen(host, port)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # a line per request, and one of them would hold the token
        proxy_headers=False,  # `Header` decides which proxies are trusted
        server_header=False,
        root_path=urlsplit(public_url).path.rstrip("/"),
        timeout_graceful_shutdown=_GRACE_SECONDS,
        lifespan="on",
    )
    with listening:
        _Server(config, app, on_start).run(sockets=[listening])


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, app: Dashboard, on_start: Callable[[int], object]
    ) -> None:
        super().__init__(config)
        self._dashboard = app
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and not self.should_exit:
            self._on_start(int(sockets[0].getsockname()[1]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._dashboard.live.stop()  # else the server would wait for pages that are open
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but do not raise them again: the exit code is 0."""
        kinds = (signal.SIGINT, signal.SIGTERM)
        former = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in former.items():
                signal.signal(kind, handler)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be used ({error.strerror}); choose another --host or --port"
        ) from None
    return made
