"""Session: one connection, for one transaction, from its first WATCH to its EXEC.

A WATCH is a promise of the connection it was sent on. If that connection is replaced, by redis-py
or by anybody, the promise is gone, so nothing may be sent on the new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import redis
from hiredis import pack_command

from conquiet.redis.wire import read_reply

pack: Callable[[tuple[Any, ...]], bytes] = pack_command
"""A command as bytes; raises TypeError for what is not text, bytes or a number."""


class Session:
    """A connection taken from its pool; each command is sent once."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._connection = pool.get_connection()
        self._connection.register_connect_callback(self._replaced)
        self.lock = threading.Lock()
        """Held while commands and replies are under way: a lease is renewed by another thread."""
        self.is_watching = False
        self._is_open = True
        self._is_lost = False

    def exchange(self, packed: Sequence[bytes]) -> list[Any]:
        """Send commands; a reply each, in order. One that failed gives its error."""
        self.send(packed)
        return self.receive(len(packed))

    def send(self, packed: Sequence[bytes]) -> None:
        """If it raises, the last byte was not sent, and so the last command cannot take effect."""
        if self._is_lost:
            raise redis.ConnectionError("the connection of a transaction was lost")
        try:
            # No health check: it would reconnect, and forget what is watched.
            self._connection.send_packed_command((b"".join(packed),), check_health=False)
        except BaseException:
            self.drop()
            raise

    def receive(self, count: int) -> list[Any]:
        replies: list[Any] = []
        try:
            for _ in range(count):
                try:
                    replies.append(read_reply(self._connection))
                except redis.ResponseError as error:
                    replies.append(error)
        except BaseException:
            self.drop()
            raise
        return replies

    def drop(self) -> None:
        """End the connection: the server forgets what it watched, we what it had to say."""
        self._is_lost = True
        self.is_watching = False
        self._connection.disconnect()

    def close(self) -> None:
        """Give the connection back to its pool."""
        if not self._is_open:
            return
        self._is_open = False
        if self.is_watching:
            self.drop()
        self._connection.deregister_connect_callback(self._replaced)
        self._pool.release(self._connection)

    def _replaced(self, connection: Any) -> None:
        raise redis.ConnectionError("the connection of a transaction was lost and replaced")
