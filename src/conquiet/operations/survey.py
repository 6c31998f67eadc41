"""Streams: how long they are, who reads them, and how far behind each reader is.

Commands of Redis 6.0; what newer servers tell by themselves (lag, entries added) is used where it
is there. In a cluster, every stream is asked where it lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from conquiet.errors import NotFound
from conquiet.operations.asking import wired
from conquiet.operations.text import moment
from conquiet.redis import ids
from conquiet.redis.group import GroupStream
from conquiet.redis.ids import LAST
from conquiet.redis.topic import beside
from conquiet.redis.wire import Command, Wire, pairs

LEASE_SECONDS = 60.0
"""After so long without a word a consumer counts as gone, unless it has told its own lease."""
COUNTED = 10_000
"""Where the server does not know a lag it is counted, up to here."""

_GIVEN_BACK = b"~back"
"""Who holds what consumers of `conquiet.kombu` gave back is nobody: see `conquiet.kombu.layout`."""
_PAGE = 1_000
_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A consumer of a group: a worker, or a relay of an outbox in Redis."""

    name: str
    pending: int
    idle_seconds: float
    """Since it last asked for something."""
    inactive_seconds: float | None
    """Since it last got something (Redis 7.2 and later)."""
    lease_seconds: float
    alive: bool
    """Whether it was heard of within its lease."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group and how far it has come."""

    name: str
    consumers: tuple[ConsumerInfo, ...]
    pending: int
    lag: int
    """Entries that were never delivered to it."""
    lag_is_exact: bool
    """False: at least so many."""
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
    """A reader without a group, such as a Spark job, and the last entry it is done with."""

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
    """What it takes in memory, as the server estimates."""
    groups: tuple[GroupInfo, ...]
    readers: tuple[ReaderInfo, ...]


def streams(client: Any, pattern: str = "*") -> list[StreamInfo]:
    """All streams whose names fit a glob pattern, by name.

    >>> from conquiet.operations import streams
    >>> streams(client, "orders*")
    []
    """
    with wired(client, f"streams {pattern!r}") as wire:
        names = names_of(wire, pattern)
        return [
            found
            for at in range(0, len(names), _AT_ONCE)
            for found in _survey(wire, names[at : at + _AT_ONCE])
        ]


def stream(client: Any, name: str) -> StreamInfo:
    """One stream by its name; raises `NotFound`."""
    with wired(client, f"stream {name!r}") as wire:
        wire.call(name.encode(), b"XINFO", b"STREAM", name)  # says what is wrong with it
        for found in _survey(wire, [name]):
            return found
    raise NotFound(f"stream {name!r}: is not there; conquiet streams list shows which there are")


def groups(client: Any, name: str) -> tuple[GroupInfo, ...]:
    """The groups of a stream; raises `NotFound` if there is no such stream."""
    return stream(client, name).groups


def names_of(wire: Wire, pattern: str = "*") -> list[str]:
    """Names of streams. One that is no UTF-8 cannot be asked for by name, and is left out."""
    nodes = [wire.client]
    if wire.is_cluster:
        nodes = [wire.client.get_redis_connection(node) for node in wire.client.get_primaries()]
    found: set[str] = set()
    for each in map(Wire, nodes):
        for keys in _scan(each, pattern):
            found.update(_names(keys))
        each.close()
    return sorted(found)


def _scan(wire: Wire, pattern: str) -> Iterator[Sequence[bytes]]:
    at: int | bytes = 0
    while True:
        at, keys = wire.call(
            b"", b"SCAN", at, b"MATCH", pattern, b"COUNT", _PAGE, b"TYPE", b"stream"
        )
        yield keys
        if int(at) == 0:
            return


def _names(keys: Sequence[bytes]) -> Iterator[str]:
    for key in keys:
        try:
            yield key.decode()
        except UnicodeDecodeError:
            continue


# --- the survey: three rounds of commands, whatever the number of streams ---------------------


def _survey(wire: Wire, names: Sequence[str]) -> Iterator[StreamInfo]:
    now = _now_ms(wire, names[0]) if names else 0
    first = _ask(
        wire,
        [
            (name, command)
            for name in names
            for command in (
                (b"XINFO", b"STREAM", name),
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
        place = _Place(wire, name, whole, now, pairs(_or(leases, ())))
        yield StreamInfo(
            name,
            place.length,
            _text(place.first),
            _text(place.last),
            moment(ids.parse(place.last)[0]) if place.last else "",
            whole.get(b"entries-added"),
            _or(size, None),
            tuple(place.groups([pairs(row) for row in _or(rows, ())])),
            tuple(place.readers(pairs(_or(readers, ())))),
        )


class _Place:
    """One stream while it is surveyed."""

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
                    self._consumer(row[b"name"], told)
                    for told in map(pairs, consumers)
                    if told[b"name"] != _GIVEN_BACK
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
        told_ms = self._leases.get(place.lease_field(row[b"name"]))
        lease = int(told_ms) / 1000 if told_ms is not None else LEASE_SECONDS
        idle, inactive = row[b"idle"] / 1000, row.get(b"inactive")
        return ConsumerInfo(
            _plain(row[b"name"]),
            int(row[b"pending"]),
            idle,
            inactive / 1000 if inactive is not None and inactive >= 0 else None,
            lease,
            idle < lease,
        )

    def _lag(self, position: bytes, told: int | None) -> tuple[int, bool]:
        """How many entries stand after a position, and whether that is all of them."""
        if self.first is None or self.last is None or ids.parse(position) >= ids.parse(self.last):
            return 0, True
        if told is not None:
            return told, True
        if ids.parse(position) < ids.parse(self.first):
            return self.length, True
        count, at = 0, ids.next_after(position)
        while count < COUNTED:
            page = self._wire.call(
                self.name.encode(), b"XRANGE", self.name, at, LAST, b"COUNT", _PAGE
            )
            count += len(page)
            if len(page) < _PAGE:
                return count, True
            at = ids.next_after(page[-1][0])
        return count, False

    def _behind(self, position: bytes) -> float:
        """The age of the first entry after a position."""
        key = self.name.encode()
        page = self._wire.call(key, b"XRANGE", key, ids.next_after(position), LAST, b"COUNT", 1)
        return self._age(page[0][0]) if page else 0.0

    def _age(self, entry_id: bytes) -> float:
        return max(0.0, round((self._now - ids.parse(entry_id)[0]) / 1000, 3))


def _ask(wire: Wire, commands: Sequence[tuple[str, Command]]) -> Iterator[Any]:
    """Replies in order, errors among them; raises if nobody answers."""
    if not commands:
        return iter(())
    replies = wire.send([(name.encode(), command) for name, command in commands])
    for reply in replies:
        if isinstance(reply, (redis.ConnectionError, redis.TimeoutError, OSError)):
            raise reply
    return iter(replies)


def _or(reply: Any, otherwise: Any) -> Any:
    """What an ACL or a managed server keeps to itself is not worth an error."""
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
