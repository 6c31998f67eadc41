"""Retention: trim from a stream only entries that no group, reader or retention period needs.

An entry is needed until every group has acked it, every registered reader has passed it, and it is
older than the retention. Spark reads without a group, so its position is registered:

    conquiet:readers:{orders}      hash: name of the reader → the last entry id it is done with
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import redis

from conquiet.errors import ConfigError
from conquiet.redis.ids import FIRST, LAST, MIN, format, is_valid, next_after, parse
from conquiet.redis.topic import beside
from conquiet.redis.wire import Wire, pairs, server_of

logger = logging.getLogger("conquiet.redis")

_PAGE = 1_000


class Readers:
    """The registered readers of one `stream`, which read it without a consumer group.

    Entries that one of them has not passed are not trimmed, so remove a reader that is gone.

    >>> readers = Readers(client, "orders")
    >>> readers.register("spark/orders")
    >>> readers.advance("spark/orders", "1700000000000-7")
    True
    >>> readers.positions()
    {'spark/orders': '1700000000000-7'}
    >>> readers.remove("spark/orders")
    True
    """

    def __init__(self, client: Any, stream: str) -> None:
        self._wire = client if isinstance(client, Wire) else Wire(client)
        self._key = beside(stream, "conquiet:readers:").encode()

    def register(self, reader: str, position: str = "0-0") -> None:
        """Keep all entries after `position` from being trimmed until the reader advances."""
        if not reader:
            raise ConfigError("a reader needs a name, such as 'spark/orders'")
        _check_id(position)
        self._wire.call(self._key, b"HSET", self._key, reader, position)

    def advance(self, reader: str, position: str) -> bool:
        """Release all entries up to `position`; False if the reader is unknown or not behind it."""
        _check_id(position)
        current = self.positions().get(reader)
        if current is None or parse(position) <= parse(current):
            return False
        self._wire.call(self._key, b"HSET", self._key, reader, position)
        return True

    def remove(self, reader: str) -> bool:
        """Forget a reader; False if it was not registered."""
        return bool(self._wire.call(self._key, b"HDEL", self._key, reader))

    def positions(self) -> dict[str, str]:
        """Return the readers and the last entry id that each is done with."""
        reply = self._wire.call(self._key, b"HGETALL", self._key)
        return {name.decode(): position.decode() for name, position in pairs(reply).items()}


@dataclass(frozen=True, slots=True)
class Trim:
    """How many entries were deleted, or in a dry run would be, and who needs the others."""

    stream: str
    removed: int
    below: str
    """Entries with an id below this one may go."""
    kept_by: str
    """The group or reader that needs the first entry that stays, or the retention."""
    dry_run: bool


def trim_stream(
    client: Any,
    stream: str,
    *,
    keep_seconds: float | None = None,
    exact: bool = False,
    dry_run: bool = False,
) -> Trim:
    """Delete entries that every group has acked and every reader has passed.

    With `keep_seconds`, only those that are older, by their ids and the server's clock. A stream
    without groups and readers is not trimmed, since its first reader will need all of it. Without
    `exact`, Redis deletes whole blocks and keeps up to one block more, which is much cheaper. A
    `dry_run` counts exactly, by reading.
    """
    if keep_seconds is not None and not keep_seconds >= 0:
        raise ConfigError(f"keep_seconds={keep_seconds}: must be 0 seconds or more")
    wire = client if isinstance(client, Wire) else Wire(client)
    below, kept_by = _floor(wire, stream, keep_seconds)
    if below == MIN:
        removed = 0
    elif dry_run:
        removed = _count_below(wire, stream, below)
    else:
        removed = _remove_below(wire, stream, below, exact)
        logger.info("trimmed %d entries of %r below %s", removed, stream, below.decode())
    return Trim(stream, removed, below.decode(), kept_by, dry_run)


def _floor(wire: Wire, stream: str, keep_seconds: float | None) -> tuple[bytes, str]:
    """Return the lowest id that is needed, and what needs it."""
    needs = [(at, f"reader {name}") for name, at in _needed_by_readers(wire, stream).items()]
    needs += [(at, f"group {name}") for name, at in _needed_by_groups(wire, stream).items()]
    if not needs:
        return MIN, "no group or reader has read it yet"
    if keep_seconds is not None:
        seconds, micros = wire.call(stream.encode(), b"TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        oldest = max(0, now_ms - round(keep_seconds * 1000))
        needs.append((format(oldest).encode(), "the retention"))
    return min(needs, key=lambda need: parse(need[0]))


def _needed_by_readers(wire: Wire, stream: str) -> dict[str, bytes]:
    positions = Readers(wire, stream).positions()
    return {name: next_after(at.encode()) for name, at in positions.items()}


def _needed_by_groups(wire: Wire, stream: str) -> dict[str, bytes]:
    key = stream.encode()
    try:
        groups = [pairs(row) for row in wire.call(key, b"XINFO", b"GROUPS", key)]
    except redis.ResponseError as error:
        if "no such key" in str(error).lower():
            return {}
        raise
    needed: dict[str, bytes] = {}
    for group in groups:
        # The position was read before the pending list: entries read in between are above it.
        _, lowest, _, _ = wire.call(key, b"XPENDING", key, group[b"name"])
        needed[group[b"name"].decode()] = lowest or next_after(group[b"last-delivered-id"])
    return needed


def _remove_below(wire: Wire, stream: str, below: bytes, exact: bool) -> int:
    key = stream.encode()
    if server_of(wire, stream).at_least("6.2"):
        how = b"=" if exact else b"~"
        return int(wire.call(key, b"XTRIM", key, b"MINID", how, below))
    # Redis 6.0 has MAXLEN only, which deletes too much if an entry is added meanwhile.
    removed = 0
    while ids := _ids_below(wire, key, FIRST, below):
        removed += int(wire.call(key, b"XDEL", key, *ids))
    return removed


def _count_below(wire: Wire, stream: str, below: bytes) -> int:
    count, start = 0, FIRST
    while ids := _ids_below(wire, stream.encode(), start, below):
        count += len(ids)
        start = next_after(ids[-1])
    return count


def _ids_below(wire: Wire, key: bytes, start: bytes, below: bytes) -> list[bytes]:
    page = wire.call(key, b"XRANGE", key, start, LAST, b"COUNT", _PAGE)
    limit = parse(below)
    return [entry_id for entry_id, _ in page if parse(entry_id) < limit]


def _check_id(position: str) -> None:
    if not is_valid(position):
        raise ConfigError(f"{position!r:.60} is not an entry id such as 1700000000000-0")
