"""Search of one event in Redis: entries, groups, dead letters, keys of inboxes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from conquiet.events.idempotency import PREFIX as IDEMPOTENCY_PREFIX
from conquiet.middleware.dead_letter import REASON
from conquiet.operations.dead_letter_streams import StreamLetters, list_streams
from conquiet.operations.dead_letters import Filter
from conquiet.operations.streams import decode, names_of, translate_errors
from conquiet.operations.text import moment
from conquiet.operations.trace import Remembered
from conquiet.redis import ids
from conquiet.redis.ids import FIRST, LAST
from conquiet.redis.inbox import PREFIX as INBOX_PREFIX
from conquiet.redis.retention import Readers
from conquiet.redis.wire import Wire, pairs

MOST = 20_000
"""Entries of one stream that are read, unless the whole log is searched."""

_PAGE = 1_000
_special = re.compile(r"([*?\[\]\\^])")


@dataclass(frozen=True, slots=True)
class Taker:
    """A group or a reader, and its state regarding an entry."""

    name: str
    state: str
    """`unread`, `pending` or `acked`; of a reader `unread` or `passed`.

    A group that began after the entry was added counts as acked."""
    consumer: str
    idle_seconds: float
    deliveries: int


@dataclass(frozen=True, slots=True)
class Logged:
    """An entry of a stream that carries the event."""

    stream: str
    id: str
    time: str
    event_type: str
    source: str
    takers: tuple[Taker, ...]


@dataclass(frozen=True, slots=True)
class Buried:
    """A dead letter of the event."""

    stream: str
    id: str
    time: str
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Searched:
    """A stream of which only a part was searched."""

    stream: str
    begin: str
    end: str


class LogSearch:
    """Searches for one event in the streams that match a pattern."""

    def __init__(self, client: Any, event_id: str, pattern: str) -> None:
        self._client = client
        self._wire = Wire(client)
        weakref.finalize(self, self._wire.close)
        self._event_id = event_id
        self._needle = event_id.encode()
        with translate_errors(f"streams {pattern!r}"):
            self._names = names_of(self._wire, pattern)

    def find_entries(
        self, span: tuple[int, int | None] | None
    ) -> tuple[tuple[Logged, ...], tuple[Searched, ...]]:
        """Find entries within a time span, or anywhere; and the streams that were cut short."""
        found: list[Logged] = []
        partly: list[Searched] = []
        for name in self._names:
            with translate_errors(f"stream {name!r}"):
                for entry_id, fields in self._entries(name, span, partly):
                    entry = decode(name, entry_id, fields)
                    if entry.event_id != self._event_id or REASON in entry.attributes:
                        continue
                    takers = tuple(self._takers(name, entry_id))
                    about = (entry.id, entry.time, entry.event_type, entry.source)
                    found.append(Logged(name, *about, takers))
        return tuple(found), tuple(partly)

    def _entries(
        self, name: str, span: tuple[int, int | None] | None, partly: list[Searched]
    ) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield entries with the event id in one of their fields."""
        at, end = FIRST, LAST
        if span is not None:
            at = b"%d-0" % span[0]
            end = LAST if span[1] is None else b"%d-%d" % (span[1], 2**64 - 1)
        begin, count = at, 0
        while True:
            page = self._wire.call(name.encode(), b"XRANGE", name, at, end, b"COUNT", _PAGE)
            for entry_id, fields in page:
                if any(self._needle in value for value in fields):
                    yield entry_id, fields
            count += len(page)
            if len(page) < _PAGE:
                return
            at = ids.next_after(page[-1][0])
            if span is not None and count >= MOST:
                partly.append(Searched(name, moment(ids.parse(begin)[0]), moment(ids.parse(at)[0])))
                return

    def _takers(self, name: str, entry_id: bytes) -> Iterator[Taker]:
        key = name.encode()
        for row in map(pairs, self._wire.call(key, b"XINFO", b"GROUPS", key)):
            group = row[b"name"]
            title = group.decode(errors="backslashreplace")
            held = self._wire.call(key, b"XPENDING", key, group, entry_id, entry_id, 1)
            if held:
                [[_, consumer, idle, deliveries]] = held
                who = consumer.decode(errors="backslashreplace")
                yield Taker(title, "pending", who, idle / 1000, deliveries)
            else:
                is_ahead = ids.parse(row[b"last-delivered-id"]) >= ids.parse(entry_id)
                yield Taker(title, "acked" if is_ahead else "unread", "", 0.0, 0)
        for reader, position in sorted(Readers(self._wire, name).positions().items()):
            is_ahead = ids.parse(position.encode()) >= ids.parse(entry_id)
            yield Taker(reader, "passed" if is_ahead else "unread", "", 0.0, 0)

    def find_dead_letters(self) -> tuple[Buried, ...]:
        """Find its dead letters, in streams that hold dead letters."""
        found: list[Buried] = []
        filter_ = Filter((self._event_id,))
        for name in list_streams(self._client):
            for letter, _ in islice(
                StreamLetters(self._client, name).scan(filter_, brief=True), MOST
            ):
                if filter_.matches(letter):
                    about = (letter.id, letter.time, letter.reason, letter.source)
                    found.append(Buried(name, *about))
        return tuple(found)

    def find_inbox_keys(self, logged: Sequence[Logged], full: bool) -> tuple[Remembered, ...]:
        """Find keys of inboxes: of `conquiet.events.Idempotency` by group, with `full` all."""
        with translate_errors("inboxes"):
            keys = {
                f"{IDEMPOTENCY_PREFIX}:{taker.name}:{self._event_id}".encode()
                for entry in logged
                for taker in entry.takers
            }
            if full:
                end = _special.sub(r"\\\1", self._event_id)
                for pattern in (f"{IDEMPOTENCY_PREFIX}:*:{end}", f"{INBOX_PREFIX}*{end}"):
                    keys |= set(self._client.scan_iter(match=pattern, count=_PAGE))
            found: list[Remembered] = []
            for key in sorted(_bytes(key) for key in keys):
                value = self._wire.call(key, b"GET", key)
                if value is not None:
                    found.append(_read_inbox_key(key, value))
        return tuple(found)


def _read_inbox_key(key: bytes, value: bytes) -> Remembered:
    name = key.decode(errors="backslashreplace")
    if name.startswith(f"{IDEMPOTENCY_PREFIX}:"):
        subscriber = name[len(IDEMPOTENCY_PREFIX) + 1 :].partition(":")[0]
    else:  # conquiet:inbox:{tag}:subscriber/handler:source id
        subscriber = name.partition("}:")[2].partition(":")[0]
        subscriber = subscriber.replace("%3A", ":").replace("%25", "%")
    return Remembered(name, subscriber, value.partition(b":")[0].decode(errors="replace"), "")


def _bytes(key: bytes | str) -> bytes:
    return key.encode() if isinstance(key, str) else key
