"""Entries of a stream: what lies there, what is pending, and handing it on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conquiet.errors import ConfigError, NotFound
from conquiet.operations.asking import wired
from conquiet.operations.content import LogEntry, shown, time_of
from conquiet.redis.group import GroupStream, Pending
from conquiet.redis.ids import FIRST, LAST, next_after, parse

_PAGE = 500
_STALE_MS = 24 * 3_600_000
"""So long idle, an entry is stale for every lease that anybody would set."""


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """An entry that was delivered and not acked."""

    id: str
    time: str
    consumer: str
    idle_seconds: float
    deliveries: int


def peek(
    client: Any,
    stream: str,
    start: str | None = None,
    limit: int = 10,
    *,
    newest: bool = False,
) -> list[LogEntry]:
    """Entries of a stream from `start` on, or with `newest` back from it; no group moves.

    >>> from conquiet.operations import peek
    >>> _ = client.xadd("orders", {"specversion": "1.0", "id": "1", "type": "sold", "data": "{}"})
    >>> [(entry.event_id, entry.event_type, entry.data) for entry in peek(client, "orders")]
    [('1', 'sold', '{}')]
    """
    key = stream.encode()
    with wired(client, f"stream {stream!r}") as wire:
        wire.call(key, b"XINFO", b"STREAM", key)  # XRANGE finds nothing wrong with no stream
        if newest:
            reply = wire.call(key, b"XREVRANGE", key, start or LAST, FIRST, b"COUNT", limit)
        else:
            reply = wire.call(key, b"XRANGE", key, start or FIRST, LAST, b"COUNT", limit)
    return [shown(stream, entry_id, fields) for entry_id, fields in reply]


def entry(client: Any, stream: str, entry_id: str) -> LogEntry:
    """One entry by its id; raises `NotFound`."""
    for found in peek(client, stream, entry_id, 1):
        if found.id == entry_id:
            return found
    raise NotFound(f"stream {stream!r} has no entry {entry_id}; it may have been trimmed")


def pending(
    client: Any,
    stream: str,
    group: str,
    *,
    min_idle: float = 0.0,
    limit: int = 100,
    consumer: str | None = None,
    after: str | None = None,
) -> list[PendingEntry]:
    """What a group was given and has not acked, the oldest first; idle in seconds.

    `after` is the id of the last entry that was seen: what follows is the next page.
    """
    with wired(client, f"group {group!r} of stream {stream!r}") as wire:
        place = GroupStream(wire, stream, stream, group, consumer or "")
        found: list[PendingEntry] = []
        for row in _pending(place, consumer, next_after(after.encode()) if after else FIRST):
            if row.idle_ms >= min_idle * 1000:
                found.append(_shown(row))
                if len(found) == limit:
                    break
        return found


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim did."""

    ids: tuple[str, ...]
    to: str | None
    """Who has them now; None: they are free for the next who looks for stale entries."""


def claim(
    client: Any,
    stream: str,
    group: str,
    *,
    min_idle: float = 60.0,
    limit: int = 100,
    consumer: str | None = None,
    ids: Sequence[str] = (),
    to: str | None = None,
    dry_run: bool = False,
) -> Claimed:
    """Free what consumers let lie for `min_idle` seconds, so that a living one takes it next.

    Without `to` the entries stay where they are and count as stale, which every worker of the
    group looks for. With `to` they go to that consumer, which reads them when it starts. Either
    way it is no delivery. What is still being worked on would be handled twice: choose `min_idle`
    above the longest handler, or have an inbox.
    """
    if min_idle < 0:
        raise ConfigError(f"min_idle={min_idle}: must be 0 seconds or more")
    with wired(client, f"group {group!r} of stream {stream!r}") as wire:
        place = GroupStream(wire, stream, stream, group, "")
        wanted = {item.encode() for item in ids}
        owners: dict[bytes, list[bytes]] = {}
        count = 0
        for row in _pending(place, consumer):
            if row.idle_ms >= min_idle * 1000 and (not wanted or row.id in wanted):
                owners.setdefault(row.consumer, []).append(row.id)
                count += 1
                if count == limit:
                    break
        done: list[bytes] = []
        for owner, some in owners.items():
            done += some if dry_run else _free(place, owner, some, min_idle, to)
        return Claimed(tuple(item.decode() for item in sorted(done, key=parse)), to)


def _free(
    place: GroupStream, owner: bytes, ids: Sequence[bytes], min_idle: float, to: str | None
) -> list[bytes]:
    """XCLAIM looks at the idle time once more: what was acked or touched meanwhile stays."""
    receiver = owner if to is None else to.encode()
    idle = (b"IDLE", _STALE_MS) if to is None else ()
    done: list[bytes] = place.call(
        b"XCLAIM", place.key, place.group, receiver, round(min_idle * 1000), *ids, *idle, b"JUSTID"
    )
    return done


def _pending(place: GroupStream, consumer: str | None, at: bytes = FIRST) -> Iterator[Pending]:
    """Page by page: filters of the server came with Redis 6.2."""
    of = None if consumer is None else consumer.encode()
    while True:
        page = place.list_pending(at, LAST, _PAGE, of)
        yield from page
        if len(page) < _PAGE:
            return
        at = next_after(page[-1].id)


def _shown(row: Pending) -> PendingEntry:
    return PendingEntry(
        row.id.decode(),
        time_of(row.id),
        row.consumer.decode(errors="backslashreplace"),
        row.idle_ms / 1000,
        row.deliveries,
    )
