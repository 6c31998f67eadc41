"""Trim: delete from a log what nobody needs any more, and nothing else (R7).

Needed is what a group has not acked, what a registered reader has not passed, and what is
younger than the retention. Spark reads without a group, so its position is registered:

    conquiet:readers:{orders}      hash: name of the reader → the last entry id it is done with
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import redis

from conquiet.errors import ConfigError
from conquiet.redis.group import pairs
from conquiet.redis.ids import FIRST, LAST, is_valid, next_after, parse
from conquiet.redis.server import server_of
from conquiet.redis.topic import beside
from conquiet.redis.wire import Wire

logger = logging.getLogger("conquiet.redis")

_PAGE = 1_000


# --- readers --------------------------------------------------------------------------------


def register_reader(client: Any, stream: str, reader: str, position: str = "0-0") -> None:
    """Keep everything after `position` from being trimmed, until the reader says it is done."""
    if not reader:
        raise ConfigError("a reader needs a name, such as 'spark/orders'")
    _check_id(position)
    _wire(client).call(_readers_key(stream), b"HSET", _readers_key(stream), reader, position)


def advance_reader(client: Any, stream: str, reader: str, position: str) -> bool:
    """The reader is done with all up to `position`; False if it is not registered or not ahead."""
    _check_id(position)
    current = readers(client, stream).get(reader)
    if current is None or parse(position.encode()) <= parse(current.encode()):
        return False
    _wire(client).call(_readers_key(stream), b"HSET", _readers_key(stream), reader, position)
    return True


def remove_reader(client: Any, stream: str, reader: str) -> bool:
    """Forget a reader; False if it was not registered."""
    return bool(_wire(client).call(_readers_key(stream), b"HDEL", _readers_key(stream), reader))


def readers(client: Any, stream: str) -> dict[str, str]:
    """The registered readers and how far each has come."""
    reply = _wire(client).call(_readers_key(stream), b"HGETALL", _readers_key(stream))
    return {name.decode(): position.decode() for name, position in pairs(reply).items()}


# --- trimming -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trim:
    """What was, or in a dry run would be, deleted, and what keeps the rest."""

    stream: str
    removed: int
    below: str
    """Entries with an id below this one may go."""
    kept_by: str
    """Who needs the first entry that stays."""
    dry_run: bool


def trim_stream(
    client: Any,
    stream: str,
    *,
    keep_seconds: float | None = None,
    exact: bool = False,
    dry_run: bool = False,
) -> Trim:
    """Delete what every group has acked, every reader has passed, and is older than asked.

    A stream without groups and readers is left alone: whoever comes next wants it whole.
    `keep_seconds` reads the age from the entry ids, by the server's clock. Without `exact`,
    whole blocks of the stream go and up to a block more stays, which is much cheaper. A dry
    run counts exactly, by reading.
    """
    if keep_seconds is not None and not keep_seconds >= 0:
        raise ConfigError(f"keep_seconds={keep_seconds}: must be 0 seconds or more")
    wire = _wire(client)
    below, kept_by = _floor(wire, stream, keep_seconds)
    if parse(below) == (0, 0):
        removed = 0
    elif dry_run:
        removed = _count_below(wire, stream, below)
    else:
        removed = _remove_below(wire, stream, below, exact)
        logger.info("trimmed %d entries of %r below %s", removed, stream, below.decode())
    return Trim(stream, removed, below.decode(), kept_by, dry_run)


def _floor(wire: Wire, stream: str, keep_seconds: float | None) -> tuple[bytes, str]:
    """The lowest id that somebody needs, and who that is."""
    needs = [(at, f"reader {name}") for name, at in _needed_by_readers(wire, stream).items()]
    needs += [(at, f"group {name}") for name, at in _needed_by_groups(wire, stream).items()]
    if not needs:
        return b"0-0", "nobody has read it yet"
    if keep_seconds is not None:
        seconds, micros = wire.call(stream.encode(), b"TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        needs.append((b"%d-0" % max(0, now_ms - round(keep_seconds * 1000)), "the retention"))
    return min(needs, key=lambda need: parse(need[0]))


def _needed_by_readers(wire: Wire, stream: str) -> dict[str, bytes]:
    return {name: next_after(at.encode()) for name, at in readers(wire, stream).items()}


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
        # First the position, then the pending: what is read in between is above the position.
        _, lowest, _, _ = wire.call(key, b"XPENDING", key, group[b"name"])
        needed[group[b"name"].decode()] = lowest or next_after(group[b"last-delivered-id"])
    return needed


def _remove_below(wire: Wire, stream: str, below: bytes, exact: bool) -> int:
    key = stream.encode()
    if server_of(wire, stream).at_least("6.2"):
        how = b"=" if exact else b"~"
        return int(wire.call(key, b"XTRIM", key, b"MINID", how, below))
    # Before 6.2 there is only MAXLEN, which deletes too much if an entry is added meanwhile.
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


def _wire(client: Any) -> Wire:
    return client if isinstance(client, Wire) else Wire(client)


def _readers_key(stream: str) -> bytes:
    return beside(stream, "conquiet:readers:").encode()


def _check_id(position: str) -> None:
    if not is_valid(position):
        raise ConfigError(f"{position!r:.60} is not an entry id such as 1700000000000-0")
