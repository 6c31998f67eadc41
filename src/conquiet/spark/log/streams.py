"""Streams of a query: find them by name or pattern, and ask Redis for the state of each."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from conquiet.errors import StoreError
from conquiet.redis.wire import Wire, pairs
from conquiet.spark.log.connection import ask
from conquiet.spark.log.offsets import Position
from conquiet.spark.log.ranges import BEGINNING

logger = logging.getLogger("conquiet.spark")

_AT_ONCE = 1_000
_FIRST_AT_ONCE, _REPLY_BYTES = 32, 16 << 20
"""Streams whose states are asked for first, and about how large later replies may be: XINFO sends
the first and the last entry of a stream with all their data."""
_SCAN_COUNT = 2_000
_GLOB = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream as XINFO describes it; fields that older servers do not report are None."""

    length: int
    first_id: str
    """`0-0` if it is empty."""
    last_id: str
    """The largest id ever added, whether or not the entry still exists."""
    added: int | None = None
    deleted_id: str | None = None
    """The largest id that XDEL ever deleted; trimming does not count."""

    @property
    def removed(self) -> int | None:
        """Count the entries that were ever trimmed or deleted."""
        return None if self.added is None else self.added - self.length

    @property
    def beginning(self) -> Position:
        return Position(BEGINNING, self.removed)

    @property
    def end(self) -> Position:
        return Position(self.last_id, self.added)


class Streams:
    """Finds the streams that a query names, and their states."""

    def __init__(self, client: Any, named: Sequence[str], discovery_seconds: float) -> None:
        self.wire = Wire(client)
        self._client = client
        self._names = [name for name in named if not is_pattern(name)]
        self._patterns = [name for name in named if is_pattern(name)]
        self._discovery_seconds = discovery_seconds
        self._found: list[str] = []
        self._looked_at: float | None = None

    def names(self) -> list[str]:
        """Return all names; patterns are looked up again every `discovery_seconds`."""
        if self._patterns:
            now = time.monotonic()
            if self._looked_at is None or now - self._looked_at >= self._discovery_seconds:
                self._found = self._scan()
                self._looked_at = now
        return sorted({*self._names, *self._found})

    def _scan(self) -> list[str]:
        found: set[bytes] = set()
        try:
            for pattern in self._patterns:
                found.update(
                    self._client.scan_iter(match=pattern, count=_SCAN_COUNT, _type="stream")
                )
        except (redis.RedisError, OSError) as error:
            raise StoreError(f"the streams of Redis cannot be listed: {error}") from error
        names = []
        for key in found:
            try:
                names.append(key.decode())
            except UnicodeDecodeError:
                logger.warning("stream %r is left out: its name is not UTF-8", key)
        return names

    def states(self, names: Iterable[str]) -> dict[str, StreamState]:
        """Return the state of each stream that exists."""
        wanted = list(names)
        states: dict[str, StreamState] = {}
        at_once = _FIRST_AT_ONCE
        while wanted:
            part, wanted = wanted[:at_once], wanted[at_once:]
            keys = [name.encode() for name in part]
            replies = ask(self.wire, [(key, (b"XINFO", b"STREAM", key)) for key in keys])
            for name, reply in zip(part, replies, strict=True):
                if not isinstance(reply, Exception):
                    states[name] = _state(pairs(reply))
                elif "no such key" not in str(reply).lower():
                    raise StoreError(f"stream {name!r} cannot be read: {reply}") from reply
            largest = max(map(_entry_bytes, replies))
            at_once = max(1, min(_AT_ONCE, 16 * at_once, _REPLY_BYTES // (1 + largest)))
        return states


def is_pattern(name: str) -> bool:
    """Return whether a name is a glob pattern of Redis.

    >>> is_pattern("orders:{0}"), is_pattern("orders:*")
    (False, True)
    """
    return not _GLOB.isdisjoint(name)


def _entry_bytes(reply: Any) -> int:
    """Return about how many bytes the first and last entry in a reply have."""
    if isinstance(reply, Exception):
        return 0
    about = pairs(reply)
    entries = (about.get(b"first-entry"), about.get(b"last-entry"))
    return sum(len(item) for entry in entries if entry for item in entry[1] or ())


def _state(about: Mapping[bytes, Any]) -> StreamState:
    first = about.get(b"first-entry")
    added = about.get(b"entries-added")
    deleted = about.get(b"max-deleted-entry-id")
    return StreamState(
        length=int(about[b"length"]),
        first_id=first[0].decode() if first else BEGINNING,
        last_id=about[b"last-generated-id"].decode(),
        added=None if added is None else int(added),
        deleted_id=None if deleted is None else deleted.decode(),
    )
