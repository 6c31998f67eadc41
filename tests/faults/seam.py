"""The seam: in a child process every I/O call of the drivers is counted, and one may be its last.

Nothing in conquiet knows of it. Wrapped are the calls that all paths end in:

- Python's sockets (redis-py, Kombu, the Spark sink, and what writes by an event loop: asyncpg,
  redis.asyncio): connect, send, recv;
- psycopg's waits, of threads and of event loops, through which all of libpq's talk goes, with a
  point in the middle, when the server has answered and the answer is not read; and its close;
- sqlite3's connect, execute, commit, rollback, close; and `flock`.

Calls are numbered per thread, so that a thread that tends leases shifts no number of another. What
passed beside the seam is noticed, not believed: the kernel counts the bytes that each TCP socket
has sent, and SQLite tells which statements it ran (`bypassed`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import sqlite3
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

SIDES = ("before", "half", "after")
_BYTES_SENT = 200  # of struct tcp_info: tcpi_bytes_sent, since Linux 4.19
_MIDDLE = ", sent"
_READABLE = 1  # psycopg.waiting.Ready.R
_VERB = re.compile(rb"\*\d+\r\n\$\d+\r\n([A-Za-z]+)\r\n")


@dataclass(frozen=True)
class Point:
    """One I/O call: the thread that made it, its number there, and what it was."""

    lane: str
    number: int
    label: str
    splits: bool = False
    """Whether half of it can be done: of a send, half of its bytes."""

    @property
    def sides(self) -> tuple[str, ...]:
        return SIDES if self.splits else ("before", "after")


@dataclass(frozen=True)
class Fate:
    """Where to die."""

    lane: str
    number: int
    side: str


class Seam:
    """Counts calls, and kills its process at one of them."""

    def __init__(self, fate: Fate | None = None) -> None:
        self.points: list[Point] = []
        self.bypassed: list[str] = []
        self._fate = fate
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._sent: dict[int, int] = {}
        self._under_way = 0
        self._is_over = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What the harness itself asks of a server is no part of the path."""
        before = self._is_aside
        self._thread.aside = True
        try:
            yield
        finally:
            self._thread.aside = before

    @property
    def _is_aside(self) -> bool:
        return getattr(self._thread, "aside", False)

    def passes(
        self,
        label: str,
        call: Callable[[], Any],
        half: Callable[[], object] | None = None,
        file: int = -1,
    ) -> Any:
        """Make a call, before, amid or after which the process may end."""
        if self._is_aside:
            return call()
        side = self._take(label, half is not None)
        try:
            self._compare(file, label)
            if side == "half" and half is not None:
                half()
            if side in ("before", "half"):
                die()
            with self.aside():
                result = call()
            if side == "after":
                die()
            self._note(file)
            return result
        finally:
            with self._lock:
                self._under_way -= 1

    async def passes_on_loop(
        self, label: str, call: Callable[[], Awaitable[Any]], file: int = -1
    ) -> Any:
        """As `passes`; other tasks of the loop make their calls meanwhile."""
        side = self._take(label, splits=False)
        try:
            self._compare(file, label)
            if side == "before":
                die()
            result = await call()
            if side == "after":
                die()
            self._note(file)
            return result
        finally:
            with self._lock:
                self._under_way -= 1

    def _take(self, label: str, splits: bool) -> str | None:
        lane = re.sub(r"[-\d]+$", "", threading.current_thread().name)
        begins = not label.endswith(_MIDDLE)
        while begins and self._is_over:  # the process ends, and what it has sent is counted
            time.sleep(1.0)
        with self._lock:
            self._under_way += begins
            self._counts[lane] += 1
            number = self._counts[lane]
            self.points.append(Point(lane, number, label, splits))
        fate = self._fate
        is_fatal = fate is not None and (fate.lane, fate.number) == (lane, number)
        return fate.side if fate is not None and is_fatal else None

    # --- what passed beside it ----------------------------------------------------------------

    def ran(self, statement: str) -> None:
        """SQLite says that it runs this."""
        if not self._is_aside:
            self.bypassed.append(f"SQLite ran {statement!r} outside of a counted call")

    def audit(self) -> list[str]:
        """What this process has sent without the seam's knowledge; it sends nothing more."""
        self._is_over = True
        deadline = time.monotonic() + 5.0
        while self._under_way and time.monotonic() < deadline:  # a thread is amid a call
            time.sleep(0.001)
        for name in os.listdir("/proc/self/fd"):
            self._compare(int(name), "the end")
        return self.bypassed

    def _compare(self, file: int, label: str) -> None:
        found = _sent_by(file)
        if found is None:
            return
        inode, sent = found
        if sent != self._sent.get(inode, 0):
            self.bypassed.append(
                f"{sent} bytes were sent on a socket before {label!r}, and"
                f" {self._sent.get(inode, 0)} of them through the seam"
            )
            self._sent[inode] = sent

    def _note(self, file: int) -> None:
        found = _sent_by(file)
        if found is not None:
            self._sent[found[0]] = found[1]

    # --- the drivers --------------------------------------------------------------------------

    def install(self) -> None:
        self._wrap_sockets()
        self._wrap_sqlite()
        if "psycopg" in sys.modules:  # a path that has not imported it by now does not use it
            self._wrap_psycopg()
        lock = fcntl.flock
        fcntl.flock = lambda *given: self.passes("flock", lambda: lock(*given))

    def _wrap_sockets(self) -> None:
        plain = socket.socket
        seam = self

        def sending(name: str) -> None:
            send = getattr(plain, name)

            def wrapped(self: socket.socket, data: Any, *given: Any) -> Any:
                view = memoryview(data).cast("B")
                return seam._on(
                    self,
                    f"{name} {_verbs(view)}",
                    lambda: send(self, data, *given),
                    lambda: send(self, view[: max(1, len(view) // 2)]),
                )

            setattr(plain, name, wrapped)

        def receiving(name: str) -> None:
            receive = getattr(plain, name)

            def wrapped(self: socket.socket, size: Any, *given: Any) -> Any:
                if name == "recv" and given and given[0] & socket.MSG_PEEK:
                    return receive(self, size, *given)  # a look, which takes nothing
                return seam._on(self, name, lambda: receive(self, size, *given))

            setattr(plain, name, wrapped)

        for name in ("send", "sendall"):  # an event loop sends by the first
            sending(name)
        for name in ("recv", "recv_into"):
            receiving(name)
        connect = plain.connect

        def connecting(self: socket.socket, address: Any) -> Any:
            return seam._on(self, "connect", lambda: connect(self, address))

        plain.connect = connecting  # type: ignore[method-assign]

    def _on(
        self,
        item: socket.socket,
        label: str,
        call: Callable[[], Any],
        half: Callable[[], object] | None = None,
    ) -> Any:
        if item.family == socket.AF_UNIX:  # a thread wakes another of the same process
            return call()
        return self.passes(label, call, half, item.fileno())

    def _wrap_psycopg(self) -> None:
        import psycopg
        from psycopg import waiting

        wait, wait_conn, close = waiting.wait, waiting.wait_conn, psycopg.Connection.close

        def waited(gen: Any, fileno: int, *given: Any, **named: Any) -> Any:
            label = f"libpq {getattr(gen, '__name__', 'exchange')}"
            out = gen if self._is_aside else self._with_middle(gen, label + _MIDDLE)
            return self.passes(label, lambda: wait(out, fileno, *given, **named), file=fileno)

        def connected(gen: Any, *given: Any, **named: Any) -> Any:
            made = self.passes("libpq connect", lambda: wait_conn(gen, *given, **named))
            self._note(made.fileno() if hasattr(made, "fileno") else made.socket)
            return made

        def closed(connection: Any) -> None:
            if connection.closed:
                close(connection)
            else:
                self.passes("libpq close", lambda: close(connection), file=connection.fileno())

        wait_async, wait_conn_async = waiting.wait_async, waiting.wait_conn_async

        async def waited_on_loop(gen: Any, fileno: int, *given: Any, **named: Any) -> Any:
            label = f"libpq {getattr(gen, '__name__', 'exchange')}"
            out = self._with_middle(gen, label + _MIDDLE)
            return await self.passes_on_loop(
                label, lambda: wait_async(out, fileno, *given, **named), fileno
            )

        async def connected_on_loop(gen: Any, *given: Any, **named: Any) -> Any:
            made = await self.passes_on_loop(
                "libpq connect", lambda: wait_conn_async(gen, *given, **named)
            )
            self._note(made.fileno() if hasattr(made, "fileno") else made.socket)
            return made

        close_async = psycopg.AsyncConnection.close

        async def closed_on_loop(connection: Any) -> None:
            if connection.closed:
                await close_async(connection)
            else:
                await self.passes_on_loop(
                    "libpq close", lambda: close_async(connection), connection.fileno()
                )

        waiting.wait_async, waiting.wait_conn_async = waited_on_loop, connected_on_loop
        psycopg.AsyncConnection.close = closed_on_loop  # type: ignore[method-assign]
        waiting.wait, waiting.wait_conn = waited, connected
        psycopg.Connection.close = closed  # type: ignore[method-assign]

    def _with_middle(self, gen: Any, label: str) -> Iterator[Any]:
        """A generator of psycopg, with a point where the server has done it, and we do not know."""
        try:
            wants = next(gen)
            ready = yield wants
            while not (ready or 0) & _READABLE:  # it could not send all at once
                wants = gen.send(ready)
                ready = yield wants
            if self._take(label, splits=False) is not None:
                die()
            while True:
                wants = gen.send(ready)
                ready = yield wants
        except StopIteration as end:
            return end.value

    def _wrap_sqlite(self) -> None:
        seam = self

        def counted(kind: type, name: str) -> None:
            plain = getattr(kind.__mro__[1], name)

            def wrapped(self: Any, *given: Any, **named: Any) -> Any:
                label = f"sqlite {name} {_first_words(given)}".strip()
                return seam.passes(label, lambda: plain(self, *given, **named))

            setattr(kind, name, wrapped)

        class CountedCursor(sqlite3.Cursor):
            pass

        class CountedConnection(sqlite3.Connection):
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **named)
                self.set_trace_callback(seam.ran)

            def cursor(self, factory: Any = CountedCursor) -> Any:
                return super().cursor(factory)

        for name in ("execute", "executemany", "executescript"):
            counted(CountedCursor, name)
        for name in ("commit", "rollback", "close", "execute", "executemany", "executescript"):
            counted(CountedConnection, name)
        connect = sqlite3.connect

        def connecting(*given: Any, **named: Any) -> Any:
            named.setdefault("factory", CountedConnection)
            return seam.passes("sqlite connect", lambda: connect(*given, **named))

        sqlite3.connect = sqlite3.dbapi2.connect = connecting


def die() -> None:
    """Now, with nothing flushed, released or said."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def _sent_by(file: int) -> tuple[int, int] | None:
    """The inode of a TCP socket and how many bytes it has sent; None if it is nothing such."""
    try:
        inode = os.fstat(file).st_ino
        with socket.socket(fileno=os.dup(file)) as item:
            if item.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            info = item.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
    return inode, struct.unpack_from("Q", info, _BYTES_SENT)[0]


def _verbs(data: memoryview) -> str:
    words = _VERB.findall(bytes(data[:4096]))
    return " ".join(word.decode() for word in dict.fromkeys(words)) or f"{len(data)} bytes"


def _first_words(given: tuple[Any, ...]) -> str:
    return " ".join(given[0].split()[:3]) if given and isinstance(given[0], str) else ""
