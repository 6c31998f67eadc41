"""A real HTTP server on the loopback that takes CloudEvents, or does what servers do to them."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from conquiet.message import Message

HANG_UP = -1
HANG = -2
GRACEFUL_CLOSE = -3
DRIP = -4
CONTINUE_SLOWLY = -5
CONTINUE_FAST = -6
MANY_HEADERS = -7
ENDLESS = {
    DRIP: (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n", b"x", 0.02),
    CONTINUE_SLOWLY: (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02),
    CONTINUE_FAST: (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0.0),
    MANY_HEADERS: (b"HTTP/1.1 200 OK\r\n", b"a: " + b"b" * 60_000 + b"\r\n", 0.0),
}
"""The beginning of an answer, what follows without end, and the pause between."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def do_POST(self) -> None:
        receiver: Receiver = self.server.receiver
        body = self.rfile.read(int(self.headers["content-length"]))
        event_id = unquote(self.headers["ce-id"])
        status = receiver.next_status(event_id)
        receiver.requests.append((event_id, self.path, dict(self.headers.items())))
        time.sleep(receiver.delay)
        if status == HANG:
            receiver.released.wait(30)
        if status == HANG_UP:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if status in ENDLESS:
            begin, more, pause = ENDLESS[status]
            self.wfile.write(begin)
            while not receiver.released.wait(pause):
                self.wfile.write(more)
        if status < 0 and status != GRACEFUL_CLOSE:
            self.close_connection = True
            return
        if 200 <= status < 300 or status == GRACEFUL_CLOSE:
            receiver.arrived.append(_message(self.headers, body))
        self.send_response(204 if status == GRACEFUL_CLOSE else status)
        for name, value in receiver.headers.items():
            self.send_header(name, value)
        if status not in (204, GRACEFUL_CLOSE):
            self.send_header("content-length", "4")
            self.end_headers()
            self.wfile.write(b"said")
        else:
            self.end_headers()
        # Without a word of it in the answer, as servers close connections that were idle.
        self.close_connection = status == GRACEFUL_CLOSE

    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, receiver: Receiver) -> None:
        self.receiver = receiver
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def get_request(self) -> Any:
        connection, address = super().get_request()
        self.connections.add(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that hang up are what these tests are about


class Receiver:
    """`answers` maps the id of a message to the statuses that it gets, the last one for ever."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, list[int]] = {}
        self.headers: dict[str, str] = {}
        self.arrived: list[Message[bytes]] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.delay = 0.0
        self.released = threading.Event()
        self._context = context
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        scheme = "https" if self._context else "http"
        return f"{scheme}://127.0.0.1:{self._port}/events"

    def next_status(self, event_id: str) -> int:
        statuses = self.answers.get(event_id) or self.answers.get("*") or [204]
        return statuses.pop(0) if len(statuses) > 1 else statuses[0]

    def start(self) -> None:
        self._server = _Server(self._port, self)
        if self._context is not None:
            self._server.socket = self._context.wrap_socket(self._server.socket, server_side=True)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for connection in self._server.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _message(headers: Any, body: bytes) -> Message[bytes]:
    attributes = {
        name.lower().removeprefix("ce-"): unquote(value)
        for name, value in headers.items()
        if name.lower().startswith("ce-")
    }
    topic = attributes.pop("topic", None)
    if "content-type" in headers:
        attributes["datacontenttype"] = headers["content-type"]
    return Message(body, attributes, topic=topic)
