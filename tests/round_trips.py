"""Count what clients ask of their servers: statements or commands, and round trips.

PostgreSQL is reached by a proxy that reads the client's half of the protocol. What it counts does
not depend on the moment at which bytes arrive:

- a statement is a Query or an Execute message;
- a round trip ends with a Query, a Sync or a Flush: from here on the server owes its answers. In a
  pipeline psycopg reads them later, so that it may wait less often.

Of Redis, and of whatever else talks by Python's sockets, the calls of this process are counted: a
command is one array of RESP, and a round trip is a read after a write on the same connection.
SQLite has no round trips; it tells which statements it runs.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Engine, event

from tests.faults.proxy import Proxy

_REQUESTS_OF_ENCRYPTION = (80877103, 80877104)  # SSLRequest, GSSENCRequest


@dataclass
class Count:
    """What was asked since the beginning."""

    asked: int = 0
    """Statements or commands."""
    trips: int = 0

    def since(self, earlier: Count) -> Count:
        return Count(self.asked - earlier.asked, self.trips - earlier.trips)

    def copy(self) -> Count:
        return Count(self.asked, self.trips)


class PostgresCounter(Proxy):
    """Passes connections to a PostgreSQL server on, and counts."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self.count = Count()
        self._counting = threading.Lock()
        super().__init__(self._parts.port or 5432, self._parts.hostname or "127.0.0.1")

    @property
    def url(self) -> str:
        user = self._parts.netloc.rpartition("@")[0]
        return urlunsplit(self._parts._replace(netloc=f"{user}@127.0.0.1:{self.port}"))

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        left = b""
        has_started = is_open = False

        def passes(data: bytes) -> bool:
            nonlocal left, has_started, is_open
            left += data
            while len(left) >= 5:
                if not has_started:  # the first messages have no kind
                    size, version = struct.unpack_from("!ii", left)
                    has_started = version not in _REQUESTS_OF_ENCRYPTION
                else:
                    size = 1 + struct.unpack_from("!i", left, 1)[0]
                    if len(left) < size:
                        break
                    is_open = self._note(left[:1], is_open)
                left = left[size:]
            return True

        self._pump(client, server, passes)

    def _note(self, kind: bytes, is_open: bool) -> bool:
        """Count a message; return whether the server need not answer it yet."""
        ends = kind in (b"Q", b"S", b"H")
        with self._counting:
            self.count.asked += kind in (b"Q", b"E")
            self.count.trips += ends and (is_open or kind == b"Q")
        return not ends


class SocketCounter:
    """Counts commands of Redis that this process sends, and its round trips."""

    def __init__(self) -> None:
        self.count = Count()
        self._asking: WeakSet[socket.socket] = WeakSet()
        self._begun: WeakKeyDictionary[socket.socket, bytes] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def note_sent(self, item: socket.socket, data: Any) -> None:
        with self._lock:
            commands, self._begun[item] = _take_commands(self._begun.get(item, b"") + bytes(data))
            self.count.asked += commands
            self._asking.add(item)

    def note_read(self, item: socket.socket) -> None:
        with self._lock:
            if item in self._asking:
                self._asking.discard(item)
                self.count.trips += 1


_LENGTH = re.compile(rb"[*$](\d+)\r\n")


def _take_commands(data: bytes) -> tuple[int, bytes]:
    """Count the whole commands in what a client sends; return also what is behind them."""
    commands = begin = 0
    while (head := _LENGTH.match(data, begin)) is not None:
        at = head.end()
        for _ in range(int(head[1])):
            argument = _LENGTH.match(data, at)
            at = len(data) + 1 if argument is None else argument.end() + int(argument[1]) + 2
        if at > len(data):
            break
        commands, begin = commands + 1, at
    return commands, data[begin:]


@contextmanager
def count_sockets(port: int) -> Iterator[SocketCounter]:
    """Count on all connections of this process to a Redis on this port, in this block."""
    counter = SocketCounter()
    names = ("send", "sendall", "recv", "recv_into")
    plain = {name: getattr(socket.socket, name) for name in names}

    def is_counted(item: socket.socket) -> bool:
        try:
            return item.family == socket.AF_INET and item.getpeername()[1] == port
        except OSError:
            return False

    def sending(name: str) -> Any:
        def send(self: socket.socket, data: Any, *given: Any) -> Any:
            if is_counted(self):
                counter.note_sent(self, data)
            return plain[name](self, data, *given)

        return send

    def reading(name: str) -> Any:
        def read(self: socket.socket, size: Any, *given: Any) -> Any:
            got = plain[name](self, size, *given)
            is_look = name == "recv" and given and given[0] & socket.MSG_PEEK
            if got and not is_look and is_counted(self):
                counter.note_read(self)
            return got

        return read

    for name in plain:
        setattr(socket.socket, name, (sending if "send" in name else reading)(name))
    try:
        yield counter
    finally:
        for name in plain:
            delattr(socket.socket, name)  # the class of C below has its own


@contextmanager
def count_statements(engine: Engine) -> Iterator[Count]:
    """Count the statements that SQLite runs for new connections of an engine."""
    count = Count()

    def trace(connection: Any, record: object) -> None:
        def note(statement: str) -> None:
            count.asked += 1

        connection.set_trace_callback(note)

    event.listen(engine, "connect", trace)
    try:
        yield count
    finally:
        event.remove(engine, "connect", trace)
