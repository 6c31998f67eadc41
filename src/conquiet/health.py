"""Serve `/healthz`, `/readyz` and `/metrics` while a relay or a worker works.

A check runs in a thread of its own, one at a time, and its answer is cached: many probes, or a
dependency that hangs, do not cause more checks. Connections are bounded, and a request has one
deadline: slow clients take neither threads nor the place of a probe.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from conquiet.errors import ConfigError
from conquiet.exchange import ExchangeSocket

logger = logging.getLogger("conquiet.health")

FRESH_SECONDS = 2.0
_REST = 10  # a slow check is repeated after ten times its duration at the earliest
_REQUEST_SECONDS = 5.0
_MAX_REQUEST_BYTES = 16 * 1024
_MAX_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds the result of a check."""

    ok: bool
    milliseconds: float
    detail: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self, *, details: bool) -> dict[str, Any]:
        if not details:
            return {"ok": self.ok}
        return {"ok": self.ok, "milliseconds": self.milliseconds, **self.detail}


class Check:
    """Checks one dependency: `look` returns details, or raises if it is unavailable."""

    def __init__(
        self,
        look: Callable[[], Mapping[str, Any] | None],
        *,
        timeout: float,
        fresh: float = FRESH_SECONDS,
    ) -> None:
        self._look = look
        self._timeout = timeout
        self._fresh = fresh
        self._lock = threading.Lock()
        self._answer: Answer | None = None
        self._until = 0.0
        self._done: threading.Event | None = None
        self.looks = 0

    def answer(self) -> Answer:
        """Return the last answer if it is fresh, else a new one within `timeout` seconds."""
        with self._lock:
            if self._answer is not None and time.monotonic() < self._until:
                return self._answer
            if self._done is None:
                self._done = threading.Event()
                self.looks += 1
                threading.Thread(
                    target=self._run, args=(self._done,), name="conquiet-check", daemon=True
                ).start()
            done = self._done
        if not done.wait(self._timeout):
            text = f"no answer within {self._timeout:g} s"
            return Answer(False, round(self._timeout * 1000, 1), {"error": text})
        with self._lock:
            assert self._answer is not None
            return self._answer

    def _run(self, done: threading.Event) -> None:
        began = time.perf_counter()
        try:
            detail: Mapping[str, Any] = self._look() or {}
            ok = True
        except Exception as error:  # noqa: BLE001 - any error means that the dependency is not ready
            ok, detail = False, {"error": f"{type(error).__name__}: {error!s:.300}"}
        taken = round((time.perf_counter() - began) * 1000, 1)
        with self._lock:
            self._answer = Answer(ok, taken, detail)
            rest = _REST * taken / 1000 if ok else 0.0
            self._until = time.monotonic() + max(self._fresh, rest)
            self._done = None
        done.set()


class Health:
    """Answers probes; `alive` returns why the process should be restarted, or None.

    `details` adds counts and errors to `/readyz`; an error may name the host and the user of a
    database.
    """

    def __init__(
        self,
        checks: Mapping[str, Check],
        *,
        alive: Callable[[], str | None],
        metrics: Callable[[], bytes],
        details: bool = False,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._checks = checks
        self._details = details
        self._alive = alive
        self._metrics = metrics
        self._has_begun_stop = False
        self._asks_stopping = is_stopping

    @property
    def _is_stopping(self) -> bool:
        return self._has_begun_stop or self._asks_stopping()

    def begin_stop(self) -> None:
        """Report from now on that the process is not ready."""
        self._has_begun_stop = True

    def respond(self, path: str) -> tuple[int, str, bytes]:
        """Return status, content type and body for a path."""
        if path == "/healthz":
            trouble = self._alive()
            return _json(200 if trouble is None else 503, {"ok": trouble is None, "error": trouble})
        if path == "/readyz":
            answers = {name: check.answer() for name, check in self._checks.items()}
            ready = not self._is_stopping and all(answer.ok for answer in answers.values())
            body = {
                "ready": ready,
                "stopping": self._is_stopping,
                "checks": {
                    name: answer.as_json(details=self._details) for name, answer in answers.items()
                },
            }
            return _json(200 if ready else 503, body)
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", self._metrics()
        return _json(404, {"error": "choose /healthz, /readyz or /metrics"})


class HealthServer:
    """Serves `Health` over HTTP until `close()`; port 0 takes a free one.

    `origin` is the setting that an error names.
    """

    def __init__(self, health: Health, host: str, port: int, origin: str = "the address") -> None:
        class Handler(_Handler):
            pass

        Handler.health = health
        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"{origin}: {host}:{port} cannot be used ({error.strerror}); choose"
                " another HOST:PORT, or off"
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="conquiet-health",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(_REQUEST_SECONDS)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # with the default of 5, a few connections would block a probe

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, bool] = {}
        """Connections, the oldest first, and whether each has still to send its request."""
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; of too many, close the one that has been silent for longest."""
        with self._lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                silent = next((one for one, is_silent in self._open.items() if is_silent), request)
                self._open.pop(silent, None)
                with suppress(OSError):
                    silent.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            is_accepted = len(self._open) < _MAX_CONNECTIONS
            if is_accepted:
                self._open[request] = True
        if is_accepted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def begin_answer(self, request: socket.socket) -> bool:
        """Return whether the connection may be answered, or was closed in favour of another."""
        with self._lock:
            if request not in self._open:
                return False
            self._open[request] = False
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a probe that hangs up without a traceback."""
        logger.debug("a probe from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    health: Health
    server: _Server
    server_version = "conquiet"
    sys_version = ""

    def setup(self) -> None:
        self._accepted = self.request
        self._exchange = ExchangeSocket(self._accepted, max_bytes=_MAX_REQUEST_BYTES)
        self._exchange.begin(_REQUEST_SECONDS)
        self.request = self._exchange
        super().setup()

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if not self.server.begin_answer(self._accepted):
            return
        status, kind, body = self.health.respond(self.path.partition("?")[0])
        self._exchange.begin(_REQUEST_SECONDS)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: probes come every few seconds."""


def _json(status: int, body: Mapping[str, Any]) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(body, default=str).encode()
