"""Hold delayed events of an outbox in Redis, and add them to its stream when they are due.

    conquiet:delayed:{stream}          sorted set: when it is due in µs, of a running number + id
    conquiet:delayed-entries:{stream}  hash: the running number + the fields as MessagePack, by id;
                                       the field with the empty name counts
    conquiet:delayed-done:{stream}     sorted set: when it became due in µs, by id; the last 10,000,
                                       so that a cancel that comes too late is told from a wrong id

The number keeps events of the same time in the order in which they came. Time is that of Redis.
One script writes both keys, in the MULTI … EXEC of the effects; one moves what is due to the
stream; one cancels. A script is atomic: an event is never in two places, and never in none.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import redis

from conquiet import bridge
from conquiet.delay import Due
from conquiet.redis.topic import beside
from conquiet.redis.wire import Wire, may_pass

logger = logging.getLogger("conquiet.redis")

LOOK_SECONDS = 0.02
"""How often a busy reader looks for delayed events that were written since."""
IDLE_SECONDS = 0.1
"""How often an idle one does: a delayed event ends no blocking read of the stream."""
SHORTEST_SECONDS = 0.005
"""The least time between two promotions, unless more are due than one of them moves."""
BATCH_SIZE = 200
"""The events that one promotion moves at least, if so many are due."""
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)
_REFUSED_SECONDS = 60.0
"""How long to wait after Redis has refused it, for example because a right is missing."""

# KEYS: sorted set, hash. ARGV: id, due in µs or empty, delay in µs, fields.
_HOLD = b"""
local due = tonumber(ARGV[2])
if not due then
    local time = redis.call('TIME')
    due = time[1] * 1000000 + time[2] + ARGV[3]
end
local field, twins = ARGV[1], 0
while redis.call('HEXISTS', KEYS[2], field) == 1 do
    twins = twins + 1
    field = ARGV[1] .. '\\0' .. twins
end
local number = string.format('%016.0f', redis.call('HINCRBY', KEYS[2], '', 1))
redis.call('HSET', KEYS[2], field, number .. ARGV[4])
redis.call('ZADD', KEYS[1], string.format('%.0f', due), number .. field)
return due
"""

# KEYS: sorted set, hash, stream, what became due. ARGV: the most events to move.
_PROMOTE = b"""
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, member in ipairs(due) do
    local field = string.sub(member, 17)
    local stored = redis.call('HGET', KEYS[2], field)
    if stored then
        redis.call('ZADD', KEYS[4], now, string.match(field, '^[^%z]*'))
        redis.call('XADD', KEYS[3], '*', unpack(cmsgpack.unpack(string.sub(stored, 17))))
    end
    redis.call('HDEL', KEYS[2], field)
    redis.call('ZREM', KEYS[1], member)
end
if #due > 0 then redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -10001) end
local next = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if not next[2] then
    redis.call('DEL', KEYS[2])
    return {#due}
end
return {#due, string.format('%.0f', next[2] - now)}
"""

# KEYS: sorted set, hash. ARGV: id.
_CANCEL = b"""
local removed = 0
for twin = 0, 99 do
    local field = twin == 0 and ARGV[1] or ARGV[1] .. '\\0' .. twin
    local stored = redis.call('HGET', KEYS[2], field)
    if stored then
        redis.call('ZREM', KEYS[1], string.sub(stored, 1, 16) .. field)
        removed = removed + redis.call('HDEL', KEYS[2], field)
    end
end
return removed
"""

# KEYS: sorted set, hash. ARGV: how many to pass over, the most events to return. Returns the time
# in µs, then id, due time and fields of each.
_LIST = b"""
local time = redis.call('TIME')
local found = {string.format('%.0f', time[1] * 1000000 + time[2])}
local members = redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[1] + ARGV[2] - 1, 'WITHSCORES')
for place = 1, #members, 2 do
    local field = string.sub(members[place], 17)
    local stored = redis.call('HGET', KEYS[2], field) or ''
    found[#found + 1] = {field, members[place + 1], string.sub(stored, 17)}
end
return found
"""


class Waiting(NamedTuple):
    """Describes a delayed event: its id, when it is due, and the fields of its entry."""

    id: str
    due_at: datetime
    seconds_left: float
    """By the clock of Redis; negative if it is overdue."""
    fields: list[bytes]


class Delayed:
    """Names the keys of the delayed events of a stream, and builds the commands on them."""

    def __init__(self, stream: str) -> None:
        self.stream = stream.encode()
        self.times = beside(stream, "conquiet:delayed:").encode()
        self.entries = beside(stream, "conquiet:delayed-entries:").encode()
        self.done = beside(stream, "conquiet:delayed-done:").encode()

    def hold(self, id: str, due: Due, fields: Sequence[Any]) -> tuple[Any, ...]:
        """Return the command that holds an entry until it is due."""
        at: int | str = ""
        after = 0
        if isinstance(due, datetime):
            at = (due - _EPOCH) // _MICROSECOND
        else:
            after = math.ceil(due.total_seconds() * 1_000_000)
        return (b"EVAL", _HOLD, 2, self.times, self.entries, id, at, after, _pack(fields))

    def promote(self, limit: int) -> tuple[Any, ...]:
        return (b"EVAL", _PROMOTE, 4, self.times, self.entries, self.stream, self.done, limit)

    def cancel(self, id: str) -> tuple[Any, ...]:
        return (b"EVAL", _CANCEL, 2, self.times, self.entries, id)

    def read(self, wire: Wire, limit: int, start: int = 0) -> list[Waiting]:
        """Return the events that wait, the next one first, from the place `start` on."""
        now, *found = wire.call(
            self.times, b"EVAL", _LIST, 2, self.times, self.entries, start, limit
        )
        return [
            Waiting(
                field.partition(b"\0")[0].decode(errors="replace"),
                _moment(due),
                (float(due) - int(now)) / 1_000_000,
                _unpack(stored),
            )
            for field, due, stored in found
        ]

    def find_promoted(self, wire: Wire, id: str) -> datetime | None:
        """Return when an event was moved to the stream; None if it is not among the last 10,000."""
        moment = wire.call(self.times, b"ZSCORE", self.done, id)
        return None if moment is None else _moment(moment)

    def count(self, wire: Wire) -> int:
        return int(wire.call(self.times, b"ZCARD", self.times))


def _moment(score: bytes) -> datetime:
    """Return the time of a score; a score of far away is rounded, and so may be of the year 10000.

    >>> _moment(b"2.534023008e+17").year
    9999
    """
    since = timedelta(microseconds=int(float(score)))
    return _EPOCH + min(since, datetime.max.replace(tzinfo=UTC) - _EPOCH)


def _pack(fields: Sequence[Any]) -> bytes:
    """Write fields as a MessagePack array of strings, which scripts read.

    Not as binary, which the library of Redis does not know, so msgspec cannot be used. A number is
    written as redis-py does.
    """
    parts = [b"\xdd", len(fields).to_bytes(4)]
    for value in fields:
        if not isinstance(value, bytes):
            value = (repr(value) if isinstance(value, float) else str(value)).encode()
        parts += (b"\xdb", len(value).to_bytes(4), value)
    return b"".join(parts)


def _unpack(stored: bytes) -> list[bytes]:
    fields: list[bytes] = []
    place = 5
    while place < len(stored):
        start = place + 5
        place = start + int.from_bytes(stored[place + 1 : start])
        fields.append(stored[start:place])
    return fields


class Promoter:
    """Promotes delayed events for the reader of an outbox, and knows when the next one is due."""

    def __init__(self, wire: Wire, stream: str) -> None:
        self._wire = wire
        self._delayed = Delayed(stream)
        self._look_at = 0.0
        self._next_at = math.inf
        self.promoted = 0
        """How many events it has moved to the stream."""

    def longest_block(self) -> float:
        """Return how long Redis may hold a read back; 0 shortly before an event is due.

        Redis ends blocking reads up to a tenth of a second late.
        """
        left = self._next_at - time.monotonic()
        return 0.0 if left < 2 * IDLE_SECONDS else min(left - IDLE_SECONDS, IDLE_SECONDS)

    def pause(self, end: float) -> None:
        """Wait for an event that is nearly due, a moment at most; reads do not block then."""
        now = time.monotonic()
        left = min(self._next_at, end) - now
        if left > 0 and self._next_at - now < 2 * IDLE_SECONDS:
            sleep = bridge.sleep if bridge.is_on_loop() else time.sleep
            sleep(min(max(left, SHORTEST_SECONDS), LOOK_SECONDS))

    def promote(self, limit: int) -> None:
        """Promote what is due, unless it was looked for a moment ago.

        If Redis refuses it, that is logged and tried again later; if it is out of reach, the read
        that follows says so.
        """
        now = time.monotonic()
        if now < self._look_at and now < self._next_at:
            return
        self._look_at, self._next_at = now + LOOK_SECONDS, math.inf
        limit = max(limit, BATCH_SIZE)
        try:
            moved, *rest = self._wire.call(self._delayed.times, *self._delayed.promote(limit))
        except (redis.RedisError, OSError) as error:
            if not may_pass(error):
                self._look_at = now + _REFUSED_SECONDS
                logger.warning(
                    "%s: delayed events could not be moved to the outbox, next try in %g s: %s",
                    *(self._delayed.times.decode(errors="replace"), _REFUSED_SECONDS, error),
                )
            return
        self.promoted += moved
        if rest:
            least = 0.0 if moved == limit else SHORTEST_SECONDS
            self._next_at = time.monotonic() + max(least, int(rest[0]) / 1_000_000)
