"""What bench/spark.py measures against: plain processes that do the least for the same result.

They run in a pool of two processes that is started before anything is timed, as the Python workers
of Spark are.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import hiredis
import psycopg
import redis

_PIPELINE = 1_000
_STEP_SECONDS = 0.02

FIELDS = {
    "specversion": "1.0",
    "id": "018f3a4e-7c1b-7000-8000-%(n)012d",
    "type": "place.order",
    "source": "/shop",
    "subject": "customer-%(n)012d",
    "time": "2026-01-31T12:00:00.000000Z",
    "datacontenttype": "application/json",
    "data": '{"order":"o-%(n)012d","customer":"c-%(n)012d","text":"' + "x" * 90 + '"}',
}
"""An event of about 300 bytes; its number has a fixed width, and so has everything else."""


class Adder:
    """Adds events by XADDs that are ready but for a number, many in a round trip."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port))
        self._reader = hiredis.Reader()
        self._send(_command("SELECT", address.path.strip("/") or "0").encode(), 1)

    def add(self, stream: str, numbers: range) -> None:
        command = _command("XADD", stream, "*", *(part for item in FIELDS.items() for part in item))
        for start in range(0, len(numbers), _PIPELINE):
            some = numbers[start : start + _PIPELINE]
            self._send("".join([command % {"n": n} for n in some]).encode(), len(some))

    def _send(self, packed: bytes, replies: int) -> None:
        self._socket.sendall(packed)
        while replies:
            reply = self._reader.gets()
            if reply is False:
                self._reader.feed(self._socket.recv(1 << 20))
            elif isinstance(reply, Exception):
                raise reply
            else:
                replies -= 1

    def close(self) -> None:
        self._socket.close()


def _command(*parts: str) -> str:
    """A command as Redis wants it; the lengths are those with a number in its place."""
    packed = [f"${len(part % {'n': 0})}\r\n{part}\r\n" for part in parts]
    return f"*{len(parts)}\r\n{''.join(packed)}"


def add(url: str, streams: Sequence[str], first: int, count: int) -> int:
    """So many events, with numbers from `first`, in equal shares one stream after the other."""
    adder = Adder(url)
    for place, stream in enumerate(streams):
        low, high = (first + count * step // len(streams) for step in (place, place + 1))
        adder.add(stream, range(low, high))
    adder.close()
    return count


def produce(url: str, streams: Sequence[str], rate: int, seconds: float) -> tuple[int, float]:
    """Events at a steady rate, in turn to each stream; how many, and in how many seconds."""
    adder = Adder(url)
    share = max(1, round(rate * _STEP_SECONDS / len(streams)))
    steps = round(rate * seconds / (share * len(streams)))
    pause = share * len(streams) / rate
    done, began = 0, time.perf_counter()
    for step in range(steps):
        time.sleep(max(0.0, began + step * pause - time.perf_counter()))
        for stream in streams:
            adder.add(stream, range(done, done + share))
            done += share
    took = time.perf_counter() - began
    adder.close()
    return done, max(took, steps * pause)


def read(url: str, streams: Sequence[str], count: int) -> int:
    """Every entry of the streams, by redis-py with hiredis, so many at a time."""
    found = 0
    with redis.Redis.from_url(url) as client:
        for stream in streams:
            after: Any = "-"
            while entries := client.xrange(stream, min=after, count=count):
                found += len(entries)
                after = b"(" + entries[-1][0]
    return found


def copy_out(url: str, query: str) -> int:
    """The rows of a query by COPY in binary; its blocks are received and dropped."""
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        with cursor.copy(f"COPY ({query}) TO STDOUT (FORMAT binary)".encode()) as copied:
            for _ in copied:
                pass
        return cursor.rowcount
