"""Messages that wait for a later try, by `Retry(delays=…)` or after a nack: list, now, never.

"Now" makes a message due at once; "never" makes it a dead letter, which can be replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from conquiet import attempts
from conquiet.attempts import FailedAttempt
from conquiet.config import DATABASES
from conquiet.errors import ConfigError, InvalidMessage, NotFound, PermanentError

if TYPE_CHECKING:
    from sqlalchemy import Engine

MAX_ROWS = 100_000
"""How many waiting messages an action looks through for ids."""
_PAGE = 1_000


@dataclass(frozen=True, slots=True)
class Waiting:
    """Describes a message that waits for a later try."""

    id: str
    event_id: str
    event_type: str
    attempts: int
    due: str
    """When it is tried again, by the clock of the store; empty if after an earlier message."""
    reason: str
    """Its last error; empty if it waits for an earlier message of its key."""
    errors: tuple[FailedAttempt, ...] = ()
    """The errors of its attempts, the oldest first: the first one, and the latest ones."""


class Retries(Protocol):
    """The messages of one group that wait."""

    name: str

    def exists(self) -> bool:
        """Return whether the group has read its topic yet, or the stream exists."""

    def list(self, limit: int = 100) -> list[Waiting]:
        """Return messages that wait, the next one first."""

    def now(self, ids: Collection[str] | None = None) -> Sequence[str]:
        """Make messages due by their ids, or those of their events; None for all.

        Return the ids of those that were.
        """

    def never(self, ids: Collection[str] | None = None) -> Sequence[str]:
        """Make dead letters of messages; as `now`."""


def open_retries(place: str, client: Any = None, group: str = "") -> Retries:
    """Open what waits for a group: the URL of a log with topic and group, or a Redis stream.

    For a stream, `client` is a Redis client, and `group` the group.
    """
    kind, colon, _ = place.partition(":")
    if colon and kind.partition("+")[0] in DATABASES:
        from sqlalchemy import NullPool

        from conquiet.sql.log_source import open_log
        from conquiet.sql.schema import OUTBOX_TABLE

        engine, settings = open_log(place, poolclass=NullPool)
        table = settings.get("table", OUTBOX_TABLE)
        return LogRetries(engine, settings["topic"], settings["group"], table)
    if not group:
        raise ConfigError(f"{place}: name the group that reads the stream, as in --group billing")
    return StreamRetries(client, place, group)


def _choose(found: Sequence[Waiting], ids: Collection[str] | None) -> list[str]:
    return [item.id for item in found if ids is None or item.id in ids or item.event_id in ids]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def find(retries: Retries, id_: str) -> Waiting:
    """Return one message by its id or that of its event; raise `NotFound` if none waits."""
    for item in retries.list(MAX_ROWS):
        if id_ in (item.id, item.event_id):
            return item
    raise NotFound(f"no message {id_!r:.100} of {retries.name} waits; retries list shows them")


# --- in a database --------------------------------------------------------------------------


class LogRetries:
    """What waits for a group of a log, in the table of retries."""

    def __init__(self, engine: Engine, topic: str, group: str, table: str) -> None:
        from conquiet.sql.log_group import GroupTables

        self.name = f"group {group!r} of topic {topic!r}"
        self.topic = topic
        self.group = group
        self._engine = engine
        self._tables = GroupTables(engine, table, topic, group)

    def exists(self) -> bool:
        from conquiet.sql.dialect import raise_store_errors

        with raise_store_errors(self._engine), self._engine.connect() as connection:
            return bool(self._tables.survey(connection))

    def list(self, limit: int = 100) -> list[Waiting]:
        from conquiet.sql.dialect import raise_store_errors

        with raise_store_errors(self._engine), self._engine.connect() as connection:
            rows = self._tables.list_waiting(connection, limit)
        return [
            Waiting(
                f"{row.xid}-{row.id}",
                row.event_id,
                row.event_type,
                row.attempts,
                "" if row.last_error is None else _moment(row.next_try),  # it waits for another
                row.last_error or "",
                attempts.read(row.errors),
            )
            for row in rows
        ]

    def now(self, ids: Collection[str] | None = None) -> Sequence[str]:
        return self._change(self._tables.hurry, ids)

    def never(self, ids: Collection[str] | None = None) -> Sequence[str]:
        return self._change(self._tables.give_up, ids)

    def _change(
        self, change: Callable[..., set[int]], ids: Collection[str] | None
    ) -> Sequence[str]:
        from conquiet.sql.dialect import begin_to_write, raise_store_errors

        chosen = {int(id_.partition("-")[2]): id_ for id_ in _choose(self.list(MAX_ROWS), ids)}
        with raise_store_errors(self._engine), begin_to_write(self._engine) as connection:
            changed = change(connection, list(chosen))
        return [id_ for number, id_ in chosen.items() if number in changed]


def find_retries(engine: Engine, table: str) -> list[LogRetries]:
    """Return what waits for each group of a log that has something waiting."""
    from sqlalchemy import select

    from conquiet.sql.dialect import has_table, raise_store_errors
    from conquiet.sql.schema import retries_table

    retries = retries_table(table)
    columns = retries.c.topic, retries.c.consumer_group
    query = select(*columns).where(retries.c.dead_at.is_(None)).distinct().order_by(*columns)
    with raise_store_errors(engine), engine.connect() as connection:
        if not has_table(connection, retries.fullname):
            return []
        found = connection.execute(query).all()
    return [LogRetries(engine, topic, group, table) for topic, group in found]


# --- in Redis -------------------------------------------------------------------------------

# KEYS: when entries are due. ARGV: ids. Returns those that waited.
_NOW = b"""
local t = redis.call('TIME')
local now, done = t[1] * 1000 + math.floor(t[2] / 1000), {}
for _, id in ipairs(ARGV) do
    if redis.call('ZSCORE', KEYS[1], id) then
        redis.call('ZADD', KEYS[1], now, id)
        done[#done + 1] = id
    end
end
return done
"""


class StreamRetries:
    """What waits for a group of a Redis stream."""

    def __init__(self, client: Any, stream: str, group: str) -> None:
        from conquiet.redis.delay import DelayKeys
        from conquiet.redis.wire import Wire

        self.name = f"group {group!r} of stream {stream!r}"
        self._stream = stream
        self._group = group
        self._keys = DelayKeys.of(stream, group)
        self._wire = Wire(client)

    def _call(self, *command: Any) -> Any:
        return self._wire.call(self._keys.due.encode(), *command)

    def _read(self, limit: int) -> list[tuple[bytes, float, Any]]:
        """Return id, due time and fields of what waits, the next one first.

        The due time of those that wait for an earlier one of their key is infinite; they come last.
        """
        from conquiet.redis.group import TURN

        timed: list[bytes] = self._call(b"ZRANGE", self._keys.due, 0, limit - 1)
        found: list[tuple[bytes, float, Any]] = []
        for at in range(0, len(timed), _PAGE):
            found += self._read_timed(timed[at : at + _PAGE])
        if len(timed) < limit:
            known = frozenset(timed)
            others = (
                item for item in self._scan(limit) if item[0] not in known and TURN in item[1][::2]
            )
            found += [(entry_id, math.inf, fields) for entry_id, fields in others]
        return found[:limit]

    def _read_timed(self, ids: Sequence[bytes]) -> Iterator[tuple[bytes, float, Any]]:
        key = self._keys.due.encode()
        asked: list[tuple[Any, ...]] = [(b"ZSCORE", key, id_) for id_ in ids]
        asked += [(b"XRANGE", self._keys.later.encode(), id_, id_) for id_ in ids]
        replies = self._wire.send([(key, command) for command in asked])
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        for id_, score, entries in zip(ids, replies, replies[len(ids) :], strict=False):
            yield from ((id_, float(score or 0) / 1000, fields) for _, fields in entries)

    def _scan(self, limit: int) -> Iterator[tuple[bytes, Any]]:
        from conquiet.redis.ids import next_after

        start = b"-"
        for _ in range(0, limit, _PAGE):
            page = self._call(b"XRANGE", self._keys.later, start, b"+", b"COUNT", _PAGE)
            yield from ((entry_id, fields) for entry_id, fields in page)
            if len(page) < _PAGE:
                return
            start = next_after(page[-1][0])

    def exists(self) -> bool:
        return bool(self._call(b"EXISTS", self._stream))

    def list(self, limit: int = 100) -> list[Waiting]:
        from conquiet.redis.entry import from_fields
        from conquiet.redis.group import ATTEMPTS, ERROR, ERRORS

        waiting = []
        for entry_id, due, fields in self._read(limit):
            named = dict(zip(fields[::2], fields[1::2], strict=True))
            try:
                _, attributes, _ = from_fields(fields)
            except InvalidMessage:  # the source reads it by a function of its own
                attributes = {}
            waiting.append(
                Waiting(
                    entry_id.decode(),
                    str(attributes.get("id", "")),
                    str(attributes.get("type", "")),
                    int(named.get(ATTEMPTS, 0)),
                    "" if math.isinf(due) else _moment(due),
                    named.get(ERROR, b"").decode(errors="replace"),
                    attempts.read(named.get(ERRORS, b"").decode(errors="replace")),
                )
            )
        return waiting

    def now(self, ids: Collection[str] | None = None) -> Sequence[str]:
        chosen = _choose(self.list(MAX_ROWS), ids)
        if not chosen:
            return []
        done: list[bytes] = []
        for at in range(0, len(chosen), 1_000):
            done += self._call(b"EVAL", _NOW, 1, self._keys.due, *chosen[at : at + 1_000])
        return [id_.decode() for id_ in done]

    def never(self, ids: Collection[str] | None = None) -> Sequence[str]:
        chosen = set(_choose(self.list(MAX_ROWS), ids))
        done = []
        for entry_id, _, fields in self._read(MAX_ROWS):
            if entry_id.decode() in chosen:
                letter = self._letter(entry_id, fields)
                if self._call(*self._keys.bury(f"{self._stream}:dead", entry_id, letter)):
                    done.append(entry_id.decode())
        return done

    def _letter(self, entry_id: bytes, fields: Any) -> Sequence[Any]:
        from conquiet.redis.consumer import Delivery
        from conquiet.redis.dead_letter import to_dead_letter
        from conquiet.redis.group import ERROR, GroupStream
        from conquiet.redis.topic import streams_of

        topic = streams_of(self._stream)[self._stream]
        place = GroupStream(
            self._wire, self._keys.again, topic, self._group, "", origin=self._stream
        )
        named = dict(zip(fields[::2], fields[1::2], strict=True))
        last = named.get(ERROR, b"").decode(errors="replace")
        why = PermanentError(f"given up by hand; the last error: {last}")
        return to_dead_letter(Delivery(place, entry_id, fields, 0, 0.0), 0, why)
