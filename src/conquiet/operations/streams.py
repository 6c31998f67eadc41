"""Streams: their length, groups, readers and entries; claiming pending entries, idle consumers.

Needs commands of Redis 6.0 only; figures that newer servers report themselves (lag, entries added)
are used where they exist. In a cluster, each stream is asked on the node that holds it.

Redis has no command for a part of an entry: scripts leave out what is not shown, so that entries of
megabytes do not travel with every look at a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from conquiet.errors import ConfigError, ConquietError, InvalidMessage, NotFound, StoreError
from conquiet.operations.text import as_text, moment
from conquiet.redis.entry import from_fields
from conquiet.redis.group import IDLE_SECONDS, GroupStream, Pending
from conquiet.redis.ids import FIRST, LAST, next_after, parse
from conquiet.redis.topic import beside
from conquiet.redis.wire import Command, Wire, pairs

LEASE_SECONDS = 60.0
"""A consumer without a request for so long counts as gone, unless it has stored its own lease."""
COUNTED = 10_000
"""Where the server does not know a lag it is counted, up to here."""

_GIVEN_BACK = b"~back"
"""Holds entries that consumers of `conquiet.kombu` gave back: see `conquiet.kombu.layout`."""
_MISSING = ("no such key", "nogroup")
_PAGE = 1_000
_PENDING_PAGE = 500
_AT_ONCE = 200
_STALE_MS = 24 * 3_600_000
"""Idle for so long, an entry is stale for every lease in use."""

# KEYS: a stream. Returns XINFO STREAM, of the first and the last entry the ids alone.
_ABOUT = b"""
local about = redis.call('XINFO', 'STREAM', KEYS[1])
for at = 1, #about, 2 do
  if type(about[at + 1]) == 'table' then about[at + 1] = {about[at + 1][1]} end
end
return about
"""
# KEYS: a stream. ARGV: XRANGE or XREVRANGE, start, end, count; how many fields of an entry, and how
# many bytes of a name or a value, are wanted. Reads one entry after the other, to hold few at once.
_PARTS = b"""
local command, at, last = ARGV[1], ARGV[2], ARGV[3]
local found, previous = {}, nil
for _ = 1, tonumber(ARGV[4]) do
  local page = redis.call(command, KEYS[1], at, last, 'COUNT', previous and 2 or 1)
  local entry = page[#page]
  if not entry or entry[1] == previous then break end
  local fields = {}
  for place = 1, math.min(#entry[2], 2 * tonumber(ARGV[5])) do
    fields[place] = string.sub(entry[2][place], 1, tonumber(ARGV[6]))
  end
  found[#found + 1] = {entry[1], fields}
  at, previous = entry[1], entry[1]
end
return found
"""
# KEYS: a stream. ARGV: how many fields of an entry, and how many bytes of a name or a value, are
# wanted; ids of entries. Returns those that are there.
_CHOSEN = b"""
local found = {}
for at = 3, #ARGV do
  for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[at], ARGV[at])) do
    local fields = {}
    for place = 1, math.min(#entry[2], 2 * tonumber(ARGV[1])) do
      fields[place] = string.sub(entry[2][place], 1, tonumber(ARGV[2]))
    end
    found[#found + 1] = {entry[1], fields}
  end
end
return found
"""
# KEYS: a stream, and the leases beside it. ARGV: a group, how many entries it may have in flight,
# the last entry it was delivered, and fields of leases. Returns 1 if the group was removed.
_REMOVE_GROUP = b"""
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local found = {}
  for at = 1, #row, 2 do found[row[at]] = row[at + 1] end
  if found['name'] == ARGV[1] then
    if found['pending'] > tonumber(ARGV[2]) or found['last-delivered-id'] ~= ARGV[3] then
      return 0
    end
    redis.call('XGROUP', 'DESTROY', KEYS[1], ARGV[1])
    if #ARGV > 3 then redis.call('HDEL', KEYS[2], unpack(ARGV, 4)) end
    return 1
  end
end
return 0
"""
_FIELDS = 200


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A consumer of a group: a worker, or a relay of an outbox in Redis."""

    name: str
    pending: int
    idle_seconds: float
    """Since its last request."""
    inactive_seconds: float | None
    """Since it last received an entry (Redis 7.2 and later)."""
    lease_seconds: float
    alive: bool
    """Whether its last request was within its lease."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A consumer group and its position."""

    name: str
    consumers: tuple[ConsumerInfo, ...]
    pending: int
    lag: int
    """Entries that were never delivered to it."""
    lag_is_exact: bool
    """If false, the lag is at least this many."""
    behind_seconds: float
    """Age of the oldest entry that was never delivered; 0 if there is none."""
    last_delivered: str
    oldest_pending: str | None
    oldest_pending_seconds: float
    """Since that entry was added."""

    @property
    def alive(self) -> int:
        return sum(consumer.alive for consumer in self.consumers)


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """A reader without a group, such as a Spark job, and the last entry it has processed."""

    name: str
    position: str
    lag: int
    lag_is_exact: bool
    behind_seconds: float


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream, its groups and its registered readers."""

    name: str
    length: int
    first_id: str | None
    last_id: str | None
    last_time: str
    """When the last entry was added; empty if there is none."""
    added: int | None
    """Entries ever added (Redis 7.0 and later)."""
    bytes: int | None
    """Memory that it occupies, as the server estimates."""
    groups: tuple[GroupInfo, ...]
    readers: tuple[ReaderInfo, ...]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of a stream."""

    stream: str
    id: str
    time: str
    """When it was added, by the server's clock; empty if its id holds no time."""
    event_id: str
    event_type: str
    source: str
    attributes: Mapping[str, str]
    """The attributes of a CloudEvent; the fields of any other entry."""
    data: str
    data_is_base64: bool
    """Whether the data is not UTF-8 text."""
    is_event: bool
    """Whether it is a CloudEvent."""


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """An entry that was delivered and not acked."""

    id: str
    time: str
    consumer: str
    idle_seconds: float
    deliveries: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """The entries that a claim freed."""

    ids: tuple[str, ...]
    to: str | None
    """The consumer that holds them now; None: the next worker that looks for stale entries does."""


@dataclass(frozen=True, slots=True)
class CeleryQueue:
    """A queue of Celery or Kombu on Redis Streams, all its priorities together."""

    prefix: str
    """The `global_keyprefix` of the application."""
    name: str
    ready: int
    in_flight: int
    behind_seconds: float
    """Age of the oldest message that no consumer has had."""
    alive: int
    """Consumers that read it: one for each process of a worker."""
    dead: int
    """Consumers that are gone and hold messages; others take them over."""
    streams: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IdleConsumer:
    """A consumer of a group that holds nothing, and has not read for long."""

    stream: str
    group: str
    name: str


# --- streams --------------------------------------------------------------------------------


def survey(client: Any, pattern: str = "*") -> list[StreamInfo]:
    """Describe all streams whose names match a glob pattern, by name.

    >>> from conquiet.operations import streams
    >>> streams.survey(client, "payments*")
    []
    """
    with open_wire(client, f"streams {pattern!r}") as wire:
        names = names_of(wire, pattern)
        return [
            found
            for at in range(0, len(names), _AT_ONCE)
            for found in _describe(wire, names[at : at + _AT_ONCE])
        ]


def describe(client: Any, name: str) -> StreamInfo:
    """Describe one stream; raise `NotFound` if there is none of this name."""
    with open_wire(client, f"stream {name!r}") as wire:
        wire.call(name.encode(), b"EVAL", _ABOUT, 1, name)  # raises if it is no stream
        for found in _describe(wire, [name]):
            return found
    raise NotFound(f"stream {name!r}: does not exist; conquiet streams list shows all")


_INTERNAL = re.compile(r"conquiet:(kombu:q:\d|again):")
_OF_KOMBU = re.compile(r"(?P<prefix>.*?)conquiet:kombu:q:\d:(?P<queue>.*)", re.DOTALL)


def is_internal(name: str) -> bool:
    """Return whether a stream belongs to a queue of Celery, or holds what a group tries again.

    >>> is_internal("conquiet:kombu:q:0:celery"), is_internal("conquiet:again:{orders}:billing")
    (True, True)
    >>> is_internal("orders"), is_internal("shop:conquiet:kombu:dead:celery")
    (False, False)
    """
    return _INTERNAL.search(name) is not None


def list_celery_queues(found: Iterable[StreamInfo]) -> list[CeleryQueue]:
    """Put together what streams of `conquiet.kombu` tell of each queue, by name.

    A queue has a stream for each priority; others are left out. An entry is deleted when it is
    acked, so what is not in flight is ready.
    """
    queues: dict[tuple[str, str], list[StreamInfo]] = {}
    for stream in found:
        if match := _OF_KOMBU.fullmatch(stream.name):
            queues.setdefault((match["prefix"], match["queue"]), []).append(stream)
    return [_celery_queue(*names, streams) for names, streams in sorted(queues.items())]


def _celery_queue(prefix: str, name: str, streams: Sequence[StreamInfo]) -> CeleryQueue:
    groups = [group for stream in streams for group in stream.groups]
    consumers = [one for group in groups for one in group.consumers]
    readers = [one for one in consumers if one.name != _GIVEN_BACK.decode()]
    in_flight = sum(one.pending for one in readers)
    silent = {one.name for one in readers if not one.alive and one.pending}
    return CeleryQueue(
        prefix,
        name,
        max(0, sum(stream.length for stream in streams) - in_flight),
        in_flight,
        max((group.behind_seconds for group in groups), default=0.0),
        len({one.name for one in readers if one.alive}),
        len(silent),
        tuple(stream.name for stream in streams),
    )


def names_of(wire: Wire, pattern: str = "*", kind: bytes = b"stream") -> list[str]:
    """List names of streams that match a pattern, or of keys of another kind.

    Names that are not UTF-8 are left out.
    """
    nodes = [wire.client]
    if wire.is_cluster:
        nodes = [wire.client.get_redis_connection(node) for node in wire.client.get_primaries()]
    found: set[str] = set()
    for each in map(Wire, nodes):
        for keys in _scan(each, pattern, kind):
            found.update(_names(keys))
        each.close()
    return sorted(found)


def _scan(wire: Wire, pattern: str, kind: bytes) -> Iterator[Sequence[bytes]]:
    at: int | bytes = 0
    while True:
        at, keys = wire.call(b"", b"SCAN", at, b"MATCH", pattern, b"COUNT", _PAGE, b"TYPE", kind)
        yield keys
        if int(at) == 0:
            return


def _names(keys: Sequence[bytes]) -> Iterator[str]:
    for key in keys:
        try:
            yield key.decode()
        except UnicodeDecodeError:
            continue


def _describe(wire: Wire, names: Sequence[str]) -> Iterator[StreamInfo]:
    now = _now_ms(wire, names[0]) if names else 0
    first = _ask(
        wire,
        [
            (name, command)
            for name in names
            for command in (
                (b"EVAL", _ABOUT, 1, name),
                (b"XINFO", b"GROUPS", name),
                (b"MEMORY", b"USAGE", name),
                (b"HGETALL", beside(name, "conquiet:readers:")),
                (b"HGETALL", beside(name, "conquiet:leases:")),
            )
        ],
    )
    for name in names:
        about, rows, size, readers, leases = (next(first) for _ in range(5))
        if isinstance(about, Exception):
            if "no such key" in str(about).lower():
                continue  # deleted meanwhile
            raise about
        whole = pairs(about)
        place = _Survey(wire, name, whole, now, pairs(_or(leases, ())))
        yield StreamInfo(
            name,
            place.length,
            _text(place.first),
            _text(place.last),
            moment(parse(place.last)[0]) if place.last else "",
            whole.get(b"entries-added"),
            _or(size, None),
            tuple(place.groups([pairs(row) for row in _or(rows, ())])),
            tuple(place.readers(pairs(_or(readers, ())))),
        )


class _Survey:
    """Describes one stream: its groups, consumers and readers."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        about: Mapping[bytes, Any],
        now: float,
        leases: Mapping[bytes, Any],
    ) -> None:
        self.name = name
        self.length = int(about[b"length"])
        self.first = _id(about.get(b"first-entry"))
        self.last = _id(about.get(b"last-entry"))
        self._wire = wire
        self._now = now
        self._leases = leases

    def groups(self, rows: Sequence[Mapping[bytes, Any]]) -> Iterator[GroupInfo]:
        replies = _ask(
            self._wire,
            [
                (self.name, command)
                for row in rows
                for command in (
                    (b"XINFO", b"CONSUMERS", self.name, row[b"name"]),
                    (b"XPENDING", self.name, row[b"name"]),
                )
            ],
        )
        for row in rows:
            consumers, pending = next(replies), next(replies)
            if isinstance(consumers, Exception) or isinstance(pending, Exception):
                continue  # the group was destroyed meanwhile
            last = row[b"last-delivered-id"]
            lag, is_exact = self._lag(last, row.get(b"lag"))
            oldest = pending[1]
            yield GroupInfo(
                _plain(row[b"name"]),
                tuple(
                    self._consumer(row[b"name"], about)
                    for about in map(pairs, consumers)
                    if about[b"name"] != _GIVEN_BACK
                ),
                int(pending[0]),
                lag,
                is_exact,
                self._behind(last) if lag else 0.0,
                last.decode(),
                _text(oldest),
                self._age(oldest) if oldest else 0.0,
            )

    def readers(self, positions: Mapping[bytes, bytes]) -> Iterator[ReaderInfo]:
        for name, position in sorted(positions.items()):
            lag, is_exact = self._lag(position, None)
            behind = self._behind(position) if lag else 0.0
            yield ReaderInfo(_plain(name), position.decode(), lag, is_exact, behind)

    def _consumer(self, group: bytes, row: Mapping[bytes, Any]) -> ConsumerInfo:
        place = GroupStream(self._wire, self.name, self.name, _plain(group), "")
        stored_ms = self._leases.get(place.lease_field(row[b"name"]))
        lease = int(stored_ms) / 1000 if stored_ms is not None else LEASE_SECONDS
        idle, inactive = row[b"idle"] / 1000, row.get(b"inactive")
        return ConsumerInfo(
            _plain(row[b"name"]),
            int(row[b"pending"]),
            idle,
            inactive / 1000 if inactive is not None and inactive >= 0 else None,
            lease,
            idle < lease,
        )

    def _lag(self, position: bytes, known: int | None) -> tuple[int, bool]:
        """Count the entries after a position, and whether the count is exact."""
        if self.first is None or self.last is None or parse(position) >= parse(self.last):
            return 0, True
        if known is not None:
            return known, True
        if parse(position) < parse(self.first):
            return self.length, True
        count, at = 0, next_after(position)
        while count < COUNTED:
            page = range_parts(self._wire, self.name, at, LAST, _PAGE, max_fields=0)
            count += len(page)
            if len(page) < _PAGE:
                return count, True
            at = next_after(page[-1][0])
        return count, False

    def _behind(self, position: bytes) -> float:
        """Return the age of the first entry after a position."""
        page = range_parts(self._wire, self.name, next_after(position), LAST, 1, max_fields=0)
        return self._age(page[0][0]) if page else 0.0

    def _age(self, entry_id: bytes) -> float:
        return max(0.0, round((self._now - parse(entry_id)[0]) / 1000, 3))


def _ask(wire: Wire, commands: Sequence[tuple[str, Command]]) -> Iterator[Any]:
    """Return the replies in order, errors among them; raise if the server does not answer."""
    if not commands:
        return iter(())
    replies = wire.send([(name.encode(), command) for name, command in commands])
    for reply in replies:
        if isinstance(reply, (redis.ConnectionError, redis.TimeoutError, OSError)):
            raise reply
    return iter(replies)


def _or(reply: Any, otherwise: Any) -> Any:
    """Replace an error: an ACL or a managed server may forbid one of the commands."""
    return otherwise if isinstance(reply, Exception) else reply


def _now_ms(wire: Wire, name: str) -> float:
    seconds, micros = wire.call(name.encode(), b"TIME")
    return int(seconds) * 1000 + int(micros) / 1000


def _id(entry: Any) -> bytes | None:
    return entry[0] if entry else None


def _text(entry_id: bytes | None) -> str | None:
    return entry_id.decode() if entry_id else None


def _plain(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


# --- entries --------------------------------------------------------------------------------


def peek(
    client: Any,
    stream: str,
    start: str | None = None,
    limit: int = 10,
    *,
    newest: bool = False,
    max_bytes: int | None = None,
) -> list[LogEntry]:
    """Read entries of a stream from `start` on, or with `newest` back from it; no group moves.

    With `max_bytes`, Redis sends no more than so many bytes of each field: for lists.

    >>> from conquiet.operations import streams
    >>> _ = client.xadd("orders", {"specversion": "1.0", "id": "1", "type": "sold", "data": "{}"})
    >>> [(entry.event_id, entry.event_type, entry.data) for entry in streams.peek(client, "orders")]
    [('1', 'sold', '{}')]
    """
    key = stream.encode()
    with open_wire(client, f"stream {stream!r}") as wire:
        wire.call(key, b"EVAL", _ABOUT, 1, key)  # XRANGE does not report a missing stream
        first, last = (start or LAST, FIRST) if newest else (start or FIRST, LAST)
        if max_bytes is not None:
            reply = range_parts(
                *(wire, stream, first, last, limit), newest=newest, max_bytes=max_bytes
            )
        else:
            command = b"XREVRANGE" if newest else b"XRANGE"
            reply = wire.call(key, command, key, first, last, b"COUNT", limit)
    return [decode(stream, entry_id, fields) for entry_id, fields in reply]


def range_parts(
    wire: Wire,
    stream: str,
    first: bytes | str,
    last: bytes | str,
    count: int,
    *,
    newest: bool = False,
    max_fields: int = _FIELDS,
    max_bytes: int = 0,
) -> list[tuple[bytes, list[bytes]]]:
    """Read a range as XRANGE or XREVRANGE does, but only the beginnings of the fields."""
    command = b"XREVRANGE" if newest else b"XRANGE"
    found: list[tuple[bytes, list[bytes]]] = wire.call(
        stream.encode(),
        *(b"EVAL", _PARTS, 1, stream, command, first, last, count, max_fields, max_bytes),
    )
    return found


def read_entry(client: Any, stream: str, entry_id: str) -> LogEntry:
    """Read one entry by its id; raise `NotFound` if there is none."""
    for found in peek(client, stream, entry_id, 1):
        if found.id == entry_id:
            return found
    raise NotFound(f"stream {stream!r} has no entry {entry_id}; it may have been trimmed")


def read_entries(
    client: Any, stream: str, ids: Sequence[str], *, max_bytes: int
) -> dict[str, LogEntry]:
    """Read the entries of these ids that are there, by id: `max_bytes` of each field at most."""
    if not ids:
        return {}
    with open_wire(client, f"stream {stream!r}") as wire:
        key = stream.encode()
        reply = wire.call(key, b"EVAL", _CHOSEN, 1, key, _FIELDS, max_bytes, *ids)
    found = [decode(stream, entry_id, fields) for entry_id, fields in reply]
    return {entry.id: entry for entry in found}


def list_pending(
    client: Any,
    stream: str,
    group: str,
    *,
    min_idle: float = 0.0,
    limit: int = 100,
    consumer: str | None = None,
    after: str | None = None,
) -> list[PendingEntry]:
    """List entries that were delivered to a group and not acked, the oldest first.

    `min_idle` is in seconds. `after` is the last entry id of the previous page.
    """
    with open_wire(client, f"group {group!r} of stream {stream!r}") as wire:
        place = GroupStream(wire, stream, stream, group, consumer or "")
        found: list[PendingEntry] = []
        for row in _pending(place, consumer, next_after(after.encode()) if after else FIRST):
            if row.idle_ms >= min_idle * 1000:
                found.append(_pending_entry(row))
                if len(found) == limit:
                    break
        return found


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
    """Free entries that were idle for `min_idle` seconds, so that another worker takes them over.

    Without `to`, the entries keep their consumer and become stale, and every worker of the group
    looks for stale entries. With `to`, they move to that consumer, which reads them when it
    starts. Neither counts as a delivery. An entry that is still in flight would be handled twice:
    choose `min_idle` above the longest handler, or use an inbox.
    """
    if min_idle < 0:
        raise ConfigError(f"min_idle={min_idle}: must be 0 seconds or more")
    with open_wire(client, f"group {group!r} of stream {stream!r}") as wire:
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


def remove_idle_consumers(
    client: Any, pattern: str = "*", *, idle: float = IDLE_SECONDS, dry_run: bool = False
) -> list[IdleConsumer]:
    """Remove the names of consumers that were idle for `idle` seconds and hold nothing.

    In all groups of the streams whose names match a glob pattern. Names of processes that crashed
    stay in a group otherwise; one that still lives gets its name back with its next entry.
    """
    if idle < 0:
        raise ConfigError(f"idle={idle}: must be 0 seconds or more")
    removed: list[IdleConsumer] = []
    with open_wire(client, f"streams {pattern!r}") as wire:
        for stream in names_of(wire, pattern):
            for group in map(pairs, wire.call(stream.encode(), b"XINFO", b"GROUPS", stream)):
                place = GroupStream(wire, stream, stream, _plain(group[b"name"]), "")
                names = [name for name in place.idle_consumers(idle) if name != _GIVEN_BACK]
                done = names if dry_run else place.remove_consumers(names)
                removed += [IdleConsumer(stream, _plain(place.group), _plain(n)) for n in done]
    return removed


def remove_consumer(client: Any, stream: str, group: str, consumer: str) -> bool:
    """Remove the name of a consumer from a group; False if it holds entries, or is not there."""
    with open_wire(client, f"group {group!r} of stream {stream!r}") as wire:
        place = GroupStream(wire, stream, stream, group, "")
        names = {pairs(row)[b"name"] for row in wire.call(stream.encode(), *_consumers(place))}
        name = consumer.encode()
        return name in names and bool(place.remove_consumers([name]))


def _consumers(place: GroupStream) -> Command:
    return (b"XINFO", b"CONSUMERS", place.key, place.group)


def remove_group(
    client: Any, stream: str, group: str, *, pending: int = 0, position: str = ""
) -> None:
    """Remove a group, whose consumers are gone; the entries stay in the stream.

    What it had in flight is forgotten: `pending` is how much of it the caller accepts to lose, and
    `position` the last entry it was delivered, as `describe` said. If either has changed, a worker
    reads the group, and nothing is done. Nothing is done either while a consumer is alive.
    """
    for found in describe(client, stream).groups:
        if found.name == group:
            break
    else:
        raise NotFound(f"stream {stream!r} has no group {group!r}")
    if found.alive:
        raise ConquietError(
            f"group {group!r} of stream {stream!r} has {found.alive} live consumers, which would"
            " fail without it; stop them first"
        )
    with open_wire(client, f"group {group!r} of stream {stream!r}") as wire:
        place = GroupStream(wire, stream, stream, group, "")
        fields = [place.lease_field(one.name.encode()) for one in found.consumers]
        keys = (place.key, beside(stream, "conquiet:leases:"))
        given: Command = (place.group, pending, position or found.last_delivered, *fields)
        if not wire.call(place.key, b"EVAL", _REMOVE_GROUP, 2, *keys, *given):
            raise ConquietError(
                f"group {group!r} of stream {stream!r} was read meanwhile; nothing was done. Look"
                " again at what it has in flight"
            )


def _free(
    place: GroupStream, owner: bytes, ids: Sequence[bytes], min_idle: float, to: str | None
) -> list[bytes]:
    """Claim entries; XCLAIM checks the idle time again, and skips those that were acked."""
    receiver = owner if to is None else to.encode()
    idle = (b"IDLE", _STALE_MS) if to is None else ()
    done: list[bytes] = place.call(
        b"XCLAIM", place.key, place.group, receiver, round(min_idle * 1000), *ids, *idle, b"JUSTID"
    )
    return done


def _pending(place: GroupStream, consumer: str | None, at: bytes = FIRST) -> Iterator[Pending]:
    """Read pending entries page by page; filters by idle time came with Redis 6.2."""
    of = None if consumer is None else consumer.encode()
    while True:
        page = place.list_pending(at, LAST, _PENDING_PAGE, of)
        yield from page
        if len(page) < _PENDING_PAGE:
            return
        at = next_after(page[-1].id)


def _pending_entry(row: Pending) -> PendingEntry:
    return PendingEntry(
        row.id.decode(),
        time_of(row.id),
        row.consumer.decode(errors="backslashreplace"),
        row.idle_ms / 1000,
        row.deliveries,
    )


def decode(stream: str, entry_id: bytes, fields: list[bytes]) -> LogEntry:
    """Decode an entry, whether it is a CloudEvent or not."""
    try:
        content, attributes, _ = from_fields(fields)
        is_event = True
    except InvalidMessage:
        named = dict(zip(fields[::2], fields[1::2], strict=False))
        content, is_event = named.pop(b"data", b""), False
        attributes = {as_text(name)[0]: as_text(value)[0] for name, value in named.items()}
    data, is_base64 = as_text(content)
    return LogEntry(
        stream,
        entry_id.decode(),
        time_of(entry_id),
        attributes.get("id", "") if is_event else "",
        attributes.get("type", "") if is_event else "",
        attributes.get("source", "") if is_event else "",
        {name: str(value) for name, value in attributes.items()},
        data,
        is_base64,
        is_event,
    )


def time_of(entry_id: bytes) -> str:
    milliseconds, _ = parse(entry_id)
    return moment(milliseconds)


# --- errors ---------------------------------------------------------------------------------


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Turn errors of Redis about `what` into errors of conquiet."""
    try:
        yield
    except redis.ResponseError as error:
        raise translate(error, what) from error
    except (redis.RedisError, OSError) as error:
        raise StoreError(f"{what}: Redis cannot be reached: {error}") from error


@contextmanager
def open_wire(client: Any, what: str) -> Iterator[Wire]:
    """Open a wire for questions about `what`; connections of its own are closed at the end."""
    with translate_errors(what):
        wire = Wire(client)
        try:
            yield wire
        finally:
            wire.close()


def translate(error: Exception, what: str) -> ConquietError:
    text = str(error)
    if "WRONGTYPE" in text:  # not at the start in errors of scripts
        return NotFound(
            f"{what}: this key does not hold a stream; conquiet streams list shows all streams"
        )
    if any(words in text.lower() for words in _MISSING):
        return NotFound(f"{what}: does not exist; conquiet streams list shows streams and groups")
    return StoreError(f"{what}: {text}")
