"""An exchange over a socket: one deadline for all its reads and writes, a limit on what is read.

The timeout of a socket holds for one call: a peer that sends a byte now and then is never late.
HTTP connections and request handlers of the standard library take an `ExchangeSocket` in place of
their own socket.
"""

from __future__ import annotations

import io
import socket
import time
from typing import Any


class TooMuchReceived(OSError):
    """The peer sent more than the limit of an exchange."""


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
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)


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
