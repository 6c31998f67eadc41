"""A dashboard behind a real server, in a thread of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from conquiet.testing import eventually


@dataclass(frozen=True)
class Served:
    app: Any
    url: str


@contextmanager
def serving(app: Any) -> Iterator[Served]:
    config = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="dashboard")
    thread.start()
    try:
        eventually(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Served(app, f"http://127.0.0.1:{port}")
    finally:
        if hasattr(app, "live"):
            app.live.stop()
        server.should_exit = True
        thread.join(10)
