"""The replies to a slice: thousands of short ones, which redis-py would look at one by one."""

from __future__ import annotations

from typing import Any

import redis
from hiredis import Reader

from conquiet.redis.connection import Connection

_RECEIVE_BYTES = 1 << 16


def receive(session: Connection, count: int) -> list[Any]:
    """As `Connection.receive`, at a tenth of its price; it owes no other replies than these."""
    socket = session._connection._sock
    reader = Reader(replyError=redis.ResponseError)
    replies: list[Any] = []
    try:
        while len(replies) < count:
            received = socket.recv(_RECEIVE_BYTES)
            if not received:
                raise redis.ConnectionError("Redis closed the connection")
            reader.feed(received)
            while (reply := reader.gets()) is not False:
                replies.append(reply)
    except BaseException:
        session.drop()  # what is still on its way must not be taken for another's reply
        raise
    return replies
