"""An exchange over a socket: one deadline for all its reads and writes, a limit on what is read.

The timeout of a socket holds for one call: a peer that sends a byte now and then is never late.
HTTP connections and request handlers of the standard library take an `ExchangeSocket` in place of
their own socket.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from typing import Any, cast


class TooMuchReceived(OSError):
    """The peer sent more than the limit of an exchange."""


def connect(
    host: str, port: int, seconds: float, context: ssl.SSLContext | None = None
) -> socket.socket:
    """Connect to a host, with TLS if there is a context, within `seconds`.

    The addresses of the host share the time: a host may have any number that do not answer, and
    `socket.create_connection` has the whole time for each.
    """
    until = time.monotonic() + seconds
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError(f"{host} has no address")
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        try:
            made = socket.socket(family, kind, protocol)
        except OSError as error:
            failure = error
            continue
        try:
            made.settimeout(_left(until) / (len(addresses) - number))
            made.connect(address)
            break
        except OSError as error:
            made.close()
            failure = error
    else:
        raise failure
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.settimeout(_left(until))
        return made if context is None else context.wrap_socket(made, server_hostname=host)
    except BaseException:
        made.close()
        raise


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def open_http(
    host: str, port: int, seconds: float, context: ssl.SSLContext | None, *, max_bytes: int
) -> http.client.HTTPConnection:
    """Open a connection whose socket is an `ExchangeSocket`: call its `begin` for each request."""
    connected = connect(host, port, seconds, context)
    if context is None:
        opened = http.client.HTTPConnection(host, port)
    else:
        opened = http.client.HTTPSConnection(host, port, context=context)
    opened.sock = cast("Any", ExchangeSocket(connected, max_bytes=max_bytes))
    return opened


class ExchangeSocket:
    """Wraps a connected socket; each `begin` starts an exchange with a deadline of its own."""

    def __init__(self, connected: socket.socket, *, max_bytes: int) -> None:
        self._socket = connected
        self._max_bytes = max_bytes
        self._until = 0.0
        self.received = 0
        """Bytes that the peer has sent in this exchange."""

    def begin(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self.received = 0

    def sendall(self, data: Any) -> None:
        # Not by the socket's own method: with TLS its timeout starts again after each record.
        rest = memoryview(data).cast("B")
        while rest:
            self._wait_no_longer()
            rest = rest[self._socket.send(rest) :]

    def makefile(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        # The file keeps the socket open after `close`, as the file of a plain socket does.
        file = self._socket.makefile("rb", buffering=0)
        return io.BufferedReader(_Reader(self, file))

    def close(self) -> None:
        self._socket.close()

    def read_into(self, file: Any, buffer: Any) -> int:
        self._wait_no_longer()
        count: int = file.readinto(buffer)
        self.received += count
        if self.received > self._max_bytes:
            raise TooMuchReceived(f"more than {self._max_bytes:,} bytes in one exchange")
        return count

    def _wait_no_longer(self) -> None:
        self._socket.settimeout(_left(self._until))


class _Reader(io.RawIOBase):
    def __init__(self, exchange: ExchangeSocket, file: io.RawIOBase | Any) -> None:
        self._exchange = exchange
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._exchange.read_into(self._file, buffer)

    def close(self) -> None:
        self._file.close()
        super().close()
