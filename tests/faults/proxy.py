"""A TCP proxy on the loopback that does to connections what networks do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

_CHUNK = 65_536


class Proxy:
    """Forwards to a port until told otherwise. Safe to use from any thread.

    `cut()` ends every connection; `refuse()` also takes no new ones. `delay(seconds)` holds
    every answer back. `mute()` lets requests pass, and no answer ever returns; `half_close()` says
    so: the client reads an end, while its requests are still carried out.
    `lose_replies(n)` lets n requests through and cuts before the answer to each; with `holding`,
    only answers with those bytes count. `heal()` undoes all of it.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._clients: set[socket.socket] = set()
        self._delay = 0.0
        self._is_mute = False
        self._refuses = False
        self._losses = 0
        self._lost_holds = b""
        self._closed = False
        self.accepted = 0
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def connections(self) -> int:
        """How many are open now."""
        with self._lock:
            return len(self._clients)

    # --- faults -----------------------------------------------------------------------------

    def cut(self) -> None:
        with self._lock:
            sockets = list(self._sockets)
        for item in sockets:
            _end(item)

    def half_close(self) -> None:
        with self._lock:
            clients = list(self._clients)
        for item in clients:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_WR)

    def refuse(self) -> None:
        self._refuses = True
        self.cut()

    def delay(self, seconds: float) -> None:
        self._delay = seconds

    def mute(self) -> None:
        self._is_mute = True

    def lose_replies(self, count: int = 1, *, holding: bytes = b"") -> None:
        self._lost_holds = holding
        self._losses = count

    def heal(self) -> None:
        self._delay, self._is_mute, self._refuses, self._losses = 0.0, False, False, 0

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """No connection while it is open."""
        self.refuse()
        try:
            yield
        finally:
            self.heal()

    # --- forwarding -------------------------------------------------------------------------

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            self.accepted += 1
            if self._refuses or self._closed:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
                self._clients.add(client)
            self._start(self._forward, client, server)
            self._start(self._answer, server, client)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        self._pump(client, server, lambda data: True)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        def passes(data: bytes) -> bool:
            if self._losses and self._lost_holds in data:
                self._losses -= 1
                return False
            if self._delay:
                time.sleep(self._delay)
            while self._is_mute and not self._closed:
                time.sleep(0.01)
            return True

        self._pump(server, client, passes)

    def _pump(self, source: socket.socket, target: socket.socket, passes: object) -> None:
        try:
            while data := source.recv(_CHUNK):
                if not passes(data):  # type: ignore[operator]
                    break
                target.sendall(data)
        except OSError:
            pass
        for item in (source, target):
            _end(item)
            with self._lock:
                self._sockets.discard(item)
                self._clients.discard(item)
            item.close()

    def close(self) -> None:
        self._closed = True
        _end(self._server)
        self._server.close()
        self.cut()
        for thread in list(self._threads):
            thread.join(5)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _end(item: socket.socket) -> None:
    with contextlib.suppress(OSError):
        item.shutdown(socket.SHUT_RDWR)
