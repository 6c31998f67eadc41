"""Delayed events of outboxes in Redis: list, count, cancel, as `relay.inspection` does in SQL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from conquiet.errors import InvalidMessage
from conquiet.operations.streams import names_of, open_wire
from conquiet.redis.entry import from_fields
from conquiet.redis.promotion import Delayed, Waiting
from conquiet.redis.topic import beside
from conquiet.relay.inspection import DelayedEntry

_PREFIX = "conquiet:delayed:"
_DONE = "conquiet:delayed-done:"
_PAGE = 500
"""How many events one script reads, so that other clients get their turn."""
_MAX_SEARCHED = 100_000
"""How many events a search looks through."""


def find_delayed(client: Any, pattern: str = "*") -> list[DelayedStream]:
    """Return the outboxes of a Redis with events that wait or did; streams that fit a pattern."""
    with open_wire(client, "delayed events") as wire:
        waiting = map(_stream_of, names_of(wire, f"{_PREFIX}*", b"zset"))
        done = (
            _stream_of(_PREFIX + key.removeprefix(_DONE))
            for key in names_of(wire, f"{_DONE}*", b"zset")
        )
        names = sorted({*waiting, *done})
    return [DelayedStream(client, name) for name in names if fnmatchcase(name, pattern)]


def _stream_of(key: str) -> str:
    """Return the stream that a key is beside.

    >>> _stream_of("conquiet:delayed:{outbox}"), _stream_of("conquiet:delayed:outbox:{shop}")
    ('outbox', 'outbox:{shop}')
    """
    name = key.removeprefix(_PREFIX)
    plain = name.removeprefix("{").removesuffix("}")
    return plain if beside(plain, _PREFIX) == key else name


class DelayedStream:
    """The delayed events of one outbox."""

    def __init__(self, client: Any, stream: str) -> None:
        self._client = client
        self._delayed = Delayed(stream)
        self.name = stream

    def delayed(self, limit: int = 50, *, type: str = "", id: str = "") -> list[DelayedEntry]:
        """Return events that wait until they are due, the next one first; * in `type` matches any.

        A search looks through the first 100,000.
        """
        found: list[DelayedEntry] = []
        for item in self._scan(min(limit, _PAGE) if not (type or id) else _PAGE):
            entry = _describe(item)
            if (not type or fnmatchcase(entry.event_type, type)) and id in ("", entry.event_id):
                found.append(entry)
                if len(found) == limit:
                    break
        return found

    def _scan(self, page: int) -> Iterator[Waiting]:
        with open_wire(self._client, f"outbox {self.name!r}") as wire:
            for start in range(0, _MAX_SEARCHED, page):
                found = self._delayed.read(wire, page, start)
                yield from found
                if len(found) < page:
                    return

    def count_delayed(self) -> int:
        with open_wire(self._client, f"outbox {self.name!r}") as wire:
            return self._delayed.count(wire)

    def cancel(self, ids: Sequence[str]) -> list[str]:
        """Delete events by their ids; return the ids of those that still waited."""
        with open_wire(self._client, f"outbox {self.name!r}") as wire:
            return [
                id_
                for id_ in dict.fromkeys(ids)
                if int(wire.call(self._delayed.times, *self._delayed.cancel(id_)))
            ]

    def find_promoted(self, id: str) -> str | None:
        """Return when an event became due; None if it is not among the last 10,000."""
        with open_wire(self._client, f"outbox {self.name!r}") as wire:
            moment = self._delayed.find_promoted(wire, id)
        return None if moment is None else _text(moment)


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _describe(item: Waiting) -> DelayedEntry:
    try:
        _, attributes, topic = from_fields(item.fields)
    except InvalidMessage:  # written by a function of the user's own
        attributes, topic = {}, None
    return DelayedEntry(
        item.id,
        str(attributes.get("type", "")),
        topic or "",
        str(attributes.get("partitionkey") or attributes.get("subject", "")),
        _text(item.due_at),
        str(attributes.get("time", "")),
        round(item.seconds_left, 3),
    )
