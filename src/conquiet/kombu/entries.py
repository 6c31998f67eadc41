"""Entries: messages as they lie in the streams, out of what the server answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A message that was fetched and not handed over yet."""

    queue: str
    stream: str
    id: str
    redelivered: bool
    payload: bytes | None


def of_fetch(reply: list[Any], streams: list[str], queue_of: Callable[[str], str]) -> list[Entry]:
    """Out of the answer of `fetch.lua`: a flag, then four values for each entry."""
    found = []
    for at in range(1, len(reply), 4):
        stream = streams[reply[at] - 1]
        entry, redelivered, payload = reply[at + 1 : at + 4]
        found.append(Entry(queue_of(stream), stream, entry.decode(), bool(redelivered), payload))
    return found


def of_read(reply: Any, queue_of: Callable[[str], str]) -> list[Entry]:
    """Out of the answer of XREADGROUP: a map by RESP3, pairs by RESP2, nothing if none came."""
    found = []
    for key, entries in reply.items() if isinstance(reply, dict) else reply or ():
        stream = key.decode()
        for entry, fields in entries:
            named = dict(zip(fields[::2], fields[1::2], strict=True))
            again, payload = b"n" in named, named.get(b"m")
            found.append(Entry(queue_of(stream), stream, entry.decode(), again, payload))
    return found
