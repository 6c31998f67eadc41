"""Line: a connection to Redis on which replies are taken as raw bytes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import redis
from hiredis import pack_command

_LEAST_BYTES = 1 << 20
_RECEIVE_BYTES = 1 << 20
_pack: Any = pack_command  # its stub knows commands of one word only


class Line:
    """Sends commands and receives their replies whole, into a buffer that is used again.

    A reply does not say how long it is, and to find out one would have to parse it. So each
    group of commands is followed by a PING with a word that nobody can know, and the replies
    have arrived when the last bytes received are that word.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._connection = pool.get_connection()
        self._socket = self._connection._sock
        self._buffer = bytearray(_LEAST_BYTES)
        word = secrets.token_hex(16).encode()
        self._ping = _pack((b"PING", word))
        self._end = b"$%d\r\n%s\r\n" % (len(word), word)
        self._owed = 0
        """Groups of replies that were not received yet."""
        self._check()

    def _check(self) -> None:
        """The user may PING: without that word no reply would ever end."""
        self._socket.sendall(self._ping)
        self._owed = 1
        said = b""
        while not said.endswith(b"\r\n") or (said[:1] == b"$" and said != self._end):
            said += self._more(self._socket.recv(1024))
        self._owed = 0
        if said != self._end:
            self.close()
            raise redis.ResponseError(said[1:].decode(errors="replace").strip())

    def send(self, commands: Sequence[Sequence[bytes | int]]) -> None:
        packed = [_pack(tuple(command)) for command in commands]
        self._owed += 1
        self._socket.sendall(b"".join([*packed, self._ping]))

    def receive(self) -> memoryview:
        """The replies to the oldest group; the bytes are good until the next call."""
        used = 0
        end = self._end
        while True:
            if len(self._buffer) - used < _RECEIVE_BYTES:
                self._grow(used)
            with memoryview(self._buffer) as view:
                used += self._more(self._socket.recv_into(view[used:]))
            if used >= len(end) and self._buffer[used - len(end) : used] == end:
                self._owed -= 1
                return memoryview(self._buffer)[: used - len(end)]

    def _grow(self, used: int) -> None:
        # A new one: arrays may still look at the old.
        grown = bytearray(2 * len(self._buffer))
        grown[:used] = self._buffer[:used]
        self._buffer = grown

    @staticmethod
    def _more(received: Any) -> Any:
        if not received:
            raise redis.ConnectionError("Redis closed the connection")
        return received

    def close(self) -> None:
        """Give the connection back; with replies still to come it is of no use to anybody."""
        if self._owed:
            self._connection.disconnect()
        self._pool.release(self._connection)
