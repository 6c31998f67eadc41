"""Delays: failed entries wait beside their stream until they are due, then their group reads them.

    held ──TryLater──▶ waiting ──due by the clock of Redis──▶ again ──▶ held
           └ one script: out of the pending list and in here, or neither

conquiet:later:{orders}:billing       stream: what waits, with attempts and the last error
conquiet:due:{orders}:billing         sorted set: its entry ids by the time at which they are due
conquiet:again:{orders}:billing       stream: what is due, read by the group as the stream itself

An entry has the fields of the original one, and `:attempts`, `:error`, `:traceback`, `:stream` and
`:entry`, the place it came from.
"""

from __future__ import annotations

import math
import time
import traceback
from typing import Any, NamedTuple

from conquiet.errors import TryLater
from conquiet.redis.consumer import Delivery
from conquiet.redis.group import ATTEMPTS, ENTRY, ERROR, STREAM, TRACEBACK, GroupStream
from conquiet.redis.topic import beside
from conquiet.redis.wire import Wire

_MAX_ERROR_CHARS = 1_000
_MAX_TRACEBACK_CHARS = 4_000
_AT_ONCE = 100
"""How many entries one script makes due, so that other clients get their turn."""
_LOOK_SECONDS = 1.0
"""How often at least a consumer looks for entries that are due; others may have added some."""

# KEYS: the stream, what waits, when it is due. ARGV: group, consumer, entry id, milliseconds, '1'
# if acked entries of the stream are deleted, then the fields. Returns 0 if the entry is not ours.
_DEFER = b"""
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) == 0 then return 0 end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local id = redis.call('XADD', KEYS[2], '*', unpack(ARGV, 6))
redis.call('ZADD', KEYS[3], now + ARGV[4], id)
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
if ARGV[5] == '1' then redis.call('XDEL', KEYS[1], ARGV[3]) end
return 1
"""

# KEYS: what waits, when it is due, the stream that the group reads. ARGV: how many at most.
# Returns how many became due, and the milliseconds until the next one, or -1.
_PROMOTE = b"""
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local ids = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, id in ipairs(ids) do
    local found = redis.call('XRANGE', KEYS[1], id, id)
    if #found > 0 then
        redis.call('XADD', KEYS[3], '*', unpack(found[1][2]))
        redis.call('XDEL', KEYS[1], id)
    end
    redis.call('ZREM', KEYS[2], id)
end
local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if not first[2] then return {#ids, -1} end
return {#ids, math.max(0, math.ceil(first[2] - now))}
"""


class DelayKeys(NamedTuple):
    """The keys of what waits for a group of a stream."""

    later: str
    due: str
    again: str

    @classmethod
    def of(cls, stream: str, group: str) -> DelayKeys:
        return cls(
            *(
                f"{beside(stream, f'conquiet:{name}:')}:{group}"
                for name in ("later", "due", "again")
            )
        )


class Delays:
    """Lets entries of a group's streams wait, and makes those due whose time has come."""

    def __init__(self, wire: Wire, streams: dict[GroupStream, GroupStream]) -> None:
        """Take each stream with the one that its due entries are read from."""
        self._wire = wire
        self._keys = {
            stream: DelayKeys.of(stream.name, stream.group.decode()) for stream in streams
        }
        self._homes = {again: stream for stream, again in streams.items()}
        self.next_look = 0.0
        """When to look for due entries, by the monotonic clock."""

    def defer(self, delivery: Delivery, attempts: int, error: TryLater) -> bool:
        """Move an entry out of the pending list; return False if it is no longer ours."""
        stream = delivery.stream
        keys = self._keys[self._homes.get(stream, stream)]
        milliseconds = math.ceil(error.seconds * 1000)
        moved = stream.call(
            *(b"EVAL", _DEFER, 3, stream.key, keys.later, keys.due),
            *(stream.group, stream.consumer, delivery.id, milliseconds, int(stream.deletes)),
            *_fields(delivery, attempts, error),
        )
        self.next_look = min(self.next_look, time.monotonic() + error.seconds)
        return bool(moved)

    def promote(self) -> None:
        """Make entries due; one that several consumers find is made due once."""
        wait = _LOOK_SECONDS
        for stream, keys in self._keys.items():
            count, left = stream.call(
                b"EVAL", _PROMOTE, 3, keys.later, keys.due, keys.again, _AT_ONCE
            )
            if count == _AT_ONCE:
                wait = 0.0
            elif left >= 0:
                wait = min(wait, left / 1000)
        self.next_look = time.monotonic() + wait


def _fields(delivery: Delivery, attempts: int, error: TryLater) -> list[Any]:
    ours = (ATTEMPTS, ERROR, TRACEBACK, STREAM, ENTRY)
    fields: list[Any] = []
    for name, value in zip(delivery.fields[::2], delivery.fields[1::2], strict=False):
        if name not in ours:
            fields += (name, value)
    lines = "".join(traceback.format_exception(error.cause))[-_MAX_TRACEBACK_CHARS:]
    stream, entry = delivery.origin
    about = (attempts, str(error)[:_MAX_ERROR_CHARS], lines, stream, entry)
    for name, fact in zip(ours, about, strict=True):
        fields += (name, str(fact).encode(errors="replace"))
    return fields
